"""The strict drain: a closed gate, no request anywhere, an idle scheduler, or an error."""

import asyncio
import time
from collections.abc import Callable

from relax_infer.contracts.failures import PermanentError, UnconfirmedError
from relax_infer.contracts.fence import FenceToken
from relax_infer.engines.control import EngineControl, OvertakenError

_POLL = 0.05
_POLITE_SECONDS = 2.0
_LEAST = 1.0


async def drain(
    control: EngineControl, token: FenceToken, timeout: float, patience: float = 0.0
) -> None:
    """Close, end every request, pause, then abort and flush until the scheduler says it is idle.

    The pause comes after the last request ended: one that waits behind a pause is in no table
    where an abort would find it. Leaves the engine closed, paused and confirmed drained.

    Args:
        patience: seconds in which what runs may end by itself; then it is aborted.

    Raises:
        UnconfirmedError: not ``timeout`` seconds after that, or a call had no answer.
        PermanentError: the engine refused a call, OvertakenError where another grant has come
            since. Either way nothing may be released.
    """
    deadline = time.monotonic() + patience + timeout
    await control.close(token, patience, _left(deadline))
    while left := (await control.status())["inflight"]:
        await _again(control, deadline, f"{left} requests are in flight")
    await control.pause(token, _left(deadline))
    while not await control.flush_cache(_left(deadline)):
        await control.abort("", token, _left(deadline))
        await _again(control, deadline, "its scheduler is busy")
    await confirm_drained(control, token, _left(deadline))


async def confirm_drained(control: EngineControl, token: FenceToken, timeout: float) -> None:
    """Wait until the fence of a closed engine agrees that it is drained.

    Args:
        token: with which it was closed.
        timeout: seconds.

    Raises:
        OvertakenError: another grant has come since.
        UnconfirmedError: it does not agree in time.
    """
    deadline = time.monotonic() + timeout
    while True:
        try:
            await control.confirm_drained(token, _left(deadline))
        except OvertakenError:
            raise
        except PermanentError as busy:
            await _again(control, deadline, str(busy))
        else:
            return


async def close_before_end(control: EngineControl, token: FenceToken) -> None:
    """Give callers of an engine that is about to be ended an aborted answer, if that works.

    An engine that does not answer is ended all the same, so its silence is no error here.
    """
    deadline = time.monotonic() + _POLITE_SECONDS
    try:
        await control.close(token, timeout=_POLITE_SECONDS)
        while (await control.status())["inflight"]:
            await _again(control, deadline, "callers are waiting")
    except (UnconfirmedError, PermanentError):
        return


async def settle(
    control: EngineControl, prefix: str, timeout: float, current: Callable[[], FenceToken]
) -> int:
    """Abort requests whose id begins with ``prefix``; the number of them, once all are gone.

    Args:
        timeout: seconds.
        current: the token of whoever has the engine now. The ids tell whose requests end: they
            may be waited for over a change of grants.

    Raises:
        UnconfirmedError: some are still there after ``timeout`` seconds.
    """
    seen: set[str] = set()
    deadline = time.monotonic() + timeout
    while left := await control.abort(prefix, current()):
        seen.update(left)
        await _again(control, deadline, f"aborted requests {left[:3]} are not gone")
    return len(seen)


def _left(deadline: float) -> float:
    """Seconds for one more call: a scheduler that stands still answers none."""
    return max(_LEAST, deadline - time.monotonic())


async def _again(control: EngineControl, deadline: float, why: str) -> None:
    if time.monotonic() > deadline:
        raise UnconfirmedError(
            f"The engine at {control.socket} is not drained in time: {why}.",
            cure="Nothing is released. Probe it again, or stop it with proof.",
        )
    await asyncio.sleep(_POLL)
