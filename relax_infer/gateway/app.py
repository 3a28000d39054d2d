"""The gateway as a pure ASGI app: routes, deadlines, disconnects and errors.

Per role the routes of :mod:`relax_infer.gateway.routes`, and of the process ``/healthz``,
``/metrics`` and ``/openapi.json``. Nothing public writes anything.
"""

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from relax_infer.discovery import InferenceRoutingError, Role, RoleSnapshot
from relax_infer.gateway._answers import Answer, Exchange, send_answer
from relax_infer.gateway._asgi import (
    JSON,
    App,
    ClientGone,
    Headers,
    Receive,
    Scope,
    Send,
    header,
    lifespan,
    read_body,
    reply,
    reply_bytes,
)
from relax_infer.gateway._caller import Caller
from relax_infer.gateway._clock import Clock
from relax_infer.gateway._deadline import Deadline
from relax_infer.gateway._direct import Direct, DirectRoute
from relax_infer.gateway._door import for_reading, for_work
from relax_infer.gateway._errors import HANG_UP, GatewayError, ending, routing
from relax_infer.gateway._limits import CALLER_LEFT, Limits, too_large
from relax_infer.gateway._payload import read_generate
from relax_infer.gateway._reads import Reads, Route
from relax_infer.gateway._upstream import Upstream
from relax_infer.gateway.handler import InferenceGatewayHandler
from relax_infer.gateway.intake import RegistryIntake
from relax_infer.gateway.judge import Render
from relax_infer.gateway.metrics import CONTENT_TYPE, Metrics, RouteMetrics
from relax_infer.gateway.openapi import document
from relax_infer.gateway.routes import routes_of
from relax_infer.security import Callers
from relax_infer.telemetry.asgi import traced
from relax_infer.telemetry.traces import tracing

log = logging.getLogger(__name__)

Work = Callable[[bytes, Headers, Exchange], Awaitable[Answer]]


class GatewayApp:
    """The ASGI app, and those of its routes that the gateway's own server may answer without it."""

    def __init__(self, app: App, direct: Mapping[bytes, DirectRoute]) -> None:
        self._app = app
        self.direct = direct
        """By the target of a POST as it stands in the request line."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


def create_gateway_app(
    intake: RegistryIntake,
    *,
    roles: Iterable[Role | str] = tuple(Role),
    timeout: float = 1800.0,
    max_connections: int = 4096,
    max_body: int = Limits.body_bytes,
    body_timeout: float = Limits.body_seconds,
    genrm_render: Render | None = None,
    rollout_router: str | None = None,
    facts: Callable[[], Mapping[str, Any]] = dict,
    upstream: Upstream | None = None,
    callers: Callers | None = None,
) -> GatewayApp:
    """ASGI app that serves the roles from what the intake holds.

    Args:
        intake: filled by the control app; a role that it does not hold answers 503.
        roles: to serve.
        timeout: seconds that one request may take in all, its stream included.
        max_connections: to backends, over all roles.
        max_body: bytes of a request body; more is 413.
        body_timeout: seconds until a request body has come; later is 408.
        genrm_render: makes a judge's prompt of messages; None: messages are refused.
        rollout_router: address of a router that rollout's chat goes to unchanged, without
            discovery; for engines that are not the run's own.
        facts: what ``/healthz`` says besides its status.
        upstream: connections to backends; None: own ones.
        callers: who may ask what; None: anybody anything. ``/healthz`` is always open.
    """
    limits = Limits(timeout, max_body, body_timeout)
    upstream = upstream or Upstream(max_connections)
    metrics = Metrics(intake)
    door = metrics.refused
    served = tuple(Role(role) for role in roles)
    bodies: Clock[Direct] = Clock(limits.body_seconds, Direct.late_body)
    answers: Clock[Direct] = Clock(limits.timeout, Direct.late)
    direct: dict[bytes, DirectRoute] = {}
    routes: dict[str, tuple[str, Route]] = {
        "/healthz": ("GET", _alive(facts)),
        "/metrics": ("GET", _metrics(metrics)),
        "/openapi.json": ("GET", _description(served)),
    }
    if callers is not None:
        for path in ("/metrics", "/openapi.json"):
            routes[path] = ("GET", for_reading(routes[path][1], None, callers, door))
    for role in served:
        handler = InferenceGatewayHandler(
            role,
            _provider(intake, role),
            genrm_render=genrm_render,
            chat_router=rollout_router if role is Role.ROLLOUT else None,
            timeout=timeout,
            upstream=upstream,
        )
        reads = Reads(handler, intake, metrics)
        for entry in routes_of(role):
            if entry.kind in ("generate", "chat"):
                work = handler.generate if entry.kind == "generate" else handler.chat
                counters = metrics.route(role, entry.path)
                route = _data_route(work, handler.end, counters, limits)
                if tracing():
                    route = traced(route, f"gateway POST /{role}{entry.path}")
                else:
                    path = f"/{role}{entry.path}"
                    direct[path.encode()] = DirectRoute(
                        path,
                        handler,
                        read_generate if entry.kind == "generate" else handler.read_chat,
                        _snapshot(intake, role),
                        upstream,
                        counters,
                        limits,
                        bodies,
                        answers,
                        callers,
                        door,
                    )
                if callers is not None:
                    route = for_work(route, role.value, callers, door)
            else:
                route = reads.route(entry.kind)
                if callers is not None:
                    route = for_reading(route, role.value, callers, door)
            routes[f"/{role}{entry.path}"] = (entry.method, route)

    async def end() -> None:
        for request in bodies.running() + answers.running():
            request.cut_off()
        await upstream.close()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await lifespan(receive, send, end)
            return
        if scope["type"] != "http":
            return
        method, route = routes.get(scope["path"], ("", None))
        if route is None:
            await reply(send, 404, {"detail": "No such route"})
        elif scope["method"] == method or (method, scope["method"]) == ("GET", "HEAD"):
            await route(scope, receive, send)
        else:
            allowed = "GET, HEAD" if method == "GET" else method
            await reply(send, 405, {"detail": f"Only {allowed}"}, [(b"allow", allowed.encode())])

    return GatewayApp(app, direct)


def _snapshot(intake: RegistryIntake, role: Role) -> Callable[[], RoleSnapshot]:
    def snapshot() -> RoleSnapshot:
        held = intake.get(role)
        if held is None:
            raise routing(InferenceRoutingError(503, f"No registry of {role} yet"))
        return held.snapshot

    return snapshot


def _provider(intake: RegistryIntake, role: Role) -> Callable[[], Awaitable[RoleSnapshot]]:
    async def provide() -> RoleSnapshot:
        held = intake.get(role)
        if held is None:
            raise InferenceRoutingError(503, f"No registry of {role} yet")
        return held.snapshot

    return provide


def _alive(facts: Callable[[], Mapping[str, Any]]) -> Route:
    async def route(scope: Scope, receive: Receive, send: Send) -> None:
        await reply(send, 200, {"status": "ok", **facts()})

    return route


def _metrics(metrics: Metrics) -> Route:
    async def route(scope: Scope, receive: Receive, send: Send) -> None:
        await reply_bytes(send, 200, metrics.text(), [(b"content-type", CONTENT_TYPE)])

    return route


def _description(roles: tuple[Role, ...]) -> Route:
    body = json.dumps(document(roles)).encode()

    async def route(scope: Scope, receive: Receive, send: Send) -> None:
        await reply_bytes(send, 200, body, [JSON])

    return route


def _data_route(
    work: Work, end: Callable[[Exchange], None], counters: RouteMetrics, limits: Limits
) -> Route:
    """One request from its head to its answer's last byte; every way out gives everything back."""

    async def route(scope: Scope, receive: Receive, send: Send) -> None:
        began = time.perf_counter()
        exchange = Exchange()
        status = CALLER_LEFT
        counters.begin()
        try:
            status = await _answer(work, scope, receive, send, exchange, limits)
        finally:
            end(exchange)
            aborted = exchange.asked and not exchange.finished
            counters.end(status, time.perf_counter() - began, aborted=aborted)

    return route


async def _answer(
    work: Work, scope: Scope, receive: Receive, send: Send, exchange: Exchange, limits: Limits
) -> int:
    """The status that the caller got."""
    task = asyncio.current_task()
    assert task is not None
    caller = Caller(task, scope, receive)
    came, started = False, 0
    try:
        # One clock for both: first the body has its time, then the answer.
        with Deadline(task, limits.body_seconds) as clock:
            body = await _body(scope, receive, limits)
            came = True
            caller.watch()
            clock.move(limits.timeout)
            answer = await work(body, scope["headers"], exchange)
            del body  # held no longer than its backend needs it
            started = answer.status
            await send_answer(send, answer)
            return started
    except ClientGone:
        return CALLER_LEFT
    except GatewayError as error:
        # Not the error itself: its traceback would keep this frame, and the body, until a
        # collection of garbage.
        failure = GatewayError(error.status, error.detail, error.headers)
    except TimeoutError:
        if came:
            failure = GatewayError(504, "Inference request timed out")
        else:
            failure = GatewayError(408, "Request body did not come in time", (HANG_UP,))
    except asyncio.CancelledError:
        if caller.left:
            return CALLER_LEFT
        task.uncancel()  # the server ends: nobody else knows this task
        failure = ending()
    finally:
        caller.let_go()
    if started:
        # Too late for a status; hanging up without an end tells the caller.
        log.warning("%s: answer broken off: %s", scope["path"], failure)
        return failure.status
    return await _refuse(scope, send, failure)


async def _body(scope: Scope, receive: Receive, limits: Limits) -> bytes:
    """Raises GatewayError: 413; ClientGone."""
    length = int(header(scope, b"content-length") or 0)
    if length > limits.body_bytes:
        raise too_large(limits.body_bytes, length)
    body = await read_body(receive, limits.body_bytes)
    if body is None:
        raise too_large(limits.body_bytes, None)
    return body


async def _refuse(scope: Scope, send: Send, error: GatewayError) -> int:
    named = header(scope, b"x-request-id")
    again = () if named is None else ((b"x-request-id", named),)
    await reply(send, error.status, {"detail": error.detail}, (*error.headers, *again))
    return error.status
