"""Whether a cluster's nodes have room for bundles, and which bundle lacks what on which node."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from relax_infer.contracts.counted import counted
from relax_infer.contracts.engines import BundleBinding
from relax_infer.placement.placed import InferencePlacementPlan, PlacementError
from relax_infer.placement.shapes import LOOKS, can_spread, cuts_of, find_spread, in_need
from relax_infer.placement.topology import validate_bound_plan

NEEDS: Mapping[str, float] = {"GPU": 1, "CPU": 1}
"""What Ray reserves for each bundle."""
_NAMED = 8
"""Nodes that a message names."""


@dataclass(frozen=True)
class NodeRoom:
    """A node of the cluster: what it has, and what nobody has reserved."""

    node_id: str
    node_ip: str
    gpus: float
    cpus: float
    free_gpus: float
    free_cpus: float
    holders: tuple[str, ...] = ()
    """Placement groups with bundles on it."""

    @property
    def bundles(self) -> int:
        """How many it could ever have."""
        return int(min(self.gpus / NEEDS["GPU"], self.cpus / NEEDS["CPU"]))

    @property
    def free_bundles(self) -> int:
        return int(min(self.free_gpus / NEEDS["GPU"], self.free_cpus / NEEDS["CPU"]))

    def idle(self) -> "NodeRoom":
        """As if nobody had anything."""
        return replace(self, free_gpus=self.gpus, free_cpus=self.cpus, holders=())


def shortage(bundles: int, nodes: Sequence[NodeRoom]) -> str | None:
    """What the free resources lack for ``bundles`` of one GPU and one CPU; None: they fit.

    The text names the bundles without a place, and for every node with GPUs what it lacks for one
    bundle more.
    """
    room = sum(node.free_bundles for node in nodes)
    if room >= bundles:
        return None
    first, last = room, bundles - 1
    which = f"bundle {last} of" if first == last else f"bundles {first} to {last} of"
    finds = "finds" if first == last else "find"
    useful = sorted((n for n in nodes if n.gpus), key=lambda n: (n.free_bundles, n.node_id))
    told = [_lack(node) for node in useful[:_NAMED]]
    if len(useful) > _NAMED:
        told.append(f"and {counted(len(useful) - _NAMED, 'node')} more")
    if len(useful) < len(nodes):
        idle = len(nodes) - len(useful)
        told.append(f"{counted(idle, 'node')} without a GPU")
    where = "; ".join(told) or "the cluster has no node"
    return f"{which} {bundles} (1 GPU and 1 CPU each) {finds} no room: {where}."


def shortage_of(
    pools: Iterable[Sequence[Mapping[str, float]]],
    nodes: Sequence[NodeRoom],
    *,
    on_one_node: bool = False,
) -> str | None:
    """The same for pools of bundles, of which some may ask for their node (``node:<address>``).

    Args:
        on_one_node: each pool needs a node that has room for all of it.
    """
    pools = list(pools)
    if lacking := shortage(sum(len(bundles) for bundles in pools), nodes):
        return lacking
    for bundles in pools if on_one_node else ():
        if all(node.free_bundles < len(bundles) for node in nodes):
            useful = sorted(
                (n for n in nodes if n.gpus), key=lambda n: (-n.free_bundles, n.node_id)
            )
            told = [_lack(node) for node in useful[:_NAMED]]
            if len(useful) > _NAMED:
                told.append(f"and {counted(len(useful) - _NAMED, 'node')} more")
            return f"no node has room for all {len(bundles)} bundles: {'; '.join(told)}."
    asked = Counter(
        kind.removeprefix("node:")
        for bundles in pools
        for bundle in bundles
        for kind in bundle
        if kind.startswith("node:")
    )
    for address, count in sorted(asked.items()):
        here = [node for node in nodes if node.node_ip == address]
        if not here:
            return f"node {address} is asked for by {_bundles(count)} and not in the cluster."
        if lacking := shortage(count, here):
            return f"node {address} is asked for by {_bundles(count)}: {lacking}"
    return None


def best_rows(bundles: int, nodes: Iterable[NodeRoom], per_node: int | None) -> list[BundleBinding]:
    """Bundles on the free GPUs, the node with the most first, at most ``per_node`` on each.

    Fewer rows than asked for where there is no room. GPUs are numbered from 0 on each node: which
    ones are reserved cannot be told without a probe.
    """
    rows: list[BundleBinding] = []
    for node in sorted(nodes, key=lambda n: (-n.free_bundles, n.node_id)):
        room = node.free_bundles if per_node is None else min(node.free_bundles, per_node)
        for gpu in range(min(room, bundles - len(rows))):
            row = BundleBinding(
                bundle=len(rows), node_id=node.node_id, node_ip=node.node_ip, gpu_id=gpu
            )
            rows.append(row)
    return rows


@dataclass(frozen=True)
class Undecided:
    """Neither a legal spread was found, nor that there is none."""

    looks: int
    """Half-made spreads that were looked at."""


def unfit_shape(
    plan: InferencePlacementPlan, nodes: Sequence[NodeRoom], looks: int = LOOKS
) -> PlacementError | Undecided | None:
    """Why engines would not fit their nodes although there are GPUs enough; None: they would.

    One pool after another on the nodes' free GPUs, in the plan's order and the neediest first, is
    what Ray does about; where that does not fit, every other spread is looked at before it is said
    that there is none.
    """
    refused: PlacementError | None = None
    sizes = dict(plan.pool_sizes)
    neediest_first = [(pool, sizes[pool]) for pool in in_need(plan)]
    for pools, per_node in product((plan.pool_sizes, neediest_first), (plan.gpus_per_node, None)):
        try:
            validate_bound_plan(plan, _spread(pools, nodes, per_node))
        except PlacementError as error:
            refused = refused or error
        else:
            return None
    rooms = Counter(node.free_bundles for node in nodes)
    match can_spread(cuts_of(plan), rooms, looks):
        case True:
            return None
        case False:
            return refused
        case None:
            return Undecided(looks)


def node_of_each(
    plan: InferencePlacementPlan, nodes: Sequence[NodeRoom], looks: int = LOOKS
) -> dict[str, list[NodeRoom]] | None:
    """A node for each bundle of each pool, so that every engine fits what is free; None: there is
    no such spread, or none was found within ``looks``."""
    pools = cuts_of(plan)
    found = find_spread(pools, Counter(node.free_bundles for node in nodes), looks)
    if found is None or found is False:
        return None
    left = {node.node_id: node.free_bundles for node in nodes}
    known = {node.node_id: node for node in nodes}
    chosen: dict[str, list[NodeRoom]] = {pool: [] for pool, _ in plan.pool_sizes}

    def put(pool: str, node: str, count: int) -> None:
        left[node] -= count
        chosen[pool] += [known[node]] * count

    for (pool, _), takes in zip(plan.pool_sizes, found, strict=True):
        mine: set[str] = set()
        for room, count in takes:
            node = next(n for n, free in left.items() if free == room and n not in mine)
            mine.add(node)
            put(pool, node, count)
    for pool, size in plan.pool_sizes:
        while lacking := size - len(chosen[pool]):
            node = max(left, key=lambda n: left[n])
            put(pool, node, min(lacking, left[node]))
    return chosen


def _spread(
    sizes: Iterable[tuple[str, int]], nodes: Sequence[NodeRoom], per_node: int | None
) -> dict[str, list[BundleBinding]]:
    """Every pool on what the earlier ones leave."""
    left = {node.node_id: node for node in nodes}
    used = dict.fromkeys(left, 0)
    pools: dict[str, list[BundleBinding]] = {}
    for pool, size in sizes:
        rows = best_rows(size, left.values(), per_node)
        taken = Counter(row.node_id for row in rows)
        pools[pool] = [r.model_copy(update={"gpu_id": r.gpu_id + used[r.node_id]}) for r in rows]
        for node, count in taken.items():
            used[node] += count
            here = left[node]
            left[node] = replace(
                here, free_gpus=here.free_gpus - count, free_cpus=here.free_cpus - count
            )
    return pools


def _lack(node: NodeRoom) -> str:
    lacking = [
        f"{kind} ({_amount(free)} of {_amount(total)} free)"
        for kind, free, total in (
            ("GPU", node.free_gpus, node.gpus),
            ("CPU", node.free_cpus, node.cpus),
        )
        if free - node.free_bundles * NEEDS[kind] < NEEDS[kind]
    ]
    held = f", held by {', '.join(node.holders)}" if node.holders else ""
    room = f"has room for {node.free_bundles} and then " if node.free_bundles else ""
    return f"node {node.node_ip} ({node.node_id[:8]}) {room}lacks {' and '.join(lacking)}{held}"


def _bundles(number: int) -> str:
    return counted(number, "bundle")


def _amount(number: float) -> str:
    return f"{number:g}"
