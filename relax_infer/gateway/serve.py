"""Run the gateway: the public app on a TCP port, the control app on a Unix socket.

A gateway that starts empty pulls each role's registry in the background, until somebody pushed it
or it was got; the data path never waits for that.
"""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping
from pathlib import Path
from typing import Any

import uvicorn

from relax_infer.contracts.failures import PermanentError
from relax_infer.discovery import Role
from relax_infer.gateway._asgi import App
from relax_infer.gateway.app import create_gateway_app
from relax_infer.gateway.control import create_control_app
from relax_infer.gateway.intake import RegistryIntake, RegistryRefused

log = logging.getLogger(__name__)

Pull = Callable[[Role], Awaitable[Mapping[str, Any] | None]]
"""Asks a role's owner for ``{"term": int, "document": {...}}``; None or an error: not now."""

_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 5.0
_GRACE = 5
"""Seconds that open requests may take to end at shutdown."""
_IDLE_CALLER = 75
"""Seconds until an idle caller is hung up; longer than clients keep a connection for reuse."""
_SOCKET_PATH_LIMIT = 100


async def serve_gateway(
    *,
    host: str,
    port: int,
    control_socket: Path,
    pull: Pull | None = None,
    roles: Iterable[Role | str] = tuple(Role),
    timeout: float = 1800.0,
) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        control_socket: made anew with mode 0600, in a folder of mode 0700.
            One that is left behind by an ended gateway is replaced.
        pull: asked for each role that nobody has pushed.
        timeout: seconds for one request.

    Raises:
        PermanentError: the port or the socket is in use.
    """
    served = tuple(Role(role) for role in roles)
    intake = RegistryIntake()
    public_app = create_gateway_app(intake, roles=served, timeout=timeout)
    servers = [make_server(public_app), make_server(create_control_app(intake))]
    async with contextlib.AsyncExitStack() as stack:
        public = stack.enter_context(_listen_tcp(host, port))
        control = stack.enter_context(_listen_unix(control_socket))
        stack.enter_context(_stopped_by_signal(servers))
        if pull is not None:
            for role in served:
                pulling = asyncio.create_task(_pull(intake, role, pull))
                stack.push_async_callback(_cancel, pulling)
        await asyncio.gather(
            servers[0].serve(sockets=[public]), servers[1].serve(sockets=[control])
        )


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _pull(intake: RegistryIntake, role: Role, pull: Pull) -> None:
    """Ask until the role is known; says so once for each new reason why not."""
    pause, said = _FIRST_PAUSE, ""
    while intake.get(role) is None:
        reason = "nobody has it"
        try:
            answer = await pull(role)
            if answer is not None:
                intake.offer(role, answer["term"], answer["document"])
                log.info("registry of %s: pulled, term %s", role, answer["term"])
                return
        except RegistryRefused:  # somebody pushed a newer one meanwhile
            return
        except Exception as error:  # whatever it is, the next try may succeed
            reason = f"{type(error).__name__}: {error}"
        if reason != said:
            log.warning("registry of %s cannot be pulled yet: %s", role, reason)
            said = reason
        await asyncio.sleep(pause)
        pause = min(pause * 2, _LONGEST_PAUSE)


class _Server(uvicorn.Server):
    """Two of them share a process, which handles the signals itself."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def make_server(app: App) -> _Server:
    return _Server(
        uvicorn.Config(
            app,
            loop="uvloop",
            http="httptools",
            ws="none",
            lifespan="on",
            access_log=False,
            log_config=None,
            server_header=False,
            date_header=False,
            backlog=1024,
            timeout_keep_alive=_IDLE_CALLER,
            timeout_graceful_shutdown=_GRACE,
        )
    )


@contextlib.contextmanager
def _stopped_by_signal(servers: Iterable[_Server]) -> Generator[None, None, None]:
    loop = asyncio.get_running_loop()
    signals = (signal.SIGTERM, signal.SIGINT)

    def stop() -> None:
        for server in servers:
            server.should_exit = True

    for number in signals:
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


def _listen_tcp(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), backlog=1024)
    except OSError as error:
        raise PermanentError(
            f"the gateway cannot listen on {host}:{port}: {error.strerror}.",
            cure="Choose another port, or end whatever listens there.",
        ) from error


def _listen_unix(path: Path) -> socket.socket:
    if len(str(path).encode()) > _SOCKET_PATH_LIMIT:
        raise PermanentError(
            f"the socket path {path} is longer than {_SOCKET_PATH_LIMIT} bytes.",
            cure="Choose a shorter folder.",
        )
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        if probe.connect_ex(str(path)) == 0:
            raise PermanentError(
                f"another gateway listens on {path}.",
                cure="End it first, or give this one another --control-socket.",
            )
    path.unlink(missing_ok=True)  # left by a gateway that was killed
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    path.chmod(0o600)
    listener.listen(64)
    return listener
