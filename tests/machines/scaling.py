"""A world for scale operations: the real plan and the real course of each direction, with stages
that end as a case says. Two replicas go side by side."""

from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

from relax_infer.contracts.scale import Members, OutsiderRecord, ScaleFailure, ScaleRequest
from relax_infer.machines import SCALE, GroupState, ScaleState
from tests.machines.values import SPEC, Violation, nothing, replaced, run
from workflows import _scale_connect, _scale_out
from workflows._scale_connect import ScaleConnect
from workflows._scale_in import ScaleIn
from workflows._scale_out import ScaleOut
from workflows._scale_work import ScaleWork
from workflows.scale_role import ScaleRole

_S = ScaleState
NEVER = 9
"""A stage that nothing has."""
URLS = ("http://a:1", "http://b:2")
STAGES = {
    "out": (_S.CREATING, _S.HEALTH_CHECKING, _S.WEIGHT_SYNCING, _S.READY),
    "connect": (_S.CONNECTING, _S.WEIGHT_SYNCING, _S.READY),
    "in": (_S.DRAINING, _S.REMOVING),
}
"""In which state each stage of a direction is carried out."""
_WHOLE = {"out": _S.ACTIVE, "connect": _S.ACTIVE, "in": _S.COMPLETED}


class Case(NamedTuple):
    """One operation, and how its stages end."""

    what: str
    """out, connect, in; refused, met: there is nothing to do; called_off: before it began."""
    fails: tuple[int, int] = (NEVER, NEVER)
    """At which stage each of the two fails."""
    keep: bool = True
    called_off: bool = False
    """A person calls it off while the first stage is carried out."""

    @property
    def expected(self) -> ScaleState:
        """Where it ends, by what became of its replicas."""
        if self.called_off or self.what == "called_off":
            return _S.CANCELLED
        if self.what not in STAGES:
            return {"refused": _S.REJECTED, "met": _S.NOOP}[self.what]
        well = sum(stage == NEVER for stage in self.fails)
        if well == 2:
            return _WHOLE[self.what]
        return _S.PARTIAL if well and self.keep else _S.FAILED

    @property
    def request(self) -> ScaleRequest:
        asked: dict[str, dict[str, Any]] = {
            "connect": {"engine_urls": URLS, "direction": "out"},
            "in": {"num_replicas": 1, "direction": "in"},
            "met": {"num_replicas": 1, "direction": "out"},
            "refused": {},
        }
        fields = asked.get(self.what, {"num_replicas": 3})
        on_partial = "keep" if self.keep else "rollback_all"
        return ScaleRequest(operation_id="o", on_partial=on_partial, **fields)

    @property
    def members(self) -> Members:
        left = [OutsiderRecord(replica=k, stage="left", operation="o") for k in (1, 2)]
        outsiders = tuple(left) if self.what == "in" else ()
        return Members(spec=SPEC, state=GroupState.READY, reserved=(1, 2), outsiders=outsiders)


def cases() -> Iterator[Case]:
    for direction, stages in STAGES.items():
        ends = (*range(len(stages)), NEVER)
        for fails in product(ends, ends):
            yield Case(direction, fails)
            if direction == "connect":
                yield Case(direction, fails, keep=False)
    yield Case("out", called_off=True)
    for what in ("called_off", "refused", "met"):
        yield Case(what)


def carry_out(case: Case) -> None:
    """Raises what the operation raises, and :class:`Violation` where a stage is carried out in
    another state than its own, or the operation ends elsewhere than it must."""
    work: Any = object.__new__(ScaleWork)
    work.request, work.state, work.facts, work.rows = case.request, SCALE.initial, {}, []
    work.called_off, work.ending = case.what == "called_off", None
    work.tell = work.roll_back = nothing

    async def members(*_: object, **__: object) -> Members:
        return case.members

    work.ask_group = members

    def well(stage: int, which: int) -> bool:
        """Of one of the two, now."""
        if work.state is not STAGES[case.what][stage]:
            raise Violation(f"{case}: its stage {stage} is carried out in {work.state}")
        work.called_off = work.called_off or case.called_off
        return case.fails[which] != stage

    def raising(module: Any, stage: int) -> Any:
        async def carry_out(_: object, which: int | str) -> None:
            at = URLS.index(which) if isinstance(which, str) else which - 1
            if not well(stage, at):
                raise module._Failed(ScaleFailure.UNKNOWN, "as the case says")

        return carry_out

    async def let_go(_: object, replica: int) -> OutsiderRecord | None:
        return case.members.outsiders[replica - 1] if well(0, replica - 1) else None

    async def end(_: object, record: OutsiderRecord) -> bool:
        return well(1, record.replica - 1)

    role: Any = object.__new__(ScaleRole)
    role._work = work
    out = [raising(_scale_out, stage) for stage in range(4)]
    connect = [raising(_scale_connect, stage) for stage in range(3)]
    with (
        replaced(
            ScaleOut, **dict(zip(("_create", "_launch", "_load", "_adopt"), out, strict=True))
        ),
        replaced(
            ScaleConnect,
            _roll_back=nothing,
            **dict(zip(("_connect", "_check", "_adopt"), connect, strict=True)),
        ),
        replaced(ScaleIn, _let_go=let_go, _end=end),
    ):
        run(role._carry_out(case.members))
    if work.state is not case.expected:
        raise Violation(f"{case} ends {work.state}, not {case.expected}")
