"""Engines of other runs, or of a run's earlier life, that may still hold a GPU.

Every engine leaves a file on its host before it is started, removed only on release proof. A new
run looks for such files on every node before it begins, and starts only on GPUs of which nobody
lives.
"""

import asyncio
import os
import tempfile
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from relax_infer.contracts.base import Message
from relax_infer.contracts.engines import BundleBinding
from relax_infer.contracts.failures import PermanentError, TransientError, UnconfirmedError
from relax_infer.contracts.refs import RunRef
from relax_infer.engines.holder import Holder, folder_of
from relax_infer.engines.release import find_processes

ASK_SECONDS = 60.0
"""For a node to look at its files and processes."""


class Orphan(Message):
    """An engine that nobody has proved gone, on a device that is asked for."""

    run: str
    engine_id: str
    node_ip: str
    devices: tuple[str, ...]
    pids: tuple[int, ...]
    why: str | None = None
    """Where it cannot be told: what stands in the way."""

    def __str__(self) -> str:
        shown = ", ".join(str(pid) for pid in self.pids) or self.why
        return (
            f"GPU {', '.join(self.devices)} of node {self.node_ip}: engine {self.engine_id} of run"
            f" {self.run} (processes {shown})"
        )


def find_orphans(run: RunRef, devices: Collection[str], node_ip: str) -> list[Orphan]:
    """Engines of other runs on this host that may hold one of ``devices``. Changes nothing."""
    mine = folder_of(run.store, run.run)
    found: list[Orphan] = []
    for path, holder in _holders(except_in=mine):
        if holder is None:  # of which devices it speaks cannot be told
            found.append(
                Orphan(
                    run="unknown",
                    engine_id=path.name.removesuffix(".holder.json"),
                    node_ip=node_ip,
                    devices=tuple(sorted(devices)),
                    pids=(),
                    why=f"unknown: {path} cannot be read; remove it once its engine is gone",
                )
            )
            continue
        held = tuple(each for each in holder.devices if each in devices)
        if not held:
            continue
        pids, why = _alive(holder)
        if pids or why:
            found.append(
                Orphan(
                    run=holder.run,
                    engine_id=holder.engine_id,
                    node_ip=node_ip,
                    devices=held,
                    pids=pids,
                    why=why,
                )
            )
    return found


def need_nobody_beside(run: RunRef, name: str, bundles: Sequence[BundleBinding]) -> None:
    """What is about to start here shares no device with a living engine of another run. What Ray
    has reserved says so of the first bundle alone, and only of today's reservations.

    Raises:
        UnconfirmedError: it would; nothing was started.
    """
    found = find_orphans(run, {b.device for b in bundles}, bundles[0].node_ip) if bundles else []
    if found:
        raise UnconfirmedError(
            f"{name} is not started beside another: {'; '.join(str(each) for each in found)}.",
            cure="One of the two runs lost its GPUs to the other while a node was away: stop one of"
            " them (`relax-infer stop RUN`).",
        )


async def need_free_devices(run: RunRef, rows: Sequence[BundleBinding]) -> None:
    """Ask every node of a bound pool whether its devices are free of other runs' engines.

    Raises:
        PermanentError: some are not; the text names run, engine, node and processes.
        TransientError: a node did not answer in time.
    """
    nodes = {row.node_id: row.node_ip for row in rows}
    asked = [
        _ask(run, node, ip, {row.device for row in rows if row.node_id == node})
        for node, ip in nodes.items()
    ]
    found = [orphan for each in await asyncio.gather(*asked) for orphan in each]
    if found:
        raise PermanentError(
            f"Run {run.run} cannot have its GPUs: they may still be held."
            f" {'; '.join(str(each) for each in found)}.",
            cure="Stop that run (`relax-infer stop RUN`); where nothing of it runs any more, end"
            " the processes on the node. Then start this run again.",
        )


async def _ask(run: RunRef, node: str, node_ip: str, devices: set[str]) -> list[Orphan]:
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    look: Any = ray.remote(find_orphans).options(
        num_cpus=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False),
    )
    try:
        return await asyncio.wait_for(look.remote(run, devices, node_ip), ASK_SECONDS)
    except (TimeoutError, RayError) as error:
        raise TransientError(
            f"Node {node_ip} did not say whether its GPUs are free: {error or 'no answer'}.",
            cure="Look at `ray status`.",
        ) from error


def _holders(except_in: Path) -> Iterator[tuple[Path, Holder | None]]:
    """Every file of a holder, and what it says; None where that cannot be read."""
    everywhere = Path(tempfile.gettempdir()) / f"relax-{os.getuid()}"
    for path in sorted(everywhere.glob("*/*.holder.json")):
        if path.parent == except_in:
            continue
        try:
            yield path, Holder.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            continue  # proved gone a moment ago
        except (OSError, ValueError):
            yield path, None


def _alive(holder: Holder) -> tuple[tuple[int, ...], str | None]:
    try:
        rows = find_processes(holder.processes)
    except UnconfirmedError as error:
        return (), str(error)
    return tuple(row.stamp.pid for row in rows), None
