"""The fence around an engine's HTTP server: what may reach the engine, and on whose word.

A pure ASGI layer outside the engine's own app. The *public* side lets through an allowlist and
puts generation behind the gate. The *management* side, for the engine's own actor, has the whole
app and ``/_fence/…``; whatever may change weights, memory or admission there carries a fence token.
Everything runs on the server's event loop, so there is no await between a check and its effect.
"""

import asyncio
import contextlib
import json
import logging
import math
from typing import Any
from urllib.parse import parse_qs

from relax_infer.contracts.base import MOST_COUNT
from relax_infer.contracts.fence import FenceMemory, FenceToken, StaleFence
from relax_infer.engines._asgi import (
    App,
    ASGIMessage,
    Receive,
    Refused,
    Scope,
    Send,
    header,
    renamed,
    reply,
    reply_text,
    said_length,
    without_body,
)
from relax_infer.engines._call import ABORT_AGAIN_SECONDS, Backend, Call
from relax_infer.engines._pauses import pauses
from relax_infer.engines._routes import ABORT, GATED, METADATA, METRICS, UNGATED, needs_token
from relax_infer.engines.guard_metrics import GuardMetrics
from relax_infer.engines.request_log import RequestLog
from relax_infer.gateway.gate import AdmissionClosed, AdmissionGate
from relax_infer.telemetry.asgi import traced
from relax_infer.telemetry.traces import tracing

log = logging.getLogger(__name__)

TOKEN_HEADER = "x-relax-fence"
"""Carries ``<counter>:<grant id>`` on the management side."""

ASK_SECONDS = 5.0
"""For the engine to answer about itself."""
_CLOSED = (503, {"detail": "engine is not admitting requests"}, ((b"retry-after", b"1"),))


def _token(text: str | None) -> FenceToken:
    counter, colon, grant = (text or "").partition(":")
    if not colon or not counter.isdecimal() or not grant:
        raise ValueError(f"{TOKEN_HEADER} must be '<counter>:<grant id>', it is {text!r}")
    if len(counter) > len(str(MOST_COUNT)) or int(counter) > MOST_COUNT:
        raise ValueError(f"{TOKEN_HEADER} has a counter above {MOST_COUNT}; grants count from 1")
    return FenceToken(counter=int(counter), grant_id=grant)


def _drain_seconds(query: dict[str, list[str]]) -> float:
    """Of ``mode=drain&deadline=SECONDS``; 0 without, or with ``mode=cancel``."""
    mode, given = (query.get(name, [""])[0] for name in ("mode", "deadline"))
    if mode in ("", "cancel") and not given:
        return 0.0
    with contextlib.suppress(ValueError):
        if mode == "drain" and 0 < float(given) < math.inf:
            return float(given)
    raise ValueError(
        f"close takes mode=cancel, or mode=drain with a deadline in seconds above 0;"
        f" it got mode={mode!r}, deadline={given!r}"
    )


def _refusal(error: Exception, before: str = "") -> dict[str, Any]:
    """``stale``: to ask again with this token cannot help."""
    return {"detail": f"{before}{error}", "stale": isinstance(error, StaleFence)}


class Fence:
    """The outermost layer of the server."""

    def __init__(
        self,
        app: App,
        backend: Backend,
        log: RequestLog,
        token: FenceToken | None = None,
        *,
        drained: bool = True,
    ) -> None:
        """``drained``: whether the engine is known to do nothing, as one that starts is."""
        self.app, self.backend = app, backend
        self.gate = AdmissionGate(drained=drained)
        self.memory = FenceMemory(token)
        self._log = log
        seen = self.memory
        self._metrics = GuardMetrics(self.gate, lambda: seen.seen.counter if seen.seen else 0)
        self._route = traced(self._gated, "engine request") if tracing() else self._gated
        self._calls: set[Call] = set()
        self._ending: asyncio.Task[None] | None = None
        self._end_at = 0.0
        """When what is left behind the closed gate is cancelled; time of the event loop."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The public side."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await self._public(scope, receive, send)

    async def management(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The other side: the whole app, and the fence's own controls."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
        elif scope["path"].startswith("/_fence/"):
            await self._control(scope, receive, send)
        elif needs_token(scope["path"]):
            try:
                self.memory.admit(_token(header(scope, TOKEN_HEADER)))
            except (StaleFence, ValueError) as error:
                await reply(send, 409, _refusal(error, f"{scope['path']}: "))
            else:
                await self.app(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _public(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, method = scope["path"], scope["method"]
        if method == "POST" and path in GATED:
            await self._route(scope, receive, send)
        elif (method, path) in UNGATED:
            await self._ungated(scope, receive, send)
        elif method == "POST" and path == ABORT:
            await self._abort_named(scope, receive, send)
        elif method == "GET" and path == "/health":
            await self._health(scope, receive, send)
        elif method == "GET" and path == "/health_generate":
            await reply(send, 200 if self.gate.ready else 503, dict(self.gate.status()))
        elif method == "GET" and path == METRICS:
            await reply_text(send, self._metrics.text())
        elif method == "GET" and path in METADATA:
            await self._metadata(scope, receive, send)
        else:
            await reply(send, 404, {"detail": "Not Found"})

    async def _gated(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        call = Call(receive, said_length(scope))
        try:
            admission = self.gate.enter(call.cancel)
        except AdmissionClosed:
            self._metrics.refused("closed")
            self._log.write("refused", path, (), 503, "closed")
            await reply(send, *_CLOSED)
            return
        self._calls.add(call)
        ended = False

        def end() -> None:
            # At the last body part, or when the app returns: SGLang keeps a streamed request's
            # task for two seconds after its last byte.
            nonlocal ended
            if not ended:
                ended = True
                self._calls.discard(call)
                self.gate.finish(admission, call.outcome == "answered")
                if call.admitted:
                    self._metrics.ended(call.outcome)
                    self._log.write("ended", path, call.rids, call.status, call.outcome)

        async def count(message: ASGIMessage) -> None:
            if message["type"] == "http.response.start":
                call.status = message["status"]
            for each in call.named_back(message):
                await send(each)
            if message["type"] == "http.response.body" and not message.get("more_body"):
                call.answered = not call.left
                end()

        watch: asyncio.Task[None] | None = None
        try:
            await call.read_body()
            if call.left:
                return
            if call.cancelled:
                self._metrics.refused("closed")
                self._log.write("refused", path, call.rids, 503, "closed")
                await reply(send, *_CLOSED)
                return
            call.keep_apart(self._calls - {call}, self.backend)
            self._log.write("admitted", path, call.rids)
            call.admitted = True
            self._metrics.admitted()
            watch = asyncio.create_task(call.watch(self.backend))
            with self.backend.noting(call.inside.add):
                await self.app(renamed(scope, GATED[path]), call.receive, count)
        except Refused as refused:
            self._metrics.refused("body")
            self._log.write("refused", path, call.rids, refused.status, "body")
            await reply(send, refused.status, {"detail": refused.detail}, refused.headers)
        finally:
            if watch is not None:
                watch.cancel()
            if call.left:  # the engine's app may give up sooner than the engine
                call.abort(self.backend)
            end()

    async def _ungated(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = Call(receive, said_length(scope))
        if scope["method"] == "POST":
            try:
                await call.read_body()
            except Refused as refused:
                await reply(send, refused.status, {"detail": refused.detail}, refused.headers)
                return
            receive = call.receive
        else:
            receive = without_body(receive)
        await self.app(scope, receive, send)

    async def _abort_named(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The engine itself does not get to see it: it would end whatever begins with the id, or
        with ``abort_all`` the requests of all callers."""
        call = Call(receive, said_length(scope))
        try:
            await call.read_body()
        except Refused as refused:
            await reply(send, refused.status, {"detail": refused.detail}, refused.headers)
            return
        if not call.rids:
            await reply(send, 400, {"detail": "Name what is to be aborted by its rid, or a list"})
            return
        for other in self._calls:
            for rid in set(other.rids).intersection(call.rids):
                for each in other.inside_of(rid):
                    self.backend.abort(each)
        await reply(send, 200, {})

    async def _health(self, scope: Scope, receive: Receive, send: Send) -> None:
        status, _ = await self._ask(scope, receive)
        await reply(send, 200 if status == 200 else 503, {"alive": status == 200})

    async def _metadata(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, fields = METADATA[scope["path"]]
        status, body = await self._ask(renamed(scope, path), receive)
        try:
            document = json.loads(body) if status == 200 else None
        except ValueError:
            document = None
        if isinstance(document, dict):
            await reply(send, 200, {name: document[name] for name in fields if name in document})
        else:
            told = f"answered {status}" if status else f"gave no answer within {ASK_SECONDS:g} s"
            await reply(send, 502, {"detail": f"the engine's {path} {told}"})

    async def _ask(self, scope: Scope, receive: Receive) -> tuple[int, bytes]:
        """The engine's own answer; status 0 where it did not come in time, 500 where it broke."""
        status, parts = 502, list[bytes]()

        async def collect(message: ASGIMessage) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                parts.append(message.get("body", b""))

        try:
            answering = self.app(scope, without_body(receive), collect)
            await asyncio.wait_for(answering, ASK_SECONDS)
        except TimeoutError:
            return 0, b""
        except Exception:
            log.exception("the engine's %s broke", scope["path"])
            return 500, b""
        return status, b"".join(parts)

    async def _control(self, scope: Scope, receive: Receive, send: Send) -> None:
        query = parse_qs(scope.get("query_string", b"").decode(), keep_blank_values=True)
        prefix = query.get("prefix", [""])[0]
        operation = (scope["method"], scope["path"].removeprefix("/_fence/"))
        try:
            match operation:
                case ("GET", "status"):
                    await reply(send, 200, await self.status())
                case ("GET", "requests"):
                    await reply(send, 200, {"rids": self.active(prefix)})
                case ("POST", "abort"):
                    self.memory.check(_token(header(scope, TOKEN_HEADER)))
                    rids = self.active(prefix)
                    self._abort(prefix)
                    await reply(send, 200, {"rids": rids})
                case ("POST", "open"):
                    self.memory.admit(_token(header(scope, TOKEN_HEADER)))
                    self.gate.open()
                    log.info("admits requests", extra={"fence": str(self.memory.seen)})
                    await reply(send, 200, await self.status())
                case ("POST", "close"):
                    seconds = _drain_seconds(query)
                    self.memory.admit(_token(header(scope, TOKEN_HEADER)))
                    self.close(seconds)
                    log.info("admits nobody", extra={"fence": str(self.memory.seen)})
                    await reply(send, 200, await self.status())
                case ("POST", "confirm_drained"):
                    await self.confirm_drained(_token(header(scope, TOKEN_HEADER)))
                    await reply(send, 200, await self.status())
                case _:
                    await reply(send, 404, {"detail": "Not Found"})
        except (StaleFence, RuntimeError, ValueError) as error:
            await reply(send, 409, _refusal(error))

    def close(self, drain_for: float = 0.0) -> None:
        """Admit nobody, and end what is admitted, at once or what is left in ``drain_for`` seconds.

        A repeat may only bring the end forward. An admitted request may be anywhere between the
        gate and the engine's own table, where an abort does not find it yet; so the abort is
        repeated while requests are in flight.
        """
        draining = self._ending is not None and not self._ending.done()
        at = asyncio.get_running_loop().time() + drain_for
        self._end_at = min(self._end_at, at) if draining and not self.gate.ready else at
        self._metrics.closed()
        if drain_for > 0:
            self.gate.close(cancel=False)
        else:
            self._cancel()
        if not draining:
            self._ending = asyncio.create_task(self._end_requests())

    def _cancel(self) -> None:
        self.gate.close()
        self.backend.abort_all()

    async def _end_requests(self) -> None:
        now = asyncio.get_running_loop().time
        pause, again = ABORT_AGAIN_SECONDS, pauses(ABORT_AGAIN_SECONDS)
        while not self.gate.ready and (self.gate.inflight or self.backend.request_ids()):
            await asyncio.sleep(pause)
            if not self.gate.ready and now() >= self._end_at:
                self._cancel()
                pause = next(again)

    async def confirm_drained(self, token: FenceToken) -> None:
        """Put down that the engine does nothing, once it says so itself.

        Raises:
            RuntimeError: it says why the engine cannot be called drained.
            StaleFence: a later or a rival token was seen, also while the engine was asked.
        """
        self.memory.check(token)
        if self.gate.ready:
            raise RuntimeError("the gate is open: close it first")
        if self.gate.inflight:
            raise RuntimeError(f"{self.gate.inflight} requests are in flight: {self.active('')}")
        if rids := self.backend.request_ids():
            raise RuntimeError(f"the engine has not finished {list(rids)}")
        if not await self.backend.flush() or not await self.backend.idle():
            raise RuntimeError("the engine's scheduler is not idle")
        if self.gate.inflight or self.backend.request_ids():
            raise RuntimeError("a request came in over the management side")
        self.memory.check(token)
        self.gate.confirm_backend_drained()
        self._metrics.drained()
        log.info("is drained", extra={"fence": str(self.memory.seen)})

    def active(self, prefix: str) -> list[str]:
        """Ids that begin with ``prefix`` of requests that are in the fence or in the engine."""
        known = set(self.backend.request_ids())
        for call in self._calls:
            for rid in call.renamed:
                known -= call.inside_of(rid)
        known.update(rid for call in self._calls for rid in call.rids)
        return sorted(rid for rid in known if rid.startswith(prefix))

    def _abort(self, prefix: str) -> None:
        for call in self._calls:
            if asked := [rid for rid in call.rids if rid.startswith(prefix)]:
                call.cancel()
            for rid in asked:
                for each in call.inside_of(rid):
                    self.backend.abort(each)
        for rid in self.backend.request_ids():
            if rid.startswith(prefix):
                self.backend.abort(rid)

    async def status(self) -> dict[str, Any]:
        seen = self.memory.seen
        busy = bool(self.backend.request_ids())
        return {
            **self.gate.status(),
            "abandoned": self.gate.abandoned,
            "fence": None if seen is None else seen.model_dump(),
            "engine_idle": not busy and await self.backend.idle(),
            "silent_for": self.backend.silent_for(),
            "rids": self.active(""),
        }
