"""Starting and ending one fenced server on this host: an engine, or one node's part of it."""

import asyncio
import contextlib
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

from relax_infer import telemetry
from relax_infer.contracts.base import Message
from relax_infer.contracts.engines import EngineGroupSpec
from relax_infer.contracts.failures import PermanentError, TransientError, UnconfirmedError
from relax_infer.contracts.fence import FenceToken
from relax_infer.engines import host_processes
from relax_infer.engines.command import command_line, environment, server_settings
from relax_infer.engines.control import EngineControl
from relax_infer.engines.holder import Holder, HolderFiles
from relax_infer.engines.host_processes import ProcessStamp
from relax_infer.engines.memory import memory_in_use
from relax_infer.engines.release import (
    EngineProcesses,
    ReleaseProof,
    check_marks,
    find_processes,
    prove_release,
)

_POLL = 0.1
_LOG_LINES = 25
_PORT_TAKEN = "address already in use"
_LOOPBACK = "127.0.0.1"
_DERIVED_PORTS = 7
"""SGLang's data-parallel attention listens on the rendezvous port and the next ones."""
_CUDA_GRACE = 30.0
"""Seconds that an engine on CUDA may take to let go by itself before it is killed."""


class PortTaken(TransientError):
    """Somebody took the port between its choice and the server's start."""


class EngineProcess:
    """One incarnation: the server's process tree and its socket."""

    def __init__(self, holder: Holder, popen: subprocess.Popen[bytes] | None) -> None:
        self.holder = holder
        self.control = EngineControl(Path(holder.socket))
        self._popen = popen
        self._core = frozenset(_workers(holder.processes))

    @property
    def inherited(self) -> bool:
        """Whether an actor that is gone started it."""
        return self._popen is None

    def with_holder(self, holder: Holder) -> "EngineProcess":
        """The same process, of which more is known."""
        return EngineProcess(holder, self._popen)

    def lost(self) -> str | None:
        """What is wrong with it, as far as its processes tell; None where they live."""
        if self.inherited:
            return (
                f"incarnation {self.holder.processes.incarnation} was started by an actor that is"
                " gone"
            )
        if self.exited():
            return (
                f"its server exited by itself; the end of its log {self.holder.log}:\n{self.tail()}"
            )
        gone = self.missing()
        return f"its process {gone[0]} is gone" if gone else None

    def exited(self) -> bool:
        """Whether the server's first process is gone (others of its tree may live on)."""
        return self._popen is None or self._popen.poll() is not None

    def missing(self) -> tuple[int, ...]:
        """Pids of processes without which the server cannot work and that are gone."""
        return tuple(s.pid for s in self._core if not host_processes.alive(s))

    async def exits_within(self, seconds: float) -> bool:
        """Wait for the server's first process to be gone."""
        deadline = time.monotonic() + seconds
        while not self.exited():
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(_POLL)
        return True

    def ended(self) -> bool:
        """Whether no process of the engine is left on this host, as far as one scan tells."""
        return self.exited() and not find_processes(self.holder.processes)

    def tail(self) -> str:
        return _tail(Path(self.holder.log))


class Launch(Message):
    """What the servers of one incarnation have in common, on every node."""

    group: EngineGroupSpec
    incarnation: str
    token: FenceToken
    model_path: str
    weight_version: int | None = None
    rendezvous: str | None = None
    """``HOST:PORT`` on the head's host at which the ranks of several nodes meet."""

    def mark(self, node: int) -> str:
        """The marker of one node's processes: two nodes on one host are told apart."""
        return f"{self.incarnation}.node-{node}" if node else self.incarnation


async def start_server(
    launch: Launch, replica: int, node: int, files: HolderFiles
) -> EngineProcess:
    """Start one node's server; it is recorded before and after, and does not answer yet."""
    spec, mark = launch.group, launch.mark(node)
    bundles = spec.node_bundles(replica, node)
    gpus = tuple(bundle.gpu_id for bundle in bundles)
    # A follower serves nobody: what SGLang lets it answer stays on its host.
    host = _LOOPBACK if node else bundles[0].node_ip
    port, dist_port = free_ports(host, 2)
    name = f"{spec.actor_name(replica, node)}.{mark[:8]}"
    log = log_folder(spec) / f"{name}.log"
    request_log = _request_log_folder(spec) / f"{name}.jsonl"
    holder = Holder(
        engine_id=spec.engine_id(replica),
        run=spec.run,
        devices=tuple(bundle.device for bundle in spec.node_bundles(replica, node)),
        processes=EngineProcesses(
            incarnation=mark,
            session=0,
            tree=(),
            host=host_processes.this_host(),
            not_before=host_processes.ticks_since_boot(),
            node=f"{bundles[0].node_ip} (Ray node {bundles[0].node_id})",
        ),
        base_url=None if node else f"http://{address(host, port)}",
        socket=str(files.socket(mark)),
        scratch=str(scratch := files.scratch(mark)),
        log=str(log),
        request_log=str(request_log),
        model_path=launch.model_path,
        memory_before=await memory_in_use(bundles) if spec.device == "cuda" else None,
    )
    settings = server_settings(
        spec,
        host=host,
        port=port,
        dist_port=dist_port,
        model_path=launch.model_path,
        weight_version=launch.weight_version,
        node=node,
        rendezvous=launch.rendezvous,
    )
    command = command_line(
        spec, settings, socket=Path(holder.socket), token=launch.token, request_log=request_log
    )
    files.write_holder(holder)
    variables = environment(spec, mark, gpus, replica=replica, scratch=scratch)
    try:
        popen = _spawn(command, variables, log)
    except OSError as error:
        files.remove_holder()  # nothing was started
        raise PermanentError(
            f"Engine {name} cannot be started on {holder.processes.node}: {error}.",
            cure="The recipe's engine.python must be an interpreter on every node.",
        ) from error
    first = host_processes.process(popen.pid)
    holder = _with_processes(
        holder, session=popen.pid, tree=(first.stamp,) if first is not None else ()
    )
    files.write_holder(holder)
    return EngineProcess(holder, popen)


async def record_tree(engine: EngineProcess, files: HolderFiles) -> EngineProcess:
    """The engine with its whole process tree, each of which shows the marker, and with what they
    share; also in its file.

    Raises:
        UnconfirmedError: one does not.
    """
    tree = await asyncio.to_thread(check_marks, engine.holder.processes)
    shared = set(engine.holder.shared).union(*(_loads(each.pid) for each in tree))
    holder = _with_processes(engine.holder, tree=tree)
    holder = holder.model_copy(update={"shared": tuple(sorted(shared))})
    files.write_holder(holder)
    return engine.with_holder(holder)


def _loads(pid: int) -> set[str]:
    """Where SGLang's ranks share how loaded they are."""
    return host_processes.shared_files(pid, "sglang_loads_")


async def end_engine(
    engine: EngineProcess, spec: EngineGroupSpec, files: HolderFiles
) -> ReleaseProof:
    """End every process of the engine and prove it; the holder file goes with the proof.

    On CUDA the server is asked first, since a kill in the middle of a release is how memory
    survives. On a CPU there is nothing to let go of.

    Raises:
        UnconfirmedError: see :func:`prove_release`; the holder file stays.
    """

    def end() -> ReleaseProof:
        tree = engine.holder.processes.tree
        if spec.device == "cuda" and tree and host_processes.send_signal(tree[0], signal.SIGTERM):
            deadline = time.monotonic() + _CUDA_GRACE
            while not engine.exited() and time.monotonic() < deadline:
                time.sleep(_POLL)
        proof = prove_release(engine.holder.processes)
        engine.exited()  # reaps it
        files.remove_holder()
        return proof

    return await asyncio.to_thread(end)


async def wait_for_answer(engine: EngineProcess, timeout: float) -> None:
    """Wait until a server that was just started answers.

    Raises:
        PermanentError: it exited; the text has the last lines of its log.
        PortTaken: it exited because of a port.
        TransientError: it did not answer within ``timeout`` seconds.
    """
    deadline = time.monotonic() + timeout
    while True:
        if engine.exited():
            tail = engine.tail()
            raise failed_start(
                f"Engine {engine.holder.engine_id} exited while it started; the end of its log"
                f" {engine.holder.log}:\n{tail}"
            )
        try:
            if await engine.control.alive():
                return
        except UnconfirmedError:
            pass  # not listening yet
        if time.monotonic() > deadline:
            raise TransientError(
                f"Engine {engine.holder.engine_id} did not answer within {timeout:.0f} s; the end"
                f" of its log {engine.holder.log}:\n{engine.tail()}",
                cure="Raise engine.launch_timeout if it was still loading.",
            )
        await asyncio.sleep(_POLL)


def failed_start(text: str) -> PortTaken | PermanentError:
    """What it means that a server exited while it started, from the end of its log."""
    kind = PortTaken if _PORT_TAKEN in text.lower() else PermanentError
    return kind(text)


def _spawn(command: list[str], variables: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def free_ports(host: str, count: int) -> list[int]:
    """Ports that were free on ``host`` a moment ago, all different."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sockets = [socket.socket(family, socket.SOCK_STREAM) for _ in range(count)]
    try:
        for each in sockets:
            each.bind((host, 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def free_rendezvous(host: str) -> str:
    """``HOST:PORT`` with a run of ports that were free on ``host`` a moment ago."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    while True:
        (port,) = free_ports(host, 1)
        with contextlib.ExitStack() as held, contextlib.suppress(OSError, OverflowError):
            for offset in range(_DERIVED_PORTS):
                each = held.enter_context(socket.socket(family, socket.SOCK_STREAM))
                each.bind((host, port + offset))
            return address(host, port)


def address(host: str, port: int) -> str:
    return f"{f'[{host}]' if ':' in host else host}:{port}"


def log_folder(spec: EngineGroupSpec) -> Path:
    return telemetry.log_folder(spec.run)


def local_path(url: str) -> Path | None:
    """The path that a ``file://`` URL or a plain path names; None for any other URL."""
    parts = urlsplit(url)
    if parts.scheme == "":
        return Path(url)
    return Path(unquote(parts.path)) if parts.scheme == "file" else None


def _request_log_folder(spec: EngineGroupSpec) -> Path:
    """In the store where that is a folder; a store of objects cannot be appended to."""
    store = local_path(spec.store)
    if store is None:
        return log_folder(spec) / "requests"
    return store / spec.run / "engines" / "requests"


def _workers(engine: EngineProcesses) -> Iterator[ProcessStamp]:
    """The server itself and SGLang's own processes; helpers of a compiler may come and go."""
    for stamp in engine.tree:
        row = host_processes.process(stamp.pid)
        if row is not None and row.stamp == stamp and row.command.startswith("sglang"):
            yield stamp
    yield from engine.tree[:1]


def _with_processes(holder: Holder, **changes: object) -> Holder:
    processes = holder.processes.model_copy(update=changes)
    return holder.model_copy(update={"processes": processes})


def _tail(path: Path) -> str:
    try:
        with path.open(errors="replace") as lines:
            return "".join(deque(lines, _LOG_LINES))
    except FileNotFoundError:
        return "(no log)"
