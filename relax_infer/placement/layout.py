"""Device layout script: which roles hold which part of the shared pool, phase by phase.

    layout  = phase { "->" phase }
    phase   = holder { "+" holder }
    holder  = role [ "[" share "]" ]
    role    = "rollout" | "genrm" | "teacher" | "actor" | "critic"
    share   = "/" | number "/" number

``[/]`` is the whole pool, ``[1/2]`` half of it; without a share a role has what its engines need.
After the last phase comes the first again. A role keeps its slots in every phase that it is in.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import permutations

NAMES = {
    "rollout": "rollout",
    "genrm": "genrm",
    "teacher": "teacher",
    "actor": "trainer",
    "critic": "critic",
}
"""Names in scripts, and the roles of the plan that they are."""

_TOKEN = re.compile(
    r"\s*(?:(?P<arrow>->)|(?P<plus>\+)|(?P<name>[A-Za-z_]\w*)|(?P<share>\[[^\]]*\]))"
)
_SHARE = re.compile(r"\[\s*(?:([0-9]{1,7})\s*/\s*([0-9]{1,7})|/)\s*\]")
"""No cluster has more GPUs than seven digits tell."""
_SHOWN = 40
"""Characters of a script that a message repeats."""
_KINDS = {
    "arrow": "'->'",
    "plus": "'+'",
    "name": "a role",
    "share": "a share",
    "end": "the end",
}


@dataclass(frozen=True)
class Holder:
    """A role in one phase of a script."""

    role: str
    """As in the plan."""
    name: str
    """As in the script."""
    share: Fraction | None
    """Of the pool; None: what the role needs."""
    position: int
    """Of its first character, from 1."""

    def __str__(self) -> str:
        if self.share is None:
            return self.name
        return f"{self.name}[/]" if self.share == 1 else f"{self.name}[{self.share}]"


@dataclass(frozen=True)
class Block:
    """What a role needs of the pool, whichever bundles it gets."""

    gpus: int
    align: int
    """It may begin at multiples of this bundle number."""
    about: str
    """How the recipe makes the number, for messages."""


@dataclass(frozen=True)
class Fault:
    """What cannot be, and where in the script."""

    position: int
    """Character, from 1."""
    rule: str
    role: str | None = None
    """Role whose configured size differs from its share."""
    gpus: int | None = None
    """GPUs of that share."""

    def __str__(self) -> str:
        return f"character {self.position}: {self.rule}"


class LayoutError(ValueError):
    """The script is not of the grammar."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        super().__init__(str(fault))


@dataclass(frozen=True)
class Layout:
    """Where each role begins, and who is in which phase."""

    starts: Mapping[str, int]
    """First bundle by role."""
    phases: tuple[tuple[str, ...], ...]
    """Roles of each phase, in the script's order."""


def parse_layout(script: str) -> tuple[tuple[Holder, ...], ...]:
    """The phases of a script.

    Raises:
        LayoutError: at the first character that does not fit.
    """
    tokens = list(_tokens(script))
    phases: list[tuple[Holder, ...]] = []
    holders: list[Holder] = []
    at = 0
    while True:
        kind, text, position = tokens[at]
        if kind != "name":
            raise _unexpected(position, kind, text, "a role")
        share: Fraction | None = None
        at += 1
        if tokens[at][0] == "share":
            share = _share(*tokens[at][1:])
            at += 1
        if text not in NAMES:
            raise LayoutError(
                Fault(position, f"no role {_short(text)!r}; there are {', '.join(NAMES)}.")
            )
        holders.append(Holder(NAMES[text], text, share, position))
        kind, text, position = tokens[at]
        if kind in ("arrow", "end"):
            phases.append(tuple(holders))
            holders = []
        elif kind != "plus":
            raise _unexpected(position, kind, text, "'+', '->' or the end")
        if kind == "end":
            return tuple(phases)
        at += 1


def plan_layout(script: str, pool: int, blocks: Mapping[str, Block]) -> Layout | tuple[Fault, ...]:
    """Slots for every role of ``blocks``, or everything that is wrong.

    Args:
        script: see the module.
        pool: GPUs of the shared pool.
        blocks: by role of the plan; exactly these roles must have a phase.

    Raises:
        LayoutError: the script is not of the grammar.
    """
    phases = parse_layout(script)
    faults = [*_participants(script, phases, blocks), *_shares(phases, pool, blocks)]
    if faults:
        return tuple(faults)
    # Whatever placement there is, pushed down to bundle 0 it is the first fit of one of the orders.
    for order in permutations(_first_holders(phases)):
        starts, lacking = _place(order, phases, pool, blocks)
        if not lacking:
            return Layout(starts, tuple(tuple(h.role for h in phase) for phase in phases))
        if not faults:  # of the script's own order
            faults = [_no_room(holder, phases, pool, blocks) for holder in lacking]
    return tuple(faults)


def _place(
    order: Sequence[Holder],
    phases: Sequence[Sequence[Holder]],
    pool: int,
    blocks: Mapping[str, Block],
) -> tuple[dict[str, int], list[Holder]]:
    """First bundles, each role as low as those before it allow, and the roles without room."""
    starts: dict[str, int] = {}
    lacking: list[Holder] = []
    for holder in order:
        start = _first_fit(holder.role, starts, phases, pool, blocks)
        if start is None:
            lacking.append(holder)
        else:
            starts[holder.role] = start
    return starts, lacking


def _tokens(script: str) -> Iterator[tuple[str, str, int]]:
    """Kind, text and position (from 1) of every token, an ``end`` last."""
    end = len(script.rstrip())
    at = 0
    while at < end:
        found = _TOKEN.match(script, at)
        if found is None:
            at += len(script[at:]) - len(script[at:].lstrip())
            raise LayoutError(Fault(at + 1, f"{script[at]!r} is not part of a layout."))
        kind = found.lastgroup or ""
        yield kind, found[kind], found.start(kind) + 1
        at = found.end()
    yield "end", "", end + 1


def _share(text: str, position: int) -> Fraction:
    found = _SHARE.fullmatch(text)
    if found is None:
        raise LayoutError(Fault(position, f"{_short(text)} is not a share such as [1/2] or [/]."))
    if found[1] is None:
        return Fraction(1)
    part, of = int(found[1]), int(found[2])
    if not 0 < part <= of:
        raise LayoutError(Fault(position, f"{text} is not more than nothing and at most all."))
    return Fraction(part, of)


def _unexpected(position: int, kind: str, text: str, wanted: str) -> LayoutError:
    there = repr(_short(text)) if text else _KINDS[kind]
    return LayoutError(Fault(position, f"{wanted} is expected, not {there}."))


def _short(text: str) -> str:
    text = text if text.isprintable() else ascii(text)[1:-1]
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _first_holders(phases: Sequence[Sequence[Holder]]) -> list[Holder]:
    first: dict[str, Holder] = {}
    for phase in phases:
        for holder in phase:
            first.setdefault(holder.role, holder)
    return list(first.values())


def _participants(
    script: str, phases: Sequence[Sequence[Holder]], blocks: Mapping[str, Block]
) -> Iterator[Fault]:
    for phase in phases:
        seen: set[str] = set()
        for holder in phase:
            if holder.role in seen:
                yield Fault(holder.position, f"{holder.name} is twice in one phase.")
            seen.add(holder.role)
            if holder.role not in blocks:
                yield Fault(holder.position, f"{holder.name} has no part in the shared pool.")
    there = {holder.role for phase in phases for holder in phase}
    for name, role in NAMES.items():
        if role in blocks and role not in there:
            yield Fault(len(script.rstrip()) + 1, f"{name} has no phase.")


def _shares(
    phases: Sequence[Sequence[Holder]], pool: int, blocks: Mapping[str, Block]
) -> Iterator[Fault]:
    """Every share must be whole GPUs, the same in each phase, and what the recipe configures."""
    known: dict[str, int] = {}
    for holder in (holder for phase in phases for holder in phase):
        block = blocks.get(holder.role)
        if block is None:
            continue
        gpus = block.gpus if holder.share is None else holder.share * pool
        if gpus != int(gpus):
            yield Fault(
                holder.position,
                f"{holder} of {pool} GPUs is {float(gpus):g}, not whole ones.",
            )
            continue
        if known.setdefault(holder.role, int(gpus)) != gpus:
            yield Fault(
                holder.position,
                f"{holder} is {int(gpus)} GPUs, an earlier phase has {known[holder.role]}:"
                " a role keeps its slots.",
            )
        elif gpus != block.gpus:
            yield Fault(
                holder.position,
                f"{holder} is {int(gpus)} of {pool} GPUs, the recipe configures"
                f" {block.gpus} ({block.about}).",
                role=holder.role,
                gpus=int(gpus),
            )


def _first_fit(
    role: str,
    starts: Mapping[str, int],
    phases: Sequence[Sequence[Holder]],
    pool: int,
    blocks: Mapping[str, Block],
) -> int | None:
    """The lowest start beside every placed role that it ever shares a phase with."""
    beside = {
        other.role
        for phase in phases
        if any(h.role == role for h in phase)
        for other in phase
        if other.role != role and other.role in starts
    }
    taken = [(starts[other], starts[other] + blocks[other].gpus) for other in beside]
    block = blocks[role]
    for bundle in sorted({0, *(stop for _, stop in taken)}):
        start = -(-bundle // block.align) * block.align
        stop = start + block.gpus
        if stop <= pool and all(stop <= low or start >= high for low, high in taken):
            return start
    return None


def _no_room(
    holder: Holder,
    phases: Sequence[Sequence[Holder]],
    pool: int,
    blocks: Mapping[str, Block],
) -> Fault:
    for number, phase in enumerate(phases):
        needed = sum(blocks[h.role].gpus for h in phase)
        if any(h.role == holder.role for h in phase) and needed > pool:
            return Fault(
                next(h.position for h in phase if h.role == holder.role),
                f"phase {number + 1} needs {needed} GPUs, the pool has {pool}.",
            )
    return Fault(
        holder.position,
        f"{holder} finds no slots that stay the same in all its phases and begin at a multiple of"
        f" {blocks[holder.role].align}.",
    )
