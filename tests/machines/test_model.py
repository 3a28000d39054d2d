"""Lease, batch gate and replicas together: every state that a hostile environment can lead to.

The searches are complete: they end when nothing new can be reached, within the stated number of
faults. On one core:

==============================================  ======  ========  =====  =======
roles                                           faults  states    depth  seconds
==============================================  ======  ========  =====  =======
rollout, trainer                                2       16,045    44     5
rollout (two replicas), trainer                 2       25,286    46     6
rollout, genrm, trainer (slow)                  2       38,615    61     15
all four                                        2       77,295    73     35
rollout, trainer (slow)                         3       217,157   55     64
all four; a lost lease (slow)                   1       54,513    67     27
rollout, trainer; it and what comes late        2       75,859    52     22
rollout, trainer; it and any other (slow)       2       151,967   52     59
==============================================  ======  ========  =====  =======

A fault is: a lost request, a lost reply, a timeout, a late operation, a probe whose answer comes
late, a dead server (with or without an orphan that holds memory), a dead actor, an operation that
fails on the host, or a phase that fails; where it is named, also a lease that is ended by hand and
an answer about what it left that does not come in time. In every state the safety of
``explore.check_state`` holds, lease book and group book survive continue-as-new, and a helpful
environment (a person included) still brings the run to a trained batch and to its end.
"""

import pytest

from tests.machines.explore import Broken, Explored, check_one_holder, explore
from tests.machines.hazards import FAULTS, LOST_LEASES, events
from tests.machines.model import Config
from tests.machines.moves import after_event
from tests.machines.mutants import GLUE, fresh

TWO = ("rollout", "trainer")
THREE = ("rollout", "genrm", "trainer")
LOST = "lease_lost"
FOUR = ("rollout", "genrm", "teacher", "trainer")


def explored(config: Config) -> Explored:
    found = explore(config)
    print(
        f"\n{', '.join(config.roles)}, {config.replicas} replicas, {config.faults} faults:"
        f" {found.states} states, depth {found.depth}"
    )
    assert found.complete
    return found


def holds_everywhere(config: Config) -> None:
    found = explored(config)
    tried = {name for name in FAULTS if found.fired[name]}
    assert tried == FAULTS
    assert all(found.fired[name] for name in ("again", "hear", "notice", "told", "resolve"))


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(Config(roles=TWO), id="two-roles"),
        pytest.param(Config(roles=TWO, replicas=2), id="two-replicas"),
        pytest.param(Config(roles=FOUR), id="four-roles"),
    ],
)
@pytest.mark.timeout(600)
def test_every_promise_holds_in_every_state(config: Config):
    holds_everywhere(config)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(
            Config(roles=FOUR, faults=1, allow=frozenset({LOST})),
            id="four-roles",
            marks=pytest.mark.wide,
        ),
        pytest.param(
            Config(
                roles=TWO,
                allow=frozenset({LOST}),
                only=frozenset({*LOST_LEASES, "late"}),
            ),
            id="two-roles-and-a-late-message",
        ),
        pytest.param(
            Config(roles=TWO, allow=frozenset({LOST})),
            id="two-roles-and-any-fault",
            marks=(pytest.mark.wide, pytest.mark.timeout(1800)),
        ),
    ],
)
@pytest.mark.timeout(600)
def test_every_promise_holds_when_a_lease_is_ended_by_hand(config: Config):
    """In every state of the run, its end included; also of one that was begun anew."""
    found = explored(config)
    assert found.fired["lease_lost"]
    assert found.fired["asks_again"]
    if config.faults > 1:
        assert found.fired["unanswered"]
        assert found.fired["word_anew"]


@pytest.mark.wide
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(Config(roles=THREE), id="three-roles"),
        pytest.param(Config(roles=TWO, faults=3), id="three-faults"),
        pytest.param(Config(roles=TWO, replicas=2, faults=3), id="three-faults-two-replicas"),
        pytest.param(
            Config(roles=FOUR, allow=frozenset({"memory_not_freed"})), id="memory-that-is-not-freed"
        ),
    ],
)
def test_every_promise_holds_in_every_state_deeper(config: Config):
    holds_everywhere(config)


def test_without_faults_there_is_one_way_and_it_ends_well():
    config = Config(roles=FOUR, faults=0)
    state = config.initial()
    while possible := events(config, state):
        (event,) = possible
        state = after_event(config, state, event)
    assert state.step.mode == "ended"
    assert state.truth.trained
    assert state.book.committed == ("step-1",)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(
            Config(roles=THREE, faults=1, allow=frozenset({"memory_not_freed"})),
            id="evidence-is-judged-before-the-pool-is-taken-back",
        ),
        pytest.param(
            Config(roles=TWO, faults=1, allow=frozenset({"acknowledge_releases"})),
            id="a-batch-is-abandoned-while-its-offload-is-acknowledged",
        ),
        pytest.param(
            Config(
                roles=TWO,
                only=frozenset({"answer", "server_dies"}),
                without=frozenset({"again"}),
            ),
            id="proof-cannot-be-had-and-a-person-says-so",
        ),
        pytest.param(
            Config(roles=THREE, only=frozenset({"request_lost", "late"})),
            id="a-person-s-word-ends-the-trainer-s-token",
        ),
        pytest.param(
            Config(
                roles=THREE,
                only=frozenset({"answer", "late"}),
                without=frozenset({"resolve", "resolve_and_abandon", "resolve_unreachable"}),
            ),
            id="a-probe-ends-the-trainer-s-token",
        ),
        pytest.param(
            Config(roles=TWO, faults=3, only=frozenset({"answer", "late"})),
            id="a-rebuild-that-is-abandoned-ends-its-token",
        ),
        pytest.param(
            Config(roles=TWO, only=frozenset({"answer"}), without=frozenset({"again"})),
            id="a-person-s-word-reaches-a-stop",
        ),
        pytest.param(
            Config(roles=THREE, allow=frozenset({"memory_not_freed"})),
            id="the-evidence-of-a-late-release-is-read",
        ),
        pytest.param(
            Config(roles=TWO, allow=frozenset({"memory_owed"})),
            id="what-is-gone-lets-go-once-its-memory-is-back",
        ),
    ],
)
def test_the_rules_hold_also_where_they_once_did_not(config: Config):
    """What else they once failed in is part of every search now."""
    assert explore(config).complete


def test_a_counterexample_is_one_line_for_each_event():
    config = Config(roles=THREE, faults=1, allow=frozenset({"memory_not_freed"}))
    with fresh() as patch:
        GLUE["evidence-is-not-read"](patch)
        with pytest.raises(Broken) as broken:
            explore(config, live=False, check=check_one_holder)
    what, *lines = str(broken.value).splitlines()
    assert what == "two physical holders: genrm and rollout"
    assert [line.split()[0] for line in lines] == [str(n + 1) for n in range(len(lines))]
    assert "rollout SLEEPING:1 [PARTIAL]" in lines[-1]
