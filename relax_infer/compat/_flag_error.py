"""The error of flags that make no recipe."""

from relax_infer.contracts.failures import PermanentError


class FlagError(PermanentError, ValueError):
    """Flags that no recipe can be made of; names the flag."""
