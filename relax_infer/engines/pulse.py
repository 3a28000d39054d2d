"""Signs of life of one READY engine, from calls that change nothing."""

import asyncio
import time

from relax_infer.contracts.failures import PermanentError, UnconfirmedError
from relax_infer.engines.canary import PROMPT
from relax_infer.engines.process import EngineProcess

ASK_AFTER = 10.0
"""Seconds of silence after which a scheduler with nothing to do is asked for a token."""


class Pulse:
    """How long an engine has said nothing. One per replica; it begins anew with each READY."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._asking: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """The engine has just shown that it computes."""
        self._since = time.monotonic()

    async def silence(self, engine: EngineProcess) -> float:
        """Seconds since it last gave a sign, as of now.

        A busy scheduler gives signs by itself; one that is idle is asked for a short prefill, whose
        answer this does not wait for.
        """
        try:
            scheduler = (await engine.control.status())["silent_for"]
        except (UnconfirmedError, PermanentError):
            return time.monotonic() - self._since
        self._since = max(self._since, time.monotonic() - scheduler)
        silent = time.monotonic() - self._since
        if silent > ASK_AFTER and (self._asking is None or self._asking.done()):
            self._asking = asyncio.create_task(self._ask(engine))
        return silent

    async def _ask(self, engine: EngineProcess) -> None:
        try:
            await engine.control.log_probs(PROMPT, 2 * ASK_AFTER)
        except (UnconfirmedError, PermanentError):
            return
        self.begin()
