"""The trainer as one engine: what its actor does with tokens, without Megatron.

The real actor loads Megatron; this mirrors its few lines about fences and residence.
"""

from relax_infer.contracts.fence import FenceMemory, StaleFence
from relax_infer.machines import ReplicaState
from tests.machines.values import Answer, Engine, Gpu, Report, Token, memo, token_of
from workflows._failures import PERMANENT, UNCONFIRMED


@memo
def trainer_operate(
    engine: Engine, method: str, token: Token, trouble: str
) -> tuple[Engine, Report]:
    """The trainer after an onload or offload reached it."""
    if engine.gpu is Gpu.ORPHAN:  # check_gone: an earlier process is still alive
        return engine, Report(ReplicaState.FAILED, engine.seen, error=True)
    memory = FenceMemory(engine.seen.real() if engine.seen else None)
    try:
        memory.admit(token.real())
    except StaleFence:
        return engine, Report(ReplicaState.FAILED, engine.seen, error=True, stale=True)
    engine = engine._replace(seen=token_of(memory.seen))
    if method == "onload" and trouble == "launch":  # refused before anything was loaded
        return engine, _report(ReplicaState.FAILED, token, error=True)
    if method == "onload":
        gpu = Gpu.PARTIAL if trouble == "load" else Gpu.FULL
        return engine._replace(gpu=gpu), _report(ReplicaState.READY, token, trouble == "load")
    if trouble == "drain":
        return engine, _report(ReplicaState.READY, token, error=True)
    return engine._replace(gpu=Gpu.NONE), _report(ReplicaState.SLEEPING, token)


def _report(state: ReplicaState, token: Token, error: bool = False) -> Report:
    return Report(state, token, error)


def trainer_answer(reports: tuple[Report, ...]) -> Answer:
    """What the lease hears. No reports: the activity was lost."""
    if not reports:
        return Answer(False, UNCONFIRMED)
    (report,) = reports
    if report.error or report.stale:
        return Answer(False, PERMANENT if report.stale else UNCONFIRMED)
    return Answer(True, state=report.state)


def trainer_look(engine: Engine, token: Token | None) -> str:
    """What a probe of the trainer says: a resident one is READY, whatever else is not."""
    if engine.seen != token:
        return "BLOCKED"
    return "READY" if engine.gpu is Gpu.FULL else "SLEEPING"
