"""The trainer as a lease role: it has no engines, so the lease drives its activities itself."""

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


class TrainerRole:
    """Carries out a lease's operations on the trainer group."""

    def __init__(self, trainer: TrainerSpec) -> None:
        self._trainer = trainer

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
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return await _CALLS[operation.method](request, summary=doing)
            except ActivityError as error:
                if kind_of(error) == PERMANENT or attempt == ATTEMPTS:
                    raise fail(kind_of(error), f"{doing}: {text_of(error)}") from error
        raise AssertionError("unreachable")
