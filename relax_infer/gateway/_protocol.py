"""uvicorn's HTTP protocol with limits on the head of a request, and a word when its caller leaves.

uvicorn limits neither the size of a head nor the time that it may take, and it appends trailers,
which come after the body, to the headers that the app has read already. An app that works and reads
nothing hears of a caller that left only from a task of its own, which waits for that; here it may
name a function instead (:data:`GONE`), at a tenth of the cost.
"""

import asyncio
import json
from collections.abc import Callable
from typing import cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD = 65_536
"""Bytes of request line and headers."""
HEAD_SECONDS = 30.0
"""That a head may take, from the connection or from its first byte."""
GONE = "relax.gone"
"""ASGI extension: takes a function to be called if the connection is lost; None takes it back."""


class LimitedProtocol(HttpToolsProtocol):
    """Refuses heads that are too large (431) or never end (408); drops trailers."""

    _head_begun = False
    _head_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None
    _why: str | None = None
    _gone = False
    _when_gone: Callable[[], object] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)
        self._gone = True
        if self._when_gone is not None:
            self._when_gone()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._head_begun:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD:
                self._refuse(431, "Request head is too large")
            elif self._head_timer is None:
                self._watch_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_begun, self._head_bytes = True, 0

    def on_headers_complete(self) -> None:
        self._head_begun = False
        if self._head_timer is not None:
            self._stop_timer()
        if self.parser is not None and self.parser.should_upgrade():
            self._why = "Upgrade is not served here; send the request without it"
            raise ValueError(self._why)  # the parser would take the body for another protocol
        cast(dict[str, object], self.scope)["extensions"] = {GONE: self._call_when_gone}
        super().on_headers_complete()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head_begun:
            super().on_header(name, value)

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, self._why or msg)

    def _call_when_gone(self, call: Callable[[], object] | None) -> None:
        self._when_gone = call
        if call is not None:
            self.flow.resume_reading()  # a large body paused it; nothing is heard until then
            if self._gone:
                call()

    def _watch_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self._late)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _late(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self._refuse(408, "Request head did not come in time")

    def _refuse(self, status: int, detail: str) -> None:
        self._stop_timer()
        if self.transport is None or self.transport.is_closing():
            return
        cycle = self.cycle
        begun = cycle is not None and cycle.response_started and not cycle.response_complete
        if not begun and not self.pipeline:  # else these bytes would stand within another answer
            self.transport.write(_answer(status, detail))
        self.transport.close()


def _answer(status: int, detail: str) -> bytes:
    body = json.dumps({"detail": detail}).encode()
    return (
        b"HTTP/1.1 %d \r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
        b"connection: close\r\n\r\n%s" % (status, len(body), body)
    )
