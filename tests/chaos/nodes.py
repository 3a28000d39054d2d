"""Further nodes of a local stack's Ray cluster, pretended on this machine by an address each."""

import os
import signal
import subprocess
import time
from pathlib import Path

from relax_infer.engines import host_processes
from relax_infer.engines.release import MARKER as ENGINE_MARKER
from workers import _processes, _ray
from workers._preflight import binary
from workers.local import Stack

_MARKER = "RELAX_TEST_NODE"


class PretendedNode:
    """A raylet with one pretended GPU, and everything that is started on it."""

    def __init__(self, stack: Stack, address: str) -> None:
        """``address``: one of loopback that no other node has."""
        self._stack, self.address = stack, address
        self._parent: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Join the cluster; also once more after :meth:`kill`."""
        import ray

        variables = self._stack.environment() | _ray.VARIABLES
        variables |= {_processes.MARKER: self._stack.stack, "SPT_NOENV": "1"}
        # Ray's word for several nodes whose addresses are of loopback.
        variables |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1"}
        variables[_MARKER] = self.address
        del variables["RAY_ADDRESS"]
        command = [
            *(binary("ray"), "start", "--block", "--disable-usage-stats"),
            *("--address", self._stack.ray_address, "--node-ip-address", self.address),
            *("--num-gpus", "1", "--num-cpus", "4", "--object-store-memory", "80000000"),
            *("--min-worker-port", "0", "--max-worker-port", "0"),
            *("--dashboard-agent-listen-port", "0"),
        ]
        with (Path(self._stack.home) / "logs" / f"node-{self.address}.log").open("ab") as log:
            self._parent = subprocess.Popen(
                command, env=variables, stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + 90
        while not any(n["Alive"] and n["NodeManagerAddress"] == self.address for n in ray.nodes()):
            assert self._parent.poll() is None, f"the node {self.address} ended as it started"
            assert time.monotonic() < deadline, f"the node {self.address} does not join"
            time.sleep(0.2)

    def kill(self, *, engines: bool) -> None:
        """SIGKILL its raylet and actors and, with ``engines``, the servers that they started."""
        deadline = time.monotonic() + 30
        while left := self._processes(engines):
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            assert time.monotonic() < deadline, f"{left} of node {self.address} do not die"
            time.sleep(0.1)
            if self._parent is not None:
                self._parent.poll()
        self.reap()

    def reap(self) -> None:
        """Once it was killed, or its stack is down."""
        if self._parent is not None:
            self._parent.wait(30)

    def _processes(self, engines: bool) -> list[int]:
        found: list[int] = []
        for row in host_processes.processes():
            try:
                variables = host_processes.environment(row.stamp.pid) or {}
            except PermissionError:  # not ours
                continue
            if variables.get(_MARKER.encode()) != self.address.encode():
                continue
            if engines or ENGINE_MARKER.encode() not in variables:
                found.append(row.stamp.pid)
        return found
