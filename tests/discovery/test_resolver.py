import hashlib
import json
import threading
import time
from collections import Counter
from typing import Any

import pytest

from relax_infer.discovery import (
    InferenceRoutingError,
    ModelSnapshot,
    ReplicaSnapshot,
    RoleSnapshot,
    RouteResolver,
    RoutingSpec,
)


def model(model_id: str, replicas: int = 3, **changes: Any) -> ModelSnapshot:
    engines = [
        ReplicaSnapshot(
            engine_id=f"{model_id}/replica-{n}",
            base_url=f"http://{model_id}:{n + 1}",
            state="READY",
            direct_eligible=True,
            generation=n + 1,
        )
        for n in range(replicas)
    ]
    given = {"model_id": model_id, "state": "READY", "route_mode": "DIRECT", "engines": engines}
    return ModelSnapshot(**(given | changes))


def role(*models: ModelSnapshot, epoch: str = "e", **routing: Any) -> RoleSnapshot:
    return RoleSnapshot(
        role="teacher",
        registry_epoch=epoch,
        topology_revision=7,
        routing=RoutingSpec(**routing),
        models={m.model_id: m for m in models},
    )


def refused(snapshot: object, **selectors: Any) -> tuple[int, str]:
    with pytest.raises(InferenceRoutingError) as caught:
        RouteResolver().resolve(snapshot, **selectors)  # type: ignore[arg-type]
    return caught.value.status_code, caught.value.message


def test_a_target_names_what_the_choice_rests_on() -> None:
    snapshot = role(model("a", served_model_name="served"))
    target = RouteResolver().resolve(snapshot, model="a")
    assert target.model_dump() == {
        "model_id": "a",
        "base_url": "http://a:1",
        "engine_id": "a/replica-0",
        "generation": 1,
        "registry_epoch": "e",
        "topology_revision": 7,
        "served_model_name": "served",
    }
    assert RouteResolver().resolve(snapshot.to_dict(), model="a") == target


@pytest.mark.parametrize("snapshot", [None, {}, {"schema_version": 1}, [], "x"])
def test_what_is_no_discovery_is_503(snapshot: object) -> None:
    assert refused(snapshot, model="") == (503, "Invalid inference discovery")


@pytest.mark.parametrize("selector", ["model", "route_key", "affinity_key"])
@pytest.mark.parametrize("value", ["", " ", 3, [], True])
def test_a_selector_that_is_no_text_is_400(selector: str, value: object) -> None:
    snapshot = role(model("a"), default_model="a")
    assert refused(snapshot, **{selector: value})[0] == 400


def test_model_wins_then_route_key_then_the_default() -> None:
    snapshot = role(
        model("a"),
        model("b"),
        model("c"),
        default_model="c",
        route_key_map={"k": "b", "a": "b"},
        aliases={"x": "a"},
    )
    resolve = RouteResolver().resolve
    assert resolve(snapshot, model="a", route_key="k").model_id == "a"
    assert resolve(snapshot, model="x", route_key="nobody").model_id == "a"
    assert resolve(snapshot, route_key="k").model_id == "b"
    assert resolve(snapshot, route_key="a").model_id == "b"
    assert resolve(snapshot).model_id == "c"


def test_an_unknown_selector_never_falls_through() -> None:
    snapshot = role(model("a"), default_model="a", route_key_map={"k": "a"})
    assert refused(snapshot, model="nobody", route_key="k")[0] == 400
    assert refused(snapshot, model="k")[0] == 400
    assert refused(snapshot, route_key="nobody")[0] == 400


def test_a_single_model_is_no_implicit_default() -> None:
    assert refused(role(model("a"))) == (400, "An explicit model or route_key is required")


@pytest.mark.parametrize("state", ["SLEEPING", "ONLOADING", "DRAINING", "FAILED", "UNKNOWN"])
def test_a_model_that_is_not_ready_is_503_even_with_ready_replicas(state: str) -> None:
    assert refused(role(model("a", state=state)), model="a")[0] == 503


def test_a_router_gets_everything_whatever_the_affinity() -> None:
    routed = model("a", route_mode="SGLANG_ROUTER", router_url="http://router:1/")
    target = RouteResolver().resolve(role(routed, policy="affinity"), model="a")
    assert (target.base_url, target.engine_id, target.generation) == ("http://router:1", None, 0)
    assert RouteResolver().resolve(role(routed), model="a", affinity_key="k") == target
    assert refused(role(model("a", route_mode="SGLANG_ROUTER")), model="a")[0] == 503


def test_only_eligible_replicas_are_targets() -> None:
    changes: tuple[dict[str, Any], ...] = (
        {"state": "DRAINING"},
        {"direct_eligible": False},
        {"base_url": None},
    )
    ready = model("a").engines
    off = [
        ReplicaSnapshot.from_dict(e.to_dict() | change)
        for e, change in zip(ready, changes, strict=True)
    ]
    assert refused(role(model("a", engines=off)), model="a")[0] == 503
    assert refused(role(model("a", engines=off)), model="a", affinity_key="k")[0] == 503
    mixed = role(model("a", engines=[*off[:2], ready[2]]))
    resolver = RouteResolver()
    assert {resolver.resolve(mixed, model="a").engine_id for _ in range(4)} == {"a/replica-2"}


def test_round_robin_goes_by_engine_id_and_is_separate_per_model() -> None:
    snapshot, resolver = role(model("a"), model("b")), RouteResolver()

    def turn(model_id: str) -> str:
        return str(resolver.resolve(snapshot, model=model_id).engine_id)[-1]

    assert [turn("a") for _ in range(4)] == ["0", "1", "2", "0"]
    assert turn("b") == "0"
    assert turn("a") == "1"


def test_a_new_epoch_starts_the_round_again() -> None:
    resolver = RouteResolver()
    old, new = role(model("a"), epoch="old"), role(model("a"), epoch="new")
    for _ in range(2):
        resolver.resolve(old, model="a")
    assert resolver.resolve(new, model="a").engine_id == "a/replica-0"
    assert resolver.resolve(new, model="a").engine_id == "a/replica-1"


def test_policy_affinity_needs_a_key() -> None:
    assert refused(role(model("a"), policy="affinity"), model="a")[0] == 400
    target = RouteResolver().resolve(
        role(model("a"), policy="affinity"), model="a", affinity_key="k"
    )
    assert target.engine_id is not None


def test_affinity_is_the_published_rendezvous_hash() -> None:
    snapshot = role(model("a"))
    chosen: set[str] = set()
    for key in (f"group-{n}" for n in range(40)):
        digests = {
            engine.engine_id: hashlib.sha256(
                json.dumps(["teacher", "a", key, engine.engine_id], separators=(",", ":")).encode()
            ).digest()
            for engine in snapshot.models["a"].engines
        }
        expected = max(digests, key=lambda engine: digests[engine])
        assert RouteResolver().resolve(snapshot, model="a", affinity_key=key).engine_id == expected
        chosen.add(expected)
    assert len(chosen) == 3


def test_affinity_survives_a_new_address_and_loses_only_what_moved() -> None:
    before = role(model("a"))
    moved = [
        ReplicaSnapshot.from_dict(e.to_dict() | {"base_url": "http://new:9", "generation": 9})
        for e in before.models["a"].engines
    ]
    after, fewer = role(model("a", engines=moved)), role(model("a", replicas=2))
    for key in (f"group-{n}" for n in range(40)):
        first = RouteResolver().resolve(before, model="a", affinity_key=key)
        second = RouteResolver().resolve(after, model="a", affinity_key=key)
        assert second.engine_id == first.engine_id
        assert (second.base_url, second.generation) == ("http://new:9", 9)
        if first.engine_id != "a/replica-2":
            third = RouteResolver().resolve(fewer, model="a", affinity_key=key)
            assert third.engine_id == first.engine_id


@pytest.mark.parametrize("key", ["prompt ü", 'a"b\\', "\ud800", "x" * 10_000, '["math", 7]'])
def test_any_text_is_an_affinity_key(key: str) -> None:
    snapshot = role(model("a"))
    weights = {
        e.engine_id: hashlib.sha256(
            json.dumps(["teacher", "a", key, e.engine_id], separators=(",", ":")).encode()
        ).digest()
        for e in snapshot.models["a"].engines
    }
    chosen = RouteResolver().resolve(snapshot, model="a", affinity_key=key).engine_id
    assert chosen == max(weights, key=lambda e: weights[e])


def test_a_choice_is_never_of_an_earlier_snapshot() -> None:
    """The resolver indexes snapshots; epoch and revision alone do not tell them apart."""
    resolver = RouteResolver()
    three, one = role(model("a")), role(model("a", replicas=1))
    for _ in range(2):
        for snapshot, size in ((three, 3), (one, 1), (three.to_dict(), 3), (one.to_dict(), 1)):
            ids = {resolver.resolve(snapshot, model="a").engine_id for _ in range(3)}
            assert len(ids) == size
            sticky = {
                resolver.resolve(snapshot, model="a", affinity_key=str(n)).engine_id
                for n in range(40)
            }
            assert len(sticky) == size
    document = three.to_dict()
    document["models"]["a"]["state"] = "SLEEPING"
    with pytest.raises(InferenceRoutingError):
        resolver.resolve(document, model="a")


def test_one_resolver_serves_several_roles_with_a_round_for_each() -> None:
    resolver, teacher = RouteResolver(), role(model("a"))
    judge = RoleSnapshot.from_dict(teacher.to_dict() | {"role": "genrm", "registry_epoch": "g"})
    turns = [
        str(resolver.resolve(snapshot, model="a").engine_id)[-1]
        for _ in range(3)
        for snapshot in (teacher, judge)
    ]
    assert turns == ["0", "0", "1", "1", "2", "2"]


def test_the_role_is_part_of_the_rendezvous() -> None:
    teacher = role(model("a", replicas=8))
    judge = RoleSnapshot.from_dict(teacher.to_dict() | {"role": "genrm"})
    resolver = RouteResolver()
    chosen = [
        [resolver.resolve(s, model="a", affinity_key=str(n)).engine_id for n in range(40)]
        for s in (teacher, judge)
    ]
    assert chosen[0] != chosen[1]


class Hesitant(dict[Any, Any]):
    """Lets other threads in between a look and what follows from it."""

    def get(self, key: Any, default: Any = None) -> Any:
        found = super().get(key, default)
        time.sleep(0.0005)
        return found


def test_turns_are_each_taken_once_by_many_threads() -> None:
    snapshot, resolver = role(model("a", replicas=4)), RouteResolver()
    resolver.resolve(snapshot, model="a")
    resolver._cursors = Hesitant()
    taken: list[str | None] = []

    def take() -> None:
        taken.extend(resolver.resolve(snapshot, model="a").engine_id for _ in range(10))

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(Counter(taken).values()) == {10}
