"""Engines and trainers of other runs, or of a run's earlier life, that may still hold a GPU.

Every engine leaves a file on its host before it is started, removed only on release proof; every
trainer one before it loads its device. A new run looks for such files on every node before it
begins, and starts only on GPUs of which nobody lives.
"""

import asyncio
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from relax_infer.contracts.base import Message
from relax_infer.contracts.engines import BundleBinding, EngineGroupSpec
from relax_infer.contracts.failures import PermanentError, TransientError, UnconfirmedError
from relax_infer.contracts.refs import RunRef
from relax_infer.engines import host_processes
from relax_infer.engines.command import ABOUT, about
from relax_infer.engines.folders import REPLICA, folder_of, replica_mark
from relax_infer.engines.holder import Holder
from relax_infer.engines.host_processes import ProcessStamp
from relax_infer.engines.release import MARKER, find_processes
from relax_infer.engines.trainer_process import RESIDENCE, Residence

ASK_SECONDS = 60.0
"""For a node to look at its files and processes."""
DYING_SECONDS = 5.0
"""For a trainer that Ray was told to kill to be gone: Ray gives up its name before."""
_HOLDER = ".holder.json"
_OF_A_NODE = re.compile(r"\.node-\d+$")
"""How the names of followers end."""
_POLL = 0.1

_M = TypeVar("_M", bound=Message)


class Orphan(Message):
    """An engine or a trainer that nobody has proved gone, on a device that is asked for."""

    run: str
    engine_id: str
    """Of a trainer: ``trainer/rank-N``."""
    node_ip: str
    devices: tuple[str, ...]
    pids: tuple[int, ...]
    why: str | None = None
    """Where it cannot be told: what stands in the way."""
    actor: str = ""
    """Ray's name, in its run's namespace, of the actor that answers for it: of an engine over
    nodes its head's."""
    incarnation: str = ""
    """What that actor holds, if this is not of an earlier life: an engine's incarnation, a
    trainer's pid."""

    def __str__(self) -> str:
        shown = ", ".join(str(pid) for pid in self.pids) or self.why
        trainer = self.engine_id.startswith("trainer/")
        what = self.engine_id if trainer else f"engine {self.engine_id}"
        return (
            f"GPU {', '.join(self.devices)} of node {self.node_ip}: {what} of run {self.run}"
            f" (processes {shown})"
        )


class Unrecorded(Message):
    """Processes that carry the mark of an engine of which this host has no file any more, because
    it was removed or is kept in another folder for temporary files. Their devices are not known."""

    incarnation: str
    about: str
    """Run, role and replica, as far as they say so themselves."""
    pids: tuple[int, ...]

    def __str__(self) -> str:
        pids = ", ".join(map(str, self.pids))
        return f"an engine of {self.about}, incarnation {self.incarnation[:8]} (processes {pids}),"


def find_orphans(run: RunRef, devices: Collection[str], node_ip: str) -> list[Orphan]:
    """Engines and trainers of other runs on this host that may hold one of ``devices``. Changes
    nothing. Files of earlier versions that name no devices stop nobody."""
    mine = folder_of(run.store, run.run)
    return [
        *_engines(mine, devices, node_ip),
        *_trainers(mine, devices, node_ip),
    ]


def find_unrecorded() -> list[Unrecorded]:
    """Engines of this host's processes that no file is about, of those that can be looked at."""
    return _unrecorded(lambda _: True)


def find_unrecorded_of(spec: EngineGroupSpec, replica: int) -> list[Unrecorded]:
    """Those of one replica, of any of its incarnations."""
    mark, said = replica_mark(spec, replica).encode(), about(spec, replica)

    def own(variables: Mapping[bytes, bytes]) -> bool:
        if (told := variables.get(REPLICA.encode())) is not None:
            return told == mark
        return _said(variables) == said  # earlier versions told no more

    return _unrecorded(own)


def _unrecorded(wanted: Callable[[Mapping[bytes, bytes]], bool]) -> list[Unrecorded]:
    found: dict[str, list[ProcessStamp]] = {}
    texts: dict[str, str] = {}
    for stamp, variables in host_processes.processes_with(MARKER):
        mark = variables[MARKER.encode()].decode(errors="replace")
        if mark and wanted(variables):
            found.setdefault(mark, []).append(stamp)
            texts.setdefault(mark, _about(variables))
    if not found:
        return []
    # A file is there before its process, and until after it: those seen are read of only now.
    recorded = {
        holder.processes.incarnation for _, holder in _files(_HOLDER, Holder) if holder is not None
    }
    living = {
        mark: tuple(sorted(stamp.pid for stamp in stamps if host_processes.alive(stamp)))
        for mark, stamps in found.items()
        if mark not in recorded
    }
    return [
        Unrecorded(incarnation=mark, about=texts[mark], pids=pids)
        for mark, pids in living.items()
        if pids
    ]


def _said(variables: Mapping[bytes, bytes]) -> Any:
    try:
        return json.loads(variables.get(ABOUT.encode(), b""))
    except ValueError:
        return None


def _about(variables: Mapping[bytes, bytes]) -> str:
    try:
        told = _said(variables)
        return f"run {told['run']}, {told['role']} replica {told['replica']}"
    except (KeyError, TypeError):
        return "an unknown run"


def _engines(mine: Path, devices: Collection[str], node_ip: str) -> list[Orphan]:
    found: list[Orphan] = []
    for path, holder in _files(_HOLDER, Holder, except_in=mine):
        if holder is None:
            found.append(_unread(path, path.name.removesuffix(_HOLDER), devices, node_ip))
            continue
        held = tuple(each for each in holder.devices if each in devices)
        if not held:
            continue
        pids, why = _alive(holder, path)
        name = path.name.removesuffix(_HOLDER)
        if pids or why:
            found.append(
                Orphan(
                    run=holder.run,
                    engine_id=holder.engine_id,
                    node_ip=node_ip,
                    devices=held,
                    pids=pids,
                    why=why,
                    actor=_OF_A_NODE.sub("", name),
                    incarnation=holder.processes.incarnation,
                )
            )
    return found


def _trainers(mine: Path, devices: Collection[str], node_ip: str) -> list[Orphan]:
    found: list[Orphan] = []
    until = time.monotonic() + DYING_SECONDS
    for path, there in _files(RESIDENCE, Residence, except_in=mine):
        if there is None:
            name = path.name.removesuffix(RESIDENCE).replace(".", "/")
            found.append(_unread(path, name, devices, node_ip))
            continue
        held = tuple(each for each in there.devices if each in devices)
        if not held or there.booted_since:
            continue
        why = None
        if there.seen_from_here:
            while there.lives and time.monotonic() < until:
                time.sleep(_POLL)
            if not there.lives:
                continue
        elif there.resident_under is None:
            continue
        else:
            why = f"{there.pid} in another pid namespace; {_word(path)}"
        found.append(
            Orphan(
                run=there.run,
                engine_id=there.holder,
                node_ip=node_ip,
                devices=held,
                pids=(there.pid,) if why is None else (),
                why=why,
                actor=path.name.removesuffix(RESIDENCE),
                incarnation=str(there.pid),
            )
        )
    return found


def _unread(path: Path, name: str, devices: Collection[str], node_ip: str) -> Orphan:
    """Of which devices its file speaks cannot be told."""
    owner = "trainer" if path.name.endswith(RESIDENCE) else "engine"
    return Orphan(
        run="unknown",
        engine_id=name,
        node_ip=node_ip,
        devices=tuple(sorted(devices)),
        pids=(),
        why=f"unknown: {path} cannot be read; remove it once its {owner} is gone",
    )


def need_nobody_beside(run: RunRef, name: str, bundles: Sequence[BundleBinding]) -> None:
    """What is about to start here shares no device with a living engine or trainer of another run.
    What Ray has reserved says so of the first bundle alone, and only of today's reservations.

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
    """Ask every node of a bound pool whether its devices are free of other runs' engines and
    trainers.

    Raises:
        PermanentError: some are not; the text names run, holder, node and processes.
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


def _files(
    ending: str, kind: type[_M], *, except_in: Path | None = None
) -> Iterator[tuple[Path, _M | None]]:
    """Every file of that kind, and what it says; None where that cannot be read."""
    everywhere = Path(tempfile.gettempdir()) / f"relax-{os.getuid()}"
    for path in sorted(everywhere.glob(f"*/*{ending}")):
        if path.parent == except_in:
            continue
        try:
            yield path, kind.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            continue  # proved gone a moment ago
        except (OSError, ValueError):
            yield path, None


def _word(path: Path) -> str:
    """How a person says of processes which nobody here can see that they are gone."""
    return (
        "a container that was started anew leaves such a file: once `nvidia-smi` on the node itself"
        f" shows nobody on it, `rm {path}` here"
    )


def _alive(holder: Holder, path: Path) -> tuple[tuple[int, ...], str | None]:
    """Its living processes, or why nobody here can tell."""
    here, there = host_processes.this_host(), holder.processes.host
    if here.another_boot(there):
        return (), None
    if here != there:
        # Its pids mean other processes here, or none: that none is found says nothing.
        session = holder.processes.session or "not known"
        return (), f"{session} on another host or in another pid namespace; {_word(path)}"
    try:
        rows = find_processes(holder.processes)
    except UnconfirmedError as error:
        return (), str(error)
    return tuple(row.stamp.pid for row in rows), None
