"""GPUs for an added replica: its own group, whole nodes, nobody else's; or a reason."""

import asyncio
from typing import Any

import pytest

from activities import scaling
from relax_infer.contracts.engines import BundleBinding, EngineGroupSpec
from relax_infer.contracts.failures import PermanentError, TransientError
from relax_infer.contracts.refs import RunRef
from relax_infer.contracts.scale import PlacementAnswer, PlacementAsk, ScaleFailure
from tests.workflows.scripted_world import plan


def rows(*nodes: str) -> list[BundleBinding]:
    return [
        BundleBinding(bundle=k, node_id=node, node_ip=f"ip-{node}", gpu_id=k)
        for k, node in enumerate(nodes)
    ]


class Cluster:
    """In the place of Ray: what was asked for, and the devices that it gives."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, given: list[BundleBinding]) -> None:
        self.given, self.error = given, None
        self.asked: dict[str, Any] = {}
        self.held: str | None = None
        self.released: list[str] = []
        monkeypatch.setattr(scaling, "bind_pool", self.bind)
        self.kept: dict[str, Any] = {}
        monkeypatch.setattr(scaling, "keep_pools", self.keep)
        monkeypatch.setattr(scaling, "let_go_of_pool", self.release)
        monkeypatch.setattr(scaling, "need_free_devices", self.need_free)

    error: Exception | None

    async def bind(self, run: str, gpus: int, timeout: float, **how: Any) -> list[BundleBinding]:
        self.asked = {"run": run, "gpus": gpus, **how}
        if self.error is not None:
            await asyncio.sleep(timeout)
            raise self.error
        await how["check"](self.given)
        return self.given

    async def keep(self, run: RunRef, pools: dict[str, Any]) -> None:
        self.kept |= {pool: tuple(rows) for pool, rows in pools.items()}

    async def release(self, run: RunRef, pool: str, timeout: float) -> None:
        self.released.append(f"{run.run}.{pool}")

    async def need_free(self, run: RunRef, given: list[BundleBinding]) -> None:
        if self.held is not None:
            raise PermanentError(self.held)


def ask(timeout: float = 60.0, **spec: Any) -> PlacementAsk:
    group: EngineGroupSpec = plan("run").groups[0].model_copy(update=spec)
    run = RunRef(run="run", store="memory://store")
    return PlacementAsk(run=run, group=group, replica=4, timeout=timeout)


async def bound(asked: PlacementAsk) -> PlacementAnswer:
    return await scaling.bind_added_replica(asked)


async def test_a_replica_of_one_node_gets_its_own_group_on_one_node(
    monkeypatch: pytest.MonkeyPatch,
):
    cluster = Cluster(monkeypatch, rows("a", "a"))
    answer = await bound(ask(gpus_per_replica=2))
    assert answer.placement is not None
    assert answer.placement.placement_group == "added-rollout-policy-4"
    assert answer.placement.bundles == tuple(cluster.given)
    assert (cluster.asked["gpus"], cluster.asked["strategy"]) == (2, "STRICT_PACK")
    assert cluster.kept == {"added-rollout-policy-4": tuple(cluster.given)}
    await scaling.release_added_replica(ask())
    assert cluster.released == ["run.added-rollout-policy-4"]


async def test_a_replica_over_two_nodes_has_a_whole_share_on_each(monkeypatch: pytest.MonkeyPatch):
    two = {"gpus_per_replica": 4, "nodes_per_replica": 2}
    Cluster(monkeypatch, rows("a", "a", "b", "b"))
    answer = await bound(ask(**two))
    assert answer.placement is not None
    Cluster(monkeypatch, rows("a", "a", "a", "b"))
    uneven = await bound(ask(**two))
    assert uneven.failure is ScaleFailure.PROVISION_FAILED
    assert "policy/replica-4 needs 2 GPUs on each of 2 nodes" in (uneven.why or "")


async def test_gpus_that_another_run_may_hold_are_not_taken(monkeypatch: pytest.MonkeyPatch):
    cluster = Cluster(monkeypatch, rows("a"))
    cluster.held = "GPU 0 of node a: engine judge/replica-0 of run old"
    answer = await bound(ask())
    assert (answer.placement, answer.failure) == (None, ScaleFailure.PROVISION_FAILED)
    assert "of run old" in (answer.why or "")
    assert cluster.kept == {}


async def test_a_cluster_without_room_is_a_timeout_and_a_busy_ray_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
):
    cluster = Cluster(monkeypatch, [])
    cluster.error = PermanentError("Ray could not place it in time")
    answer = await bound(ask(timeout=0.01))
    assert answer.failure is ScaleFailure.PROVISION_TIMEOUT
    cluster.error = TransientError("Ray's control plane did not answer")
    with pytest.raises(TransientError):
        await bound(ask(timeout=0.01))
