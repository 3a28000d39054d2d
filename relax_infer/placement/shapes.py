"""Whether pools can be spread over nodes so that every engine fits: decided, not guessed.

Bundles are counted node by node, the node with the most of the pool first, so a spread of a pool is
a row of falling numbers, one for each of its nodes. It is legal where no number ends inside the
part of an engine that one node has, and one ends between two such parts of the same engine. Nodes
of one size are one and the same here, and that keeps the search small.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from relax_infer.placement.placed import InferencePlacementPlan, Placement

LOOKS = 30_000
"""Half-made spreads that are looked at before it is given up: about a second."""

Rooms = tuple[tuple[int, int], ...]
"""Bundles that a node has room for, and how many such nodes there are; the smallest first."""


Take = tuple[int, int]
"""Bundles that a node had room for, and how many of them are taken."""
Takes = list[Take]


@dataclass(frozen=True)
class Cuts:
    """Where a pool may pass from one node to the next, as numbers of bundles from its first."""

    size: int
    never: frozenset[int]
    """Inside what one node has of an engine."""
    needed: frozenset[int]
    """Between what two nodes have of an engine."""

    @property
    def free(self) -> bool:
        """Whether it may be cut anywhere, so that it fits wherever there is room."""
        return not self.never and not self.needed


class _Spread(NamedTuple):
    """So far; the pools before ``pool`` are spread in full."""

    pool: int
    placed: int
    """Bundles of ``pool``."""
    last: int
    """On its node before: the next has no more."""
    unused: Rooms
    """Nodes without bundles of ``pool``."""
    used: Rooms


def cuts_of(plan: InferencePlacementPlan) -> list[Cuts]:
    """One for each pool of the plan. Training ranks go wherever they are put."""
    return [
        Cuts(
            size,
            never=frozenset(_inside(mine)),
            needed=frozenset(_between(mine)),
        )
        for pool, size in plan.pool_sizes
        for mine in [[p for p in plan.placements if p.pool == pool]]
    ]


def in_need(plan: InferencePlacementPlan) -> list[str]:
    """The pools in the order to ask for them: a node that one needs whole is taken by no other
    before. Ray begins a pool on the node with the most free."""
    needs = {
        pool: max(
            (
                (p.nodes_per_engine > 1, p.gpus_per_worker)
                for p in plan.placements
                if p.pool == pool
            ),
            default=(False, 0),
        )
        for pool, _ in plan.pool_sizes
    }
    sizes = dict(plan.pool_sizes)
    return sorted(needs, key=lambda pool: (needs[pool], sizes[pool]), reverse=True)


def can_spread(pools: Iterable[Cuts], rooms: Mapping[int, int], looks: int = LOOKS) -> bool | None:
    """Whether all pools have a legal spread at once.

    Args:
        rooms: bundles that a node has room for → how many such nodes there are.
        looks: half-made spreads that may be looked at.

    Returns:
        None: it was not decided within ``looks``.
    """
    found = find_spread(pools, rooms, looks)
    return None if found is None else found is not False


def find_spread(
    pools: Iterable[Cuts], rooms: Mapping[int, int], looks: int = LOOKS
) -> "list[Takes] | Literal[False] | None":
    """A legal spread of all pools at once.

    Returns:
        For each pool what it takes of its nodes, one after another and pool after pool; False:
        there is none; None: it was not decided within ``looks``.
    """
    pools = list(pools)
    if sum(pool.size for pool in pools) > sum(room * nodes for room, nodes in rooms.items()):
        return False
    if any(pool.never & pool.needed for pool in pools):
        return False
    # What may be cut anywhere takes what the others leave.
    bound = [pool for pool in pools if not pool.free]
    start = _Spread(0, 0, max(rooms, default=0), _rooms(Counter(rooms)), ())
    came: dict[_Spread, tuple[_Spread, Take] | None] = {start: None}
    left = [start]
    while left:
        spread = left.pop()
        if spread.pool == len(bound):
            return _takes(pools, spread, came)
        if len(came) > looks:
            return None
        for fresh, take in _further(spread, bound):
            if fresh not in came:
                came[fresh] = (spread, take)
                left.append(fresh)
    return False


def _takes(
    pools: Sequence[Cuts], last: _Spread, came: Mapping[_Spread, tuple[_Spread, Take] | None]
) -> list[Takes]:
    steps: list[tuple[int, Take]] = []
    while (step := came[last]) is not None:
        last, take = step
        steps.append((last.pool, take))
    bound = [number for number, pool in enumerate(pools) if not pool.free]
    found: list[Takes] = [[] for _ in pools]
    for pool, take in reversed(steps):
        found[bound[pool]].append(take)
    return found


def _further(spread: _Spread, pools: Sequence[Cuts]) -> Iterator[tuple[_Spread, Take]]:
    """One node more of the pool, in every way; the most bundles, and then the fullest node, last,
    where the search goes on."""
    pool = pools[spread.pool]
    lacking = pool.size - spread.placed
    if sum(min(room, spread.last) * nodes for room, nodes in spread.unused) < lacking:
        return
    edge = min((cut for cut in pool.needed if cut > spread.placed), default=pool.size)
    for count in range(1, min(spread.last, edge - spread.placed) + 1):
        placed = spread.placed + count
        if placed in pool.never:
            continue
        for room, _ in reversed(spread.unused):
            if room < count:
                break
            unused = _rooms(Counter(dict(spread.unused)) - Counter({room: 1}))
            used = _rooms(Counter(dict(spread.used)) + Counter({room - count: 1}))
            if placed < pool.size:
                yield _Spread(spread.pool, placed, count, unused, used), (room, count)
                continue
            whole = _rooms(Counter(dict(unused)) + Counter(dict(used)))
            largest = max((room for room, _ in whole), default=0)
            yield _Spread(spread.pool + 1, 0, largest, whole, ()), (room, count)


def _rooms(nodes: Mapping[int, int]) -> Rooms:
    return tuple(sorted((room, count) for room, count in nodes.items() if room and count))


def _inside(placements: Iterable[Placement]) -> Iterator[int]:
    for placement in placements:
        for head in placement.heads:
            yield from range(head + 1, head + placement.gpus_per_worker)


def _between(placements: Iterable[Placement]) -> Iterator[int]:
    for placement in placements:
        for head in placement.heads:
            if (head - placement.bundle_start) % placement.gpus_per_engine:
                yield head
