"""Fence tokens: what makes a late activity of an earlier grant harmless."""

from relax_infer.contracts.base import Message


class FenceToken(Message):
    """Carried by every operation on something that may hold a GPU.

    The counter only grows per pool; the grant id tells two grants with one counter apart (which
    can only come from two leases over one pool, and is refused).
    """

    counter: int
    grant_id: str

    def __str__(self) -> str:
        return f"{self.counter}:{self.grant_id}"


class StaleFence(Exception):
    """The token is older than, or contradicts, one that was already seen."""

    def __init__(self, offered: FenceToken, seen: FenceToken) -> None:
        self.offered, self.seen = offered, seen
        super().__init__(f"fence token {offered} is stale: {seen} has been seen")

    def __reduce__(self) -> tuple[type["StaleFence"], tuple[FenceToken, FenceToken]]:
        return (StaleFence, (self.offered, self.seen))


class FenceMemory:
    """The highest token seen; one per engine, per fence process and per trainer."""

    def __init__(self, seen: FenceToken | None = None) -> None:
        self.seen = seen

    def admit(self, token: FenceToken) -> None:
        """Remember ``token``; raises :class:`StaleFence` if a later or a rival one was seen."""
        seen = self.seen
        if seen is not None and (
            token.counter < seen.counter
            or (token.counter == seen.counter and token.grant_id != seen.grant_id)
        ):
            raise StaleFence(token, seen)
        self.seen = token
