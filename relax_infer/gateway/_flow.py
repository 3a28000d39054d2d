"""Reading from a caller that sends more than may wait, and its leaving meanwhile.

A connection that is not read from tells of no end: what the caller sent stands before it. The
kernel knows all the same, once the end has come there.
"""

import asyncio
import select
from typing import Any, cast

from uvicorn.protocols.http.flow_control import FlowControl

from relax_infer.gateway._clock import Clock

LOOK_SECONDS = 1.0
"""Between two looks whether a caller that is not read from is there."""
_LEFT = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR


class WatchedFlow(FlowControl):
    """Pauses as uvicorn's; a caller that leaves during a pause is hung up on."""

    def __init__(self, transport: asyncio.Transport, paused: "Clock[WatchedFlow]") -> None:
        super().__init__(transport)
        self._paused = paused

    def pause_reading(self) -> None:
        if not self.read_paused:
            self._paused.start(self)
        super().pause_reading()

    def resume_reading(self) -> None:
        if self.read_paused:
            self._paused.stop(self)
        super().resume_reading()

    def look(self) -> None:
        """Whether the caller is there; again soon if it is."""
        if not self.read_paused or self._transport.is_closing():
            return
        if _has_left(self._transport):
            self._transport.abort()
        else:
            self._paused.start(self)

    def end(self) -> None:
        """The connection is gone."""
        self._paused.stop(self)


def _has_left(transport: asyncio.Transport) -> bool:
    """Whether the caller has closed its side, read or not."""
    socket = cast(Any, transport.get_extra_info("socket"))
    asked = select.poll()
    asked.register(socket.fileno(), _LEFT)
    return bool(asked.poll(0))
