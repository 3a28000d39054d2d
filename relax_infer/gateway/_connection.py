"""One HTTP/1.1 connection to a backend: one request at a time, its answer as raw bytes.

What an answer may look like is left to llhttp in its strict mode, and to the few rules here that
say how long its body is. Whatever breaks one of them ends the connection: it is never guessed where
an answer ends.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol, cast

import httptools

MAX_HEAD = 65_536
"""Bytes of a status line and its headers, interim answers included."""
HIGH_WATER = 262_144
"""Bytes of a body that may wait for their reader; more stay with the backend."""
_PER_HEAD, _PER_HEADER = 16, 4
"""Bytes, at least, of a status line with the empty one, and of a header besides name and value."""
_TOO_LARGE = "the head of its answer is too large"


class Broken(Exception):
    """The backend hung up before its answer's end, or does not speak HTTP."""


class Sink(Protocol):
    """Who is told of one answer as it comes. Nothing that it does may raise."""

    connection: "Connection | None"
    """Set when the request is sent; to be hung up on, if the rest is not wanted."""

    def headed(self, status: int, headers: list[tuple[bytes, bytes]], length: int | None) -> None:
        """Status, headers in the backend's order and spelling, and length if it was said."""

    def got(self, data: bytes) -> bool:
        """Some of the body; true: the backend must wait until :meth:`Connection.go_on`."""
        ...

    def over(self, error: Broken | None = None) -> None:
        """Nothing more comes: the answer is whole, or has broken off. The connection is no longer
        this answer's."""


class Response:
    """One answer for a reader that waits, from its head on.

    It must be closed, by whoever reads it. When its body has come whole, its connection has gone
    back already.
    """

    __slots__ = (
        *("_chunks", "_error", "_loop", "_waiter", "_waiting", "_whole"),
        *("connection", "ended", "headers", "length", "status"),
    )

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        """In the backend's order and spelling."""
        self.length: int | None = None
        """Of the body, if the backend said it."""
        self.ended = False
        """The whole answer has come; it may not have been read."""
        self.connection: Connection | None = None
        self._loop = loop
        self._chunks: list[bytes] = []
        self._waiting = 0
        self._error: Broken | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._whole = False

    async def read(self) -> bytes:
        """What is left of the body, however long.

        Raises:
            Broken: the answer broke off.
        """
        self._whole = True
        while not self.ended:
            await self._more()
        return self._take()

    async def read_some(self) -> bytes:
        """What has come since the last read; empty at the end.

        Raises:
            Broken: the answer broke off, and what came before was read.
        """
        while not self._chunks and not self.ended:
            await self._more()
        return self._take()

    async def head(self) -> None:
        """Wait for status and headers; raises Broken."""
        while not self.status:
            await self._more()

    def close(self) -> None:
        """Hang up, unless the answer has ended; a repeat changes nothing."""
        if self.connection is not None:
            self.connection.hang_up()

    # --- the connection's side

    def headed(self, status: int, headers: list[tuple[bytes, bytes]], length: int | None) -> None:
        self.status, self.headers, self.length = status, headers, length
        self._wake()

    def got(self, data: bytes) -> bool:
        """Whether the backend must wait until some of it is read."""
        self._chunks.append(data)
        self._waiting += len(data)
        if self._whole:
            return False
        self._wake()
        return self._waiting > HIGH_WATER

    def over(self, error: Broken | None = None) -> None:
        """Nothing more will come."""
        if error is None:
            self.ended = True
        else:
            self._error = error
        self._wake()

    def _take(self) -> bytes:
        chunks = self._chunks
        data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        chunks.clear()
        self._waiting = 0
        return data

    async def _more(self) -> None:
        if self._error is not None:
            raise self._error
        if self.connection is not None:
            self.connection.go_on()
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Connection(asyncio.Protocol):
    """Sends requests one after the other.

    ``over`` is called once for each, with whether the next one may follow; ``lost`` once, when the
    connection is gone.
    """

    def __init__(
        self,
        over: Callable[["Connection", bool], None],
        lost: Callable[["Connection"], None],
    ) -> None:
        self.idle_since = 0.0
        """On the loop's clock, while it waits for a request."""
        self._over, self._lost = over, lost
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._sink: Sink | None = None
        self._whole = self._keep = False
        self._headers: list[tuple[bytes, bytes]] = []
        self._head_bytes = self._counted = 0
        self._in_head = True
        self._until_close = False
        self._paused = False

    @property
    def open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def send(self, head: bytes, body: bytes, sink: Sink) -> None:
        """Write a whole request. The backend may answer before it has read it.

        Raises:
            Broken: the connection is gone; nothing was sent.
        """
        if self._transport is None or self._transport.is_closing():
            raise Broken("the backend hung up")
        assert self._sink is None
        self._sink, sink.connection = sink, self
        self._head_bytes, self._counted, self._in_head = 0, 0, True
        self._until_close = self._whole = self._keep = False
        if len(body) < 4096:
            self._transport.write(head + body)
        else:
            self._transport.writelines((head, body))

    def go_on(self) -> None:
        """The reader has caught up."""
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()

    def hang_up(self) -> None:
        """At once: what was not sent yet is dropped."""
        if self._transport is not None:
            self._transport.abort()
        self._break(Broken("hung up"))

    # --- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's has the methods but is no subclass.
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._until_close and exc is None and self._sink is not None:
            self._end()
        self._break(Broken("the backend hung up" if exc is None else str(exc)))
        self._lost(self)

    def data_received(self, data: bytes) -> None:
        if self._sink is None:  # it was not asked
            self.hang_up()
            return
        if self._in_head:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if self._whole:  # what is wrong comes after the answer
                self._keep = False
                self._end()
                return
            reason = error.__context__ if isinstance(error.__context__, Broken) else error
            self._fail(str(reason))
            return
        if self._in_head and self._head_bytes > MAX_HEAD:
            self._fail(_TOO_LARGE)
        elif self._whole:
            # Not before all that has come was read: a request that is sent meanwhile would be
            # answered by what follows.
            self._end()

    # --- the parser's side; what is raised here ends the connection

    def on_message_begin(self) -> None:
        if self._sink is None or self._whole:
            raise Broken("it answered twice")
        self._headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # else a trailer
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if not 100 <= status <= 599 or status == 101:
            raise Broken(f"it answered {status}")
        # What came in one piece with its body is counted only if it may be too much.
        if self._head_bytes > MAX_HEAD:
            self._counted += _size(self._headers)
            if self._counted > MAX_HEAD:
                raise Broken(_TOO_LARGE)
        if self._sink is None or status < 200:
            return
        version = self._parser.get_http_version()
        if version not in ("1.1", "1.0"):
            raise Broken(f"it answered in HTTP/{version}")
        length, chunked = None, False
        for name, value in self._headers:
            if len(name) == 14 and name.lower() == b"content-length":
                length = int(value)
            elif len(name) == 17 and name.lower() == b"transfer-encoding":
                if chunked or version == "1.0" or value.lower() != b"chunked":
                    raise Broken("its Transfer-Encoding is not chunked alone")
                chunked = True
        self._in_head = False
        self._until_close = not chunked and length is None and status not in (204, 304)
        self._sink.headed(status, self._headers, length)

    def on_body(self, body: bytes) -> None:
        sink, transport = self._sink, self._transport
        if sink is None or transport is None:
            return
        if sink.got(body) and not self._paused:
            self._paused = True
            transport.pause_reading()

    def on_message_complete(self) -> None:
        self._whole = not self._in_head  # else an interim answer
        self._keep = self._parser.should_keep_alive()

    # --- ends

    def _end(self) -> None:
        """The answer is whole; the connection goes on to the next request, or away."""
        sink, transport = self._sink, self._transport
        if sink is None or transport is None:
            return
        self._sink, self._whole, sink.connection = None, False, None
        self.go_on()
        # A request that was answered before it was read would stand before the next one.
        usable = self._keep and not transport.get_write_buffer_size()
        if not usable:
            transport.abort()
        self._over(self, usable)
        sink.over()

    def _fail(self, reason: str) -> None:
        self._break(Broken(reason))
        if self._transport is not None:
            self._transport.abort()

    def _break(self, error: Broken) -> None:
        sink, self._sink = self._sink, None
        if sink is not None:
            sink.connection = None
            self._over(self, False)
            sink.over(error)


def _size(headers: list[tuple[bytes, bytes]]) -> int:
    return _PER_HEAD + sum(len(name) + len(value) + _PER_HEADER for name, value in headers)
