"""JSON that a person typed for Temporal's own tools, and what is wrong with it."""

from typing import Any

import pytest
from temporalio.client import Client, WorkflowFailureError, WorkflowUpdateFailedError

from tests.cli.conftest import Command, Temporal, eventually
from tests.workflows.scripted_world import ScriptedWorld


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        (
            {"recipe": "quickstart", "stepps": 20},
            "RunInput: stepps: no such field, got 20; did you mean steps?",
        ),
        (
            {"recipe": "quickstart", "steps": "many"},
            "RunInput: steps: must be a whole number, got 'many'",
        ),
        (
            {"recipe": "quickstart", "steps": 0},
            "RunInput: steps: must be a positive whole number, got 0",
        ),
        ({"steps": 1}, "RunInput: recipe: is missing"),
        (
            {"recipe": "quickstart", "overrides": "train.lr=1"},
            "RunInput: overrides: must be a mapping of fields to values, got 'train.lr=1'",
        ),
        ("quickstart", "RunInput: must be a mapping of fields to values, got 'quickstart'"),
    ],
)
def test_what_starts_a_run_is_refused_with_field_value_and_what_is_allowed(
    temporal: Temporal, run_id: str, typed: Any, says: str
):
    async def start(client: Client) -> str:
        run = await client.start_workflow("TrainingRun", typed, id=run_id, task_queue="relax")
        try:
            await run.result()
        except WorkflowFailureError as failure:
            return str(failure.cause.message)  # type: ignore[attr-defined]
        return ""

    with temporal.working(ScriptedWorld()):
        assert temporal.do(start) == says


def test_an_update_is_refused_in_the_same_words_and_the_run_goes_on(
    remote: Command, temporal: Temporal, run_id: str
):
    async def resolve(client: Client) -> str:
        run = client.get_workflow_handle(run_id)
        answer = {"who": "ada", "why": "looked", "action": "again"}
        try:
            await run.execute_update("resolve", answer)
        except WorkflowUpdateFailedError as failure:
            return str(failure.cause.message)  # type: ignore[attr-defined]
        return ""

    with temporal.working(ScriptedWorld()):
        remote("run", "quickstart", "--run-id", run_id, "--steps", "500", "--no-follow")
        refused = eventually(lambda: temporal.do(resolve))
        assert refused == ("ResolveRun: action: must be one of retry, restart, stop, got 'again'")
        assert remote("stop", run_id).exit_code == 0
        eventually(lambda: "DONE" in remote("status", run_id).stdout)
