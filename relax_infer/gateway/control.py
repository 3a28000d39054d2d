"""The gateway's control app: where registries come in. Served on a Unix socket only.

``PUT /registry/<role>`` with ``{"term": int, "document": {...}}``: 200 (accepted or unchanged),
409 (older, or another document under the same revision), 400 (not a registry of that role).
``GET /registry``: what is held. ``PUT /judging``: how messages are judged from now on.
"""

import json
import logging
from collections.abc import Callable
from typing import Any

from pydantic import ValidationError

from relax_infer.contracts.batch import Judging
from relax_infer.contracts.faults import explain
from relax_infer.discovery import Role
from relax_infer.gateway._asgi import (
    App,
    ClientGone,
    Receive,
    Scope,
    Send,
    lifespan,
    read_body,
    reply,
)
from relax_infer.gateway.intake import RegistryIntake, RegistryRefused

log = logging.getLogger(__name__)

_PREFIX = "/registry/"
_JUDGING = "/judging"


def create_control_app(
    intake: RegistryIntake, judge: Callable[[Judging], object] = lambda judging: None
) -> App:
    """ASGI app over the intake that the gateway serves from; ``judge`` is told of judging."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await lifespan(receive, send, _nothing)
            return
        method, path = scope["method"], scope["path"]
        if method == "GET" and path == "/registry":
            await reply(send, 200, intake.to_dict())
        elif path.startswith(_PREFIX) and path.removeprefix(_PREFIX) in list(Role):
            if method != "PUT":
                await reply(send, 405, {"detail": "Only PUT"}, [(b"allow", b"PUT")])
                return
            try:
                body = await read_body(receive)
            except ClientGone:
                return
            status, answer = _put(intake, path.removeprefix(_PREFIX), body or b"")
            await reply(send, status, answer)
        elif method == "PUT" and path == _JUDGING:
            try:
                judge(Judging.model_validate_json(await read_body(receive) or b""))
            except ClientGone:
                return
            except ValidationError as error:
                await reply(send, 400, {"detail": explain(error)})
                return
            await reply(send, 200, {})
        else:
            await reply(send, 404, {"detail": f"No such route: {method} {path}"})

    return app


def _put(intake: RegistryIntake, role: str, body: bytes) -> tuple[int, dict[str, Any]]:
    try:
        message = json.loads(body)
        if not isinstance(message, dict) or message.keys() != {"term", "document"}:
            raise ValueError("the body must be an object with term and document")
        outcome = intake.offer(role, message["term"], message["document"])
    except RegistryRefused as refused:
        log.warning("%s", refused)
        held = refused.held.to_dict()
        return 409, {"detail": str(refused), "outcome": refused.reason, "held": held}
    except (ValueError, RecursionError) as error:
        log.warning("registry of %s refused: %s", role, error)
        return 400, {"detail": str(error)}
    held = intake.get(role)
    assert held is not None
    if outcome == "accepted":
        log.info("registry of %s: term and revision %s", role, held.order)
    return 200, {"outcome": outcome, "held": held.to_dict()}


async def _nothing() -> None:
    return
