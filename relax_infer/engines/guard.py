"""The fence in front of an engine that we did not launch: a proxy in a thread of its own.

An engine of ours has the fence inside its own process, where nobody gets around it. This one guards
an address: whoever reaches the engine's own is not held up, so the engine has to listen where only
the guard gets to it.
"""

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import uvicorn
import uvloop

from relax_infer.contracts.external import ADDRESS
from relax_infer.contracts.failures import PermanentError
from relax_infer.contracts.fence import FenceToken
from relax_infer.engines.fence import Fence
from relax_infer.engines.remote import RemoteEngine
from relax_infer.engines.request_log import RequestLog
from relax_infer.gateway.listening import listen_tcp, listen_unix
from relax_infer.gateway.serve import make_server

log = logging.getLogger(__name__)

START_SECONDS = 30.0
STOP_SECONDS = 30.0
_ENDING_SECONDS = 5.0
"""For requests to end, once they are aborted, before the engine is hung up on for them."""

T = TypeVar("T")


class EngineGuard:
    """One guard of one engine. Every method may be called from any thread but the guard's own.

    The gate starts closed, and what the engine does is not known: :meth:`open` looks first.
    """

    def __init__(
        self,
        engine: str,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        socket: Path | None = None,
        request_log: Path | None = None,
        key: str | None = None,
        timeout: float = 1800.0,
        max_connections: int = 4096,
    ) -> None:
        """
        Args:
            engine: address of an SGLang server, ``http://host:port``.
            host: to listen on, IPv4 or IPv6.
            port: 0 takes any free one.
            socket: where the management side listens, for the guard's user alone; None: nowhere.
            request_log: file of what was asked, as of an engine of ours; None: none is kept.
            key: the engine's bearer token.
            timeout: seconds for one request, its stream included.
            max_connections: requests under way at the engine; others wait for their turn.

        Raises:
            PermanentError: that is no address of a server.
        """
        if not ADDRESS.fullmatch(engine):
            raise PermanentError(
                f"{engine!r} is not the address of an engine.",
                cure="Name it as http://host:port, without a path.",
            )
        self.engine = engine.rstrip("/")
        self.url = ""
        """Of the guard, once it is started."""
        self._where = (host, port)
        self._socket = socket
        self._log = RequestLog(request_log or Path(os.devnull))
        self._options = {"key": key, "timeout": timeout, "max_connections": max_connections}
        self._thread: threading.Thread | None = None
        self._up = threading.Event()
        self._failure: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._fence: Fence | None = None
        self._stopping: asyncio.Event | None = None

    def start(self, timeout: float = START_SECONDS) -> str:
        """Listen, in a thread of its own; the address.

        Raises:
            PermanentError: the port or the socket is in use.
            TimeoutError: it does not answer after ``timeout`` seconds.
        """
        if self._thread is not None:
            raise RuntimeError("a guard is started once")
        self._thread = threading.Thread(target=self._run, name="engine guard", daemon=True)
        self._thread.start()
        if not self._up.wait(timeout):
            self._ask_to_stop()
            raise TimeoutError(f"the guard of {self.engine} did not start in {timeout:g} s")
        if self._failure is not None:
            raise self._failure
        return self.url

    def open(self, token: FenceToken, timeout: float = 30.0) -> None:
        """Confirm that the engine is idle, then admit requests; nothing happens if it is open.

        Args:
            token: as the management side asks for it: no lower one than was seen before.

        Raises:
            StaleFence: a later or a rival token was seen.
            RuntimeError: the engine is not idle, or does not say so.
        """

        async def confirm_and_open(fence: Fence) -> None:
            fence.memory.admit(token)
            if not fence.gate.ready:
                await fence.confirm_drained(token)
                fence.memory.admit(token)  # somebody may have closed it meanwhile
                fence.gate.open()

        self._do(confirm_and_open, timeout)
        log.info("the guard of %s admits requests", self.engine)

    def close(self, token: FenceToken, drain_for: float = 0.0, timeout: float = 30.0) -> None:
        """Admit nobody and abort what runs, at once or what is left in ``drain_for`` seconds; in
        flight until each request has ended. Does not wait for that.

        Raises:
            StaleFence: a later or a rival token was seen.
        """

        async def close(fence: Fence) -> None:
            fence.memory.admit(token)
            fence.close(drain_for)

        self._do(close, timeout)

    def confirm_drained(self, token: FenceToken, timeout: float = 30.0) -> None:
        """Put down that the engine does nothing, once it says so.

        Raises:
            StaleFence: a later or a rival token was seen.
            RuntimeError: the gate is open, or the engine does not say that it is idle.
        """
        self._do(lambda fence: fence.confirm_drained(token), timeout)

    def status(self, timeout: float = 30.0) -> dict[str, Any]:
        """As ``/_fence/status`` of the management side."""
        return self._do(Fence.status, timeout)

    def stop(self, timeout: float = STOP_SECONDS) -> None:
        """Close the gate, abort what runs, hang up and end the thread; a repeat changes nothing.

        What the engine has not ended 5 s after its abort is 503 for its caller, or a stream that
        breaks off. A caller that does not read what it is sent is hung up on 5 s later.

        Raises:
            TimeoutError: the thread lives after ``timeout`` seconds. The gate is closed.
        """
        if self._thread is None:
            return
        self._ask_to_stop()
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"the guard of {self.engine} did not end in {timeout:g} s")

    # --- between the threads

    def _do(self, work: Callable[[Fence], Awaitable[T]], timeout: float) -> T:
        """On the guard's loop."""
        fence, loop = self._fence, self._loop
        if fence is None or loop is None or loop.is_closed():
            raise RuntimeError(f"the guard of {self.engine} does not run")

        async def call() -> T:
            return await work(fence)

        future = asyncio.run_coroutine_threadsafe(call(), loop)
        try:
            return future.result(timeout)
        except FutureTimeout as error:
            future.cancel()
            raise TimeoutError(f"{self.engine} did not answer in {timeout:g} s") from error

    def _ask_to_stop(self) -> None:
        loop, stopping = self._loop, self._stopping
        if loop is not None and stopping is not None and not loop.is_closed():
            loop.call_soon_threadsafe(stopping.set)

    # --- the guard's thread

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._serve())
        except BaseException as error:  # whatever it is, whoever started the guard is told
            self._failure = error
            if self._up.is_set():
                log.exception("the guard of %s has ended", self.engine)
        finally:
            self._up.set()

    async def _serve(self) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        remote = RemoteEngine(self.engine, **self._options)  # pyright: ignore[reportArgumentType]
        fence = Fence(remote, remote, self._log, drained=False)
        with ExitStack() as stack:
            public = stack.enter_context(listen_tcp(*self._where, who="guard"))
            servers = [(make_server(fence), public)]
            if self._socket is not None:
                private = stack.enter_context(listen_unix(self._socket, who="guard"))
                servers.append((make_server(fence.management), private))
            serving = [
                asyncio.create_task(server.serve(sockets=[listener]))
                for server, listener in servers
            ]
            try:
                await _started([server for server, _ in servers], serving)
                host, port = public.getsockname()[:2]
                self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
                self._fence = fence
                self._up.set()
                await _first(self._stopping.wait(), *serving)
            finally:
                fence.close()
                await _ended(fence)
                remote.cut_all()
                for server, _ in servers:
                    server.should_exit = True
                await asyncio.gather(*serving, return_exceptions=True)
                await remote.close()


async def _started(servers: list[uvicorn.Server], serving: list[asyncio.Task[None]]) -> None:
    while not all(server.started for server in servers):
        for task in serving:
            if task.done():
                task.result()
                raise RuntimeError("the guard's server ended before it was up")
        await asyncio.sleep(0.005)


async def _first(*awaited: Awaitable[Any]) -> None:
    tasks = [asyncio.ensure_future(each) for each in awaited]
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    tasks[0].cancel()
    for task in done:
        task.result()


async def _ended(fence: Fence) -> None:
    """The gate's requests, or the time for them."""
    with contextlib.suppress(TimeoutError):
        await asyncio.to_thread(fence.gate.wait_requests_closed, _ENDING_SECONDS)
