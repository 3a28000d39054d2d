"""Which orders of turns in a layout script are those of a step: it generates, judges, teaches and
then trains, and each role has one turn."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from relax_infer.placement.layout import Fault, Holder

_TRAINING = ("critic", "trainer")
_VERBS = {"rollout": "generated", "genrm": "scored", "teacher": "scored"}

Turns = Mapping[str, Sequence[tuple[int, Holder]]]
"""By role: every phase that it is in, in order, and the holder there."""


def order_faults(phases: Sequence[Sequence[Holder]]) -> tuple[Fault, ...]:
    """Everything that no step does, with its place in the script; of the parsed script."""
    turns: dict[str, list[tuple[int, Holder]]] = {}
    for number, phase in enumerate(phases):
        for holder in phase:
            turns.setdefault(holder.role, []).append((number, holder))
    found = [*_again(turns), *_before_rollout(turns), *_taught_first(turns), *_trained(turns)]
    return tuple(found)


def _first(turns: Turns, role: str) -> int:
    return turns[role][0][0]


def _last(turns: Turns, role: str) -> int:
    return turns[role][-1][0]


def _again(turns: Turns) -> Iterator[Fault]:
    for mine in turns.values():
        for (before, _), (number, holder) in pairwise(mine):
            if number > before + 1:
                yield Fault(
                    holder.position,
                    f"{holder.name} comes back after its turn has ended: a step has one turn of"
                    " each role.",
                )


def _before_rollout(turns: Turns) -> Iterator[Fault]:
    for role, mine in turns.items():
        if "rollout" in turns and _first(turns, role) < _first(turns, "rollout"):
            holder = mine[0][1]
            yield Fault(
                holder.position, f"{holder.name} is before rollout: a step generates first."
            )


def _taught_first(turns: Turns) -> Iterator[Fault]:
    """Scorers beside the rollout are asked by whom shares what with whom, not by the script."""
    if not {"rollout", "genrm", "teacher"} <= turns.keys():
        return
    if _first(turns, "rollout") < _first(turns, "teacher") < _first(turns, "genrm"):
        at = turns["teacher"][0][1].position
        yield Fault(at, "teacher has its turn before genrm: a step judges first.")


def _trained(turns: Turns) -> Iterator[Fault]:
    for role in _TRAINING:
        late = [
            other
            for other in _VERBS
            if role in turns and other in turns and _last(turns, role) < _last(turns, other)
        ]
        for other in late[-1:]:
            holder = turns[role][-1][1]
            yield Fault(
                holder.position,
                f"{holder.name} ends its turn before {other} has {_VERBS[other]}: a step trains"
                " last.",
            )
    if {*_TRAINING} <= turns.keys() and _last(turns, "critic") > _last(turns, "trainer"):
        at = turns["critic"][0][1].position
        yield Fault(at, "critic ends its turn after actor: a step trains the critic first.")
