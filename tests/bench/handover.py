"""What a GPU handover costs beside the engines' own work: ``python -m tests.bench.handover``.

A run over the scripted world, whose engines answer at once, on a real Temporal dev server with the
database and the options of the local stack. Counted is from the moment the lease asks one role to
let go to the moment the next one has confirmed that it is up: drain, evidence, publication, grant
and onload, with every signal and activity between them.
"""

import asyncio
import os
import statistics
import sys
import tempfile
from contextlib import AsyncExitStack
from itertools import pairwise
from pathlib import Path

from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.testing import WorkflowEnvironment
from temporalio.worker import Worker

from relax_infer.contracts.lease import LeaseStatus, LeaseTransition
from relax_infer.contracts.policies import QUEUES
from relax_infer.contracts.run import RunInput, RunStatus
from tests.workflows.scripted_world import ScriptedWorld
from workers._runner import FAILS_WORKFLOW, workflow_runner
from workers._temporal import SPEED, VARIABLES
from workflows import WORKFLOWS
from workflows._visible import REWARD, ROLE, RUN, STATE, STEP, WEIGHT_VERSION

STEPS = 12
LIMIT = 0.2
"""Seconds that a handover may cost, at the median."""


def handovers(transitions: tuple[LeaseTransition, ...]) -> dict[str, list[float]]:
    """Seconds of each handover whose roles follow one another without a pause between, by name."""
    found: dict[str, list[float]] = {}
    let_go: tuple[str, float] | None = None
    released = 0.0
    for before, now in pairwise(transitions):
        if now.event == "DRAIN_STARTED":
            let_go = (now.role, now.at)
        elif now.event == "RELEASE_CONFIRMED":
            released = now.at
        elif now.event == "ONLOAD_CONFIRMED" and let_go is not None:
            between = before.at - released  # what the step did between release and next grant
            name = f"{let_go[0]} -> {now.role}"
            found.setdefault(name, []).append(now.at - let_go[1] - max(0.0, between))
            let_go = None
    return found


async def measure() -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory() as folder:
        async with (
            await WorkflowEnvironment.start_local(
                dev_server_existing_path=str(Path(sys.executable).parent / "temporal"),
                data_converter=pydantic_data_converter,
                search_attributes=[RUN, STEP, ROLE, STATE, WEIGHT_VERSION, REWARD],
                dev_server_database_filename=f"{folder}/temporal.db",
                dev_server_extra_args=list(SPEED),
                dev_server_log_level="error",
            ) as environment,
            AsyncExitStack() as stack,
        ):
            world = ScriptedWorld()
            for queue in QUEUES:
                worker = Worker(
                    environment.client,
                    task_queue=queue,
                    workflows=WORKFLOWS if queue == "relax" else [],
                    activities=world.activities(),
                    workflow_runner=workflow_runner(),
                    workflow_failure_exception_types=FAILS_WORKFLOW,
                )
                await stack.enter_async_context(worker)
            handle = await environment.client.start_workflow(
                "TrainingRun",
                RunInput.model_validate({"recipe": "scripted", "steps": STEPS}),
                id="bench",
                task_queue="relax",
                result_type=RunStatus,
            )
            await handle.result()
            lease = environment.client.get_workflow_handle("bench.lease")
            return handovers((await lease.query("state", result_type=LeaseStatus)).transitions)


def main() -> None:
    os.environ.update(VARIABLES)
    found = asyncio.run(measure())
    everything = [seconds for each in found.values() for seconds in each]
    for name, each in found.items():
        print(f"{name:22} {statistics.median(each) * 1000:6.0f} ms  ({len(each)} times)")
    median = statistics.median(everything)
    print(f"{'all':22} {median * 1000:6.0f} ms median, {LIMIT * 1000:.0f} ms allowed")
    sys.exit(median > LIMIT)


if __name__ == "__main__":
    main()
