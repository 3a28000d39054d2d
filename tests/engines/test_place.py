"""A lost node's bundle may come back anywhere: what an actor may say and do there."""

from pathlib import Path

import pytest

from relax_infer.contracts.engines import BundleBinding, EngineOperation
from relax_infer.contracts.failures import PermanentError, UnconfirmedError
from relax_infer.contracts.fence import FenceToken
from relax_infer.contracts.host import HostIdentity
from relax_infer.engines import place
from relax_infer.engines.actor import EngineActor
from relax_infer.engines.node import EngineNode
from relax_infer.engines.place import Place
from relax_infer.machines import ReplicaState
from tests.engines.checkpoints import group_spec, make_checkpoint

HERE = HostIdentity(machine_id="m1", boot_id="b1", pid_namespace="pid:[1]")
BOUND = BundleBinding(bundle=3, node_id="n", node_ip="10.0.0.1", gpu_id=5, host=HERE)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineNode:
    monkeypatch.setenv("RELAX_HOME", str(tmp_path))
    make_checkpoint(tmp_path / "version-0", 0)
    return EngineNode(group_spec(tmp_path, bundles=(BOUND,)), 0, 0)


def come_up(monkeypatch: pytest.MonkeyPatch, **changes: object) -> None:
    where = Place("10.0.0.1", (5,), HERE)._replace(**changes)
    monkeypatch.setattr(place, "where_this_is", lambda: where)


def test_where_it_was_bound_it_may_speak_and_load(node, monkeypatch):
    come_up(monkeypatch)
    node.check_place(loads=True)


@pytest.mark.parametrize(
    "elsewhere",
    [
        pytest.param({"node_ip": "10.0.0.2"}, id="another address"),
        pytest.param(
            {"host": HERE.model_copy(update={"machine_id": "m2", "boot_id": "b2"})},
            id="another machine that was given the address",
        ),
        pytest.param(
            {"host": HERE.model_copy(update={"pid_namespace": "pid:[2]"})},
            id="another container of the machine",
        ),
    ],
)
def test_elsewhere_it_proves_nothing(node, monkeypatch, elsewhere):
    """pains 5, 7: what another host does not show may live on the lost one."""
    come_up(monkeypatch, **elsewhere)
    with pytest.raises(UnconfirmedError, match=r"bound on 10\.0\.0\.1.* proves nothing"):
        node.check_place()


def test_its_own_machine_booted_again_is_its_place(node, monkeypatch):
    come_up(monkeypatch, host=HERE.model_copy(update={"boot_id": "b2", "pid_namespace": "pid:[2]"}))
    node.check_place(loads=True)


def test_on_another_device_it_may_prove_but_not_load(node, monkeypatch):
    come_up(monkeypatch, gpu_ids=(6,))
    node.check_place()
    with pytest.raises(PermanentError, match=r"bound to GPU 5 of 10\.0\.0\.1.* GPU 6"):
        node.check_place(loads=True)


async def test_the_actor_of_a_replica_elsewhere_calls_it_failed_and_never_gone(node, monkeypatch):
    come_up(monkeypatch, node_ip="10.0.0.2")
    actor = EngineActor(node.spec, 0)
    token = FenceToken(counter=1, grant_id="g")
    for kind in ("stop", "offload", "forget", "launch"):
        op = EngineOperation(group=node.spec, operation_id=kind, fence=token)
        outcome = await actor.operate(kind, op)
        assert outcome.report.state is ReplicaState.FAILED
        assert (outcome.report.error or "").startswith("Unconfirmed: ")
        assert outcome.evidence is None
    for ask in (actor.probe, actor.health, actor.read_weights):
        with pytest.raises(UnconfirmedError):
            await ask()
    with pytest.raises(UnconfirmedError):
        await actor.settle_requests("run/", 1.0)
    monkeypatch.undo()
    assert node.files.fence() is None, "a token was written down on the wrong host"
