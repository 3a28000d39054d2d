"""What a step leaves when a bound of the recipe is passed, and when a phase had to be repeated."""

import pytest
from temporalio.client import WorkflowHandle

from relax_infer.contracts.alarms import LogProbBound
from relax_infer.contracts.run import RunStatus
from relax_infer.machines import RunState, StepPhase
from tests.workflows.scripted_world import ScriptedWorld, until
from tests.workflows.test_training_run import Working, start, status

pytestmark = pytest.mark.asyncio(loop_scope="session")
WORDS = "rollout and trainer log-probs differ: mean 0.4 is above 0.1 (train.logprob_bound)"


async def paused(handle: WorkflowHandle[object, RunStatus]) -> bool:
    return (await status(handle)).state is RunState.PAUSED


async def test_a_log_prob_difference_past_its_bound_is_told_and_the_run_goes_on(working: Working):
    world = ScriptedWorld(logprob_bound=LogProbBound(mean=0.1))
    world.logprob_gaps = {1: 0.4, 2: 0.1}
    async with working(world) as client:
        handle = await start(client, steps=2)
        done = await handle.result()
    assert [p.alarms for p in done.progress] == [(), (WORDS,), ()]
    assert [p.logprob_gap for p in done.progress] == [None, 0.4, 0.1]
    assert world.records[1].record.result.alarms == (WORDS,)
    assert world.records[2].record.result.alarms == ()


async def test_where_the_recipe_wants_it_the_run_pauses_with_the_reason(working: Working):
    world = ScriptedWorld(logprob_bound=LogProbBound(mean=0.1, action="pause"))
    world.logprob_gaps = {1: 0.4, 2: 0.4}
    async with working(world) as client:
        handle = await start(client, steps=2)
        await until(lambda: paused(handle))
        seen = await status(handle)
        assert (
            seen.doing == f"is paused (step 1: {WORDS}); `relax-infer resume {handle.id}` goes on"
        )
        assert sorted(world.ledger) == [1]
        await handle.execute_update("resume", result_type=RunStatus)
        done = await handle.result()
    assert done.state is RunState.DONE  # after the last step nobody is asked
    assert done.step == 2


@pytest.mark.wide
async def test_a_phase_that_was_run_again_is_on_record_with_its_times(working: Working):
    world = ScriptedWorld()
    world.faults["judge_samples"] = ["flake"]
    async with working(world) as client:
        await (await start(client, steps=1)).result()
    [retry] = world.records[1].record.retries
    assert (retry.phase, retry.what) == (StepPhase.GENRM_SCORING, "score with genrm")
    assert retry.attempt == 1
    assert "judge_samples flaked" in retry.error
    assert retry.recovered is not None
    assert retry.began <= retry.failed < retry.recovered
