"""Routes of an operator, who shows a token: more and fewer replicas of a role, and another try for
those that were given up.

``POST /<role>/scale_out``, ``POST /<role>/scale_in`` and ``GET`` of either with an operation's id;
``POST /rollout/recover_rollout_engines``. Whoever serves the gateway says how a role is asked;
without a token there are no such routes.
"""

import asyncio
import hmac
import json
import logging
import re
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, Literal

from pydantic import Field, ValidationError

from relax_infer.contracts.base import StartInput
from relax_infer.contracts.faults import explain
from relax_infer.contracts.lease import RoleResult
from relax_infer.contracts.scale import ScaleRequest, ScaleStatus
from relax_infer.discovery import Role
from relax_infer.gateway._asgi import (
    App,
    ClientGone,
    Receive,
    Scope,
    Send,
    header,
    read_body,
    reply,
)
from relax_infer.gateway._errors import HANG_UP
from relax_infer.gateway._limits import Limits
from relax_infer.machines import ScaleState

log = logging.getLogger(__name__)

Ask = Callable[[Role, ScaleRequest], Awaitable[ScaleStatus]]
Look = Callable[[Role, str], Awaitable[ScaleStatus | None]]
Recover = Callable[[Role, str, float], Awaitable[RoleResult | None]]

_PATH = re.compile(r"/(rollout|genrm|teacher)/scale_(out|in)(?:/([A-Za-z0-9_-]{1,64}))?")
_RECOVER = "/rollout/recover_rollout_engines"
_BODY_BYTES = 64 << 10


class ScaleRefused(Exception):
    """The role does not take the request in; its text says why."""

    @property
    def conflict(self) -> bool:
        return "CONFLICT" in str(self) or "asked for something else" in str(self)


class ScaleBody(StartInput):
    """What is posted; the path says the direction."""

    request_id: str | None = None
    """The operation's id; the same one again joins or gets its result. None: a new one."""
    model: str | None = None
    num_replicas: int | None = None
    engine_urls: tuple[str, ...] = ()
    on_partial: Literal["keep", "rollback_all"] = "keep"
    force: bool = False
    dry_run: bool = False
    timeout: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Seconds: out, for GPUs to be found; in, for admitted requests to end."""

    def request(self, direction: Literal["out", "in"]) -> ScaleRequest:
        fields = self.model_dump(exclude={"request_id", "timeout"})
        if self.timeout is not None:
            name = "provision_timeout" if direction == "out" else "drain_timeout"
            fields[name] = self.timeout
        operation_id = self.request_id or uuid.uuid4().hex[:12]
        return ScaleRequest.model_validate(
            {**fields, "operation_id": operation_id, "direction": direction}
        )


class RecoverBody(StartInput):
    """What is posted to have given up replicas tried again."""

    request_id: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")
    """The same one again joins, or gets its result. None: a new one."""
    timeout: float = Field(default=30.0, ge=0, le=600, allow_inf_nan=False)
    """Seconds to wait for the end; it goes on without anybody who waits."""


def with_operator_routes(
    app: App,
    *,
    token: str,
    ask: Ask,
    look: Look,
    recover: Recover,
    body_timeout: float = Limits.body_seconds,
) -> App:
    """The app and, before it, the routes of whoever has the token.

    Args:
        token: that ``Authorization: Bearer`` must name.
        ask: has a role take a request in; raises :class:`ScaleRefused`, or anything else where
            nobody answers.
        look: how an operation stands; None where the role does not know it.
        recover: gives replicas of a role that were given up another try, under an id, and waits for
            so many seconds; None: it is still at work. Raises as ``ask``.
        body_timeout: seconds until a request body has come; later is 408.
    """
    if not token:
        raise ValueError("an operator's token may not be empty")
    expected = f"Bearer {token}".encode()

    async def routed(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"] if scope["type"] == "http" else ""
        found, recovers = _PATH.fullmatch(path), path == _RECOVER
        if found is None and not recovers:
            await app(scope, receive, send)
            return
        given = header(scope, b"authorization") or b""
        if not hmac.compare_digest(given, expected):
            why = {"detail": "These routes ask for the operator's token"}
            await reply(send, 401, why, [(b"www-authenticate", b"Bearer")])
            return
        role = Role.ROLLOUT if found is None else Role(found[1])
        direction, operation = (found[2], found[3]) if found is not None else ("", None)
        method = "POST" if operation is None else "GET"
        if scope["method"] != method:
            allow = (b"allow", method.encode())
            await reply(send, 405, {"detail": f"Only {method}"}, [allow])
            return
        try:
            if operation is not None:
                await _tell(send, await look(role, operation), operation)
                return
            body = await _body(send, receive, body_timeout)
            if body is None:
                return
            if recovers:
                await _try_again(send, body, role, recover)
            else:
                await _take(send, body, role, direction, ask)
        except ClientGone:
            return
        except Exception as error:
            log.warning("%s: %s", path, error)
            await reply(send, 503, {"detail": f"{role} does not answer: {error}"})

    return routed


async def _body(send: Send, receive: Receive, seconds: float) -> bytes | None:
    """None: it was refused. Raises ClientGone."""
    try:
        async with asyncio.timeout(seconds):
            body = await read_body(receive, _BODY_BYTES)
    except TimeoutError:
        await reply(send, 408, {"detail": "Request body did not come in time"}, (HANG_UP,))
        return None
    if body is None:
        await reply(send, 413, {"detail": f"More than {_BODY_BYTES} bytes"}, (HANG_UP,))
    return body


async def _take(send: Send, body: bytes, role: Role, direction: Any, ask: Ask) -> None:
    try:
        request = ScaleBody.model_validate_json(body or b"{}").request(direction)
    except ValidationError as error:
        await reply(send, 400, {"detail": explain(error)})
        return
    try:
        status = await ask(role, request)
    except ScaleRefused as refused:
        await reply(send, 409 if refused.conflict else 400, {"detail": str(refused)})
        return
    if status.state is ScaleState.REJECTED:
        await reply(send, 400, {"detail": status.why, **_document(status)})
    else:
        await reply(send, 200 if status.ended else 202, _document(status))


async def _try_again(send: Send, body: bytes, role: Role, recover: Recover) -> None:
    try:
        wanted = RecoverBody.model_validate_json(body or b"{}")
    except ValidationError as error:
        await reply(send, 400, {"detail": explain(error)})
        return
    request_id = wanted.request_id or uuid.uuid4().hex[:12]
    try:
        result = await recover(role, request_id, wanted.timeout)
    except ScaleRefused as refused:
        await reply(send, 409, {"detail": str(refused)})
        return
    told = {"request_id": request_id, "role": role.value}
    if result is None:
        await reply(send, 202, {**told, "status": "RECOVERING", "why": None})
    else:
        await reply(send, 200, {**told, "status": result.state, "why": result.why})


async def _tell(send: Send, status: ScaleStatus | None, operation: str) -> None:
    if status is None:
        await reply(send, 404, {"detail": f"No operation {operation} is remembered"})
    else:
        await reply(send, 200, _document(status))


def _document(status: ScaleStatus) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(status.model_dump_json())
    return {"request_id": told.pop("operation_id"), "status": told.pop("state"), **told}
