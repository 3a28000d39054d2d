"""One caller's connection: uvicorn's HTTP protocol with limits, and data routes past the app.

uvicorn limits neither the size of a head nor the time that it may take, and it appends trailers,
which come after the body, to the headers that the app has read already. An app that works and reads
nothing hears of a caller that left only from a task of its own, which waits for that; here it may
name a function instead (:data:`GONE`), at a tenth of the cost. Routes that need no app
(:mod:`relax_infer.gateway._direct`) are answered from here.

Requests are answered in their order, one at a time. What is no HTTP is refused after everything
that came before it has its answer, and nothing is read after it.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from relax_infer.gateway._clock import Clock
from relax_infer.gateway._direct import Direct, DirectRoute
from relax_infer.gateway._flow import LOOK_SECONDS, WatchedFlow
from relax_infer.gateway._writing import refusal_of

MAX_HEAD = 65_536
"""Bytes of target and headers, trailers included; and of a line that has not ended."""
HEAD_SECONDS = 30.0
"""That a head may take, from the connection or from its first byte."""
IDLE_SECONDS = 75.0
"""Until an idle caller is hung up; longer than clients keep a connection for reuse."""
LINGER_SECONDS = 2.0
"""For a caller that is hung up in the middle of its request to read why, and stop."""
GONE = "relax.gone"
"""ASGI extension: takes a function to be called if the connection is lost; None takes it back."""

_AHEAD, _AHEAD_BYTES = 16, 65_536
"""Requests, and bytes of their bodies, that may wait for their turn; more stay with the caller."""
_PER_HEADER = 4
"""Bytes of a header besides its name and value."""
_INVALID = "Invalid HTTP request received."
_TOO_LARGE = (431, "Request head is too large")


class GatewayProtocol(HttpToolsProtocol):
    """Refuses heads that are too large (431) or never end (408); drops trailers."""

    parser: Any  # uvicorn sets None at the end
    direct: Mapping[bytes, DirectRoute]
    heads: "Clock[GatewayProtocol]"
    idle: "Clock[GatewayProtocol]"
    lingering: "Clock[GatewayProtocol]"
    paused: Clock[WatchedFlow]

    _head_begun = _in_body = _timed = _is_chunked = False
    _head_bytes = _line_bytes = _unread = 0
    _rest = 0
    """Bytes of what came last that may be of a line without its end."""
    _why = (400, _INVALID)
    """Status and detail of the refusal, should the parser stop here."""
    _gone = False
    _when_gone: Callable[[], object] | None = None
    _current: Any = None
    """Whose turn it is: a :class:`Direct`, or uvicorn's cycle for the app."""
    _deaf = False
    """Nothing that comes is read any more: it follows the last request of this connection."""
    _last_words: bytes | None = None
    """Sent when what came before has been answered."""
    _advancing = _lingers = False

    # --- asyncio's side

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = WatchedFlow(transport, self.paused)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_clocks()
        cast(WatchedFlow, self.flow).end()
        self._gone = self._deaf = True
        if isinstance(self.cycle, Direct):
            self.cycle = cast(Any, None)
        super().connection_lost(exc)
        for request, _ in self.pipeline:
            if isinstance(request, Direct):
                request.leave()
        self.pipeline.clear()
        if isinstance(self._current, Direct):
            self._current.leave()
        elif self._current is not None and not self._current.response_complete:
            self._current.disconnected = True
            self._current.message_event.set()
        if self._when_gone is not None:
            self._when_gone()
        self._current = self.cycle = cast(Any, None)  # they know this connection

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        self._rest = len(data)
        try:
            self.parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            if not self._deaf:
                self._refuse(*self._why)
            return
        goes_on = self._rest == len(data)  # nothing of it was the end of anything
        self._line_bytes = self._rest + (self._line_bytes if goes_on else 0)
        if self._line_bytes > MAX_HEAD:
            self._refuse(*_TOO_LARGE)
        elif self._head_begun:
            if not self._timed:
                self._watch_head()
        elif self._in_body and isinstance(self.cycle, Direct):
            self.cycle.await_body()

    def resume_writing(self) -> None:
        super().resume_writing()
        if isinstance(self._current, Direct):
            self._current.caught_up()

    def shutdown(self) -> None:
        """The server ends: nothing new is read."""
        current = self._current
        if current is None or current.response_complete:
            self.transport.close()
        else:
            current.keep_alive = False

    # --- the parser's side

    def on_message_begin(self) -> None:
        if self._deaf:
            raise ValueError("after the last request")
        self.url, self.headers = b"", []
        self.expect_100_continue = self._is_chunked = False
        self._head_begun, self._head_bytes = True, 0

    def on_url(self, url: bytes) -> None:
        self.url += url
        self._rest -= len(url)
        self._head_bytes += len(url)
        if self._head_bytes > MAX_HEAD:
            self._stop(*_TOO_LARGE)

    def on_header(self, name: bytes, value: bytes) -> None:
        size = len(name) + len(value) + _PER_HEADER
        self._rest -= size
        self._head_bytes += size
        if self._head_bytes > MAX_HEAD:
            self._stop(*_TOO_LARGE)
        if not self._head_begun:  # a trailer
            return
        name = name.lower()
        if name == b"expect":
            self.expect_100_continue |= value.lower() == b"100-continue"
        elif name == b"transfer-encoding" and (value.lower() != b"chunked" or self._is_chunked):
            self._stop(400, "Transfer-Encoding may be chunked alone")
        elif name == b"transfer-encoding":
            self._is_chunked = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._head_begun = False
        if self._timed:
            self._stop_clocks()
        if self.parser.should_upgrade():
            # The parser would take the body for another protocol.
            self._stop(400, "Upgrade is not served here; send the request without it")
        self._in_body = True
        route = self.direct.get(self.url)
        if (
            route is None
            or self.parser.get_method() != b"POST"
            or self.parser.get_http_version() != "1.1"
        ):
            self._to_app()
            return
        keep = self.parser.should_keep_alive()
        before, request = (
            self.cycle,
            Direct(route, self, self.headers, keep, self.expect_100_continue),
        )
        self.cycle = cast(Any, request)
        if before is None or (before.response_complete and not self.pipeline):
            self._current = request
            request.start()
        else:
            self._queue(request)

    def on_body(self, body: bytes) -> None:
        self._rest = 0
        request = self.cycle
        if isinstance(request, Direct):
            request.got_body(body)
            if request.waiting_bytes > _AHEAD_BYTES:
                self.flow.pause_reading()
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_body, self._rest = False, 0
        request: Any = self.cycle
        if not request.keep_alive:
            self._deaf = True
        elif request.response_complete:  # its body was dropped
            self.idle.start(self)
        if isinstance(request, Direct):
            request.ended_body()
        else:
            super().on_message_complete()

    # --- requests and their turns

    def write(self, data: bytes) -> None:
        self.transport.write(data)

    def write_both(self, head: bytes, body: bytes) -> None:
        if len(body) < 4096:
            self.transport.write(head + body)
        else:
            self.transport.writelines((head, body))

    def must_wait(self) -> bool:
        return self.flow.write_paused

    def answered(self, keep_alive: bool) -> None:
        if not keep_alive:
            self._end()
        self.on_response_complete()

    def break_off(self) -> None:
        self._deaf = True
        if self.flow.write_paused:  # the caller does not read
            self.transport.abort()
        else:
            self.transport.close()

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self._advancing or self._lingers or self.transport.is_closing():
            return
        self.flow.resume_reading()
        self._advancing = True  # many that are answered at once are many turns, not many frames
        try:
            self._take_turns()
        finally:
            self._advancing = False
        if not self._is_busy() and not self.transport.is_closing():
            if self._last_words is not None:
                self.transport.write(self._last_words)
                self._linger()
            elif not self._head_begun:
                self.idle.start(self)

    def _take_turns(self) -> None:
        """Start those that wait, until one is not answered at once."""
        while self.pipeline and not self.transport.is_closing():
            self._current, app = self.pipeline.pop()
            if isinstance(self._current, Direct):
                self._current.start()
                if not self._current.whole:
                    self._current.await_body()
            else:
                super()._start_asgi_task(self._current, app)
            if not self._current.response_complete:
                return

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._current = cycle
        super()._start_asgi_task(cycle, app)

    def _to_app(self) -> None:
        url, headers, expects = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.url, self.headers, self.expect_100_continue = url, headers, expects
        scope = cast(dict[str, object], self.scope)
        scope["headers"] = headers
        scope["extensions"] = {GONE: self._call_when_gone}
        super().on_headers_complete()

    def _queue(self, request: Direct) -> None:
        self.pipeline.appendleft((cast(Any, request), cast(Any, None)))
        if len(self.pipeline) >= _AHEAD:
            self.flow.pause_reading()

    def _is_busy(self) -> bool:
        return bool(self.pipeline) or (
            self._current is not None and not self._current.response_complete
        )

    def _call_when_gone(self, call: Callable[[], object] | None) -> None:
        self._when_gone = call
        if call is not None:
            self.flow.resume_reading()  # a large body paused it; nothing is heard until then
            if self._gone:
                call()

    # --- limits

    def _stop(self, status: int, detail: str) -> NoReturn:
        """From within the parser, which ends with it."""
        self._why = (status, detail)
        raise ValueError(detail)

    def _watch_head(self) -> None:
        self._timed = True
        self.heads.start(self)

    def _stop_clocks(self) -> None:
        self._timed = False
        self.heads.stop(self)
        self.idle.stop(self)
        self.lingering.stop(self)

    def late_head(self) -> None:
        """The head has not come in time."""
        self._timed = False
        if not self.transport.is_closing():
            self._refuse(408, "Request head did not come in time")

    def hang_up(self) -> None:
        """Nothing was answered for long. Not stopped by what comes, so it is seen here what did;
        the rest of a body whose request was answered without it does not count."""
        if self._is_busy() or self._head_begun or self._lingers or self.transport.is_closing():
            return
        unread = self.transport.get_write_buffer_size()
        if not unread:
            self.transport.close()
        elif unread == self._unread:
            self.transport.abort()
        else:  # it may be reading
            self._unread = unread
            self.idle.start(self)

    def _refuse(self, status: int, detail: str) -> None:
        """What comes is not read on; what came before is answered first."""
        if self.transport is None or self._lingers or self.transport.is_closing():
            return
        self._stop_clocks()
        self._deaf = True
        self.flow.resume_reading()  # to hear when the caller leaves
        words = refusal_of(status, detail)
        if self._in_body and self.pipeline:  # of the newest, which cannot be answered now
            self.pipeline.popleft()
        elif self._in_body and not self.cycle.response_complete:
            if isinstance(self.cycle, Direct):
                self.cycle.refuse(status, detail)
            else:
                if not self.cycle.response_started:
                    self.transport.write(words)
                self.transport.close()
            return
        if self._is_busy():
            self._last_words = words
        else:
            self.transport.write(words)
            self._linger()

    def _end(self) -> None:
        """After the last answer of this connection."""
        self._deaf = True
        if self._in_body:
            self._linger()
        else:
            self.transport.close()

    def _linger(self) -> None:
        """Closed with something unread, a connection is reset, and the caller loses the answer with
        it: so what it still sends is dropped for a while, until it closes its side."""
        if self.transport.can_write_eof():
            self._lingers = True
            self.transport.write_eof()
            self.flow.resume_reading()
            self.lingering.start(self)
        else:
            self.transport.close()

    def lingered(self) -> None:
        """The caller neither reads nor leaves."""
        self.transport.abort()


def protocol_of(direct: Mapping[bytes, DirectRoute]) -> type[GatewayProtocol]:
    """The protocol of one server.

    Args:
        direct: answered without the app, by the target of a POST as it stands in the request line.
    """
    given = {
        "direct": direct,
        "heads": Clock(HEAD_SECONDS, GatewayProtocol.late_head),
        "idle": Clock(IDLE_SECONDS, GatewayProtocol.hang_up),
        "lingering": Clock(LINGER_SECONDS, GatewayProtocol.lingered),
        "paused": Clock(LOOK_SECONDS, WatchedFlow.look),
    }
    return type("GatewayProtocol", (GatewayProtocol,), given)
