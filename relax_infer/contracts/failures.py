"""Three kinds of failure, told apart by type.

The activity layer carries the kind across the Temporal boundary as the failure's ``type``.
"""


class RelaxError(Exception):
    """Base of the errors that the project raises on purpose. ``cure`` says what to do next."""

    kind = "Permanent"

    def __init__(self, message: str, *, cure: str = "") -> None:
        self.message, self.cure = message, cure
        super().__init__(sentences(message, cure))

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self.cure))


def sentences(message: str, cure: str) -> str:
    """Both in one line, with the full stop between them that the message may lack."""
    message = message.strip()
    if message and cure and message[-1] not in ".:;!?…":
        message += "."
    return f"{message} {cure}".strip()


def _rebuild(kind: type[RelaxError], message: str, cure: str) -> RelaxError:
    return kind(message, cure=cure)


class TransientError(RelaxError):
    """Trying again may help and cannot hurt."""

    kind = "Transient"


class PermanentError(RelaxError):
    """Trying again cannot help; a person must change something."""

    kind = "Permanent"


class UnconfirmedError(RelaxError):
    """We do not know what happened; nothing may be released on the strength of it."""

    kind = "Unconfirmed"


class InferenceCleanupError(UnconfirmedError):
    """Something of an engine is left and asking again may end it."""


class InferenceRecoveryRequired(UnconfirmedError):
    """Nobody can prove that an engine let go; its node or container has to be looked at."""
