"""What one rank of a trainer group says of another that failed, or of the place it is at."""

from relax_infer.contracts.failures import TransientError, UnconfirmedError


class OtherRankFailed(TransientError):
    """The rank that failed says why; this one only stopped with it."""


class RankLost(UnconfirmedError):
    """A rank that was asked to train does not answer, or does not get on."""


class RankMoved(UnconfirmedError):
    """This actor is not where the rank's GPU was bound, and cannot speak for what is there."""
