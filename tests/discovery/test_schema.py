import json
import pickle
from typing import Any

import pytest

from relax_infer.discovery import (
    ModelSnapshot,
    Policy,
    ReplicaSnapshot,
    Role,
    RoleSnapshot,
    RouteMode,
    RoutingSpec,
    State,
    WeightSource,
)

STATIC_CANNOT = {"weight_update", "update_weights", "dcs", "register_dcs", "seed_weight_sync"}


def replica(**changes: Any) -> ReplicaSnapshot:
    given = {
        "engine_id": "m/replica-0",
        "base_url": "http://engine:30000",
        "state": "READY",
        "direct_eligible": True,
    }
    return ReplicaSnapshot(**(given | changes))


def model(**changes: Any) -> ModelSnapshot:
    given = {
        "model_id": "m",
        "state": "READY",
        "route_mode": "DIRECT",
        "engines": [replica()],
    }
    return ModelSnapshot(**(given | changes))


def role(**changes: Any) -> RoleSnapshot:
    given = {
        "role": "rollout",
        "registry_epoch": "epoch",
        "topology_revision": 1,
        "routing": RoutingSpec(default_model="m", aliases={"a": "m"}, route_key_map={"k": "m"}),
        "models": {"m": model()},
    }
    return RoleSnapshot(**(given | changes))


def document(**changes: Any) -> dict[str, Any]:
    return role().to_dict() | changes


def test_a_document_survives_json_and_pickle() -> None:
    snapshot = role()
    again = RoleSnapshot.from_dict(json.loads(json.dumps(snapshot.to_dict())))
    assert again == snapshot
    assert again.to_dict() == snapshot.to_dict()
    assert pickle.loads(pickle.dumps(snapshot)) == snapshot
    assert snapshot.to_dict() == {
        "schema_version": 2,
        "role": "rollout",
        "registry_epoch": "epoch",
        "topology_revision": 1,
        "routing": {
            "default_model": "m",
            "route_key_map": {"k": "m"},
            "aliases": {"a": "m"},
            "policy": "round_robin",
            "policy_revision": 0,
        },
        "models": {
            "m": {
                "model_id": "m",
                "state": "READY",
                "route_mode": "DIRECT",
                "router_url": None,
                "engines": [
                    {
                        "engine_id": "m/replica-0",
                        "base_url": "http://engine:30000",
                        "state": "READY",
                        "direct_eligible": True,
                        "generation": 0,
                    }
                ],
                "weight_source": "STATIC",
                "weight_version": None,
                "capabilities": [],
                "served_model_name": None,
            }
        },
    }


@pytest.mark.parametrize("value", ["", " m", "m ", "\tm", 3, None, b"m"])
def test_text_is_trimmed_and_not_empty(value: object) -> None:
    with pytest.raises(ValueError, match=r"engine_id"):
        replica(engine_id=value)


@pytest.mark.parametrize("value", [-1, True, 1.0, "1", None, 2**53, 10**400])
def test_an_integer_is_an_int_from_zero(value: object) -> None:
    with pytest.raises(ValueError, match="generation"):
        replica(generation=value)
    with pytest.raises(ValueError, match="topology_revision"):
        role(topology_revision=value)


@pytest.mark.parametrize(
    "url",
    [
        *("file:///etc/passwd", "ftp://h", "h:1", "http://", "http:///x", "//h/x", ""),
        *("http://u@h", "http://u:p@h", "http://h?q=1", "http://h/?", "http://h#f", "http://h/#"),
        *("http://h:0", "http://h:bad", "http://h:", "http://h:70000", "http://h:-1"),
        *("http://h/a b", " http://h", "http://h\n", "http://h/\x00", "http://h/\u2028x"),
    ],
)
def test_addresses_that_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="base_url"):
        replica(base_url=url)
    with pytest.raises(ValueError, match="router_url"):
        model(router_url=url)


@pytest.mark.parametrize(
    ("url", "kept"),
    [
        ("http://h", "http://h"),
        ("https://h:8443/", "https://h:8443"),
        ("http://h/rollout//", "http://h/rollout"),
        ("http://[::1]:30000/", "http://[::1]:30000"),
    ],
)
def test_addresses_lose_their_trailing_slashes(url: str, kept: str) -> None:
    assert replica(base_url=url).base_url == kept


@pytest.mark.parametrize("state", [s for s in State if s is not State.READY])
def test_only_a_ready_replica_with_an_address_is_eligible(state: State) -> None:
    assert replica().direct_eligible is True
    assert replica(state=state).direct_eligible is False
    assert replica(base_url=None).direct_eligible is False
    assert replica(direct_eligible=False).direct_eligible is False
    with pytest.raises(ValueError, match="direct_eligible"):
        replica(direct_eligible=1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("state", "ready"),
        ("route_mode", "direct"),
        ("weight_source", "static"),
        ("engines", "x"),
        ("engines", {"a": 1}),
        ("engines", [{"engine_id": "x"}]),
        ("capabilities", "x"),
        ("capabilities", [" x"]),
        ("served_model_name", ""),
    ],
)
def test_wrong_model_fields_are_named(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        model(**{field: value})


def test_engines_and_capabilities_are_ordered_and_copied() -> None:
    engines = [replica(engine_id="b"), replica(engine_id="a")]
    capabilities = ["logprob", "chat", "chat"]
    made = model(engines=engines, capabilities=capabilities)
    engines.clear()
    capabilities.clear()
    assert [e.engine_id for e in made.engines] == ["a", "b"]
    assert made.capabilities == ("chat", "logprob")
    with pytest.raises(ValueError, match="Duplicate engine_id: a"):
        model(engines=[replica(engine_id="a"), replica(engine_id="a")])


def test_a_static_model_takes_no_weights() -> None:
    with pytest.raises(ValueError, match="STATIC model has no weight_version"):
        model(weight_version="3")
    for capability in ("weight_update", "DCS", "Seed_Weight_Sync", "update_weights"):
        with pytest.raises(ValueError, match="STATIC"):
            model(capabilities=["chat", capability])
    actor = model(weight_source="ACTOR", weight_version="3", capabilities=["weight_update"])
    assert actor.weight_version == "3"


def test_scorers_are_static() -> None:
    trained = {"m": model(weight_source="ACTOR")}
    assert role(models=trained)
    for name in ("genrm", "teacher"):
        with pytest.raises(ValueError, match="STATIC"):
            role(role=name, models=trained)
    with pytest.raises(ValueError, match="role"):
        role(role="worker")


def test_routing_names_only_models_that_exist() -> None:
    for routing in (
        RoutingSpec(default_model="x"),
        RoutingSpec(aliases={"a": "x"}),
        RoutingSpec(route_key_map={"k": "x"}),
    ):
        with pytest.raises(ValueError, match="Routing references an unknown model: x"):
            role(routing=routing)


def test_an_alias_does_not_shadow_another_model() -> None:
    models = {"m": model(), "n": model(model_id="n")}
    with pytest.raises(ValueError, match="aliases must not shadow another model ID"):
        role(models=models, routing=RoutingSpec(aliases={"n": "m"}))
    assert role(models=models, routing=RoutingSpec(aliases={"n": "n"}))


def test_everything_is_frozen_and_detached() -> None:
    aliases, models = {"a": "m"}, {"m": model()}
    snapshot = role(routing=RoutingSpec(aliases=aliases), models=models)
    aliases["b"], models["n"] = "m", model(model_id="n")
    assert dict(snapshot.routing.aliases) == {"a": "m"}
    assert list(snapshot.models) == ["m"]
    for target, name in ((snapshot, "role"), (snapshot.models["m"], "state")):
        with pytest.raises(ValueError, match="frozen"):
            setattr(target, name, "x")
    with pytest.raises(TypeError):
        snapshot.models["n"] = model()  # type: ignore[index]
    with pytest.raises(TypeError):
        snapshot.routing.aliases["n"] = "m"  # type: ignore[index]
    detached = snapshot.to_dict()
    detached["models"]["m"]["engines"].clear()
    assert len(snapshot.models["m"].engines) == 1


@pytest.mark.parametrize("version", [1, 3, 2.0, True, "2", None])
def test_the_schema_version_is_the_int_two(version: object) -> None:
    with pytest.raises(ValueError, match="schema_version"):
        RoleSnapshot.from_dict(document(schema_version=version))


def test_unknown_and_missing_keys_are_errors_at_every_level() -> None:
    levels = {
        "registry": lambda d: d,
        "routing": lambda d: d["routing"],
        "model": lambda d: d["models"]["m"],
        "replica": lambda d: d["models"]["m"]["engines"][0],
    }
    required = {
        "registry": (
            *("schema_version", "role", "registry_epoch"),
            *("topology_revision", "routing", "models"),
        ),
        "routing": (),
        "model": ("state", "route_mode", "engines", "weight_source"),
        "replica": ("engine_id", "base_url", "state", "direct_eligible"),
    }
    for level, find in levels.items():
        wrong = document()
        find(wrong)["pid"] = 1
        with pytest.raises(ValueError, match=f"Unknown {level} fields: pid"):
            RoleSnapshot.from_dict(wrong)
        for key in required[level]:
            short = document()
            del find(short)[key]
            with pytest.raises(ValueError, match=f"Missing {level} fields: {key}"):
                RoleSnapshot.from_dict(short)


def test_what_is_optional_may_be_left_out() -> None:
    small = document(routing={})
    small["models"]["m"] = {
        "state": "READY",
        "route_mode": "SGLANG_ROUTER",
        "engines": [],
        "weight_source": "STATIC",
    }
    snapshot = RoleSnapshot.from_dict(small)
    assert snapshot.models["m"].model_id == "m"
    assert snapshot.routing == RoutingSpec()


def test_a_model_is_listed_under_its_own_id() -> None:
    with pytest.raises(ValueError, match="model_id"):
        role(models={"n": model()}, routing=RoutingSpec())
    wrong = document()
    wrong["models"]["m"]["model_id"] = "n"
    with pytest.raises(ValueError, match="model_id"):
        RoleSnapshot.from_dict(wrong)
    with pytest.raises(ValueError, match="model_id"):
        ModelSnapshot.from_dict(wrong["models"]["m"], "m")
    with pytest.raises(ValueError, match="Missing model fields: model_id"):
        ModelSnapshot.from_dict({k: v for k, v in model().to_dict().items() if k != "model_id"})


@pytest.mark.parametrize("wrong", [None, [], "x", 2])
def test_a_document_is_an_object(wrong: object) -> None:
    for broken in (wrong, document(models=wrong), document(routing=wrong)):
        with pytest.raises(ValueError, match="must be an object"):
            RoleSnapshot.from_dict(broken)


def test_the_enumerations_are_exactly_these() -> None:
    assert [r.value for r in Role] == ["rollout", "genrm", "teacher"]
    assert {s.value for s in State} == {
        *("UNKNOWN", "STARTING", "READY", "DRAINING", "SLEEPING"),
        *("ONLOADING", "FAILED", "STOPPING", "DEAD"),
    }
    assert {m.value for m in RouteMode} == {"DIRECT", "SGLANG_ROUTER"}
    assert {w.value for w in WeightSource} == {"STATIC", "ACTOR", "DCS"}
    assert {p.value for p in Policy} == {"round_robin", "affinity"}
    assert RoutingSpec().policy is Policy.ROUND_ROBIN
    assert model().weight_source is WeightSource.STATIC


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("policy", v) for v in ("random", "ROUND_ROBIN", None, 1)),
        *(("policy_revision", v) for v in (-1, True, 2.0, "1", None)),
        *(("default_model", v) for v in ("", " m", 1)),
        *(("aliases", v) for v in (None, [], "a", {"": "m"}, {"a ": "m"}, {"a": ""}, {"a": 1})),
        *(("route_key_map", v) for v in (None, [["k", "m"]], {1: "m"}, {"k": None})),
    ],
)
def test_wrong_routing_fields_are_named(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{field}"):
        RoutingSpec(**{field: value})


@pytest.mark.parametrize("capability", sorted(STATIC_CANNOT))
def test_every_capability_of_changing_weights_is_forbidden_to_static(capability: str) -> None:
    for spelled in (capability, capability.upper(), capability.title()):
        with pytest.raises(ValueError, match="STATIC"):
            model(capabilities=[spelled])
        for source in ("ACTOR", "DCS"):
            assert model(capabilities=[spelled], weight_source=source).capabilities == (spelled,)


def test_fields_of_a_phase_are_refused_wherever_they_stand() -> None:
    """Finding F16: a snapshot says what may be called, and nothing of phases."""
    for field in ("phase", "phase_epoch"):
        with pytest.raises(ValueError, match=f"Unknown registry fields: {field}"):
            RoleSnapshot.from_dict(document(**{field: 1}))
        wrong = document()
        wrong["models"]["m"][field] = 1
        with pytest.raises(ValueError, match=f"Unknown model fields: {field}"):
            RoleSnapshot.from_dict(wrong)


@pytest.mark.parametrize("wrong", ["x", {"engine_id": "e"}, None, {}])
def test_engines_of_a_document_are_a_list(wrong: object) -> None:
    broken = document()
    broken["models"]["m"]["engines"] = wrong
    with pytest.raises(ValueError, match="engines must be a list"):
        RoleSnapshot.from_dict(broken)


def test_a_served_name_is_independent_of_the_model_id_and_its_aliases() -> None:
    served = {"m": model(served_model_name="a"), "n": model(model_id="n", served_model_name="m")}
    assert role(models=served).models["n"].served_model_name == "m"
