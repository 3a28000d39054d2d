"""A world for the states of a run: the real ``TrainingRun``, whose roles, steps and lease do what a
script says, and what a person may ask of it.

A run is begun anew for every script; scripts that bring it to the same place are gone on from once.
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Generator
from types import SimpleNamespace
from typing import Any, NamedTuple

from temporalio.exceptions import ApplicationError, ChildWorkflowError

from relax_infer.contracts.run import ResolveRun, RunInput
from relax_infer.machines import RUN, RunState
from tests.machines.values import Violation, nothing, replaced
from workflows import _run_core, training_run
from workflows.training_run import TrainingRun

_S = RunState
STEPS = 2
LIMITS = {
    **{"open_fails": 1, "step_fails": 1, "cannot_close": 1, "lease_blocked": 1},
    **{"pause": 1, "resume": 1, "stop": 1, "retry": 2, "give_up": 1},
}
"""How often each may happen; what is not here happens as often as it can."""
TROUBLES = ("open_fails", "step_fails", "cannot_close", "lease_blocked")
MAY_ASK: dict[RunState, frozenset[str]] = {
    _S.STARTING: frozenset({"stop"}),
    _S.RUNNING: frozenset({"pause", "stop"}),
    _S.PAUSING: frozenset({"resume", "stop"}),
    _S.PAUSED: frozenset({"resume", "stop"}),
    _S.BLOCKED: frozenset({"stop"}),
}
"""What a person may ask for in each state, beside a word where one is waited for."""


class _Pause:
    """Until the next event."""

    def __await__(self) -> Generator[None, None, None]:
        yield


async def _until(condition: Callable[[], bool], **_: object) -> None:
    while not condition():
        await _Pause()


class _Premises:
    """What a run brings up and takes down."""

    def __init__(self, run: "Run") -> None:
        self._run = run

    async def open(self) -> None:
        if await self._run.told("open", "open_fails") == "open_fails":
            raise ApplicationError("a role does not come up")

    async def close(self) -> None:
        """Every role has let go before any is stopped, so the lease waits for nobody by then."""
        if await self._run.told("closed", "cannot_close") == "cannot_close":
            await self._run._ask_person("a role cannot be stopped", "goes on down")


class Run(TrainingRun):
    """With a world of this module."""

    def __init__(self) -> None:
        super().__init__(RunInput(recipe="r"))
        self.awaited: tuple[str, ...] = ()
        """Events of the world that are waited for."""
        self.heard: str | None = None
        self._lease = SimpleNamespace(ask=nothing, find=nothing)  # type: ignore[assignment]

    async def told(self, *awaited: str) -> str:
        self.awaited, self.heard = awaited, None
        await _until(lambda: self.heard is not None)
        self.awaited = ()
        assert self.heard is not None
        return self.heard

    @property
    def _premises(self) -> Any:
        return _Premises(self)

    async def _try_step(self, step: int, attempt: int) -> Any:
        if await self.told("step_done", "step_fails") == "step_done":
            return SimpleNamespace(weights=None)
        raise ChildWorkflowError(
            "it gave up",
            namespace="n",
            workflow_id="w",
            run_id="r",
            workflow_type="TrainingStep",
            initiated_event_id=1,
            started_event_id=1,
            retry_state=None,
        )

    def _note(self, result: Any) -> None:
        pass

    def _status(self) -> Any:
        return None

    def _lease_resolution(self, *_: object, **__: object) -> Any:
        return None

    def may(self, method: str, *args: object) -> bool:
        try:
            getattr(self, f"_check_{method}")(*args)
        except ValueError:
            return False
        return True


class Place(NamedTuple):
    """Where a script has brought a run."""

    state: RunState
    step: int
    waits: tuple[object, ...]
    left: tuple[int, ...]
    """Of :data:`LIMITS`."""


class After(NamedTuple):
    """A script's end: where it is, and what may happen next."""

    place: Place
    possible: tuple[str, ...]
    ended: bool


def _word(event: str) -> ResolveRun:
    action = "retry" if event == "retry" else "stop"
    return ResolveRun(who="ada", why="looked", action=action, confirm_released=True)


def play(script: tuple[str, ...]) -> After:
    """Raises what the run raises, and :class:`Violation` where it is not as it must be."""

    async def planned(*_: object, **__: object) -> Any:
        return SimpleNamespace(
            steps=STEPS, initial_weights=None, begins_after=0, max_staleness=0, run=None
        )

    async def bound(plan: Any, **_: object) -> Any:
        return SimpleNamespace(plan=plan)

    async def in_peace(work: Awaitable[Any]) -> Any:
        return await work

    outside: Any = SimpleNamespace(
        info=lambda: SimpleNamespace(
            workflow_id="run",
            first_execution_run_id="r",
            is_continue_as_new_suggested=lambda: False,
        ),
        wait_condition=_until,
        logger=SimpleNamespace(warning=nothing),
    )
    shown: dict[str, Any] = {"show_state": lambda _: None, "show_details": lambda *_: None}
    with (
        replaced(_run_core, workflow=outside, placement_rows=lambda _: [], **shown),
        replaced(
            training_run,
            workflow=outside,
            show_run=lambda _: None,
            RESOLVE_RECIPE=planned,
            BIND_PLACEMENT=bound,
            in_peace=in_peace,
        ),
    ):
        run = Run()
        course = run.run(RunInput(recipe="r"))
        ended = _goes_on(course)
        for event in script:
            before = run._state
            _happens(run, event)
            ended = _goes_on(course)
            _check(run, event, before, ended)
        left = Counter(script)
        place = Place(
            run._state,
            run._step,
            (
                *(run.awaited, run._lease_waits, run._words_awaited, run._wanted is not None),
                *(run._resolved and run._resolved.action, run._left, run._error is not None),
            ),
            tuple(most - left[name] for name, most in LIMITS.items()),
        )
        possible = () if ended else tuple(_possible(run, left))
        course.close()
        return After(place, possible, ended)


def _goes_on(course: Any) -> bool:
    """Whether it has ended."""
    try:
        course.send(None)
    except StopIteration:
        return True
    except ApplicationError:  # it could not start
        return True
    return False


def _happens(run: Run, event: str) -> None:
    if event in run.awaited:
        run.heard = event
    elif event == "lease_blocked":
        run.lease_blocked("a holder is not known")
    elif event == "lease_unblocked":
        run.lease_unblocked("")
    elif event in ("retry", "give_up"):
        word = run.resolve(_word(event))
        if not _goes_on(word):
            raise Violation("a word waits for something")
    else:
        getattr(run, event)()


def _possible(run: Run, left: Counter[str]) -> list[str]:
    found = [event for event in run.awaited if event != "closed" or not run._lease_waits]
    found += [event for event in ("pause", "resume", "stop") if run.may(event)]
    found += [event for event in ("retry", "give_up") if run.may("resolve", _word(event))]
    found.append("lease_unblocked" if run._lease_waits else "lease_blocked")
    troubles = sum(left[name] for name in TROUBLES)
    return [
        event
        for event in found
        if left[event] < LIMITS.get(event, 1000) and (event not in TROUBLES or troubles < 2)
    ]


def _check(run: Run, event: str, before: RunState, ended: bool) -> None:
    state = run._state
    if ended != (state in RUN.terminal):
        raise Violation(f"the run is {state} and its workflow has {'' if ended else 'not '}ended")
    may = {update for update in ("pause", "resume", "stop") if run.may(update)}
    if may != MAY_ASK.get(state, frozenset()):
        raise Violation(f"in {state} a person may ask for {sorted(may)}")
    troubled = event in ("lease_blocked", "cannot_close")
    troubled = troubled or (event == "step_fails" and before is not _S.STOPPING)
    if troubled and state is not (_S.PAUSED if before is _S.PAUSED else _S.BLOCKED):
        raise Violation(f"on {event} a run that was {before} is {state}")
    waits = run._words_awaited or run._lease_waits
    if state is _S.BLOCKED and not waits:
        raise Violation(f"after {event} the run waits for a person, and nothing needs one")
    if event == "stop" and state not in (_S.STOPPING, _S.DONE):
        raise Violation(f"a run that was {before} and is asked to stop is {state}")


class Explored(NamedTuple):
    """Every place, and what leads from it where."""

    ways: dict[Place, dict[str, Place]]
    ended: frozenset[Place]

    def end_well(self, places: set[Place], without: frozenset[str]) -> set[Place]:
        """Those from which an end can be reached without some events."""
        good = set(self.ended)
        while True:
            more = {
                place
                for place in places - good
                if any(to in good for event, to in self.ways[place].items() if event not in without)
            }
            if not more:
                return good
            good |= more


def explore() -> Explored:
    """Every place that the limits allow; raises what :func:`play` raises, with the script."""
    first = play(())
    ways: dict[Place, dict[str, Place]] = {first.place: {}}
    layer: list[tuple[tuple[str, ...], After]] = [((), first)]
    ended: set[Place] = set()
    while layer:
        following: list[tuple[tuple[str, ...], After]] = []
        for script, after in layer:
            if after.ended:
                ended.add(after.place)
            for event in after.possible:
                try:
                    then = play((*script, event))
                except Exception as broken:
                    raise Violation(f"{broken}: {' '.join((*script, event))}") from broken
                ways[after.place][event] = then.place
                if then.place not in ways:
                    ways[then.place] = {}
                    following.append(((*script, event), then))
        layer = following
    found = Explored(ways, frozenset(ended))
    everywhere = set(ways)
    nobody_stops = frozenset({"stop", "give_up", *TROUBLES})
    for place in everywhere - found.end_well(everywhere, nobody_stops):
        if place.left[list(LIMITS).index("resume")] and place.left[list(LIMITS).index("retry")]:
            raise Violation(f"from {place} no end can be reached unless somebody stops the run")
    return found
