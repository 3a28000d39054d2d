"""Whether the devices that pools turned out to have fit the plan."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from relax_infer.contracts.engines import BundleBinding
from relax_infer.placement.placed import (
    InferencePlacementPlan,
    Placement,
    PlacementError,
    Violation,
)

Row = TypeVar("Row", Mapping[str, Any], BundleBinding)
Device = tuple[str, int]
"""Node id and the node's own number of the GPU."""
Identity = str | Device
"""Names of a GPU: its device, and where the driver tells it the UUID, since Ray may have a host
under two node ids."""

SUBJECT = "the GPUs that Ray gave do not fit the plan"
_NUMBERS = "Start Ray with a CUDA_VISIBLE_DEVICES of numbers (no UUIDs, no MIG parts)."
_AGAIN = (
    "Look at `ray status`, whether it has a host under two node ids; `ray stop` there, bind again."
)
_WHOLE = "Free whole nodes of the cluster, or lower gpus_per_replica to what its nodes have."


def validate_bound_placement(
    placement: Placement | Mapping[str, Any],
    topology: Iterable[Row],
    bundle_indices: Sequence[int] | None = None,
) -> list[Row]:
    """The rows of the placement's slice, in order, once they are usable.

    Args:
        placement: the plan's, or its serialised form.
        topology: one row per bundle: a :class:`BundleBinding`, or a mapping with ``bundle_index``,
            ``node_id``, ``node_ip``, ``gpu_id`` and, where it is known, ``gpu_uuid``.
        bundle_indices: the pool's order; None: the order of ``topology``. It counts as it is
            handed in, whatever the numbers are.

    Raises:
        PlacementError: with every violation; each says which bundle or engine is off and why.
    """
    if isinstance(placement, Mapping):
        placement = Placement.from_dict(placement)
    rows, faults = _rows(topology)
    order = list(rows) if bundle_indices is None else list(bundle_indices)
    faults += _order_faults(order, rows)
    if placement.bundle_stop > len(order):
        faults.append(_exceeds(_who(placement), placement.bundle_stop, len(order)))
    known = [index for index in dict.fromkeys(order) if index in rows]
    devices, more = _devices({index: rows[index] for index in known})
    faults += more
    chosen = order[placement.bundle_start : placement.bundle_stop]
    for replica in range(placement.replicas):
        start = replica * placement.gpus_per_engine
        members = chosen[start : start + placement.gpus_per_engine]
        if len(members) == placement.gpus_per_engine and all(i in devices for i in members):
            faults += _replica_faults(placement, replica, [devices[i] for i in members])
    if faults:
        raise PlacementError(faults, SUBJECT)
    return [rows[i] for i in chosen]


def validate_bound_plan(
    plan: InferencePlacementPlan, pools: Mapping[str, Sequence[BundleBinding]]
) -> None:
    """Every placement and every rank of a plan on the rows of all its pools.

    Raises:
        PlacementError: with every violation, each once.
    """
    faults: list[Violation] = []
    for placement in plan.placements:
        try:
            validate_bound_placement(placement, pools.get(placement.pool, ()))
        except PlacementError as error:
            faults += error.violations
    for training in plan.training:
        there = len(pools.get(training.pool, ()))
        if training.bundle_stop > there:
            faults.append(_exceeds(training.role, training.bundle_stop, there))
    for rows in pools.values():
        faults += _devices({row.bundle: row for row in rows})[1]
    faults += _shared(pools)
    if faults:
        raise PlacementError(list(dict.fromkeys(faults)), SUBJECT)


def _rows(topology: Iterable[Row]) -> tuple[dict[int, Row], list[Violation]]:
    rows: dict[int, Row] = {}
    faults: list[Violation] = []
    for row in topology:
        index = _field(row, "bundle_index", "bundle")
        if not isinstance(index, int) or isinstance(index, bool) or index < 0:
            faults.append(_topology(f"bundle index {index!r} is not a number from 0."))
        elif index in rows:
            faults.append(_topology(f"duplicate bundle index {index} in the topology."))
        else:
            rows[index] = row
    return rows, faults


def _order_faults(order: Sequence[int], rows: Mapping[int, Any]) -> list[Violation]:
    faults: list[Violation] = []
    if len(set(order)) != len(order):
        faults.append(_topology(f"duplicate bundle index in {list(order)}."))
    unknown = [i for i in order if i not in rows]
    if unknown:
        faults.append(_topology(f"unknown indices {unknown}: the topology has {sorted(rows)}."))
    return faults


def _devices(rows: Mapping[int, Row]) -> tuple[dict[int, Device], list[Violation]]:
    """By bundle; a GPU that two bundles have is the first one's."""
    devices: dict[int, Device] = {}
    holders: dict[Identity, int] = {}
    faults: list[Violation] = []
    for index, row in rows.items():
        node, gpu = _field(row, "node_id"), _field(row, "gpu_id")
        field = f"bundle {index}"
        if not isinstance(node, str) or not node:
            faults.append(Violation(field, "it has no node identity.", "Look at `ray status`."))
        elif isinstance(gpu, bool) or not str(gpu).isdecimal():
            faults.append(Violation(field, f"gpu id {gpu!r} is not a number.", _NUMBERS))
        elif same := _known(holders, row, (node, int(gpu))):
            rule = f"it and bundle {holders[same]} are the same physical {_named(same)}."
            faults.append(Violation(field, rule, _AGAIN))
        else:
            holders.update(dict.fromkeys(_names(row, (node, int(gpu))), index))
            devices[index] = (node, int(gpu))
    return devices, faults


def _replica_faults(
    placement: Placement, replica: int, devices: Sequence[Device]
) -> list[Violation]:
    field = f"{_who(placement)} replica {replica}"
    size = placement.gpus_per_worker
    workers = [devices[i : i + size] for i in range(0, len(devices), size)]
    faults: list[Violation] = []
    for worker in workers:
        nodes = dict.fromkeys(node for node, _ in worker)
        ids = [gpu for _, gpu in worker]
        if len(nodes) > 1:
            rule = f"one worker's {size} GPUs must be on one node, are on {', '.join(nodes)}."
            faults.append(Violation(field, rule, _WHOLE))
        elif ids != list(range(ids[0], ids[0] + len(ids))):
            rule = (
                f"its GPU ids on node {worker[0][0]} must be ascending and contiguous, are {ids}."
            )
            faults.append(Violation(field, rule, _WHOLE))
    if len({worker[0][0] for worker in workers}) < len(workers):
        rule = f"the {len(workers)} workers of a multi-node replica need distinct nodes."
        faults.append(Violation(field, rule, _WHOLE))
    return faults


def _shared(pools: Mapping[str, Sequence[BundleBinding]]) -> list[Violation]:
    """Devices that two pools have."""
    holders: dict[Identity, str] = {}
    faults: list[Violation] = []
    for pool, rows in pools.items():
        for row in rows:
            device = (row.node_id, row.gpu_id)
            same = _known(holders, row, device)
            if same is None:
                holders.update(dict.fromkeys(_names(row, device), pool))
            elif (first := holders[same]) != pool:
                rule = (
                    f"its bundle {row.bundle} and one of pool {first} are the same physical"
                    f" {_named(same)}."
                )
                faults.append(Violation(f"pool {pool}", rule, _AGAIN))
    return faults


def _known(
    holders: Mapping[Identity, Any], row: Mapping[str, Any] | BundleBinding, device: Device
) -> Identity | None:
    """The name under which the row's GPU has a holder."""
    return next((name for name in reversed(_names(row, device)) if name in holders), None)


def _names(row: Mapping[str, Any] | BundleBinding, device: Device) -> list[Identity]:
    uuid = _field(row, "gpu_uuid")
    return [uuid, device] if isinstance(uuid, str) and uuid else [device]


def _named(same: Identity) -> str:
    return f"GPU {same}" if isinstance(same, str) else f"GPU {same[1]} of node {same[0]}"


def _exceeds(who: str, stop: int, bundles: int) -> Violation:
    rule = f"it ends at bundle {stop}, which exceeds the pool of {bundles}."
    return Violation(who, rule, "Bind a pool of the size that the plan says.")


def _topology(rule: str) -> Violation:
    return Violation("topology", rule, "Hand in each bundle of the pool once.")


def _who(placement: Placement) -> str:
    return f"{placement.role}/{placement.model_id}"


def _field(row: Mapping[str, Any] | BundleBinding, key: str, attribute: str | None = None) -> Any:
    if isinstance(row, BundleBinding):
        return getattr(row, attribute or key)
    return row.get(key)
