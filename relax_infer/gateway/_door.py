"""The gateway's door: who asks is known before anything of a request is read."""

from collections.abc import Callable

from relax_infer.gateway._asgi import Receive, Scope, Send, header, reply
from relax_infer.gateway._errors import HANG_UP, GatewayError
from relax_infer.gateway._reads import Route
from relax_infer.security import Callers, Refused

Count = Callable[[str, str, str], None]
"""Told role, caller and reason of a refusal."""

_WORDS = {
    "no_token": "A bearer token is needed",
    "unknown_token": "The token is not known",
    "role": "This caller may not ask this role",
    "rate": "This caller asks more often than it may",
    "concurrency": "This caller has as many requests under way as it may",
}


def for_work(route: Route, role: str, callers: Callers, count: Count) -> Route:
    """``route`` for callers of the role, within their rate and concurrency. Its backend does not
    get to see the token."""

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            caller = callers.begin(header(scope, b"authorization"), role)
        except Refused as refused:
            count(role, refused.caller, refused.reason)
            await _refuse(refused, send)
            return
        scope["headers"] = [pair for pair in scope["headers"] if pair[0] != b"authorization"]
        try:
            await route(scope, receive, send)
        finally:
            callers.end(caller)

    return guarded


def for_reading(route: Route, role: str | None, callers: Callers, count: Count) -> Route:
    """``route`` for every caller, or every caller of a role; reading is not limited."""

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            caller = callers.known(header(scope, b"authorization"))
            if role is not None and role not in caller.roles:
                raise Refused("role", caller.name)
        except Refused as refused:
            count(role or "", refused.caller, refused.reason)
            await _refuse(refused, send)
            return
        await route(scope, receive, send)

    return guarded


def refusal(refused: Refused) -> GatewayError:
    """What somebody who is turned away is told."""
    headers: list[tuple[bytes, bytes]] = []
    if refused.status == 401:
        error = b"" if refused.reason == "no_token" else b', error="invalid_token"'
        headers.append((b"www-authenticate", b'Bearer realm="relax-infer"' + error))
        headers.append(HANG_UP)  # nothing is read from somebody who is not known
    if refused.retry_after is not None:
        headers.append((b"retry-after", b"%d" % refused.retry_after))
    return GatewayError(refused.status, _WORDS[refused.reason], tuple(headers))


async def _refuse(refused: Refused, send: Send) -> None:
    error = refusal(refused)
    await reply(send, error.status, {"detail": error.detail}, error.headers)
