"""Whether a cluster's nodes have room for bundles, and which bundle lacks what on which node."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from relax_infer.contracts.engines import BundleBinding
from relax_infer.placement.placed import InferencePlacementPlan, PlacementError
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
        told.append(f"and {len(useful) - _NAMED} nodes more")
    if len(useful) < len(nodes):
        told.append(f"{len(nodes) - len(useful)} nodes have no GPU")
    where = "; ".join(told) or "the cluster has no node"
    return f"{which} {bundles} (1 GPU and 1 CPU each) {finds} no room: {where}."


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


def unfit_shape(plan: InferencePlacementPlan, nodes: Sequence[NodeRoom]) -> PlacementError | None:
    """Why engines would not fit their nodes although there are GPUs enough; None: they would.

    Looks at one pool after another on the nodes' free GPUs; where that fails nothing is proved, but
    Ray, which does not know engines either, is not likely to find what this does not.
    """
    refused: PlacementError | None = None
    for per_node in (plan.gpus_per_node, None):
        try:
            validate_bound_plan(plan, _spread(plan, nodes, per_node))
        except PlacementError as error:
            refused = refused or error
        else:
            return None
    return refused


def _spread(
    plan: InferencePlacementPlan, nodes: Sequence[NodeRoom], per_node: int | None
) -> dict[str, list[BundleBinding]]:
    """Every pool on what the earlier ones leave."""
    left = {node.node_id: node for node in nodes}
    used = dict.fromkeys(left, 0)
    pools: dict[str, list[BundleBinding]] = {}
    for pool, size in plan.pool_sizes:
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


def _amount(number: float) -> str:
    return f"{number:g}"
