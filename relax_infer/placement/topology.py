"""Whether the devices that a pool turned out to have fit the plan."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from relax_infer.contracts.engines import BundleBinding
from relax_infer.placement.placed import Placement

Row = TypeVar("Row", Mapping[str, Any], BundleBinding)


def validate_bound_placement(
    placement: Placement | Mapping[str, Any],
    topology: Iterable[Row],
    bundle_indices: Sequence[int] | None = None,
) -> list[Row]:
    """The rows of the placement's slice, in order, once they are usable.

    Args:
        placement: the plan's, or its serialised form.
        topology: one row per bundle: a :class:`BundleBinding`, or a mapping with ``bundle_index``,
            ``node_id``, ``node_ip`` and ``gpu_id``.
        bundle_indices: the pool's order; None: the order of ``topology``.

    Raises:
        ValueError: says which bundle is off and why.
    """
    if isinstance(placement, Mapping):
        placement = Placement.from_dict(placement)
    rows: dict[int, Row] = {}
    for row in topology:
        index = _field(row, "bundle_index", "bundle")
        if not isinstance(index, int) or isinstance(index, bool) or index < 0:
            raise ValueError(f"bundle index {index!r} is not a number from 0")
        if index in rows:
            raise ValueError(f"duplicate bundle index {index} in the topology")
        rows[index] = row
    order = list(rows) if bundle_indices is None else list(bundle_indices)
    if len(set(order)) != len(order):
        raise ValueError(f"duplicate bundle index in {order}")
    unknown = [i for i in order if i not in rows]
    if unknown:
        raise ValueError(f"unknown indices {unknown}: the topology has {sorted(rows)}")
    if placement.bundle_stop > len(order):
        raise ValueError(
            f"{placement.role}/{placement.model_id} ends at bundle {placement.bundle_stop}, which"
            f" exceeds the pool of {len(order)}"
        )
    devices: dict[tuple[str, int], int] = {}
    for index in order:
        device = _device(rows[index], index)
        if device in devices:
            raise ValueError(
                f"bundles {devices[device]} and {index} are the same physical GPU"
                f" {device[1]} of node {device[0]}"
            )
        devices[device] = index
    chosen = order[placement.bundle_start : placement.bundle_stop]
    for replica in range(placement.replicas):
        start = replica * placement.gpus_per_engine
        members = chosen[start : start + placement.gpus_per_engine]
        _check_replica(placement, replica, [_device(rows[i], i) for i in members])
    return [rows[i] for i in chosen]


def _check_replica(placement: Placement, replica: int, devices: list[tuple[str, int]]) -> None:
    who = f"{placement.role}/{placement.model_id} replica {replica}"
    size = placement.gpus_per_worker
    workers = [devices[i : i + size] for i in range(0, len(devices), size)]
    for worker in workers:
        nodes = {node for node, _ in worker}
        if len(nodes) > 1:
            raise ValueError(f"{who}: one worker's GPUs must be on one node, are on {nodes}")
        ids = [gpu for _, gpu in worker]
        if ids != list(range(ids[0], ids[0] + len(ids))):
            raise ValueError(f"{who}: GPU ids must be ascending and contiguous, are {ids}")
    if len({worker[0][0] for worker in workers}) < len(workers):
        raise ValueError(f"{who}: the workers of a multi-node replica need distinct nodes")


def _field(row: Mapping[str, Any] | BundleBinding, key: str, attribute: str | None = None) -> Any:
    if isinstance(row, BundleBinding):
        return getattr(row, attribute or key)
    return row.get(key)


def _device(row: Mapping[str, Any] | BundleBinding, index: int) -> tuple[str, int]:
    node, gpu = _field(row, "node_id"), _field(row, "gpu_id")
    if not isinstance(node, str) or not node:
        raise ValueError(f"bundle {index} has no node identity")
    if isinstance(gpu, bool) or not str(gpu).isdecimal():
        raise ValueError(f"bundle {index}: gpu id {gpu!r} is not a number")
    return node, int(gpu)
