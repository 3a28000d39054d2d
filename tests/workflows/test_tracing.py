"""A step's trace: one, with all that was done for it, whoever did it; and it changes no history."""

import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from temporalio.client import Client
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.worker import Replayer

from relax_infer.contracts.run import RunInput, RunStatus
from relax_infer.machines import RunState
from relax_infer.telemetry.step_trace import ACTIVITY, STEP, Span, read_spans, shares, spans_of_step
from relax_infer.telemetry.traces import configure_traces, end_traces, step_traceparent
from tests.workflows.scripted_world import ScriptedWorld
from workers._runner import FAILS_WORKFLOW, workflow_runner
from workers._tracing import StepTraces
from workflows import WORKFLOWS

pytestmark = pytest.mark.asyncio(loop_scope="session")
Working = Callable[..., AbstractAsyncContextManager[Client]]


@pytest.fixture
def traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / "traces.jsonl"
    monkeypatch.setenv("RELAX_TRACES", f"file:{path}")
    assert configure_traces("relax-worker")
    yield path
    end_traces()


async def finished(client: Client, steps: int) -> str:
    run = f"run-{uuid.uuid4().hex[:8]}"
    status = await client.execute_workflow(
        "TrainingRun",
        RunInput(recipe="scripted", steps=steps),
        id=run,
        task_queue="relax",
        result_type=RunStatus,
    )
    assert status.state is RunState.DONE
    return run


def parents(spans: list[Span]) -> dict[str, str | None]:
    names = {span.document["spanId"]: span.name for span in spans}
    return {s.name: names.get(s.document.get("parentSpanId", "")) for s in spans}


async def test_a_step_is_one_trace_with_what_engines_lease_and_trainer_did_for_it(
    working: Working, traces: Path
):
    async with working(ScriptedWorld(), [StepTraces()]) as client:
        run = await finished(client, 2)
        described = await client.get_workflow_handle(f"{run}.step-2").describe()
    end_traces()
    every = list(read_spans(traces))
    spans = spans_of_step(every, run, 2)
    names = parents(spans)
    assert {
        *("generate_groups", "judge_samples", "teach_samples", "train_step", "publish_batch"),
        # asked for by the lease and by roles, to which the step only sent a signal
        *("onload_engines", "offload_engines", "confirm_rollout_offload", "onload_trainer"),
    } <= {name.removeprefix(ACTIVITY) for name in names}
    assert all(parent == STEP for name, parent in names.items() if name != STEP)
    trace = step_traceparent(f"{run}.step-2", described.run_id).split("-")
    assert {span.trace for span in spans} == {trace[1]}
    found = shares(spans)
    assert set(found.phases) >= {"GENERATING", "TRAINING", "SYNCING_WEIGHTS"}
    assert 0 < found.control_share < 1
    assert found.seconds == pytest.approx(sum(found.phases.values()), abs=1e-3)
    assert {span.trace for span in spans_of_step(every, run, 1)} != {trace[1]}


@pytest.mark.wide
@pytest.mark.usefixtures("traces")
async def test_traced_histories_replay_with_the_interceptor_and_without_it(working: Working):
    async with working(ScriptedWorld(), [StepTraces()]) as client:
        run = await finished(client, 1)
        names = (run, f"{run}.step-1", f"{run}.lease", f"{run}.rollout.policy")
        histories = [await client.get_workflow_handle(name).fetch_history() for name in names]
    for interceptors in ([StepTraces()], []):
        replayer = Replayer(
            workflows=WORKFLOWS,
            data_converter=pydantic_data_converter,
            workflow_runner=workflow_runner(),
            workflow_failure_exception_types=FAILS_WORKFLOW,
            interceptors=interceptors,
        )
        for history in histories:
            await replayer.replay_workflow(history)
