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

from relax_infer.contracts.counted import counted
from relax_infer.placement.alignment import Row, line_up

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
_AFTER_ROLE = ("plus", "arrow", "end")
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

    rows: tuple[Row, ...]
    """Its engines, model after model; or its ranks, which may be anywhere."""
    node: int
    """GPUs of a node."""
    about: str
    """How the recipe makes the number, for messages."""

    @property
    def gpus(self) -> int:
        """With those between its engines when the first begins as low as it may in a node."""
        starts, stop = line_up(self.rows, 0, self.node)
        return stop - starts[0]

    @property
    def least(self) -> int:
        """Wherever it begins."""
        return sum(row.gpus for row in self.rows)


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

    def __init__(self, faults: Sequence[Fault]) -> None:
        self.faults = tuple(faults)
        super().__init__("; ".join(str(fault) for fault in self.faults))


@dataclass(frozen=True)
class Layout:
    """Where each role begins, and who is in which phase."""

    starts: Mapping[str, tuple[int, ...]]
    """By role the first bundle of each of its rows."""
    phases: tuple[tuple[str, ...], ...]
    """Roles of each phase, in the script's order."""


def parse_layout(script: str) -> tuple[tuple[Holder, ...], ...]:
    """The phases of a script.

    Raises:
        LayoutError: with everything that does not fit, in the script's order.
    """
    faults: list[Fault] = []
    tokens = list(_tokens(script, faults))
    phases: list[tuple[Holder, ...]] = []
    holders: list[Holder] = []
    at = 0
    while True:
        kind, text, position = tokens[at]
        if kind == "name":
            at += 1
            share: Fraction | None = None
            if tokens[at][0] == "share":
                share = _share(*tokens[at][1:], faults)
                at += 1
            if text in NAMES:
                holders.append(Holder(NAMES[text], text, share, position))
            else:
                rule = f"no role {_short(text)!r}; there are {', '.join(NAMES)}."
                faults.append(Fault(position, rule))
            wanted = "'+', '->' or the end"
        else:
            wanted = "a role"
        kind, text, position = tokens[at]
        if wanted == "a role" or kind not in _AFTER_ROLE:
            if kind != "none":  # which is told already
                faults.append(_unexpected(position, kind, text, wanted))
            while tokens[at][0] not in _AFTER_ROLE:
                at += 1
        if tokens[at][0] != "plus":
            phases.append(tuple(holders))
            holders = []
        if tokens[at][0] == "end":
            break
        at += 1
    if faults:
        raise LayoutError(sorted(faults, key=lambda fault: fault.position))
    return tuple(phases)


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
        spans, lacking = _place(order, phases, pool, blocks)
        if not lacking:
            starts = {role: span.starts for role, span in spans.items()}
            return Layout(starts, tuple(tuple(h.role for h in phase) for phase in phases))
        if not faults:  # of the script's own order
            faults = [_no_room(holder, phases, pool, blocks) for holder in lacking]
    return tuple(faults)


def _place(
    order: Sequence[Holder],
    phases: Sequence[Sequence[Holder]],
    pool: int,
    blocks: Mapping[str, Block],
) -> "tuple[dict[str, _Span], list[Holder]]":
    """Each role as low as those before it allow, and the roles without room."""
    spans: dict[str, _Span] = {}
    lacking: list[Holder] = []
    for holder in order:
        span = _first_fit(holder.role, spans, phases, pool, blocks)
        if span is None:
            lacking.append(holder)
        else:
            spans[holder.role] = span
    return spans, lacking


def _tokens(script: str, faults: list[Fault]) -> Iterator[tuple[str, str, int]]:
    """Kind, text and position (from 1) of every token, an ``end`` last. One or more characters that
    make none are a ``none``."""
    end = len(script.rstrip())
    at = 0
    before = ""
    while at < end:
        found = _TOKEN.match(script, at)
        if found is None:
            at += len(script[at:]) - len(script[at:].lstrip()) + 1
            if before != "none":
                faults.append(Fault(at, f"{script[at - 1]!r} is not part of a layout."))
                yield "none", "", at
            before = "none"
            continue
        before = kind = found.lastgroup or ""
        yield kind, found[kind], found.start(kind) + 1
        at = found.end()
    yield "end", "", end + 1


def _share(text: str, position: int, faults: list[Fault]) -> Fraction | None:
    found = _SHARE.fullmatch(text)
    if found is None:
        faults.append(Fault(position, f"{_short(text)} is not a share such as [1/2] or [/]."))
        return None
    if found[1] is None:
        return Fraction(1)
    part, of = int(found[1]), int(found[2])
    if not 0 < part <= of:
        faults.append(Fault(position, f"{text} is not more than nothing and at most all."))
        return None
    return Fraction(part, of)


def _unexpected(position: int, kind: str, text: str, wanted: str) -> Fault:
    there = repr(_short(text)) if text else _KINDS[kind]
    return Fault(position, f"{wanted} is expected, not {there}.")


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
                f"{holder} of {counted(pool, 'GPU')} is {float(gpus):g}, not whole ones.",
            )
            continue
        if known.setdefault(holder.role, int(gpus)) != gpus:
            yield Fault(
                holder.position,
                f"{holder} is {counted(int(gpus), 'GPU')}, an earlier phase has"
                f" {known[holder.role]}: a role keeps its slots.",
            )
        elif gpus != block.gpus:
            yield Fault(
                holder.position,
                f"{holder} is {int(gpus)} of {counted(pool, 'GPU')}, the recipe configures"
                f" {block.gpus} ({block.about}).",
                role=holder.role,
                gpus=int(gpus),
            )


@dataclass(frozen=True)
class _Span:
    """What a role has of the pool."""

    starts: tuple[int, ...]
    stop: int


def _first_fit(
    role: str,
    spans: Mapping[str, _Span],
    phases: Sequence[Sequence[Holder]],
    pool: int,
    blocks: Mapping[str, Block],
) -> _Span | None:
    """The lowest span beside every placed role that it ever shares a phase with."""
    mine = [phase for phase in phases if any(h.role == role for h in phase)]
    beside = {h.role for phase in mine for h in phase if h.role != role and h.role in spans}
    shared = any(h.role == role and h.share is not None for phase in mine for h in phase)
    taken = [spans[other] for other in beside]
    for bundle in sorted({0, *(span.stop for span in taken)}):
        span = _lowest(blocks[role], bundle, within_share=shared)
        free = all(span.stop <= t.starts[0] or span.starts[0] >= t.stop for t in taken)
        if free and span.stop <= pool:
            return span
    return None


def _lowest(block: Block, bundle: int, *, within_share: bool) -> _Span:
    """From ``bundle`` on. Engines of several sizes may take more than the role's share there."""
    while True:
        starts, stop = line_up(block.rows, bundle, block.node)
        if not within_share or stop - starts[0] <= block.gpus:
            return _Span(starts, stop)
        bundle = starts[0] + 1


def _no_room(
    holder: Holder,
    phases: Sequence[Sequence[Holder]],
    pool: int,
    blocks: Mapping[str, Block],
) -> Fault:
    for number, phase in enumerate(phases):
        needed = sum(blocks[h.role].least for h in phase)
        if any(h.role == holder.role for h in phase) and needed > pool:
            return Fault(
                next(h.position for h in phase if h.role == holder.role),
                f"phase {number + 1} needs {counted(needed, 'GPU')}, the pool has {pool}.",
            )
    return Fault(
        holder.position,
        f"{holder} finds no slots that stay the same in all its phases and that engines may begin"
        f" in: none may cross the end of a node of {blocks[holder.role].node}.",
    )
