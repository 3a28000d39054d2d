"""What single pieces of the code do, asked of each alone; whole traces are in ``test_model``."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from relax_infer.contracts.engines import GroupReport, GroupSnapshot
from relax_infer.machines import GroupState, ReplicaState
from tests.machines.groups import Work, advance
from tests.machines.host import operate
from tests.machines.recoveries import course
from tests.machines.trainer import lose_trainer, trainer_look, trainer_operate, trainer_train
from tests.machines.values import SPEC, Engine, Gpu, Group, Recovery, Report, Token, run
from workflows._group_book import GroupBook
from workflows._role_groups import RoleGroups
from workflows.inference_role import InferenceRole

_TOKEN = Token(1, "grant")


def test_a_stop_ends_the_token_where_a_launch_failed():
    """The error of the launch is not one of the stop."""
    engine, _ = operate(Engine(), "onload", _TOKEN, "launch")
    engine, report = operate(engine, "stop", _TOKEN, "")
    assert report.state is ReplicaState.DEAD
    assert engine.ended


def test_a_recovery_s_proof_waits_for_the_memory_of_what_is_gone():
    """Its processes are gone; what it says to a stop that ends its grant is that it owes."""
    gone = Report(ReplicaState.DEAD, _TOKEN)
    owing = gone._replace(error=True)
    begun = Recovery(0, _TOKEN, rebuild=False)
    blocked = course(begun._replace(results=((owing,),)))
    assert blocked.blocked
    assert blocked.result is None
    proved = course(begun._replace(results=((gone,), (gone,))))
    assert proved.result is not None


def test_a_stopped_replica_that_owes_its_memory_is_in_doubt():
    book = GroupBook(SPEC)
    book.state = GroupState.SLEEPING
    asleep = Report(ReplicaState.SLEEPING, _TOKEN)
    book.replicas = {0: asleep.real(0)}
    book.begin_stop()
    owing = Report(ReplicaState.DEAD, _TOKEN, error=True).real(0)
    book.settle_stop(GroupReport(replicas=(owing,)))
    assert book.failed == (0,)


def test_a_probe_looks_at_what_was_given_up():
    """A group of which everything was given up says that it sleeps, whatever its engines say."""
    group = Group(GroupState.SLEEPING, ((0, ReplicaState.DEAD),), _TOKEN, given_up=(0,))
    seen = (Report(ReplicaState.READY, _TOKEN),)
    work = Work("probe", _TOKEN, group, results=(seen,))
    turn = advance(work, 1, ())
    assert turn.call is not None
    assert (turn.call.kind, turn.call.replicas, turn.call.ends) == ("offload", (0,), True)
    refused = (Report(ReplicaState.FAILED, _TOKEN, error=True),)
    turn = advance(work._replace(results=(seen, refused)), 1, ())
    assert turn.answer is not None
    assert turn.answer.state != "SLEEPING"


def test_a_trainer_whose_sleep_was_proved_does_not_load_for_a_late_update():
    """Its process died under the grant; a probe says SLEEPING and ends nothing."""
    engine, _ = trainer_operate(Engine(), "onload", _TOKEN, "")
    engine = lose_trainer(engine, orphan=False)
    engine, said = trainer_look(engine, _TOKEN)
    assert said == "SLEEPING"
    engine, _ = trainer_train(engine, _TOKEN)
    assert engine.gpu is Gpu.NONE


@pytest.mark.parametrize(
    "before",
    [
        pytest.param(GroupState.BLOCKED, id="it-was-blocked"),
        pytest.param(GroupState.SLEEPING, id="it-was-loading"),
    ],
)
def test_the_lease_hears_when_a_group_is_known_again(before: GroupState):
    """A lease that waits for a person looks again only then; a group that loads says nothing
    before its end, so the role has known it as SLEEPING all the while."""
    heard: list[tuple[str, Any]] = []

    async def signal(name: str, argument: Any) -> None:
        heard.append((name, argument))

    class Role(InferenceRole):
        _lease = SimpleNamespace(signal=signal)  # type: ignore[assignment]

    role: Any = object.__new__(Role)
    role._start, role._doing = SimpleNamespace(role="rollout", groups=()), ""
    role._publication, role._turn = SimpleNamespace(behind=False), asyncio.Lock()

    def snapshot(state: GroupState) -> GroupSnapshot:
        return GroupSnapshot(role="rollout", model="m", state=state, weight_source="STATIC")

    document = snapshot(before).model_dump(mode="json")
    role._groups = RoleGroups(role._start, role, [document])
    run(role.group_changed(snapshot(GroupState.READY)))
    assert heard == [("holder_known", "rollout")]
