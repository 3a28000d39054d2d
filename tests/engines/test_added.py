"""What an engine group asks of replicas that were added, or are on their way out."""

from pathlib import Path
from typing import Any

import pytest

from relax_infer.contracts.failures import UnconfirmedError
from relax_infer.engines import EngineGroup, group
from tests.engines.checkpoints import group_spec


class Remote:
    """One method of an actor: its answers, in order, then the last one for ever."""

    def __init__(self, *answers: int) -> None:
        self.answers = list(answers)
        self.calls: list[tuple[Any, ...]] = []

    async def remote(self, *arguments: Any) -> int:
        self.calls.append(arguments)
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


class Actor:
    def __init__(self, *in_flight: int) -> None:
        self.in_flight = Remote(*in_flight)
        self.settle_requests = Remote(1)


@pytest.fixture
def actors(monkeypatch: pytest.MonkeyPatch) -> dict[int, Actor]:
    """Heads that Ray knows, by replica."""
    known: dict[int, Actor] = {}

    async def node_actor(spec: object, replica: int) -> Actor:
        return known[replica]

    monkeypatch.setattr(group, "node_actor", node_actor)
    monkeypatch.setattr(group, "living_heads", lambda spec: known)
    monkeypatch.setattr(group, "IDLE_SECONDS", 0.0)
    return known


def engines(replicas: int = 2) -> EngineGroup:
    return EngineGroup(group_spec(Path("/nowhere"), bundles=(), replicas=replicas))


async def test_a_replica_that_leaves_is_waited_for_until_its_last_answer(actors: dict[int, Actor]):
    actors[2] = Actor(3, 1, 0)
    assert await engines().wait_idle(2, timeout=60.0) == 0
    assert len(actors[2].in_flight.calls) == 3


async def test_what_is_left_at_the_deadline_is_told(actors: dict[int, Actor]):
    actors[2] = Actor(2)
    assert await engines().wait_idle(2, timeout=0.0) == 2


async def test_requests_are_settled_on_replicas_that_the_caller_does_not_know_of(
    actors: dict[int, Actor],
):
    """A phase has the spec that the run began with."""
    actors.update({k: Actor(0) for k in (0, 1, 5)})
    assert await engines().settle_requests("run/7/") == 3
    assert [len(actor.settle_requests.calls) for actor in actors.values()] == [1, 1, 1]


async def test_an_added_replica_that_does_not_answer_leaves_it_open(
    actors: dict[int, Actor], monkeypatch: pytest.MonkeyPatch
):
    async def silent(call: Any, timeout: float) -> int:
        call.close()
        raise UnconfirmedError("no answer")

    actors.update({k: Actor(0) for k in (0, 1, 5)})
    monkeypatch.setattr(group, "answer", silent)
    with pytest.raises(UnconfirmedError):
        await engines().settle_requests("run/7/")
