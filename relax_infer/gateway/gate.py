"""The admission gate of one engine: who may still ask it, and whether it is known to be idle."""

import logging
import threading
import time
from collections.abc import Callable
from typing import TypedDict

log = logging.getLogger(__name__)


class GateStatus(TypedDict):
    ready: bool
    inflight: int
    backend_drained: bool


class AdmissionClosed(Exception):
    """The gate is closed: the request must not reach the engine."""


class AdmissionGate:
    """Counts requests in, refuses them while closed, and opens only over a drained engine.

    Three facts are kept apart, because none follows from another: the gate is *ready* (open),
    requests are *in flight* (admitted and not finished), the backend is *drained* (somebody looked
    at the engine itself). A finished request says nothing about the engine, which may go on
    computing for a caller that left; so :meth:`finish` never sets drained, only
    :meth:`confirm_backend_drained` does, and every admission takes it back.

    Starts closed, and drained unless it stands before an engine of which nobody knows. Every method
    but the two waits returns at once and may be called from an event loop or from any thread; the
    waits block, so a loop runs them in a thread.
    """

    def __init__(self, *, drained: bool = True) -> None:
        self._changed = threading.Condition(threading.RLock())
        self._ready = False
        self._backend_drained = drained
        self._active: dict[int, Callable[[], None] | None] = {}
        self._last_token = 0
        self._abandoned = 0

    def enter(self, on_cancel: Callable[[], None] | None = None) -> int:
        """Admit one request; the token is given back to :meth:`finish`.

        ``on_cancel`` is called, once, by whoever closes the gate while the request is active.

        Raises:
            AdmissionClosed: the gate is closed.
        """
        with self._changed:
            if not self._ready:
                raise AdmissionClosed("the engine admits no requests at the moment")
            self._last_token += 1
            self._active[self._last_token] = on_cancel
            self._backend_drained = False
            return self._last_token

    def finish(self, token: int, completed: bool = True) -> None:
        """The request is over for its caller; a repeat is ignored.

        ``completed=False``: the caller left or was cancelled before the last byte, so the engine
        may still be computing for it (counted in :attr:`abandoned`).
        """
        with self._changed:
            if token not in self._active:
                return
            del self._active[token]
            self._abandoned += not completed
            self._changed.notify_all()

    def close(self, *, cancel: bool = True) -> None:
        """Admit nobody and cancel every active request; in flight until each has finished.

        With ``cancel=False`` they go on to their end, or until a later close cancels them. A
        request whose cancel raises is logged, and the others are cancelled all the same.
        """
        with self._changed:
            self._ready = False
            cancels = [each for each in self._active.values() if cancel and each is not None]
            if cancel:
                self._active = dict.fromkeys(self._active)
            self._changed.notify_all()
        for each in cancels:
            try:
                each()
            except Exception:  # whatever it is, nobody else may stay admitted for it
                log.exception("an active request could not be cancelled")

    def confirm_backend_drained(self) -> None:
        """Somebody looked at the engine and found it idle.

        Raises:
            RuntimeError: the gate is open, so the engine may be busy again already.
        """
        with self._changed:
            if self._ready:
                raise RuntimeError("the gate is open: close it before the engine is called drained")
            self._backend_drained = True
            self._changed.notify_all()

    def open(self) -> None:
        """Admit requests; nothing happens if it is open.

        Raises:
            RuntimeError: requests are active, or nobody confirmed that the engine is drained.
        """
        with self._changed:
            if self._ready:
                return
            if self._active:
                raise RuntimeError(f"{len(self._active)} requests of before the close are active")
            if not self._backend_drained:
                raise RuntimeError("the engine was not confirmed drained since its last request")
            self._ready = True
            self._changed.notify_all()

    def wait_drained(self, timeout: float) -> None:
        """Block until nothing is in flight and the engine is confirmed drained.

        Raises:
            TimeoutError: not within ``timeout`` seconds.
        """
        self._wait(lambda: not self._active and self._backend_drained, timeout, "drained")

    def wait_requests_closed(self, timeout: float) -> None:
        """Block until nothing is in flight; says nothing of the engine.

        Raises:
            TimeoutError: not within ``timeout`` seconds.
        """
        self._wait(lambda: not self._active, timeout, "without requests")

    def status(self) -> GateStatus:
        with self._changed:
            return {
                "ready": self._ready,
                "inflight": len(self._active),
                "backend_drained": self._backend_drained,
            }

    @property
    def ready(self) -> bool:
        return self._ready

    @property
    def inflight(self) -> int:
        return len(self._active)

    @property
    def abandoned(self) -> int:
        """Requests so far whose caller left before the last byte."""
        return self._abandoned

    def _wait(self, reached: Callable[[], bool], timeout: float, wanted: str) -> None:
        deadline = time.monotonic() + timeout
        with self._changed:
            while not reached():
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"gate not {wanted} after {timeout:g} s: {self.status()}")
                self._changed.wait(left)
