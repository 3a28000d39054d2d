"""The fenced SGLang server, a program: ``python -m relax_infer.engines.server``.

SGLang's own server in its own process, with :class:`relax_infer.engines.fence.Fence` as the
outermost layer of its app. The TCP port has the public side only. The whole app and ``/_fence/…``
are on a Unix socket (mode 0600, in a folder of mode 0700) that belongs to the engine's actor.
The gate starts closed. Takes ``--fence-socket``, ``--fence-token``, ``--request-log``,
``--fence-nodes`` and SGLang's own flags.

On a follower of a replica over several nodes SGLang builds no app: nothing but ``/health`` on
loopback, no socket, no gate. It lives until its scheduler ends.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import uvicorn

from relax_infer.contracts.fence import FenceToken
from relax_infer.engines._asgi import ASGIMessage, Receive, Scope, Send
from relax_infer.engines._table import RequestTable, noting
from relax_infer.engines.command import ABOUT
from relax_infer.engines.fence import Fence
from relax_infer.engines.flags import UNFENCED
from relax_infer.engines.request_log import RequestLog
from relax_infer.telemetry import configure_logs
from relax_infer.telemetry.traces import configure_traces

_log = logging.getLogger("relax_infer.engines.server")

UNFENCED_ENVIRONMENT = ("SGLANG_RUST_SERVER", "SGLANG_GRPC_PORT", "DUMPER_SERVER_PORT")


class SGLangBackend:
    """The engine as its own tokenizer manager and scheduler see it."""

    def __init__(self, http_server: Any) -> None:
        self._http_server = http_server

    @property
    def _manager(self) -> Any:
        return self._http_server.get_global_state().tokenizer_manager

    def request_ids(self) -> Sequence[str]:
        return list(self._manager.rid_to_state)

    def abort(self, rid: str) -> None:
        self._manager.abort_request(rid=rid)

    def abort_all(self) -> None:
        self._manager.abort_request(abort_all=True)

    def noting(self, note: Callable[[str], None]) -> contextlib.AbstractContextManager[None]:
        manager = self._manager
        if not isinstance(manager.rid_to_state, RequestTable):
            manager.rid_to_state = RequestTable(manager.rid_to_state)
        return noting(note)

    async def idle(self) -> bool:
        loads = await self._manager.get_loads()
        return not any(load.num_running_reqs or load.num_waiting_reqs for load in loads)

    async def flush(self) -> bool:
        return bool((await self._manager.flush_cache()).success)

    def silent_for(self) -> float:
        return max(0.0, time.time() - self._manager.last_receive_tstamp)


class FencedServer:
    """Puts the fence around SGLang's app and serves its management side on a Unix socket."""

    def __init__(self, http_server: Any, socket: Path, log: RequestLog, token: FenceToken) -> None:
        self._owner = http_server.app
        self._socket = socket
        self._log = log
        self._token = token
        self._backend = SGLangBackend(http_server)
        self._build = self._owner.build_middleware_stack
        self._management: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._fence: Fence | None = None
        # Whatever layers SGLang adds later (keys, metrics) end up inside.
        self._owner.build_middleware_stack = self._outermost

    def _outermost(self) -> Any:
        self._fence = Fence(self._build(), self._backend, self._log, self._token)
        return self._public

    async def _public(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self._fence is not None
        if scope["type"] != "lifespan":
            await self._fence(scope, receive, send)
            return

        async def around(message: ASGIMessage) -> None:
            if message["type"] == "lifespan.startup.complete":
                await self._serve_management()
            elif message["type"].startswith("lifespan.shutdown") and self._management is not None:
                self._management.should_exit = True
            await send(message)

        await self._fence(scope, receive, around)

    async def _private(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self._fence is not None
        scope["app"] = self._owner
        await self._fence.management(scope, receive, send)

    async def _serve_management(self) -> None:
        self._socket.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._socket.unlink(missing_ok=True)
        config = uvicorn.Config(
            self._private,
            uds=str(self._socket),
            lifespan="off",
            interface="asgi3",
            log_level="warning",
            access_log=False,
        )
        self._management = _Quiet(config)
        self._serving = asyncio.create_task(self._management.serve())
        while not self._management.started:
            if self._serving.done():
                self._serving.result()
                raise RuntimeError(f"the management socket {self._socket} did not open")
            await asyncio.sleep(0.01)
        self._socket.chmod(0o600)
        _log.info("management side on %s", self._socket)


class _Quiet(uvicorn.Server):
    """Leaves the process's signals to SGLang."""

    @contextlib.contextmanager
    def capture_signals(self):  # pyright: ignore[reportIncompatibleMethodOverride]
        yield


def unfenced(settings: Any, nodes: int = 1) -> list[str]:
    """Settings of a server, and variables, that would open a way around the fence.

    ``nodes`` of the replica are fenced by the head's actor: a follower serves nobody, and what the
    ranks say to each other is no way in for callers. More of them were not asked for.
    """
    found = [
        f"{name}={getattr(settings, name)}"
        for name, harmless in {**UNFENCED, "nnodes": (None, nodes)}.items()
        if hasattr(settings, name) and getattr(settings, name) not in harmless
    ]
    return found + [
        f"{name}={os.environ[name]} (environment)"
        for name in UNFENCED_ENVIRONMENT
        if os.environ.get(name, "").lower() not in ("", "0", "-1", "false")
    ]


def _worth_a_line(record: logging.LogRecord) -> bool:
    """The router greets every new engine in gRPC's language first; that is answered 400."""
    return record.getMessage() != "Invalid HTTP request received."


def _fork_children() -> None:
    """The scheduler and the detokenizer take over what this process has imported: on a CPU, where a
    fork leaves no device behind, an engine is up in half the time and on less memory."""
    multiprocessing.set_start_method("fork", force=True)
    # SGLang would set its own, which starts every child from nothing.
    multiprocessing.set_start_method = lambda method, force=False: None


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--fence-socket", type=Path, required=True)
    parser.add_argument("--fence-token", required=True, help="<counter>:<grant id>")
    parser.add_argument("--request-log", type=Path, required=True)
    parser.add_argument("--fence-nodes", type=int, default=1, help="nodes of the replica")
    ours, theirs = parser.parse_known_args(arguments)
    counter, _, grant = ours.fence_token.partition(":")
    about = json.loads(os.environ.get(ABOUT, "{}"))
    with contextlib.suppress(ImportError):  # an engine's own interpreter may be without them
        configure_logs(only="relax_infer", **about)
        configure_traces("relax-engine")

    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    # SGLang's own warm-up asks the public port, which starts closed.
    server_args = prepare_server_args([*theirs, "--skip-server-warmup"])
    server_args.resolve_once()
    from sglang.srt.arg_groups.overrides import resolving_view

    views = (server_args, resolving_view(server_args))
    if ways := sorted({way for view in views for way in unfenced(view, ours.fence_nodes)}):
        raise SystemExit(
            f"refused: {', '.join(ways)} would open a listener that the fence does not cover;"
            " remove it from the engine's server_args or the environment"
        )
    from sglang.srt.entrypoints import http_server

    # It asks the public port as well, fails, and leaves a traceback in every engine's log.
    http_server._freeze_gc_after_server_warmup = lambda server_args: None
    logging.getLogger("uvicorn.error").addFilter(_worth_a_line)

    FencedServer(
        http_server,
        ours.fence_socket,
        RequestLog(ours.request_log),
        FenceToken(counter=int(counter), grant_id=grant),
    )
    if getattr(server_args, "device", None) == "cpu":
        _fork_children()
    try:
        http_server.launch_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main(sys.argv[1:])
