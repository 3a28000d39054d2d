"""A step whose spans are known."""

from relax_infer.contracts.refs import WeightsRef
from relax_infer.contracts.run import PhaseTime, StepRecord, StepResult
from relax_infer.machines import StepPhase
from relax_infer.telemetry.step_trace import write_step
from relax_infer.telemetry.traces import ids_of, step_traceparent, write_span

PARENT = step_traceparent("run-1.step-3", "an-execution")


def make_step() -> None:
    """Of 10 s: 3 s generation, then 5 s training of which the first second overlaps it."""
    ids = ids_of(PARENT)
    assert ids is not None
    told = {"relax.run": "run-1", "relax.step": 3}
    for name, began, ended in (
        ("activity generate_groups", 101.0, 104.0),
        ("activity ensure_front", 100.0, 101.0),
        ("activity train_step", 103.0, 108.0),
    ):
        write_span(name, began, ended, trace=ids[0], parent=ids[1], attributes=told)
    phases = (
        PhaseTime(phase=StepPhase.GENERATING, started=100.0, seconds=4.0),
        PhaseTime(phase=StepPhase.TRAINING, started=104.0, seconds=6.0),
    )
    weights = WeightsRef(version=3, uri="/w", digest="d")
    result = StepResult(step=3, weights=weights, phases=phases)
    write_step(PARENT, StepRecord(run="run-1", step=3, outcome=StepPhase.DONE, result=result))
