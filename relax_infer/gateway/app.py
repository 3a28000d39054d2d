"""The gateway as a pure ASGI app: routes, deadlines, disconnects and errors.

Per role (``/rollout``, ``/genrm``, ``/teacher``): POST ``/generate``, GET ``/engines?schema=2``,
GET ``/health?schema=2``; and GET ``/healthz`` of the process. Nothing public writes anything.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from urllib.parse import parse_qs

from relax_infer.discovery import InferenceRoutingError, Role, RoleSnapshot
from relax_infer.gateway._asgi import (
    JSON,
    App,
    ClientGone,
    Receive,
    Scope,
    Send,
    lifespan,
    read_body,
    reply,
    reply_bytes,
)
from relax_infer.gateway._errors import RETRY_SOON, GatewayError
from relax_infer.gateway._upstream import Upstream
from relax_infer.gateway.handler import Answer, Exchange, InferenceGatewayHandler
from relax_infer.gateway.intake import RegistryIntake

log = logging.getLogger(__name__)

Route = Callable[[Scope, Receive, Send], Awaitable[None]]


def create_gateway_app(
    intake: RegistryIntake,
    *,
    roles: Iterable[Role | str] = tuple(Role),
    timeout: float = 1800.0,
    max_connections: int = 4096,
) -> App:
    """ASGI app that serves the roles from what the intake holds.

    Args:
        intake: filled by the control app; a role that it does not hold answers 503.
        roles: to serve.
        timeout: seconds that one request may take in all, its stream included.
        max_connections: to backends, over all roles.
    """
    upstream = Upstream(max_connections)
    routes: dict[str, tuple[str, Route]] = {"/healthz": ("GET", _alive)}
    for role in map(Role, roles):
        handler = InferenceGatewayHandler(
            role, _provider(intake, role), timeout=timeout, upstream=upstream
        )
        routes[f"/{role}/generate"] = ("POST", _generate(handler))
        routes[f"/{role}/engines"] = ("GET", _discovery(intake, role))
        routes[f"/{role}/health"] = ("GET", _health(handler))

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await lifespan(receive, send, upstream.close)
            return
        if scope["type"] != "http":
            return
        method, route = routes.get(scope["path"], ("", None))
        if route is None:
            await reply(send, 404, {"detail": f"No such route: {scope['path']}"})
        elif scope["method"] != method:
            allowed = [(b"allow", method.encode())]
            await reply(send, 405, {"detail": f"Only {method}"}, allowed)
        else:
            await route(scope, receive, send)

    return app


def _provider(intake: RegistryIntake, role: Role) -> Callable[[], Awaitable[RoleSnapshot]]:
    async def provide() -> RoleSnapshot:
        held = intake.get(role)
        if held is None:
            raise InferenceRoutingError(503, f"No registry of {role} yet")
        return held.snapshot

    return provide


async def _alive(scope: Scope, receive: Receive, send: Send) -> None:
    await reply(send, 200, {"status": "ok"})


def _discovery(intake: RegistryIntake, role: Role) -> Route:
    async def route(scope: Scope, receive: Receive, send: Send) -> None:
        query = parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        held = intake.get(role)
        if query.get("schema", ["2"]) != ["2"]:
            await reply(send, 400, {"detail": "Unsupported discovery schema"})
        elif held is None:
            await reply(send, 503, {"detail": f"No registry of {role} yet"}, [RETRY_SOON])
        elif any(name not in held.snapshot.models for name in query.get("model_name", [])):
            await reply(send, 404, {"detail": f"Unknown model {query['model_name'][0]!r}"})
        else:
            await reply_bytes(send, 200, held.body, [JSON])

    return route


def _health(handler: InferenceGatewayHandler) -> Route:
    async def route(scope: Scope, receive: Receive, send: Send) -> None:
        query = parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        if query.get("schema", ["2"]) != ["2"]:
            await reply(send, 400, {"detail": "Unsupported health schema"})
        else:
            await reply(send, 200, await handler.health())

    return route


def _generate(handler: InferenceGatewayHandler) -> Route:
    async def route(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await read_body(receive)
        except ClientGone:
            return
        exchange = Exchange()
        started = False
        work = asyncio.current_task()
        gone = False

        async def watch() -> None:
            """Interrupt the work when its caller leaves; nothing else reads these events."""
            nonlocal gone
            while (await receive())["type"] != "http.disconnect":
                pass
            gone = True
            assert work is not None
            work.cancel()

        watcher = asyncio.create_task(watch())
        try:
            async with asyncio.timeout(handler.timeout):
                answer = await handler.generate(body, scope["headers"], exchange)
                started = True
                await _send(send, answer)
        except GatewayError as error:
            failure = error
        except TimeoutError:
            failure = GatewayError(504, "Inference request timed out")
        except asyncio.CancelledError:
            if not gone:
                raise
            return
        else:
            return
        finally:
            watcher.cancel()
            handler.end(exchange)
        if gone:
            return
        if started:
            # Too late for a status; hanging up without an end tells the caller.
            log.warning("%s: answer broken off: %s", scope["path"], failure)
            return
        await reply(send, failure.status, {"detail": failure.detail}, failure.headers)

    return route


async def _send(send: Send, answer: Answer) -> None:
    if answer.rest is None:
        await reply_bytes(send, answer.status, answer.body, answer.headers)
        return
    start = {"type": "http.response.start", "status": answer.status, "headers": answer.headers}
    await send(start)
    await send({"type": "http.response.body", "body": answer.body, "more_body": True})
    async for chunk in answer.rest:
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
    await send({"type": "http.response.body", "body": b""})
