"""Routes of an operator, who shows a token: more and fewer replicas of a role.

``POST /<role>/scale_out``, ``POST /<role>/scale_in`` and ``GET`` of either with an operation's id.
Whoever serves the gateway says how a role is asked; without a token there are no such routes.
"""

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
from relax_infer.contracts.scale import ScaleRequest, ScaleStatus
from relax_infer.discovery import Role
from relax_infer.gateway._asgi import App, Receive, Scope, Send, header, read_body, reply
from relax_infer.machines import ScaleState

log = logging.getLogger(__name__)

Ask = Callable[[Role, ScaleRequest], Awaitable[ScaleStatus]]
Look = Callable[[Role, str], Awaitable[ScaleStatus | None]]

OPERATION_ID = "[A-Za-z0-9_-]{1,64}"
_PATH = re.compile(rf"/(rollout|genrm|teacher)/scale_(out|in)(?:/({OPERATION_ID}))?")
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


def with_operator_routes(app: App, *, token: str, ask: Ask, look: Look) -> App:
    """The app and, before it, the routes of whoever has the token.

    Args:
        token: that ``Authorization: Bearer`` must name.
        ask: has a role take a request in; raises :class:`ScaleRefused`, or anything else where
            nobody answers.
        look: how an operation stands; None where the role does not know it.
    """
    if not token:
        raise ValueError("an operator's token may not be empty")
    expected = f"Bearer {token}".encode()

    async def routed(scope: Scope, receive: Receive, send: Send) -> None:
        found = _PATH.fullmatch(scope["path"]) if scope["type"] == "http" else None
        if found is None:
            await app(scope, receive, send)
            return
        given = header(scope, b"authorization") or b""
        if not hmac.compare_digest(given, expected):
            why = {"detail": "These routes ask for the operator's token"}
            await reply(send, 401, why, [(b"www-authenticate", b"Bearer")])
            return
        role, direction, operation = Role(found[1]), found[2], found[3]
        method = "POST" if operation is None else "GET"
        if scope["method"] != method:
            allow = (b"allow", method.encode())
            await reply(send, 405, {"detail": f"Only {method}"}, [allow])
            return
        try:
            if operation is not None:
                await _tell(send, await look(role, operation), operation)
            else:
                await _take(send, receive, role, direction, ask)
        except Exception as error:
            log.warning("scale_%s of %s: %s", direction, role, error)
            await reply(send, 503, {"detail": f"{role} does not answer: {error}"})

    return routed


async def _take(send: Send, receive: Receive, role: Role, direction: Any, ask: Ask) -> None:
    body = await read_body(receive, _BODY_BYTES)
    if body is None:
        await reply(send, 413, {"detail": f"More than {_BODY_BYTES} bytes"})
        return
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


async def _tell(send: Send, status: ScaleStatus | None, operation: str) -> None:
    if status is None:
        await reply(send, 404, {"detail": f"No operation {operation} is remembered"})
    else:
        await reply(send, 200, _document(status))


def _document(status: ScaleStatus) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(status.model_dump_json())
    return {"request_id": told.pop("operation_id"), "status": told.pop("state"), **told}
