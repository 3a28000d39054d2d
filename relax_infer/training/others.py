"""What one rank of a trainer group says when another has failed."""

from relax_infer.contracts.failures import TransientError


class OtherRankFailed(TransientError):
    """The rank that failed says why; this one only stopped with it."""
