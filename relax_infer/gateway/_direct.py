"""One request of a data route, from its head to its answer's last byte, without a task.

What the ASGI app does for such a request (:mod:`relax_infer.gateway.app`), done by whoever has the
next bytes: the caller's connection, the backend's, or a clock. Most of what a request costs a
server in Python is its task, its events and its timers, and here are none. A request that has to
wait for more than bytes (a connection to be made, a judge's prompt) gets a task for that alone.
"""

import asyncio
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from relax_infer.discovery import RoleSnapshot
from relax_infer.gateway._answers import Answer, Exchange, error_of, is_told, whole_of
from relax_infer.gateway._asgi import JSON
from relax_infer.gateway._clock import Clock
from relax_infer.gateway._connection import Broken, Connection
from relax_infer.gateway._door import Count, refusal
from relax_infer.gateway._errors import HANG_UP, GatewayError, ending
from relax_infer.gateway._headers import Sent, to_backend, to_caller
from relax_infer.gateway._limits import CALLER_LEFT, Limits, too_large
from relax_infer.gateway._payload import ChatRequest, MessagesRequest, RawRequest
from relax_infer.gateway._upstream import Upstream
from relax_infer.gateway._writing import chunk, head_of
from relax_infer.gateway.handler import InferenceGatewayHandler, Plan
from relax_infer.gateway.metrics import RouteMetrics
from relax_infer.security import Caller, Callers, Refused

log = logging.getLogger(__name__)

_Lines = list[tuple[bytes, bytes]]

_LAST = b"0\r\n\r\n"
_UNAVAILABLE = "Inference backend is unavailable"


class Line(Protocol):
    """The caller's connection."""

    def write(self, data: bytes) -> None: ...

    def write_both(self, head: bytes, body: bytes) -> None: ...

    def must_wait(self) -> bool:
        """The caller reads slower than the backend answers."""
        ...

    def answered(self, keep_alive: bool) -> None:
        """The answer is whole: the next request's turn, or the end."""
        ...

    def break_off(self) -> None:
        """Hang up within an answer."""
        ...


@dataclass(frozen=True, eq=False)
class DirectRoute:
    """What the requests of one route have in common."""

    path: str
    handler: InferenceGatewayHandler
    read: Callable[[bytes], RawRequest | ChatRequest | MessagesRequest | Plan]
    snapshot: Callable[[], RoleSnapshot]
    """Raises GatewayError: 503."""
    upstream: Upstream
    counters: RouteMetrics
    limits: Limits
    bodies: "Clock[Direct]"
    """How long bodies may take to come."""
    answers: "Clock[Direct]"
    """How long answers may take in all."""
    callers: Callers | None
    refused: Count


class Direct(Exchange):
    """One request. ``response_complete`` and ``keep_alive`` are named as uvicorn names them."""

    # Of the class, as long as nothing else is known: a request that needs them not sets them not.
    connection: Connection | None = None
    response_started = response_complete = False
    running = whole = _timed = False
    _began = 0.0
    _size = _status = 0
    _caller: Caller | None = None
    _task: asyncio.Task[None] | None = None
    _received: _Lines = []  # noqa: RUF012 - never changed
    _chunks: list[bytes] | None = None
    _keeps_length = False

    def __init__(
        self, route: DirectRoute, line: Line, headers: _Lines, keep_alive: bool, expects: bool
    ) -> None:
        """``expects``: the body comes only once the caller was told to go on."""
        self.route, self._line, self._headers = route, line, headers
        self.keep_alive, self._waits = keep_alive, expects
        self._body: list[bytes] = []

    # --- the caller's side

    @property
    def waiting_bytes(self) -> int:
        """Of a body whose turn has not come."""
        return 0 if self.running else self._size

    def start(self) -> None:
        """Nothing stands before it any more."""
        route = self.route
        self.running = True
        self._began = time.perf_counter()
        if route.callers is not None and not self._enter(route.callers):
            return
        route.counters.begin()
        if self._is_too_large():
            return
        if self.whole:
            self._ask()
        elif self._waits:
            self._line.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._waits = False

    def await_body(self) -> None:
        """Its turn has come and its body has not: from now on that has its time."""
        if self.running and not self._timed:
            self._timed = True
            self.route.bodies.start(self)

    def got_body(self, data: bytes) -> None:
        """Some of the body; what comes after the answer is dropped."""
        if self.response_complete:
            return
        self._waits = False
        self._size += len(data)
        if self._size <= self.route.limits.body_bytes:
            self._body.append(data)
        elif self.running:
            self._refuse(too_large(self.route.limits.body_bytes, None))

    def ended_body(self) -> None:
        """All of the body has come."""
        self.whole = True
        if self._timed:
            self.route.bodies.stop(self)
        if self.running and not self.response_complete:
            self._ask()

    def refuse(self, status: int, detail: str) -> None:
        """What comes is no HTTP: the body will not be whole."""
        if not self.response_complete:
            self._refuse(GatewayError(status, detail, (HANG_UP,)))

    def cut_off(self) -> None:
        """The gateway ends, and waits no longer."""
        self.route.bodies.stop(self)
        if self.running and not self.response_complete:
            self._fail(ending())

    def leave(self) -> None:
        """The caller has gone."""
        self.route.bodies.stop(self)
        if self.running and not self.response_complete:
            self._finish(CALLER_LEFT)

    def caught_up(self) -> None:
        """The caller has read what it was sent."""
        if self.connection is not None:
            self.connection.go_on()

    def late_body(self) -> None:
        """The body has not come in time."""
        if self.response_complete:  # nor what was to be dropped of it
            self._line.break_off()
        else:
            self._refuse(GatewayError(408, "Request body did not come in time", (HANG_UP,)))

    def late(self) -> None:
        """The answer has not come in time."""
        if not self.response_complete:
            self._fail(GatewayError(504, "Inference request timed out"))

    # --- to the backend

    def _enter(self, callers: Callers) -> bool:
        token = next((v for k, v in self._headers if k == b"authorization"), None)
        role = self.route.handler.role.value
        try:
            self._caller = callers.begin(token, role)
        except Refused as refused:
            self.route.refused(role, refused.caller, refused.reason)
            self.response_complete = True
            self._write_error(refusal(refused), [])
            self._line.answered(self.keep_alive)
            return False
        self._headers = [pair for pair in self._headers if pair[0] != b"authorization"]
        return True

    def _is_too_large(self) -> bool:
        """By what has come of it, or by its length: then it is refused."""
        limit = self.route.limits.body_bytes
        for name, value in self._headers:
            if name == b"content-length" and int(value) > limit:
                self._refuse(too_large(limit, int(value)))
                return True
        if self._size > limit:
            self._refuse(too_large(limit, None))
            return True
        return False

    def _ask(self) -> None:
        parts, self._body = self._body, []
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        del parts
        route = self.route
        route.answers.start(self)
        try:
            request = route.read(body)
            del body
            sent = to_backend(self._headers)
            if isinstance(request, MessagesRequest):
                judge = self._judge(request, sent)
                self._task = asyncio.get_running_loop().create_task(judge)
                return
            if isinstance(request, Plan):
                plan = request
            else:
                plan = route.handler.plan(request, route.snapshot(), sent)
            route.handler.begin(self, plan)
            self._chunks = None if plan.stream else []
            self._task = route.upstream.ask(plan.base_url, plan.path, sent, plan.body, self)
        except GatewayError as error:
            self._refuse(error)
        except Exception:
            log.exception("%s", route.path)
            self._refuse(GatewayError(500, "Internal error", (HANG_UP,)))

    async def _judge(self, request: MessagesRequest, sent: Sent) -> None:
        try:
            answer = await self.route.handler.judge(request, sent, self)
        except GatewayError as error:
            failure = GatewayError(error.status, error.detail, error.headers)
        except Exception:
            log.exception("%s", self.route.path)
            failure = GatewayError(500, "Internal error", (HANG_UP,))
        else:
            self._task = None
            self._answer(answer)
            return
        self._task = None
        self._refuse(failure)

    # --- from the backend

    def headed(self, status: int, headers: _Lines, length: int | None) -> None:
        self._status, self._received, self._keeps_length = status, headers, length is not None
        if 200 <= status < 300:
            return
        self._chunks = []
        if not is_told(status, length):
            self.finished = True
            self._refuse(error_of(status, headers, None))

    def got(self, data: bytes) -> bool:
        if self._chunks is not None:
            self._chunks.append(data)
            return False
        framed = data if self._keeps_length else chunk(data)
        if self.response_started:
            self._line.write(framed)
        else:
            self.response_started = True
            headers = to_caller(self._received, buffered=False, decoded=False)
            if not self._keeps_length:
                headers.append((b"transfer-encoding", b"chunked"))
            self._line.write(self._head(self._status, headers) + framed)
        return self._line.must_wait()

    def over(self, error: Broken | None = None) -> None:
        if self.response_complete:
            return
        self._task = None
        if error is not None:
            log.warning("%s: %s", self.route.path, error)
            self._fail(GatewayError(502, _UNAVAILABLE))
            return
        self.finished = True
        if self._chunks is None:
            if self.response_started:
                if not self._keeps_length:
                    self._line.write(_LAST)
                self._finish(self._status)
            else:
                headers = to_caller(self._received, buffered=True, decoded=False)
                self._answer(Answer(self._status, headers, b""))
            return
        body = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        try:
            if 200 <= self._status < 300:
                self._answer(whole_of(self._status, self._received, body))
            else:
                raise error_of(self._status, self._received, body)
        except GatewayError as failure:
            self._refuse(failure)

    # --- ends

    def _answer(self, answer: Answer) -> None:
        lines = [*answer.headers, (b"content-length", b"%d" % len(answer.body))]
        self._line.write_both(self._head(answer.status, lines), answer.body)
        self._finish(answer.status)

    def _fail(self, error: GatewayError) -> None:
        """By a status, or where it is too late for one by hanging up without an end."""
        if not self.response_started:
            self._refuse(error)
            return
        log.warning("%s: answer broken off: %s", self.route.path, error)
        self._finish(error.status, broken=True)

    def _refuse(self, error: GatewayError) -> None:
        named = [pair for pair in self._headers if pair[0] == b"x-request-id"][:1]
        self._write_error(error, named)
        self._finish(error.status)

    def _write_error(self, error: GatewayError, also: _Lines) -> None:
        body = json.dumps({"detail": error.detail}).encode()
        headers = [pair for pair in error.headers if pair != HANG_UP]
        if self._waits or len(headers) < len(error.headers):
            self.keep_alive = False  # who waits to be told to go on may send its body or not
        lines = [JSON, *headers, *also, (b"content-length", b"%d" % len(body))]
        self._line.write_both(self._head(error.status, lines), body)

    def _head(self, status: int, headers: _Lines) -> bytes:
        if not self.keep_alive:
            headers.append(HANG_UP)
        return head_of(status, headers)

    def _finish(self, status: int, *, broken: bool = False) -> None:
        """Once, whichever way it ended; everything is given back."""
        route = self.route
        self.response_complete = True
        route.answers.stop(self)
        if self._task is not None:
            self._task.cancel()
            self._task = None
        if self.connection is not None:
            self.connection.hang_up()
        route.handler.end(self)
        aborted = self.asked and not self.finished
        route.counters.end(status, time.perf_counter() - self._began, aborted=aborted)
        if self._caller is not None:
            Callers.end(self._caller)
        self._body.clear()
        self._chunks = None
        if broken:
            self._line.break_off()
        elif status != CALLER_LEFT:
            self._line.answered(self.keep_alive)
