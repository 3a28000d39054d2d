"""Whether a rank that was asked to train still does: its actor answers, and gets on."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from relax_infer.training.others import RankLost

T = TypeVar("T")

LOOK_SECONDS = 5.0
ANSWER_SECONDS = 30.0
SILENT_SECONDS = 300.0
"""Without any answer the rank's process is frozen, or its node is gone."""
STILL_SECONDS = 7_200.0
"""Without a micro-batch or a file that was finished. Twice what a rank may wait for the others, one
of which may write the whole model."""


async def watched(
    call: Awaitable[T], look: Callable[[], Awaitable[int | None]], named: str, end_it: str
) -> T:
    """The answer to ``call``, for as long as there is hope of one.

    Args:
        look: asks for a number that changes as the rank gets on; None: it gets on as far as anybody
            knows.
        named: the rank, for messages.
        end_it: how a person ends its process, for messages.

    Raises:
        RankLost: it does not answer looks, or does not get on; it may go on all the same.
    """
    work = asyncio.ensure_future(call)
    lost = asyncio.ensure_future(_until_lost(look, named, end_it))
    try:
        await asyncio.wait({work, lost}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            lost.result()
        return await work
    finally:
        work.cancel()
        lost.cancel()


async def _until_lost(look: Callable[[], Awaitable[int | None]], named: str, end_it: str) -> None:
    """Only ever ends by raising."""
    from ray.exceptions import RayError

    clock = asyncio.get_running_loop().time
    heard = moved = clock()
    last: int | None = None
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        try:
            number = await asyncio.wait_for(look(), ANSWER_SECONDS)
        except (TimeoutError, RayError) as error:
            if clock() - heard >= SILENT_SECONDS:
                raise RankLost(
                    f"{named} did not answer for {SILENT_SECONDS:.0f} s while it trained.",
                    cure="Ray ends it, frozen or not, and the step goes on from the newest"
                    f" checkpoint. If its node does not answer Ray, {end_it}.",
                ) from error
            continue
        heard = clock()
        if number is None or number != last:
            last, moved = number, heard
        elif heard - moved >= STILL_SECONDS:
            raise RankLost(
                f"{named} answers, and has not got on with its update for {STILL_SECONDS:.0f} s.",
                cure="Ray ends it, and the step goes on from the newest checkpoint. If its process"
                f" is left, look at `dmesg` and `nvidia-smi` on its node, and {end_it}.",
            )
