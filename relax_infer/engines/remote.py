"""An engine on the other side of a connection, as a fence needs it: an app, and a backend.

What the fence inside an engine reads from the engine's own table is kept here instead: the ids that
were sent and have not been answered. What the table cannot know, the engine is asked.
"""

import asyncio
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from relax_infer.engines._asgi import ASGIMessage, Receive, Refused, Scope, Send, reply, reply_bytes
from relax_infer.engines._named import Named, ids_in, named
from relax_infer.engines._pauses import pauses
from relax_infer.engines._table import RequestTable, noting
from relax_infer.engines.loads import requests_of
from relax_infer.gateway import Forwarder

log = logging.getLogger(__name__)

GENERATING = frozenset({"/generate", "/v1/chat/completions", "/v1/completions"})
ABORT_AGAIN_SECONDS = 0.2
"""Until the first repeat of an abort; later ones are rarer."""
GRACE_SECONDS = 2.0
"""That a request, aborted by its id, may take to end before its connection is closed."""
SETTLE_SECONDS = 5.0
"""After a connection was closed, until whatever the engine still has of it must be in its
scheduler, where its own numbers show it. SGLang looks every 4 s whether a caller is there."""
_NO_ANSWER_SECONDS = 1.0
"""Between aborts while none is answered."""
_STUBBORN = 10
"""Aborts of one request after which the log says that they do not help: half a minute."""
_sleep = asyncio.sleep
_OLDER = {"/server_info": "/get_server_info", "/model_info": "/get_model_info"}
"""What engines of earlier versions call it."""
_ABORTED = (503, {"detail": "The request was aborted"})


@dataclass(eq=False)
class _Request:
    named: Named
    task: asyncio.Task[Any]
    over: bool = False
    """Its connection is closed, and the engine may still have it."""
    cut: bool = False
    answering: bool = False
    let_be: bool = False
    """Nobody waits for it, and to abort it would end another, whose id begins as its own."""


class RemoteEngine:
    """The app answers what it is asked by asking the engine, once. Belongs to one event loop."""

    def __init__(
        self,
        url: str,
        *,
        key: str | None = None,
        timeout: float = 1800.0,
        max_connections: int = 4096,
    ) -> None:
        """``key``: the engine's bearer token, which callers then need not have."""
        self._forwarder = Forwarder(
            url,
            timeout=timeout,
            max_connections=max_connections,
            key=key,
            drops=(b"x-relax-fence",),
        )
        self._table: RequestTable = RequestTable()
        """Id to its :class:`_Request`."""
        self._under_way = set[_Request]()
        """Their connections are not closed."""
        self._over = set[_Request]()
        self._aborts: dict[tuple[str, _Request], asyncio.Task[Any]] = {}
        self._obeys = True
        self._heard = time.monotonic()

    # --- app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await _body(receive)
        if body is None:
            return
        if scope["method"] == "POST" and scope["path"] in GENERATING:
            try:
                sent = named(body)
            except Refused as refused:
                await reply(send, refused.status, {"detail": refused.detail}, refused.headers)
                return
            del body
            await self._generate(scope, sent, receive, send)
        elif scope["method"] == "GET" and scope["path"] in _OLDER:
            await self._about_itself(scope["path"], send)
        elif await self._forwarder.forward(scope, body, receive, send, stream=False):
            self._heard = time.monotonic()

    async def _about_itself(self, path: str, send: Send) -> None:
        status, body = await self._ask("GET", path)
        if status == 404:
            status, body = await self._ask("GET", _OLDER[path])
        if status:
            await reply_bytes(send, status, body)
        else:
            await reply(send, 502, {"detail": "Inference backend is unavailable"})

    async def _generate(self, scope: Scope, sent: Named, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None
        request = _Request(sent, task)
        for rid in sent.rids:
            self._claim(rid, request)

        async def pass_on(message: ASGIMessage) -> None:
            request.answering = True
            if sent.samples and sent.stream and message["type"] == "http.response.body":
                for rid in ids_in(message.get("body", b"")):
                    self._claim(rid, request)
            await send(message)

        async def patient() -> ASGIMessage:
            message = await receive()
            await asyncio.sleep(GRACE_SECONDS)  # it is being aborted, and may yet say that it ended
            return message

        whole = False
        self._under_way.add(request)
        try:
            whole = await self._forwarder.forward(
                scope, sent.body, patient, pass_on, stream=sent.stream
            )
        except asyncio.CancelledError:
            if not request.cut:
                raise
            task.uncancel()
            if not request.answering:  # else it is broken off where it is
                await reply(send, *_ABORTED)
        finally:
            self._under_way.discard(request)
            self._leave(request, whole)

    def _claim(self, rid: str, request: _Request) -> None:
        """An id that the engine has already is left to it to refuse, and to whom it belongs."""
        for left in self._over:
            if any(rid.startswith(other) for other in self._of(left)):
                left.let_be = True
        held: _Request | None = self._table.get(rid)
        if held is None or held.over:
            self._table[rid] = request

    def _leave(self, request: _Request, whole: bool) -> None:
        if whole:
            self._heard = time.monotonic()
            self._forget(request)
            return
        request.over = True
        self._over.add(request)
        for rid in self._of(request):
            self.abort(rid)
        asyncio.get_running_loop().call_later(SETTLE_SECONDS, self._forget, request)

    def _of(self, request: _Request) -> list[str]:
        return [rid for rid, held in self._table.items() if held is request]

    def _forget(self, request: _Request) -> None:
        self._over.discard(request)
        for rid in self._of(request):
            del self._table[rid]

    # --- backend

    def request_ids(self) -> Sequence[str]:
        """Sent and not answered, and for :data:`SETTLE_SECONDS` those that were given up."""
        return list(self._table)

    def abort(self, rid: str) -> None:
        """Again and again, but ever more seldom, until it is answered: the engine may not have read
        it yet."""
        request: _Request | None = self._table.get(rid)
        if request is None:
            return
        if request.named.samples and not request.named.stream and not request.over:
            # No id that is known names its samples; SGLang ends them when nobody listens any more.
            if not request.answering:
                self._cut(request)
        elif (rid, request) not in self._aborts:
            task = asyncio.create_task(self._abort(rid, request))
            self._aborts[rid, request] = task
            task.add_done_callback(lambda _: self._aborts.pop((rid, request), None))

    def abort_all(self) -> None:
        """What was sent from here: the engine may have other callers."""
        for rid in self.request_ids():
            self.abort(rid)

    noting = staticmethod(noting)

    async def idle(self) -> bool:
        """Whether the engine says that nothing runs or waits; one that does not say it is not."""
        return await requests_of(self._ask) == 0

    async def flush(self) -> bool:
        status, _ = await self._ask("POST", "/flush_cache")
        return status == 200

    def silent_for(self) -> float:
        """Seconds since the engine last answered anything to the end."""
        return time.monotonic() - self._heard

    async def close(self) -> None:
        """Leave the engine alone from now on."""
        ending = list(self._aborts.values())
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        self._table.clear()
        await self._forwarder.close()

    def cut_all(self) -> None:
        """Hang up on the engine for every request that it has not ended: its caller gets 503, and
        of a stream nothing more."""
        for request in self._under_way:
            self._cut(request)

    # --- to the engine

    def _cut(self, request: _Request) -> None:
        if not request.cut:
            request.cut = True
            request.task.cancel()

    async def _abort(self, rid: str, request: _Request) -> None:
        for told, pause in enumerate(pauses(ABORT_AGAIN_SECONDS), 1):
            if self._table.get(rid) is not request or request.let_be:
                return
            answered = await self._tell(rid)
            if told == _STUBBORN and answered:
                log.warning(
                    "the engine was told %d times to abort %s and goes on with it", told, rid
                )
            await _sleep(pause if answered else max(pause, _NO_ANSWER_SECONDS))

    async def _tell(self, rid: str) -> bool:
        """Whether it was answered well; said once where it is not."""
        status, body = await self._ask("POST", "/abort_request", json.dumps({"rid": rid}).encode())
        if status != 200 and self._obeys:
            told = f"{status} {body[:200].decode(errors='replace')}" if status else "nothing"
            log.warning("the engine answered the abort of %s with %s", rid, told)
        self._obeys = status == 200
        return self._obeys

    async def _ask(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """Status and body; status 0: no answer."""
        answer = await self._forwarder.question(method, path, body)
        if answer is None:
            return 0, b""
        self._heard = time.monotonic()
        return answer


async def _body(receive: Receive) -> bytes | None:
    """All of it; None: the caller left before it came."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
