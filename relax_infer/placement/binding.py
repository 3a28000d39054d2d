"""The run's pool of GPUs as Ray gave it: one detached placement group, probed bundle by bundle."""

import asyncio
import contextlib
import math
import shutil
import subprocess
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from relax_infer.contracts.engines import BundleBinding
from relax_infer.contracts.failures import PermanentError, TransientError
from relax_infer.placement.placed import POOL

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

_PROBE_SHARE = 0.01
"""Of a GPU: enough for Ray to name the bundle's device."""
_POLL = 0.1
_ASK = 30.0
"""Seconds that Ray's own control plane may take to answer."""


def pool_name(run: str, pool: str = POOL) -> str:
    """Ray keeps placement group names per job namespace, which a worker shares between runs."""
    return f"relax-{run}.{pool}"


def find_pool(run: str, pool: str = POOL) -> "PlacementGroup | None":
    """The run's placement group from any job of the cluster; None when there is none.

    ``pool`` is what engine groups and trainer name as ``placement_group``. Blocks for one call to
    Ray's control plane.
    """
    from ray import PlacementGroupID
    from ray.util.placement_group import PlacementGroup

    for identity, entry in _table().items():
        if entry["name"] == pool_name(run, pool) and entry["state"] != "REMOVED":
            return PlacementGroup(PlacementGroupID(bytes.fromhex(identity)))
    return None


async def bind_pool(run: str, gpus: int, timeout: float) -> list[BundleBinding]:
    """Make or find the run's pool, and say which device each bundle is.

    Args:
        run: run id; the pool is a detached placement group of one GPU and one CPU per bundle.
        gpus: bundles.
        timeout: seconds for everything; a pool that does not fit by then is given back.

    Returns:
        One row per bundle, by node and GPU; ``bundle`` is Ray's own index.

    Raises:
        PermanentError: the cluster is too small, or the run has a pool of another size.
        TransientError: the cluster is large enough but busy, or did not answer in time.
    """
    if not (math.isfinite(timeout) and timeout > 0):
        raise PermanentError(f"bind timeout {timeout!r} is not a positive number of seconds.")
    deadline = asyncio.get_running_loop().time() + timeout
    group, made = await asyncio.wait_for(asyncio.to_thread(_make_or_find, run, gpus), _ASK)
    try:
        await _placed(run, group, gpus, deadline)
        rows = await _probe(run, group, gpus, deadline)
        _distinct(rows)
    except BaseException:
        if made:
            await asyncio.shield(release_pool(run))
        raise
    return sorted(rows, key=lambda r: (r.node_id, r.gpu_id))


async def release_pool(run: str, timeout: float = 60.0) -> None:
    """Remove the run's pool, with every actor in it, and see it gone. Idempotent.

    Raises:
        TransientError: it was still there after ``timeout`` seconds.
    """
    import ray.util

    deadline = asyncio.get_running_loop().time() + timeout
    while group := await asyncio.wait_for(asyncio.to_thread(find_pool, run), _ASK):
        await asyncio.wait_for(asyncio.to_thread(ray.util.remove_placement_group, group), _ASK)
        if asyncio.get_running_loop().time() > deadline:
            raise TransientError(f"placement group {pool_name(run)} is there after {timeout:g} s.")
        await asyncio.sleep(_POLL)


def _table() -> dict[str, Any]:
    from ray.util import placement_group_table

    return placement_group_table()


def _make_or_find(run: str, gpus: int) -> "tuple[PlacementGroup, bool]":
    from ray.util.placement_group import placement_group

    found = find_pool(run)
    if found is not None:
        if found.bundle_count != gpus:
            raise PermanentError(
                f"run {run} has a pool of {found.bundle_count} GPUs, its recipe says {gpus}.",
                cure="Choose another run id, or end the run first.",
            )
        return found, False
    bundles: list[dict[str, float]] = [{"GPU": 1, "CPU": 1} for _ in range(gpus)]
    made = placement_group(bundles, strategy="PACK", name=pool_name(run), lifetime="detached")
    return made, True


async def _placed(run: str, group: "PlacementGroup", gpus: int, deadline: float) -> None:
    """Wait for Ray to reserve the bundles; at the deadline say what is missing."""
    identity = group.id.hex()
    while True:
        table = await asyncio.wait_for(asyncio.to_thread(_table), _ASK)
        state = table.get(identity, {}).get("state", "REMOVED")
        if state == "CREATED":
            return
        if state == "REMOVED":
            raise TransientError(f"the pool of run {run} was removed while it was being placed.")
        if asyncio.get_running_loop().time() > deadline:
            raise await asyncio.to_thread(_shortage, run, gpus, state)
        await asyncio.sleep(_POLL)


def _shortage(run: str, gpus: int, state: str) -> PermanentError | TransientError:
    import ray

    has, free = ray.cluster_resources(), ray.available_resources()
    nodes = sum(1 for node in ray.nodes() if node["Alive"])

    def count(resources: Mapping[str, float], kind: str) -> str:
        return f"{resources.get(kind, 0):g}"

    text = (
        f"Ray could not place the pool of run {run} ({gpus} bundles of 1 GPU and 1 CPU, {state}):"
        f" the cluster of {nodes} nodes has {count(has, 'GPU')} GPUs and {count(has, 'CPU')} CPUs,"
        f" free are {count(free, 'GPU')} and {count(free, 'CPU')}."
    )
    if min(has.get("GPU", 0), has.get("CPU", 0)) < gpus:
        return PermanentError(text, cure="Add nodes, or lower cluster.gpus in the recipe.")
    others = [
        entry["name"] or identity
        for identity, entry in _table().items()
        if entry["state"] == "CREATED" and entry["name"] != pool_name(run)
    ]
    return TransientError(
        text,
        cure=f"Other placement groups: {', '.join(others) or 'none'}. Wait for them or end them"
        " (relax-infer down); raise cluster.bind_timeout to wait longer.",
    )


class _Probe:
    """Lives for one question: which device is this bundle?"""

    def device(self) -> dict[str, Any]:
        import ray
        import ray.util

        from relax_infer.engines.host_processes import this_host

        ids = ray.get_gpu_ids()
        return {
            "node_id": ray.get_runtime_context().get_node_id(),
            "node_ip": ray.util.get_node_ip_address(),
            "gpu_id": ids[0] if ids else None,
            "gpu_uuid": _uuid(str(ids[0])) if ids else None,
            "host": this_host(),
        }


def _uuid(gpu_id: str) -> str | None:
    """The device's UUID from its driver; None where there is no driver (pretended devices)."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    asked = [tool, "--query-gpu=index,uuid", "--format=csv,noheader"]
    listed = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=False)
    for line in listed.stdout.splitlines():
        index, _, uuid = line.partition(",")
        if index.strip() == gpu_id:
            return uuid.strip()
    return None


async def _probe(
    run: str, group: "PlacementGroup", gpus: int, deadline: float
) -> list[BundleBinding]:
    """Ask one short-lived actor per bundle; every one of them is killed."""
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    probes: list[Any] = []
    try:
        for bundle in range(gpus):
            place = PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=bundle
            )
            remote = ray.remote(_Probe).options(
                num_cpus=0, num_gpus=_PROBE_SHARE, scheduling_strategy=place
            )
            probes.append(remote.remote())
        async with asyncio.timeout_at(deadline):
            answers = await asyncio.gather(*(p.device.remote() for p in probes))
    except TimeoutError:
        raise TransientError(
            f"the pool of run {run} is placed, but not every bundle answered a probe in time: a"
            " node may be down, or a bundle's GPU is reserved in full.",
            cure="Look at `ray status` and `ray list actors`.",
        ) from None
    except RayError as error:
        raise TransientError(f"probing the pool of run {run}: {error}") from error
    finally:
        for probe in probes:
            with contextlib.suppress(RayError):  # dead already
                ray.kill(probe)
    return [_row(bundle, answer) for bundle, answer in enumerate(answers)]


def _row(bundle: int, answer: dict[str, Any]) -> BundleBinding:
    gpu = answer["gpu_id"]
    if not str(gpu).isdecimal():
        raise PermanentError(
            f"bundle {bundle} on node {answer['node_ip']} has the GPU id {gpu!r}, not a number.",
            cure="Start Ray with a CUDA_VISIBLE_DEVICES of numbers (no UUIDs, no MIG parts).",
        )
    return BundleBinding.model_validate(answer | {"bundle": bundle, "gpu_id": int(gpu)})


def _distinct(rows: list[BundleBinding]) -> None:
    devices = [(r.node_id, r.gpu_id) for r in rows]
    if len(set(devices)) < len(devices):
        raise PermanentError(f"Ray gave the same physical GPU to two bundles: {devices}.")
