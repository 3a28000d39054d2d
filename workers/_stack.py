"""One local stack: its processes started, watched and ended; every change recorded at once."""

import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from relax_infer.contracts.policies import QUEUES
from relax_infer.engines.host_processes import send_signal, this_host
from relax_infer.engines.release import MARKER as ENGINE_MARKER
from workers import _processes, _ray, _stack_file, _temporal
from workers._preflight import HOST, Ports, StackError
from workers._stack_file import ProcessRecord, StackRecord

Say = Callable[[str], object]

_CHECKOUT = Path(__file__).resolve().parent.parent
_POLL = 0.1
_TEMPORAL_TIMEOUT, _RAY_TIMEOUT, _WORKER_TIMEOUT = 60.0, 120.0, 120.0
_KILL_TIMEOUT = 30.0
_ENDS = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT})
_WORKER_GRACE, _ENGINE_GRACE, _SERVER_GRACE, _REST_GRACE = 12.0, 15.0, 15.0, 3.0
_SWEEP_TIMEOUT = 60.0


@dataclass(frozen=True)
class DownReport:
    """What ``down`` found and did."""

    ended: tuple[str, ...]
    """Names of what was alive: processes of stack.json, ``engine <pid>``."""
    killed: tuple[int, ...]
    """Pids that did not end when asked and were killed."""
    left: tuple[int, ...]
    """Pids that not even SIGKILL ended; stack.json stays then."""


class Stack:
    """A local stack that was started, from any process of this machine."""

    def __init__(self, record: StackRecord) -> None:
        self._record = record

    @classmethod
    def new(
        cls,
        home: Path,
        *,
        gpus: int,
        worker: bool,
        temporal_port: int,
        ui_port: int,
        metrics_port: int,
        worker_ports: tuple[int, int],
        ray_port: int,
    ) -> Self:
        """One of which nothing runs yet, recorded so that whatever will run can be ended."""
        identity = str(uuid.uuid4())
        ours, sdks = (f"http://{HOST}:{port}/metrics" for port in worker_ports)
        record = StackRecord(
            stack=identity,
            home=str(home),
            boot=this_host().boot_id,
            temporal_address=f"{HOST}:{temporal_port}",
            temporal_ui=f"http://{HOST}:{ui_port}",
            temporal_metrics=f"http://{HOST}:{metrics_port}/metrics",
            worker_metrics=ours,
            worker_sdk_metrics=sdks,
            ray_address=f"{_ray.NODE}:{ray_port}",
            ray_folder=str(_ray.folder_of(identity)),
            ray_token_file=str(home / "ray.token"),
            gpus=gpus,
            worker=worker,
        )
        _stack_file.write(record)
        return cls(record)

    @classmethod
    def load(cls, home: Path) -> Self:
        """
        Raises:
            StackError: nothing was started in ``home``.
        """
        record = _stack_file.read(home.absolute())
        if record is None:
            raise StackError(f"No local stack in {home}.", cure="Start one with `relax-infer up`.")
        return cls(record)

    @property
    def ready(self) -> bool:
        """Whether the ``up`` that made it has finished."""
        return self._record.ready

    @property
    def home(self) -> Path:
        return Path(self._record.home)

    @property
    def gpus(self) -> int:
        """Of its Ray head."""
        return self._record.gpus

    @property
    def stack(self) -> str:
        """Value of RELAX_STACK in each of its processes."""
        return self._record.stack

    @property
    def temporal_address(self) -> str:
        return self._record.temporal_address

    @property
    def temporal_ui(self) -> str:
        return self._record.temporal_ui

    @property
    def temporal_namespace(self) -> str:
        return self._record.temporal_namespace

    @property
    def ray_address(self) -> str:
        return self._record.ray_address

    @property
    def processes(self) -> dict[str, ProcessRecord]:
        """By name, dead ones included."""
        return dict(self._record.processes)

    def environment(self) -> dict[str, str]:
        """Variables for a client: this process's own, pointed at this stack and no other Temporal.

        Without the stack's marker: a client is not part of the stack, ``down`` leaves it alone.
        """
        strange = ("TEMPORAL_", "RAY_", _processes.MARKER, ENGINE_MARKER)
        own = {name: value for name, value in os.environ.items() if not name.startswith(strange)}
        paths = [str(_CHECKOUT), *filter(None, own.get("PYTHONPATH", "").split(os.pathsep))]
        programs = [str(Path(sys.executable).parent), own.get("PATH", os.defpath)]
        ray = _ray.auth_variables(Path(self._record.ray_token_file))
        return (
            own
            | ray
            | {
                "PATH": os.pathsep.join(programs),
                "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
                "RELAX_HOME": self._record.home,
                "RAY_ADDRESS": self.ray_address,
                # Else Ray replaces a loopback address by that of a network interface, where the
                # local head does not listen.
                "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
                "TEMPORAL_ADDRESS": self.temporal_address,
                "TEMPORAL_NAMESPACE": self.temporal_namespace,
                # The person's own file may turn TLS on for another server.
                "TEMPORAL_CONFIG_FILE": os.devnull,
            }
        )

    def joined_ray(self, namespace: str) -> AbstractContextManager[None]:
        """This process is a driver of the stack's Ray while the block runs.

        A plain ``ray.init`` would lack the stack's token; a process started with
        :meth:`environment` has it.
        """
        token = _ray.auth_variables(Path(self._record.ray_token_file))
        return _ray.joined(self.ray_address, token, namespace)

    def alive(self, name: str) -> bool:
        """Whether the process of that name runs; False if it was never started."""
        record = self._record.processes.get(name)
        same_boot = self._record.boot == this_host().boot_id
        return record is not None and same_boot and _processes.lives(record.stamp)

    def missing(self) -> tuple[str, ...]:
        """Names of what belongs to the stack and does not run."""
        return tuple(name for name in self._record.expected if not self.alive(name))

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Signal one process; after a signal that ends it, wait until it is gone.

        Raises:
            StackError: it does not run, or does not end.
        """
        if not self.alive(name):
            raise StackError(f"{name} of the stack in {self.home} does not run.")
        stamp = self._record.processes[name].stamp
        send_signal(stamp, number)
        if number in _ENDS and not _processes.wait_gone((stamp,), _KILL_TIMEOUT):
            raise StackError(f"{name} (pid {stamp.pid}) lives on after {number.name}.")

    def start_temporal(self) -> None:
        """Start the server on the recorded ports and database, wait until it answers.

        Raises:
            StackError: it runs already, ended, or does not answer.
        """
        self._launch_temporal()
        self._await_temporal()

    def start_worker(self) -> None:
        """Start the worker, wait until Temporal sees it ask for work on every queue.

        Raises:
            StackError: it runs already, ended, or does not get there.
        """
        self._launch("worker", [sys.executable, "-m", "workers.worker"])
        variables = self.environment()
        pid = self._record.processes["worker"].pid
        waiting = list(QUEUES)

        def polling() -> bool:
            while waiting and _temporal.polled_by(variables, waiting[0], pid):
                waiting.pop(0)
            return not waiting

        self._await("worker", polling, _WORKER_TIMEOUT)

    def start(self, say: Say) -> None:
        """Everything that does not run yet; Temporal and Ray side by side."""
        names = self.missing()
        offset = 0
        if "temporal" in names:
            self._launch_temporal()
        if "ray" in names:
            offset = self._launch_ray()
        if "temporal" in names:
            self._await_temporal()
            say(f"Temporal answers at {self.temporal_address}, web UI {self.temporal_ui}")
        if "ray" in names:
            log = self._log("ray")
            self._await("ray", lambda: _ray.started(log, offset), _RAY_TIMEOUT)
            say(f"Ray runs at {self.ray_address} with {self._record.gpus} GPUs")
        if "worker" in names:
            self.start_worker()
            say(f"The worker asks for work on {', '.join(QUEUES)}")
        self._update(ready=True)

    def _launch_temporal(self) -> None:
        ports = (self.temporal_address, self.temporal_ui, self._record.temporal_metrics)
        numbers = [_port_of(each) for each in ports]
        command = _temporal.server_command(self.home / "temporal.db", *numbers)
        self._launch("temporal", command)

    def _await_temporal(self) -> None:
        variables = self.environment()
        self._await("temporal", lambda: _temporal.answers(variables), _TEMPORAL_TIMEOUT)

    def _launch_ray(self) -> int:
        """Returns the length of its log before it began."""
        log = self._log("ray")
        offset = log.stat().st_size if log.exists() else 0
        folder = Path(self._record.ray_folder)
        folder.parent.mkdir(mode=0o700, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        _ray.write_token(Path(self._record.ray_token_file))
        port = int(self.ray_address.rpartition(":")[2])
        with Ports() as ports:
            client_port = ports.choose("Ray's clients")
            command = _ray.head_command(port, client_port, self._record.gpus, folder)
        self._launch("ray", command)
        return offset

    def _launch(self, name: str, command: Sequence[str]) -> None:
        if self.alive(name):
            raise StackError(f"{name} of the stack in {self.home} runs already.")
        variables = {**_temporal.VARIABLES, **self.environment(), _processes.MARKER: self.stack}
        variables |= _ray.VARIABLES
        # Else setproctitle erases the marker from Ray's and SGLang's processes.
        variables["SPT_NOENV"] = "1"
        if name == "ray":
            del variables["RAY_ADDRESS"]  # it begins a cluster, it joins none
        if name == "worker" and self._record.worker_metrics:
            variables["RELAX_METRICS_PORT"] = str(_port_of(self._record.worker_metrics))
            variables["RELAX_SDK_METRICS_PORT"] = str(_port_of(self._record.worker_sdk_metrics))
        log = self._log(name)
        stamp = _processes.launch(name, command, variables, log)
        record = ProcessRecord(pid=stamp.pid, started=stamp.started, log=str(log))
        self._update(processes={**self._record.processes, name: record})

    def _await(self, name: str, ready: Callable[[], bool], timeout: float) -> None:
        deadline = time.monotonic() + timeout
        log = self._log(name)
        while not ready():
            if not self.alive(name):
                raise _processes.ended_early(name, log)
            if time.monotonic() > deadline:
                raise _processes.slow(name, log, timeout)
            time.sleep(_POLL)
        if not self.alive(name):  # another one answered in its place
            raise _processes.ended_early(name, log)

    def _log(self, name: str) -> Path:
        return self.home / "logs" / f"{name}.log"

    def _update(self, **changes: object) -> None:
        self._record = self._record.model_copy(update=changes)
        _stack_file.write(self._record)

    def end(self, say: Say) -> DownReport:
        """End everything, in the order in which nobody starts again what was ended."""
        same_boot = self._record.boot == this_host().boot_id
        stamps = [each.stamp for each in self._record.processes.values()] if same_boot else []
        ended: list[str] = []

        def ask(grace: float, *names: str) -> None:
            asked = [self._record.processes[name].stamp for name in names if self.alive(name)]
            ended.extend(name for name in names if self.alive(name))
            _processes.end(asked, grace)

        ask(_WORKER_GRACE, "worker")
        engines = _processes.engine_leaders(_processes.stack_processes(self.stack, stamps))
        ended += [f"engine {row.stamp.pid}" for row in engines]
        _processes.end([row.stamp for row in engines], _ENGINE_GRACE)
        ask(_SERVER_GRACE, "ray", "temporal")
        rest = _processes.stack_processes(self.stack, stamps)
        _processes.end([row.stamp for row in rest], _REST_GRACE)
        killed, left = _processes.sweep(self.stack, stamps, _SWEEP_TIMEOUT)
        _ray.keep_logs(Path(self._record.ray_folder), self.home / "logs" / "ray")
        report = DownReport(tuple(ended), tuple(sorted(killed)), tuple(sorted(left)))
        if left:
            say(f"Not even SIGKILL ended {report.left}: look at dmesg; {self.home} stays recorded.")
        else:
            Path(self._record.ray_token_file).unlink(missing_ok=True)
            _stack_file.remove(self.home)
        return report


def _port_of(address: str) -> int:
    """Of ``host:port`` or a URL with a port."""
    return int(address.removesuffix("/metrics").rpartition(":")[2])
