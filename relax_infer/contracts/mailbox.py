"""How one workflow asks another: a signal out, a signal back, both sides remember the id."""

from typing import Any

from pydantic import Field

from relax_infer.contracts.base import Message


class Ask(Message):
    """Body of the signal ``ask``."""

    operation_id: str
    asker: str
    """Workflow id to answer to; without a run id, so that it survives continue-as-new."""
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
