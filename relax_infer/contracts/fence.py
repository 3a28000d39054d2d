"""Fence tokens: what makes a late activity of an earlier grant harmless."""

from typing import Annotated

from pydantic import Field

from relax_infer.contracts.base import MOST_COUNT, Message


class FenceToken(Message):
    """Carried by every operation on something that may hold a GPU.

    The counter only grows per pool; the grant id tells two grants with one counter apart (which
    can only come from two leases over one pool, and is refused).
    """

    counter: Annotated[int, Field(ge=0, le=MOST_COUNT)]
    grant_id: str

    def __str__(self) -> str:
        return f"{self.counter}:{self.grant_id}"


class StaleFence(Exception):
    """The token is older than, or contradicts, one that was already seen."""

    def __init__(self, offered: FenceToken, seen: FenceToken) -> None:
        self.offered, self.seen = offered, seen
        why = (
            "its holder has let go; nothing is loaded under it again"
            if offered == seen
            else f"{seen} has been seen"
        )
        super().__init__(f"fence token {offered} is stale: {why}")

    def __reduce__(self) -> tuple[type["StaleFence"], tuple[FenceToken, FenceToken]]:
        return (StaleFence, (self.offered, self.seen))


class FenceMemory:
    """The highest token seen; one per engine, per fence process and per trainer.

    A token ends with the release of its grant: a load that was on its way and comes after that is
    refused, although no later token has been seen yet.
    """

    def __init__(self, seen: FenceToken | None = None, *, ended: bool = False) -> None:
        self.seen = seen
        self.ended = ended

    def admit(self, token: FenceToken, *, loads: bool = False) -> None:
        """Remember ``token``; raises :class:`StaleFence` if a later or a rival one was seen, or if
        something is to be loaded under one that has ended."""
        self.check(token)
        seen = self.seen
        if loads and self.ended and token == seen:
            raise StaleFence(token, token)
        if token != seen:
            self.seen, self.ended = token, False

    def check(self, token: FenceToken) -> None:
        """Raises :class:`StaleFence` as :meth:`admit`, and remembers nothing: for what ends work
        and begins none."""
        seen = self.seen
        if seen is not None and (
            token.counter < seen.counter
            or (token.counter == seen.counter and token.grant_id != seen.grant_id)
        ):
            raise StaleFence(token, seen)

    def end(self) -> None:
        """The grant was released here: nothing may be loaded under its token again."""
        self.ended = True


class FenceRecord(Message):
    """A fence memory as it is kept on a disk."""

    token: FenceToken
    ended: bool = False
