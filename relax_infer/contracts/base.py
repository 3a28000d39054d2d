"""The two kinds of value that cross a process boundary."""

from pydantic import BaseModel, ConfigDict

MOST_COUNT = 2**53 - 1
"""The last whole number that every reader of JSON keeps exact. No revision, term or counter gets
there; what does is none (a clock's nanoseconds, say), and would be ahead of all that follow."""


class Message(BaseModel):
    """Between our own processes: frozen; fields a newer peer adds are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)


class StartInput(BaseModel):
    """From a person: frozen; a field we do not know is an error, never a silent no-op."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
