"""The trainer as a lease role: it has no engines, so the lease drives its activities itself."""

from temporalio import workflow
from temporalio.exceptions import ActivityError

from relax_infer.contracts.lease import RoleOperation, RoleResult
from relax_infer.contracts.training import TrainerOperation, TrainerSpec
from workflows._calls import (
    FORGET_TRAINER,
    OFFLOAD_TRAINER,
    ONLOAD_TRAINER,
    PROBE_TRAINER,
    STOP_TRAINER,
    Call,
)
from workflows._failures import PERMANENT, fail, kind_of, text_of

_CALLS: dict[str, Call[TrainerOperation, RoleResult]] = {
    "onload": ONLOAD_TRAINER,
    "offload": OFFLOAD_TRAINER,
    "probe": PROBE_TRAINER,
    "stop": STOP_TRAINER,
    "resolve": FORGET_TRAINER,
}
ATTEMPTS = 4
LEAST = 1.0
"""Seconds for an attempt after the time is over: what is asked again may have ended meanwhile. That
it is made all the same keeps what a history says independent of the time."""
_BOUNDED = ("onload", "offload", "probe")


class TrainerRole:
    """Carries out a lease's operations on the trainer group."""

    def __init__(self, trainer: TrainerSpec, timeout: float) -> None:
        """``timeout``: seconds that an onload, an offload or a probe may take in all."""
        self._trainer, self._timeout = trainer, timeout

    async def perform(self, operation: RoleOperation, operation_id: str) -> RoleResult:
        """The trainer's answer.

        A lost worker is no reason to block: the same operation id asked again joins the operation
        inside the trainer actor, or returns its recorded result.
        """
        assert operation.fence is not None
        request = TrainerOperation(
            trainer=self._trainer, operation_id=operation_id, fence=operation.fence
        )
        doing = f"trainer {operation.method}"
        until = workflow.time() + self._timeout
        for attempt in range(1, ATTEMPTS + 1):
            try:
                bounded = operation.method in _BOUNDED
                left = max(LEAST, until - workflow.time()) if bounded else None
                return await _CALLS[operation.method](request, summary=doing, within=left)
            except ActivityError as error:
                if kind_of(error) == PERMANENT or attempt == ATTEMPTS:
                    raise fail(kind_of(error), f"{doing}: {text_of(error)}") from error
        raise AssertionError("unreachable")
