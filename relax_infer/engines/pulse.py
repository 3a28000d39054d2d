"""Signs of life of one READY engine, from calls that change nothing."""

import asyncio
import time

from relax_infer.contracts.failures import PermanentError, UnconfirmedError
from relax_infer.engines.canary import PROMPT
from relax_infer.engines.process import EngineProcess

ASK_AFTER = 10.0
"""Seconds of silence after which an engine is asked, and seconds that it then has to answer; half
of its health timeout if that is less."""


class Pulse:
    """How long an engine has said nothing. One per replica; it begins anew with each READY."""

    def __init__(self) -> None:
        self._sign = time.monotonic()
        self._asked: float | None = None
        """When it was first asked after its last sign."""
        self._asking: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """The engine has just shown that it computes."""
        self._heard(time.monotonic())

    async def silence(self, engine: EngineProcess, health_timeout: float) -> float:
        """Seconds since it last gave a sign; at most ``ASK_AFTER`` as long as it may still answer.

        ``health_timeout``: seconds of silence after which it will be given up.

        A busy scheduler gives signs by itself; one that is idle says nothing until it is asked, for
        a short prefill whose answer this does not wait for. So the time in which nobody looked
        never counts against it.
        """
        ask_after = min(ASK_AFTER, health_timeout / 2)
        try:
            quiet = (await engine.control.status())["silent_for"]
        except (UnconfirmedError, PermanentError):
            answers = False
        else:
            answers = True
            self._heard(time.monotonic() - quiet)
        now = time.monotonic()
        silent = now - self._sign
        if answers and silent <= ask_after:
            return silent
        if self._asked is None:
            self._asked = now
        if answers and (self._asking is None or self._asking.done()):
            self._asking = asyncio.create_task(self._ask(engine))
        patient = now - self._asked <= ask_after
        return min(silent, ask_after) if patient else silent

    def _heard(self, at: float) -> None:
        if at > self._sign:
            self._sign = at
            if self._asked is not None and at >= self._asked:
                self._asked = None

    async def _ask(self, engine: EngineProcess) -> None:
        try:
            await engine.control.log_probs(PROMPT, 2 * ASK_AFTER)
        except (UnconfirmedError, PermanentError):
            return
        self.begin()
