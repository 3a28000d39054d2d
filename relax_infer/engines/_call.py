"""One request between its caller and the engine, as the fence sees it."""

import asyncio
import json
from collections.abc import Sequence
from typing import Protocol

from relax_infer.engines._asgi import ASGIMessage, Receive
from relax_infer.engines.request_log import Reason

ABORT_AGAIN_SECONDS = 0.05


class Backend(Protocol):
    """The engine behind the fence, as far as the fence has to know it."""

    def request_ids(self) -> Sequence[str]:
        """Requests that the engine has not finished."""
        ...

    def abort(self, rid: str) -> None: ...

    def abort_all(self) -> None: ...

    async def idle(self) -> bool:
        """Whether the scheduler's last published load shows nothing running or waiting."""
        ...

    async def flush(self) -> bool:
        """Ask the scheduler itself; True if it was idle and dropped its cache."""
        ...

    def silent_for(self) -> float:
        """Seconds since the scheduler last said anything."""
        ...


class Call:
    """One admitted request between its caller and the engine.

    The fence reads the caller's messages itself: it needs the request id, and it must see the
    caller leave while the engine is busy and reads nothing.
    """

    def __init__(self, receive: Receive) -> None:
        self.rids: tuple[str, ...] = ()
        """Request ids that the payload names."""
        self.status: int | None = None
        self.admitted = False
        """Whether it was handed to the engine."""
        self.answered = False
        self.cancelled = False
        self.left = False
        self._upstream = receive
        self._body = b""
        self._handed_over = False
        self._gone = asyncio.Event()
        self._reading: asyncio.Future[bytes] | None = None

    @property
    def outcome(self) -> Reason:
        if self.left:
            return "disconnected"
        if self.cancelled:
            return "cancelled"
        return "answered" if self.answered else "failed"

    def cancel(self) -> None:
        """The gate closes, or somebody aborts this id: do not wait for the rest of the body."""
        self.cancelled = True
        if self._reading is not None:
            self._reading.cancel()

    async def read_body(self) -> None:
        self._reading = asyncio.ensure_future(self._read())
        try:
            self._body = await self._reading
        except asyncio.CancelledError:
            if not self.cancelled:
                raise
        finally:
            self._reading = None
        self.rids = request_ids(self._body)

    async def _read(self) -> bytes:
        parts: list[bytes] = []
        while True:
            message = await self._upstream()
            if message["type"] == "http.disconnect":
                self.left = True
                self._gone.set()
                return b""
            parts.append(message.get("body", b""))
            if not message.get("more_body"):
                return b"".join(parts)

    async def receive(self) -> ASGIMessage:
        """What the engine's app reads: the body once, then nothing until the caller leaves."""
        if not self._handed_over:
            self._handed_over = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        if not self._gone.is_set():
            await self._gone.wait()
        return {"type": "http.disconnect"}

    async def watch(self, backend: Backend) -> None:
        """Abort the request in the engine as soon as its caller leaves; ends by cancellation.

        The engine may still be reading the request in, where an abort does not find it, so the
        abort is repeated until the engine's app has returned.
        """
        while (await self._upstream())["type"] != "http.disconnect":
            pass
        self.left = not self.answered
        self._gone.set()
        while self.left:
            for rid in self.rids:
                backend.abort(rid)
            await asyncio.sleep(ABORT_AGAIN_SECONDS)


def request_ids(body: bytes) -> tuple[str, ...]:
    """Request ids that a generation payload names (``rid``: a string or a list of strings)."""
    try:
        document = json.loads(body) if b'"rid"' in body else None
    except ValueError:
        return ()
    rid = document.get("rid") if isinstance(document, dict) else None
    rids = rid if isinstance(rid, list) else [rid]
    return tuple(each for each in rids if isinstance(each, str) and each)
