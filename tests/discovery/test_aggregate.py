import asyncio
import logging
from typing import Any

import pytest

from relax_infer.discovery import InferenceRegistry, RoleDiscovery, RoleSnapshot, RouteResolver
from tests.discovery.test_registry import model
from tests.gateway.fakes import until


class Group:
    """An engine group's registry of one model ``inner``, which tests change and break."""

    def __init__(self, epoch: str, **changes: Any) -> None:
        self.registry = InferenceRegistry("teacher", epoch)
        self.reads = 0
        self.error: Exception | None = None
        self.go = asyncio.Event()
        self.go.set()
        self.say(**changes)

    def say(self, **changes: Any) -> None:
        self.registry.publish([model("inner", **changes)])

    async def __call__(self) -> dict[str, Any]:
        self.reads += 1
        document = self.registry.snapshot()
        await self.go.wait()
        if self.error is not None:
            raise self.error
        return document


async def test_models_are_published_under_their_sources_keys_with_its_epoch_in_every_name() -> None:
    math = Group("e1", served_model_name="qwen")
    code = Group("e2", served_model_name="llama", state="SLEEPING")
    role = RoleDiscovery("teacher", {"math": math, "code": code}, registry_epoch="all")
    document = await role.read()
    assert (document["role"], document["registry_epoch"]) == ("teacher", "all")
    assert RoleSnapshot.from_dict(document).to_dict() == document
    assert document["routing"] == {
        "default_model": None,
        "route_key_map": {"math": "math", "code": "code"},
        "aliases": {"qwen": "math", "llama": "code"},
        "policy": "round_robin",
        "policy_revision": 0,
    }
    assert list(document["models"]) == ["code", "math"]
    shown = document["models"]["math"]
    assert (shown["model_id"], shown["state"]) == ("math", "READY")
    assert [e["engine_id"] for e in shown["engines"]] == [
        "math/e1/inner/replica-0",
        "math/e1/inner/replica-1",
    ]
    assert document["models"]["code"]["state"] == "SLEEPING"
    target = RouteResolver().resolve(document, route_key="math")
    assert (target.model_id, target.served_model_name) == ("math", "qwen")


async def test_a_single_source_is_the_default() -> None:
    document = await RoleDiscovery("teacher", {"math": Group("e")}).read()
    assert document["routing"]["default_model"] == "math"


async def test_a_served_name_is_an_alias_only_when_it_is_unique_and_no_key() -> None:
    sources = {
        "a": Group("1", served_model_name="same"),
        "b": Group("2", served_model_name="same"),
        "c": Group("3", served_model_name="a"),
        "d": Group("4", served_model_name="own"),
        "e": Group("5"),
    }
    document = await RoleDiscovery("teacher", sources).read()
    assert document["routing"]["aliases"] == {"own": "d"}


async def test_two_reads_without_a_change_are_equal() -> None:
    math, code = Group("e1"), Group("e2")
    role = RoleDiscovery("teacher", {"math": math, "code": code})
    first = await role.read()
    assert first["topology_revision"] == 1
    assert await role.read() == first
    first["models"].clear()
    assert (await role.read())["models"]


async def test_a_failing_source_is_failed_without_replicas_and_hurts_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    math, code = Group("e1"), Group("e2")
    role = RoleDiscovery("teacher", {"math": math, "code": code})
    before = await role.read()
    math.error = RuntimeError("its actor died")
    with caplog.at_level(logging.WARNING):
        broken = await role.read()
    assert "teacher source math: RuntimeError its actor died" in caplog.text
    assert broken["models"]["math"]["state"] == "FAILED"
    assert broken["models"]["math"]["engines"] == []
    assert broken["models"]["code"] == before["models"]["code"]
    assert broken["topology_revision"] > before["topology_revision"]
    assert await role.read() == broken
    math.error = None
    again = await role.read()
    assert again["models"] == before["models"]
    assert again["topology_revision"] > broken["topology_revision"]


async def test_a_late_source_does_not_hold_up_the_others() -> None:
    math, code = Group("e1"), Group("e2")
    math.go.clear()
    role = RoleDiscovery("teacher", {"math": math, "code": code}, timeout=0.05)
    document = await role.read()
    assert document["models"]["math"]["state"] == "FAILED"
    assert document["models"]["code"]["state"] == "READY"
    math.go.set()
    assert (await role.read())["models"]["math"]["state"] == "READY"


async def test_sources_are_asked_at_once() -> None:
    sources = {key: Group(key) for key in ("a", "b", "c")}
    for source in sources.values():
        source.go.clear()
    reading = asyncio.create_task(RoleDiscovery("teacher", sources).read())
    await until(lambda: all(s.reads == 1 for s in sources.values()))
    for source in sources.values():
        source.go.set()
    assert len((await reading)["models"]) == 3


@pytest.mark.parametrize("models", [[], ["x", "y"]])
async def test_a_source_with_other_than_one_model_has_failed(models: list[str]) -> None:
    math = Group("e1")
    math.registry.publish([model(name) for name in models])
    document = await RoleDiscovery("teacher", {"math": math}).read()
    assert document["models"]["math"]["state"] == "FAILED"


async def test_a_source_of_another_role_or_without_a_document_has_failed() -> None:
    other = Group("e1")
    other.registry = InferenceRegistry("genrm", "e1")
    other.registry.publish([model("inner")])

    async def nothing() -> Any:
        return None

    document = await RoleDiscovery("teacher", {"a": other, "b": nothing}).read()
    assert {m["state"] for m in document["models"].values()} == {"FAILED"}


async def test_a_restart_and_a_sleep_between_two_reads_advance_the_revision() -> None:
    math, code = Group("e1"), Group("e2")
    role = RoleDiscovery("teacher", {"math": math, "code": code})
    first = await role.read()
    math.say(state="SLEEPING")
    math.say()
    second = await role.read()
    assert second["models"] == first["models"]
    assert second["topology_revision"] > first["topology_revision"]
    restarted = InferenceRegistry("teacher", "e9")  # the same model at the same address
    for state in ("SLEEPING", "STARTING", "READY"):
        restarted.publish([model("inner", state=state)])
    assert restarted.current.topology_revision == math.registry.current.topology_revision
    math.registry = restarted
    third = await role.read()
    assert third["topology_revision"] > second["topology_revision"]
    ids = [e["engine_id"] for e in third["models"]["math"]["engines"]]
    assert ids == ["math/e9/inner/replica-0", "math/e9/inner/replica-1"]


async def test_a_restart_advances_the_revision_of_a_model_without_replicas_too() -> None:
    pd = Group("e1", engines=[], route_mode="SGLANG_ROUTER", router_url="http://router:1")
    role = RoleDiscovery("teacher", {"math": pd})
    first = await role.read()
    shown, pd.registry = pd.registry.current.models, InferenceRegistry("teacher", "e2")
    pd.registry.publish(shown)
    second = await role.read()
    assert second["models"] == first["models"]
    assert second["topology_revision"] > first["topology_revision"]


async def test_who_asks_while_others_wait_shares_their_next_read() -> None:
    math = Group("e1")
    math.go.clear()
    role = RoleDiscovery("teacher", {"math": math})
    first = asyncio.create_task(role.read())
    await until(lambda: math.reads == 1)
    others = [asyncio.create_task(role.read()) for _ in range(100)]
    await asyncio.sleep(0)
    math.say(state="SLEEPING")
    math.go.set()
    assert (await first)["models"]["math"]["state"] == "READY"
    answers = await asyncio.gather(*others)
    assert {a["models"]["math"]["state"] for a in answers} == {"SLEEPING"}
    assert math.reads == 2


@pytest.mark.parametrize("sources", [{}, {"": Group}, {" m": Group}])
def test_sources_have_names(sources: Any) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        RoleDiscovery("teacher", sources)
