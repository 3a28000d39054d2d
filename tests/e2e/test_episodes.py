"""Episodes on real parts: engines that are asked turn by turn, a trainer that sees whose tokens."""

import json

import pytest
from temporalio.client import Client

from relax_infer.engines import read_request_log
from relax_infer.machines import RunState
from relax_infer.samples import from_table
from tests.e2e.looking import RunFiles, finish, start
from workers.local import Stack

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.asyncio(loop_scope="session"),
]
RETRY = {"source": "retry", "config": {"again": "?", "discount": 0.5}, "max_turns": 2}


async def test_a_policy_that_may_try_again_is_trained_on_its_own_tokens_alone(
    stack: Stack, client: Client
):
    overrides = {
        "rollout.environment": RETRY,
        "reward.source": "environment",
        "distillation": None,
        "evaluation.every": 0,
    }
    handle = await start(client, steps=2, overrides=overrides)
    done = await finish(handle)
    assert (done.state, done.step) == (RunState.DONE, 2)
    files = RunFiles(stack.home, handle.id)
    for step in (1, 2):
        result = files.record(step).result
        assert result.batch is not None
        assert result.training is not None
        assert result.batch.groups == 32
        assert result.training.logprob_gap < 0.02, "rollout and trainer see the same tokens"
    samples = from_table(files.store.peek("steps/2/scored.arrow"))
    again = [s for s in samples if json.loads(s.metadata)["episode"]["turns"] == 2]
    assert 0 < len(again) < len(samples)
    assert {s.reward for s in samples} == {0.0, 0.5, 1.0}
    for sample in again:
        assert sample.loss_mask.count(0) == 1
        assert sample.reward != 1.0
    turns = {
        path.name: {str(event["rid"]) for event in read_request_log(path)}
        for path in files.folder.glob("engines/requests/*rollout*.jsonl")
    }
    prefix = f"{handle.id}/2/generated/"
    seconds = 0
    for rids in turns.values():
        for rid in rids:
            if rid.startswith(prefix) and rid.endswith("/t1"):
                seconds += 1
                assert f"{rid.removesuffix('t1')}t0" in rids, "an episode stays with its replica"
    assert seconds == len(again)
