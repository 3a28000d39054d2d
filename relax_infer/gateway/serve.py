"""Run the gateway: the public app on a TCP port, the control app on a Unix socket.

Of a run: a gateway that starts empty pulls each role's registry in the background, until it was got
once; the data path never waits for that. Without a run: a file says what is
served, and there is no control app.
"""

import asyncio
import contextlib
import gc
import json
import logging
import signal
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn

from relax_infer.contracts.batch import Judging
from relax_infer.contracts.failures import PermanentError
from relax_infer.discovery import Role
from relax_infer.gateway._asgi import App
from relax_infer.gateway._direct import DirectRoute
from relax_infer.gateway._open_files import allow_files
from relax_infer.gateway._protocol import protocol_of
from relax_infer.gateway._upstream import Upstream
from relax_infer.gateway.app import GatewayApp, create_gateway_app
from relax_infer.gateway.control import create_control_app
from relax_infer.gateway.intake import RegistryIntake, RegistryRefused
from relax_infer.gateway.judge import MAX_NEW_TOKENS, ChatTemplates, Locate
from relax_infer.gateway.listening import listen_tcp, listen_unix
from relax_infer.gateway.registry_file import RegistryFile
from relax_infer.gateway.tls import Tls, is_loopback, tls_of
from relax_infer.security import Callers, load_callers

log = logging.getLogger(__name__)

Pull = Callable[[Role], Awaitable[Mapping[str, Any] | None]]
"""Asks a role's owner for ``{"term": int, "document": {...}}``; None or an error: not now."""

_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 5.0
_GRACE = 5
"""Seconds that open requests may take to end at shutdown."""


@dataclass(frozen=True)
class GatewayOptions:
    """What both kinds of gateway are told."""

    roles: tuple[Role, ...] = tuple(Role)
    timeout: float = 1800.0
    """Seconds for one request."""
    max_connections: int = 4096
    """To backends, over all roles: requests under way; others wait for their turn."""
    rollout_router: str | None = None
    """Address of a router that rollout's chat goes to unchanged, without discovery."""
    tokenizers: Mapping[str, str] = field(default_factory=dict)
    """GenRM model id to the folder of its tokenizer; of others the engine is asked."""
    template_kwargs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """GenRM model id to what its chat template is given besides the messages."""
    judge_tokens: int = MAX_NEW_TOKENS
    """``max_new_tokens`` of messages that do not say."""
    callers: Callers | None = field(default_factory=load_callers)
    """Who may ask what; by default what the environment says."""
    tls: Tls | None = field(default_factory=tls_of)
    """By default what the environment says."""


async def serve_gateway(
    *,
    host: str,
    port: int,
    control_socket: Path,
    pull: Pull | None = None,
    options: GatewayOptions | None = None,
    wrap: Callable[[App], App] = lambda app: app,
) -> None:
    """Serve a run's roles until SIGTERM or SIGINT.

    Args:
        control_socket: made anew with mode 0600, in a folder of mode 0700.
            One that is left behind by an ended gateway is replaced.
        pull: asked for each role, until it has answered once.
        wrap: puts further routes before the public ones.

    Raises:
        PermanentError: the port or the socket is in use, or a tokenizer cannot be read.
    """
    options = options or GatewayOptions()
    intake = RegistryIntake()
    app, templates = _public_app(intake, options)
    _warn_if_open(host, options)

    def judge(told: Judging) -> None:
        templates.change(told.template_kwargs, told.max_new_tokens)

    servers = [
        make_server(wrap(app), options.tls, app.direct),
        make_server(create_control_app(intake, judge)),
    ]
    async with contextlib.AsyncExitStack() as stack:
        public = stack.enter_context(listen_tcp(host, port))
        control = stack.enter_context(listen_unix(control_socket))
        stack.enter_context(_stopped_by_signal(servers))
        if pull is not None:
            for role in options.roles:
                pulling = asyncio.create_task(_pull(intake, role, pull))
                stack.push_async_callback(_cancel, pulling)
        _settle_memory()
        await asyncio.gather(
            servers[0].serve(sockets=[public]), servers[1].serve(sockets=[control])
        )


async def serve_file(
    *,
    host: str,
    port: int,
    registry: Path,
    options: GatewayOptions | None = None,
    listening: Callable[[str], None] = lambda url: None,
) -> None:
    """Serve what a file says until SIGTERM or SIGINT; it is read again when it changes.

    Args:
        port: 0 takes any free one.
        listening: called with the gateway's address as soon as it may be asked.

    Raises:
        PermanentError: the port is in use, or the file or a tokenizer cannot be used.
    """
    intake = RegistryIntake()
    file = RegistryFile(registry, intake)
    file.load()
    options = options or GatewayOptions()
    _warn_if_open(host, options)
    app, _ = _public_app(intake, options, file.facts)
    server = make_server(app, options.tls, app.direct)
    async with contextlib.AsyncExitStack() as stack:
        public = stack.enter_context(listen_tcp(host, port))
        stack.enter_context(_stopped_by_signal([server]))
        stack.push_async_callback(_cancel, asyncio.create_task(file.watch()))
        shown = f"[{host}]" if ":" in host else host
        _settle_memory()
        scheme = "http" if options.tls is None else "https"
        listening(f"{scheme}://{shown}:{public.getsockname()[1]}")
        await server.serve(sockets=[public])


def _settle_memory() -> None:
    """What is there now stays: later collections of garbage need not look at it again.

    Requests leave no cycles behind, so those are made rarer, too: they were 4 % of the time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


def named_folders(pairs: Iterable[str]) -> dict[str, str]:
    """``MODEL=FOLDER`` pairs of a command line.

    Raises:
        PermanentError: one is no such pair.
    """
    named: dict[str, str] = {}
    for pair in pairs:
        model, equals, folder = pair.partition("=")
        if not (model and equals and folder):
            raise PermanentError(
                f"--genrm-tokenizer {pair!r} is not MODEL=FOLDER.",
                cure="Name the model as the registry does, and the folder of its checkpoint.",
            )
        named[model] = folder
    return named


def named_objects(pairs: Iterable[str]) -> dict[str, dict[str, Any]]:
    """``MODEL=JSON`` pairs of a command line.

    Raises:
        PermanentError: one is no such pair.
    """
    named: dict[str, dict[str, Any]] = {}
    for pair in pairs:
        model, _, text = pair.partition("=")
        try:
            value = json.loads(text)
        except ValueError:
            value = None
        if not model or not isinstance(value, dict):
            raise PermanentError(
                f"--genrm-template-kwargs {pair!r} is not MODEL=JSON object.",
                cure="""For example: --genrm-template-kwargs 'judge={"enable_thinking": false}'""",
            )
        named[model] = value
    return named


def _public_app(
    intake: RegistryIntake,
    options: GatewayOptions,
    facts: Callable[[], Mapping[str, Any]] = dict,
) -> tuple[GatewayApp, ChatTemplates]:
    allow_files(options.max_connections)
    upstream = Upstream(options.max_connections)
    templates = ChatTemplates(
        options.tokenizers,
        locate=_engine_tokenizer(intake, upstream),
        template_kwargs=options.template_kwargs,
        max_new_tokens=options.judge_tokens,
    )
    templates.load()
    app = create_gateway_app(
        intake,
        roles=options.roles,
        timeout=options.timeout,
        genrm_render=templates,
        rollout_router=options.rollout_router,
        facts=facts,
        upstream=upstream,
        callers=options.callers,
    )
    return app, templates


def _warn_if_open(host: str, options: GatewayOptions) -> None:
    """Loud where others can reach the gateway."""
    if is_loopback(host):
        return
    if options.callers is None:
        log.warning(
            "THE GATEWAY LISTENS ON %s AND ASKS NOBODY FOR A TOKEN: whoever reaches this address"
            " can use the engines. Set RELAX_GATEWAY_TOKENS, or listen on 127.0.0.1.",
            host,
        )
    if options.tls is None:
        log.warning(
            "THE GATEWAY LISTENS ON %s WITHOUT TLS: prompts, answers and tokens can be read on the"
            " way. Set RELAX_GATEWAY_TLS_CERT and RELAX_GATEWAY_TLS_KEY.",
            host,
        )


def _engine_tokenizer(intake: RegistryIntake, upstream: Upstream) -> Locate:
    """Asks a ready engine of the model where its tokenizer is; once for each model."""
    known: dict[str, str] = {}

    async def locate(model: str) -> str | None:
        held = intake.get(Role.GENRM)
        found = None if held is None else held.snapshot.models.get(model)
        if model not in known and found is not None:
            for engine in found.engines:
                if engine.direct_eligible and engine.base_url is not None:
                    info = await upstream.get(engine.base_url, "/model_info")
                    path = info.get("tokenizer_path") if isinstance(info, dict) else None
                    if isinstance(path, str) and path:
                        known[model] = path
                        break
        return known.get(model)

    return locate


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _pull(intake: RegistryIntake, role: Role, pull: Pull) -> None:
    """Ask until the role was told once, also if somebody pushed it meanwhile: that may have been
    an older one, and the intake orders them. Says once for each new reason why not."""
    pause, said = _FIRST_PAUSE, ""
    while True:
        reason = "nobody has it"
        try:
            answer = await pull(role)
            if answer is not None:
                outcome = intake.offer(role, answer["term"], answer["document"])
                log.info("registry of %s: pulled, term %s, %s", role, answer["term"], outcome)
                return
        except RegistryRefused as refused:  # somebody pushed a newer one meanwhile
            log.info("registry of %s: pulled, and %s", role, refused)
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


def make_server(
    app: App, tls: Tls | None = None, direct: Mapping[bytes, DirectRoute] | None = None
) -> _Server:
    """``direct``: what is answered without the app, by :attr:`GatewayApp.direct`."""
    return _Server(
        uvicorn.Config(
            app,
            loop="uvloop",
            http=protocol_of(direct or {}),
            ws="none",
            lifespan="on",
            interface="asgi3",
            access_log=False,
            log_config=None,
            proxy_headers=False,  # who calls plays no part here
            server_header=False,
            date_header=False,
            backlog=1024,
            timeout_graceful_shutdown=_GRACE,
            ssl_certfile=None if tls is None else tls.certificate,
            ssl_keyfile=None if tls is None else tls.key,
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
