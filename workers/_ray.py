"""The Ray head of the local stack: its command, its variables, and when it is up."""

import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from workers._preflight import StackError, binary

NODE = "127.0.0.2"
"""Loopback, so that engines listen to nobody outside and a new network does not end the stack.
Ray replaces 127.0.0.1 by the machine's address on the network. Its own ports ask for the token."""

_OBJECT_STORE = 200_000_000
_CPUS = 4
"""Beside one for each GPU: actors of others (TransferQueue) may ask for one each."""
_STARTED = b"Ray runtime started."
_LONGEST_FOLDER = 40
"""Ray's socket paths are 65 characters longer; a Unix socket's may have 107."""

VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray must not hide the devices of actors that ask for none.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Idle Python workers made in advance cost 87 MB each and the first seconds of two cores.
    "RAY_prestart_worker_first_driver": "0",
    # Ray would kill actors when others fill the machine's memory.
    "RAY_memory_monitor_refresh_ms": "0",
    # Nothing of this node could move elsewhere; its actors would hold the end up for 30 s.
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    "PYTHONUNBUFFERED": "1",
}


def auth_variables(token_file: Path) -> dict[str, str]:
    """For the head and whoever joins it: the stack's own token, nobody's personal one.

    Said in so many words, since by default a head may ask for a token that a driver with an
    explicit address does not present.
    """
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token_file)}


@contextmanager
def joined(address: str, variables: Mapping[str, str], namespace: str) -> Iterator[None]:
    """This process is a driver of the cluster until the block ends."""
    import ray

    raylet: Any = import_module("ray._raylet")

    def settle(values: Mapping[str, str | None]) -> None:
        for name, value in values.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        # Ray reads both once per process, and this one may have seen another cluster.
        raylet.Config.initialize("")
        raylet.AuthenticationTokenLoader.instance().reset_cache()

    before = {name: os.environ.get(name) for name in variables}
    settle(variables)
    try:
        ray.init(
            address=address, namespace=namespace, log_to_driver=False, logging_level=logging.WARNING
        )
        try:
            yield
        finally:
            ray.shutdown()
    finally:
        settle(before)


def write_token(token_file: Path) -> None:
    """A new token that only this user may read."""
    token_file.unlink(missing_ok=True)
    token_file.touch(mode=0o600, exist_ok=False)
    token_file.write_text(secrets.token_hex(32))


def head_command(port: int, client_port: int, gpus: int, folder: Path) -> list[str]:
    """A head node with ``gpus`` GPUs, pretended ones where the machine has none."""
    return [
        *(binary("ray"), "start", "--head", "--block", "--disable-usage-stats"),
        *("--node-ip-address", NODE, "--port", str(port), "--temp-dir", str(folder)),
        *("--num-gpus", str(gpus), "--num-cpus", str(max(_CPUS + gpus, os.cpu_count() or 1))),
        *("--object-store-memory", str(_OBJECT_STORE), "--include-dashboard=false"),
        # Ray's fixed defaults would meet those of another cluster on this machine.
        *("--min-worker-port", "0", "--max-worker-port", "0", "--dashboard-agent-listen-port", "0"),
        *("--ray-client-server-port", str(client_port)),
        *("--include-log-monitor=false", "--log-style", "record", "--log-color", "false"),
    ]


def folder_of(stack: str) -> Path:
    """A short folder for Ray's sockets.

    Raises:
        StackError: the machine's folder for temporary files has too long a name.
    """
    folder = Path(tempfile.gettempdir()) / f"relax-{os.getuid()}" / f"ray-{stack[:8]}"
    if len(str(folder)) > _LONGEST_FOLDER:
        raise StackError(
            f"The path {folder} is too long for Ray's sockets.", cure="Set TMPDIR to a short one."
        )
    return folder


def started(log: Path, offset: int) -> bool:
    """Whether the log says so after ``offset`` bytes of it: written once the node has joined."""
    with log.open("rb") as lines:
        lines.seek(offset)
        return _STARTED in lines.read()


def keep_logs(folder: Path, logs: Path) -> None:
    """Move the last session's logs to ``logs``, remove the rest of Ray's folder."""
    sessions = sorted(path for path in folder.glob("session_2*/logs") if path.is_dir())
    if sessions:
        shutil.rmtree(logs, ignore_errors=True)
        shutil.move(sessions[-1], logs)
    shutil.rmtree(folder, ignore_errors=True)
