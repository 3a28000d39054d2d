"""Which device each bundle of a placement group is: asked of short-lived actors, always killed."""

import asyncio
import contextlib
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from relax_infer.contracts.engines import BundleBinding
from relax_infer.contracts.failures import PermanentError, TransientError

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

_SHARE = 0.01
"""Of a GPU: enough for Ray to name the bundle's device."""


async def probe_bundles(
    group: "PlacementGroup", name: str, nodes: Mapping[int, str], deadline: float
) -> list[BundleBinding]:
    """One row per bundle, in Ray's own order.

    Args:
        group: a placement group that Ray has placed.
        name: of the group, for messages.
        nodes: node of each bundle, for messages.
        deadline: of the running loop's clock.

    Raises:
        TransientError: not every bundle answered; the text names those that did not.
        PermanentError: a bundle's device has no number.
    """
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    probes: list[Any] = []
    try:
        for bundle in range(group.bundle_count):
            place = PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=bundle
            )
            remote = ray.remote(_Probe).options(
                num_cpus=0, num_gpus=_SHARE, scheduling_strategy=place
            )
            probes.append(remote.remote())
        answers = await _answers([p.device.remote() for p in probes], deadline)
    finally:
        for probe in probes:
            with contextlib.suppress(RayError):  # dead already
                ray.kill(probe)
    silent = [b for b, answer in enumerate(answers) if answer is None]
    failed = {b: answer for b, answer in enumerate(answers) if isinstance(answer, Exception)}
    if failed:
        bundle, error = next(iter(failed.items()))
        where = nodes.get(bundle, "unknown")
        raise TransientError(
            f"{name}: probing bundle {bundle} on node {where} failed: {error}",
            cure="Look at `ray status`: the node may be down.",
        ) from error
    if silent:
        where = ", ".join(dict.fromkeys(nodes.get(bundle, "unknown") for bundle in silent))
        raise TransientError(
            f"{name} is placed, but bundles {silent} on node {where} answered no probe in time: the"
            " node may be down, or a bundle's GPU is reserved in full.",
            cure="Look at `ray status` and `ray list actors`.",
        )
    return [_row(bundle, answer) for bundle, answer in enumerate(answers)]


async def _answers(calls: Sequence[Any], deadline: float) -> list[Any]:
    """Each call's answer or exception; None where there is none. Waits until the deadline, or
    for the first exception."""
    loop = asyncio.get_running_loop()
    asked = [asyncio.ensure_future(call) for call in calls]
    try:
        await asyncio.wait(
            asked,
            timeout=max(0.0, deadline - loop.time()),
            return_when=asyncio.FIRST_EXCEPTION,
        )
        return [_answer(each) for each in asked]
    finally:
        for each in asked:
            each.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


def _answer(call: "asyncio.Future[Any]") -> Any:
    if not call.done() or call.cancelled():
        return None
    return call.exception() or call.result()


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
            "gpu_uuid": device_uuids().get(str(ids[0])) if ids else None,
            "host": this_host(),
        }


def device_uuids() -> dict[str, str]:
    """UUID of every device of this host by its number; none without a driver."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {}
    asked = [tool, "--query-gpu=index,uuid", "--format=csv,noheader"]
    listed = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=False)
    if listed.returncode:
        return {}  # a tool without its driver says so on stdout
    lines = (line.partition(",") for line in listed.stdout.splitlines())
    return {index.strip(): uuid.strip() for index, _, uuid in lines}


def _row(bundle: int, answer: dict[str, Any]) -> BundleBinding:
    gpu = answer["gpu_id"]
    if not str(gpu).isdecimal():
        raise PermanentError(
            f"bundle {bundle} on node {answer['node_ip']} has the GPU id {gpu!r}, not a number.",
            cure="Start Ray with a CUDA_VISIBLE_DEVICES of numbers (no UUIDs, no MIG parts).",
        )
    return BundleBinding.model_validate(answer | {"bundle": bundle, "gpu_id": int(gpu)})
