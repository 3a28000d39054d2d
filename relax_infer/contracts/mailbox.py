"""How one workflow asks another: a signal out, a signal back, both sides remember the id."""

from typing import Annotated, Any

from pydantic import Field

from relax_infer.contracts.base import Message


class Ask(Message):
    """Body of the signal ``ask``."""

    operation_id: str
    asker: Annotated[str, Field(min_length=1, max_length=1000)]
    """Workflow id to answer to, of a length that Temporal takes; without a run id, so that it
    outlives continue-as-new."""
    method: str
    payload: dict[str, Any]


class Answer(Message):
    """Body of the signal ``answer``."""

    operation_id: str
    ok: bool
    result: dict[str, Any] = Field(default_factory=dict)
    kind: str = ""
    """Transient, Permanent or Unconfirmed when not ok."""
    error: str = ""
