import threading
import time
import uuid
from typing import Any

import pytest

from relax_infer.discovery import (
    InferenceRegistry,
    ModelSnapshot,
    ReplicaSnapshot,
    RoleSnapshot,
    RoutingSpec,
    etag_of,
)


def replica(number: int, **changes: Any) -> ReplicaSnapshot:
    given = {
        "engine_id": f"m/replica-{number}",
        "base_url": "http://engine:1",
        "state": "READY",
        "direct_eligible": True,
        "generation": 1,
    }
    return ReplicaSnapshot(**(given | changes))


def model(model_id: str = "m", *, generation: int = 1, **changes: Any) -> ModelSnapshot:
    url = changes.pop("base_url", "http://engine:1")
    engines = [
        replica(n, engine_id=f"{model_id}/replica-{n}", base_url=url, generation=generation)
        for n in (0, 1)
    ]
    given = {"model_id": model_id, "state": "READY", "route_mode": "DIRECT", "engines": engines}
    return ModelSnapshot(**(given | changes))


def test_a_registry_starts_empty_at_revision_zero() -> None:
    document = InferenceRegistry("genrm").snapshot()
    assert document["topology_revision"] == 0
    assert document["models"] == {}
    assert uuid.UUID(document["registry_epoch"]).version == 4
    assert InferenceRegistry("genrm", "e").snapshot()["registry_epoch"] == "e"
    for wrong in ("", " "):
        with pytest.raises(ValueError, match="registry_epoch"):
            InferenceRegistry("genrm", wrong)
    with pytest.raises(ValueError, match="role"):
        InferenceRegistry("worker")


def test_the_same_content_in_another_order_is_no_change() -> None:
    registry = InferenceRegistry("rollout", "e")
    first = registry.publish([model("a"), model("b")], RoutingSpec(default_model="a"))
    assert first["topology_revision"] == 1
    turned = model("a", engines=tuple(reversed(model("a").engines)))
    assert registry.publish([model("b"), turned]) == first
    assert registry.publish({"a": model("a"), "b": model("b").to_dict()}) == first


@pytest.mark.parametrize(
    "changed",
    [
        model(state="SLEEPING"),
        model(engines=[model().engines[0], replica(1, state="DRAINING")]),
        model(engines=model().engines[:1]),
        model(weight_source="ACTOR", weight_version="1"),
        model(route_mode="SGLANG_ROUTER", router_url="http://router:1"),
        model(base_url="http://engine:2"),
        model(generation=2),
        model(served_model_name="served"),
        model(engines=[]),
        model(capabilities=["chat"]),
    ],
)
def test_every_change_of_a_model_advances_the_revision(changed: ModelSnapshot) -> None:
    registry = InferenceRegistry("rollout", "e")
    registry.publish([model()])
    assert registry.publish([changed])["topology_revision"] == 2
    assert registry.publish([model()])["topology_revision"] == 3


def test_a_new_routing_advances_and_none_keeps_the_old_one() -> None:
    registry = InferenceRegistry("rollout", "e")
    registry.publish([model()], RoutingSpec(default_model="m"))
    changed = registry.publish([model()], {"default_model": "m", "policy_revision": 1})
    assert changed["topology_revision"] == 2
    assert registry.publish([model()]) == changed


def test_a_failed_publish_leaves_the_last_snapshot_in_force() -> None:
    registry = InferenceRegistry("genrm", "e")
    before = registry.publish([model()], RoutingSpec(default_model="m"))
    with pytest.raises(ValueError, match="STATIC"):
        registry.publish([model(weight_source="ACTOR")])
    with pytest.raises(ValueError, match="unknown model"):
        registry.publish([model("n")])
    with pytest.raises(ValueError, match="Duplicate model_id"):
        registry.publish([model(), model()])
    with pytest.raises(ValueError, match="model_id"):
        registry.publish({"x": model()})
    with pytest.raises(ValueError, match="Unknown routing fields"):
        registry.publish([model()], {"default": "m"})
    assert registry.snapshot() == before


def test_documents_are_detached() -> None:
    registry = InferenceRegistry("rollout", "e")
    published = registry.publish([model()])
    published["models"].clear()
    registry.snapshot()["models"]["m"]["engines"].clear()
    assert len(registry.snapshot()["models"]["m"]["engines"]) == 2


def test_invalidation_forgets_every_state_and_always_advances() -> None:
    registry = InferenceRegistry("rollout", "e")
    ready = registry.publish([model()])
    gone = registry.invalidate()
    assert gone["topology_revision"] == 2
    assert gone["models"]["m"]["state"] == "UNKNOWN"
    for engine in gone["models"]["m"]["engines"]:
        assert (engine["state"], engine["direct_eligible"]) == ("UNKNOWN", False)
        assert engine["generation"] == 1
    assert registry.invalidate()["topology_revision"] == 3
    again = registry.publish([model()])
    assert again == ready | {"topology_revision": 4}


def test_another_registry_has_another_epoch_though_the_revisions_match() -> None:
    one, other = (InferenceRegistry("rollout").publish([model()]) for _ in range(2))
    assert one["topology_revision"] == other["topology_revision"]
    assert one["registry_epoch"] != other["registry_epoch"]
    assert etag_of(one) != etag_of(other)


def test_the_current_snapshot_is_one_object_until_something_changes() -> None:
    registry = InferenceRegistry("rollout", "e")
    registry.publish([model()])
    current = registry.current
    registry.publish([model()])
    assert registry.current is current
    assert current.to_dict() == registry.snapshot()
    registry.publish([model(state="SLEEPING")])
    assert registry.current is not current


def test_revisions_are_unique_under_concurrent_publishing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def hesitant(**fields: Any) -> RoleSnapshot:
        time.sleep(0.0005)  # between a look at the current revision and the next one
        return RoleSnapshot(**fields)

    monkeypatch.setattr("relax_infer.discovery.registry.RoleSnapshot", hesitant)
    registry = InferenceRegistry("rollout", "e")
    seen: list[int] = []

    def publish(start: int) -> None:
        seen.extend(
            registry.publish([model(generation=generation)])["topology_revision"]
            for generation in range(start, start + 20)
        )

    threads = [threading.Thread(target=publish, args=(n * 100,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert registry.snapshot()["topology_revision"] == 80
    assert sorted(seen) == list(range(1, 81))


def test_an_entity_tag_names_epoch_and_revision_and_fits_a_header() -> None:
    registry = InferenceRegistry("rollout", "e")
    assert etag_of(registry.snapshot()) == '"e-0"'
    assert etag_of(registry.publish([model()])) == '"e-1"'
    odd = etag_of(InferenceRegistry("rollout", 'a "b" ü%').snapshot())
    assert odd == '"a%20%22b%22%20%C3%BC%25-0"'
    assert odd != etag_of(InferenceRegistry("rollout", "a%20%22b%22%20%C3%BC%25").snapshot())
