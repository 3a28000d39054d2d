"""One gateway, one lifecycle and one set of routing rules for all roles; what discovery shows."""

from typing import Any

import pytest

from relax_infer.contracts.engines import GroupReport, ReplicaReport
from relax_infer.discovery import (
    InferenceClient,
    InferenceRegistry,
    ModelSnapshot,
    RoleSnapshot,
    RouteResolver,
    legacy_document,
)
from relax_infer.engines import InferenceEngineSpec
from relax_infer.engines.static import WEIGHT_OPERATIONS
from relax_infer.gateway import InferenceGatewayHandler, app
from relax_infer.machines import ReplicaState
from tests.discovery.servers import echo
from tests.engines.checkpoints import group_spec
from tests.gateway.asking import ask
from tests.gateway.fakes import engine, gateway, registry
from tests.workflows.scripted_world import ScriptedWorld
from tests.workflows.test_training_run import Working, start
from workflows._group_book import GroupBook
from workflows._registry import models_of

ROLES = ("rollout", "genrm", "teacher")


async def test_the_same_gateway_class_serves_rollout_genrm_and_teacher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served: list[str] = []

    class Noted(InferenceGatewayHandler):
        def plan(self, *arguments: Any) -> Any:
            served.append(str(self.role))
            return super().plan(*arguments)

    monkeypatch.setattr(app, "InferenceGatewayHandler", Noted)
    async with gateway() as front, engine(echo) as upstream:
        for role in ROLES:
            routed = {"route_mode": "SGLANG_ROUTER", "router_url": upstream.url}
            front.publish(role, upstream.url, **(routed if role == "rollout" else {}))
            assert (await ask("POST", f"{front.url}/{role}/generate", {"text": "x"})).status == 200
    assert served == list(ROLES)
    assert len(upstream.posts) == 3


@pytest.mark.asyncio(loop_scope="session")
async def test_the_same_lifecycle_core_owns_all_three_kinds_of_engine_pools(
    working: Working,
) -> None:
    world = ScriptedWorld()
    groups = ("rollout.policy", "genrm.genrm", "teacher.teacher")
    async with working(world) as client:
        handle = await start(client, steps=1)
        await handle.result()
        found = [await client.get_workflow_handle(f"{handle.id}.{g}").describe() for g in groups]
    assert [each.workflow_type for each in found] == ["EngineLifecycle"] * 3
    assert {role for role, _ in world.engines.launches} == set(ROLES)


async def test_gateway_and_direct_clients_share_the_routing_rules() -> None:
    """Whoever asks, a key of affinity leads to the replica that the one resolver names."""
    async with gateway() as front, engine(echo) as one, engine(echo) as other, engine(echo) as last:
        engines = (one, other, last)
        document = front.publish("genrm", *(e.url for e in engines))

        async def snapshot() -> dict[str, Any]:
            return document

        resolver = RouteResolver()
        async with InferenceClient(snapshot_provider=snapshot) as client:
            for number in range(24):
                key = f"prompt-{number}"
                named = resolver.resolve(document, model="m", affinity_key=key).base_url
                (meant,) = [e for e in engines if e.url == named]
                before = len(meant.posts)
                await client.generate({"text": "x"}, model="m", affinity_key=key)
                headers = {"X-SMG-Routing-Key": key}
                payload = {"text": "x", "model": "m"}
                await ask("POST", f"{front.url}/genrm/generate", payload, headers)
                assert len(meant.posts) == before + 2
        assert sum(len(e.posts) for e in engines) == 48
        assert all(e.posts for e in engines)


def test_discovery_never_shows_internal_workers_as_replicas(tmp_path) -> None:
    """Two engines of sixteen ranks over two nodes each are two replicas, and a document that
    would show more of them is no document."""
    sizes = {"gpus_per_replica": 16, "nodes_per_replica": 2, "replicas": 2}
    book = GroupBook(group_spec(tmp_path, role="teacher", weight_source="STATIC", **sizes))
    book.begin_onload()
    book.settle_onload(
        GroupReport(
            replicas=tuple(
                ReplicaReport(
                    replica=k,
                    engine_id=f"policy/replica-{k}",
                    state=ReplicaState.READY,
                    base_url=f"http://10.0.0.{k}:9000",
                    incarnation=f"i-{k}",
                )
                for k in range(2)
            )
        )
    )
    document = InferenceRegistry("teacher").publish(models_of((book.snapshot(),), None))
    (model,) = document["models"].values()
    assert [(e["engine_id"], e["base_url"]) for e in model["engines"]] == [
        ("policy/replica-0", "http://10.0.0.0:9000"),
        ("policy/replica-1", "http://10.0.0.1:9000"),
    ]
    (old,) = legacy_document(RoleSnapshot.from_dict(document))["models"].values()
    (listed,) = (group["engines"] for group in old["engine_groups"])
    assert [sorted(each) for each in listed] == [["rank", "status", "url"]] * 2
    model["engines"][0]["workers"] = ["http://10.0.0.9:1"]
    with pytest.raises(ValueError, match="workers"):
        RoleSnapshot.from_dict(document)


def test_static_models_cannot_register_for_dynamic_weights_or_updates() -> None:
    spec = InferenceEngineSpec("teacher")
    assert {"register_dcs", "update_weights_from_distributed"} <= WEIGHT_OPERATIONS
    for operation in WEIGHT_OPERATIONS:
        with pytest.raises(RuntimeError, match="STATIC"):
            spec.require_operation(operation)
    spec.require_operation("generate")
    fields = {"model_id": "m", "state": "READY", "route_mode": "DIRECT"}
    with pytest.raises(ValueError, match="STATIC"):
        ModelSnapshot(**fields, weight_source="STATIC", weight_version="1")
    for source in ("ACTOR", "DCS"):
        model = ModelSnapshot(**fields, weight_source=source, weight_version="1")
        with pytest.raises(ValueError, match="STATIC"):
            InferenceRegistry("teacher").publish([model])
    assert registry("rollout", "http://e:1", weight_source="ACTOR", weight_version="1")
