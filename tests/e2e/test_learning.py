"""Forty steps of the quickstart in every mode: what must be learned, and what must not.

Not in CI: ``make slow`` runs it, several minutes a mode.
"""

from typing import Any

import pytest
from temporalio.client import Client

from tests.e2e.looking import RunFiles, finish, start
from workers.local import Stack

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.asyncio(loop_scope="session"),
]

MODES: dict[str, dict[str, Any]] = {
    "genrm and teacher": {},
    "genrm only": {"distillation": None},
    "teacher only": {"reward.source": "none"},
}
PLACEBO = {"reward.source": "random", "distillation": None}


async def accuracies(stack: Stack, client: Client, overrides: dict[str, Any]) -> list[float]:
    """At step 0 and at step 40."""
    handle = await start(client, steps=40, overrides={"evaluation.every": 40, **overrides})
    await finish(handle, seconds=3000)
    files = RunFiles(stack.home, handle.id)
    evaluations = [files.record(step).result.evaluation for step in (0, 40)]
    return [evaluation.accuracy for evaluation in evaluations if evaluation is not None]


@pytest.mark.parametrize("mode", MODES)
async def test_forty_steps_teach_the_policy_to_sort(stack: Stack, client: Client, mode: str):
    first, last = await accuracies(stack, client, MODES[mode])
    assert 0.25 <= first <= 0.45
    assert last >= 0.90


async def test_a_random_reward_teaches_nothing(stack: Stack, client: Client):
    first, last = await accuracies(stack, client, PLACEBO)
    assert 0.25 <= first <= 0.45
    assert last <= 0.60
