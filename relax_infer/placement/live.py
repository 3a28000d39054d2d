"""Look at a living Ray cluster: ``python -m relax_infer.placement.live``, a process of its own.

Reads a :class:`Wanted` as JSON from stdin, joins the cluster of RAY_ADDRESS, changes nothing, and
writes :class:`ClusterFacts` to stdout.
"""

import asyncio
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from relax_infer.contracts.refs import RunRef
from relax_infer.engines.orphans import find_orphans, find_unrecorded
from relax_infer.engines.process import free_ports, local_path
from relax_infer.engines.shared_bucket import SHARED_MEMORY
from relax_infer.placement.facts import ClusterFacts, GpuProcess, NodeFacts, Wanted
from relax_infer.placement.probes import device_uuids
from relax_infer.placement.ray_view import group_table, living_nodes
from relax_infer.placement.room import NodeRoom
from relax_infer.placement.run_actors import (
    joined,
    look_at_actors,
    look_at_routers,
    recorded_routers,
)
from relax_infer.samples.prompt_file import file_fault

_NODE_SECONDS = 90.0
"""For a node to look at itself."""
_ROUTER_SECONDS = 45.0
_NOBODY = RunRef(run="preflight", store="preflight:")
"""No run: engines of every run are found."""


async def look_at_cluster(wanted: Wanted) -> ClusterFacts:
    """Facts about every living node of the cluster that this process has joined."""
    import ray

    nodes = await asyncio.to_thread(living_nodes)
    useful = [node for node in nodes if node.gpus]
    # An engine may be rebuilt meanwhile: what its actor held before or holds after is its own.
    routers, before = await asyncio.gather(look_at_routers(), look_at_actors())
    table = await asyncio.to_thread(group_table)
    groups = tuple(e["name"] for e in table.values() if e["name"] and e["state"] != "REMOVED")
    frontless = runs_of(groups) - {router.run for router in routers}
    asked = {
        "cluster": ray.get_runtime_context().gcs_address,
        "frontless": tuple(sorted(frontless)),
    }
    wanted = wanted.model_copy(update=asked)
    facts = await asyncio.gather(*(_ask(wanted, node) for node in useful))
    after = await look_at_actors()
    return ClusterFacts(
        nodes=tuple(nodes),
        facts=tuple(facts),
        accelerators=any(n.startswith("accelerator_type:") for n in ray.cluster_resources()),
        groups=groups,
        actors=joined(before, after),
        # Two nodes of one host have the same files.
        routers=tuple(dict.fromkeys((*routers, *(each for n in facts for each in n.routers)))),
        files=await asyncio.to_thread(_faults, wanted.files),
    )


def runs_of(groups: Iterable[str]) -> set[str]:
    """Of the names of placement groups, ``relax-<run>.<pool>``."""
    named = (name.partition(".")[0] for name in groups)
    return {name.removeprefix("relax-") for name in named if name.startswith("relax-")}


async def _ask(wanted: Wanted, node: NodeRoom) -> NodeFacts:
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    look: Any = ray.remote(look_at_node).options(
        num_cpus=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node.node_id, soft=False),
    )
    call = look.remote(wanted, node.node_id, node.node_ip, int(node.gpus))
    try:
        return await asyncio.wait_for(call, _NODE_SECONDS)
    except (TimeoutError, RayError) as error:
        why = str(error) or f"no answer within {_NODE_SECONDS:.0f} s"
        return NodeFacts(node_id=node.node_id, node_ip=node.node_ip, silent=why)


def look_at_node(wanted: Wanted, node_id: str, node_ip: str, gpus: int) -> NodeFacts:
    """What this host says of itself. Blocks; changes nothing."""
    uuids = device_uuids()
    devices = set(uuids.values()) or {f"{node_id}/{k}" for k in range(gpus)}
    return NodeFacts(
        node_id=node_id,
        node_ip=node_ip,
        processes=_processes(uuids),
        orphans=tuple(find_orphans(_NOBODY, devices, node_ip)),
        unrecorded=tuple(find_unrecorded()),
        port_fault=_port_fault(node_ip, wanted.ports),
        disk_free=_disk_free(wanted.store),
        shared_memory_free=_shared_memory_free(),
        models={folder: _weights(Path(folder)) for folder in wanted.models},
        files=_faults(wanted.files),
        router=_router(),
        router_fault=_router_fault(),
        routers=tuple(asyncio.run(recorded_routers(wanted.cluster, wanted.frontless, node_ip))),
    )


def parse_processes(table: str, uuids: dict[str, str]) -> tuple[GpuProcess, ...]:
    """Of nvidia-smi's lines ``uuid, pid, name, mebibytes``; others are left out."""
    numbers = {uuid: number for number, uuid in uuids.items()}
    found: list[GpuProcess] = []
    for line in table.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) < 4 or not fields[1].isdecimal():
            continue
        uuid, pid, *name, memory = fields
        found.append(
            GpuProcess(
                gpu=numbers.get(uuid, uuid),
                pid=int(pid),
                name=", ".join(name),
                mib=int(memory) if memory.isdecimal() else None,
            )
        )
    return tuple(found)


def _processes(uuids: dict[str, str]) -> tuple[GpuProcess, ...]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    fields = "--query-compute-apps=gpu_uuid,pid,process_name,used_memory"
    asked = [tool, fields, "--format=csv,noheader,nounits"]
    listed = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=False)
    return parse_processes(listed.stdout, uuids)


def _port_fault(host: str, count: int) -> str | None:
    try:
        free_ports(host, count)
    except OSError as error:
        return str(error)
    return None


def _disk_free(store: str) -> int | None:
    path = local_path(store)
    if path is None:
        return None
    there = next(p for p in (path, *path.absolute().parents) if p.exists())
    return shutil.disk_usage(there).free


def _shared_memory_free() -> int | None:
    try:
        return shutil.disk_usage(SHARED_MEMORY).free
    except OSError:
        return None


def _weights(folder: Path) -> int | None:
    if not folder.is_dir():
        return None
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _faults(files: Iterable[str]) -> dict[str, str | None]:
    return {path: file_fault(path) for path in files}


def _router() -> str | None:
    try:
        return version("sglang-router")
    except PackageNotFoundError:
        return None


def _router_fault() -> str | None:
    """Whether the program that a run's front starts can be loaded; it listens nowhere."""
    if _router() is None:
        return None
    load = (sys.executable, "-c", "import sglang_router.launch_router")
    try:
        done = subprocess.run(
            load, capture_output=True, text=True, timeout=_ROUTER_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"it was not loaded within {_ROUTER_SECONDS:.0f} s"
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"exit code {done.returncode}"


def main() -> None:
    import ray

    wanted = Wanted.model_validate_json(sys.stdin.read())
    ray.init(
        address=os.environ.get("RAY_ADDRESS", "auto"),
        namespace="relax",
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    try:
        print(asyncio.run(look_at_cluster(wanted)).model_dump_json())
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
