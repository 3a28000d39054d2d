"""One request between its caller and the engine, as the fence sees it."""

import asyncio
import json
import uuid
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from relax_infer.engines._asgi import ASGIMessage, Receive, Refused
from relax_infer.engines._pauses import pauses
from relax_infer.engines._rids import request_ids, with_other_ids
from relax_infer.engines.request_log import Reason

ABORT_AGAIN_SECONDS = 0.05
"""Until the first repeat of an abort; later ones are rarer."""
BODY_BYTES = 64 << 20
"""Of a request body, at most; a gateway's default."""


class Backend(Protocol):
    """The engine behind the fence, as far as the fence has to know it."""

    def request_ids(self) -> Sequence[str]:
        """Requests that the engine has not finished."""
        ...

    def abort(self, rid: str) -> None: ...

    def abort_all(self) -> None: ...

    def noting(self, note: Callable[[str], None]) -> AbstractContextManager[None]:
        """Within it, ``note`` is told every id under which the engine begins to work for what this
        task, and those that it starts, ask."""
        ...

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

    def __init__(self, receive: Receive, said: int = 0) -> None:
        """``said``: bytes of the body by its head; 0: it does not say."""
        self.rids: tuple[str, ...] = ()
        """Request ids that the payload names."""
        self.inside = set[str]()
        """Ids under which the engine has it; known as soon as the engine has them."""
        self.renamed = dict[str, str]()
        """Of :attr:`rids`, those for which the engine got another."""
        self.status: int | None = None
        self.admitted = False
        """Whether it was handed to the engine."""
        self.answered = False
        self.cancelled = False
        self.left = False
        self._upstream, self._said = receive, said
        self._body = b""
        self._handed_over = False
        self._gone = asyncio.Event()
        self._reading: asyncio.Future[bytes] | None = None
        self._start: ASGIMessage | None = None
        self._held_back = b""

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
        """Raises :class:`Refused`: it is larger than :data:`BODY_BYTES`, or cannot be read."""
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
        if self._said > BODY_BYTES:  # to read on would ask a caller that waits for that to send it
            raise _too_large()
        parts: list[bytes] = []
        length = 0
        while True:
            message = await self._upstream()
            if message["type"] == "http.disconnect":
                self.left = True
                self._gone.set()
                return b""
            parts.append(message.get("body", b""))
            length += len(parts[-1])
            if length > BODY_BYTES:
                raise _too_large()
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

        The engine may still be reading the request in, where an abort does not find it, and makes
        new ids as it goes, so the abort is repeated until the engine's app has returned.
        """
        while (await self._upstream())["type"] != "http.disconnect":
            pass
        self.left = not self.answered
        self._gone.set()
        again = pauses(ABORT_AGAIN_SECONDS)
        while self.left:
            self.abort(backend)
            await asyncio.sleep(next(again))

    def abort(self, backend: Backend) -> None:
        """What the engine has of it so far."""
        for rid in tuple(self.inside):
            backend.abort(rid)

    def inside_of(self, rid: str) -> set[str]:
        """Ids under which the engine has what the payload calls ``rid``, with those of which cannot
        be told which of the payload's they are."""
        other = {self.renamed.get(each, each) for each in self.rids if each != rid}
        return {
            each
            for each in self.inside
            if each not in other and each.rpartition("_")[0] not in other
        }

    def keep_apart(self, others: Iterable["Call"], backend: Backend) -> None:
        """Give the engine another id for one that begins as another caller's does, or whose
        beginning that is: SGLang aborts by prefix, so that one who leaves would end both.

        Only the engine sees it. An id that the engine has already is left to it to refuse.

        Raises:
            Refused: one needs another id, and the body cannot be written with it.
        """
        taken = {name for call in others if call.admitted for name in call._names}
        if not taken or not self.rids:
            return
        ordered = sorted(taken)
        known = frozenset(backend.request_ids()) if taken.intersection(self.rids) else frozenset()
        for rid in self.rids:
            if rid not in known and _clashes(rid, taken, ordered):
                self.renamed[rid] = f"fence-{uuid.uuid4().hex}"
        if self.renamed:
            self._body = with_other_ids(self._body, self.renamed)

    def named_back(self, message: ASGIMessage) -> tuple[ASGIMessage, ...]:
        """A part of the answer with the caller's own ids. The head waits for the first part, which
        says how long it has become; what may be the beginning of an id waits for the next one."""
        if not self.renamed:
            return (message,)
        if message["type"] == "http.response.start":
            self._start = message
            return ()
        body = self._held_back + message.get("body", b"")
        for rid, name in self.renamed.items():
            body = body.replace(name.encode(), json.dumps(rid)[1:-1].encode())
        held = _beginning(body, self.renamed.values()) if message.get("more_body") else 0
        body, self._held_back = body[: len(body) - held], body[len(body) - held :]
        message = {**message, "body": body}
        if (start := self._start) is None:
            return (message,)
        self._start = None
        headers = [pair for pair in start["headers"] if pair[0].lower() != b"content-length"]
        if not message.get("more_body"):
            headers.append((b"content-length", b"%d" % len(body)))
        return ({**start, "headers": headers}, message)

    @property
    def _names(self) -> set[str]:
        """Its ids in the engine, now and soon."""
        return {self.renamed.get(rid, rid) for rid in self.rids} | self.inside


def _too_large() -> Refused:
    text = f"Request body is larger than {BODY_BYTES} bytes"
    return Refused(413, text, ((b"connection", b"close"),))


def _beginning(body: bytes, names: Iterable[str]) -> int:
    """Bytes at the end of ``body`` that may be the beginning of one of ``names``."""
    encoded = [name.encode() for name in names]
    longest = max(map(len, encoded)) - 1
    tails = range(min(longest, len(body)), 0, -1)
    return next((n for n in tails if any(each.startswith(body[-n:]) for each in encoded)), 0)


def _clashes(rid: str, taken: set[str], ordered: Sequence[str]) -> bool:
    """Whether one of ``taken`` is a beginning of ``rid``, or the other way round."""
    if any(rid[:length] in taken for length in range(1, len(rid) + 1)):
        return True
    at = bisect_left(ordered, rid)
    return at < len(ordered) and ordered[at].startswith(rid)
