"""A run on somebody's own prompts and policy, and a second run that goes on from it; on real parts.

Not in CI: ``make slow`` runs it.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from temporalio.client import Client

from relax_infer.engines.command import CPU_SHIM
from relax_infer.machines import RunState
from relax_infer.samples import from_table
from tests.e2e.looking import Handle, RunFiles, finish, start
from tests.samples.byte_policy import byte_policy
from workers.local import Stack

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.asyncio(loop_scope="session"),
]
PROMPTS = 24
_RANDOM_QWEN3 = """
import sys, torch
from transformers import Qwen3Config, Qwen3ForCausalLM

torch.manual_seed(0)
config = Qwen3Config(
    vocab_size=320, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=1024,
    tie_word_embeddings=True, eos_token_id=1, pad_token_id=0, bos_token_id=None,
)
Qwen3ForCausalLM(config).float().save_pretrained(sys.argv[1])
"""


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random Qwen3 that reads bytes."""
    folder = tmp_path_factory.mktemp("own") / "policy"
    byte_policy(folder, chat=True)
    # In a process of its own: transformers warns as it is imported, and a warning fails a test.
    subprocess.run(
        [sys.executable, "-c", _RANDOM_QWEN3, str(folder)],
        check=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": str(CPU_SHIM)},
    )
    return str(folder)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("own") / "prompts.jsonl"
    rows = [{"question": f"{n} + 1 = ?", "label": n + 1} for n in range(PROMPTS)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def own(policy: str, prompts: Path, **overrides: Any) -> dict[str, Any]:
    return {
        "rollout.model": policy,
        "rollout.prompts_per_step": 8,
        "rollout.samples_per_prompt": 4,
        "rollout.sampling.max_new_tokens": 8,
        "data.source": "file",
        "data.path": str(prompts),
        "data.prompt_field": "question",
        "data.answer_field": "label",
        "data.held_out": 8,
        "reward.source": "math_verify",
        "reward.unfinished": -1.0,
        "distillation": None,
        "evaluation.every": 2,
    } | overrides


async def test_a_run_on_ones_own_prompts_and_one_that_goes_on_from_it(
    stack: Stack, client: Client, policy: str, prompts: Path
):
    """Two steps are one pass over the 16 rows to train on; the next two, in another run, are the
    second. Versions, optimizer and the place in the data go on; the first run's files stay."""
    first = await start(client, steps=2, overrides=own(policy, prompts))
    assert (await finish(first)).state is RunState.DONE
    seen = [prompts_of(stack, first, step) for step in (1, 2)]
    assert [len(each) for each in seen] == [8, 8]
    assert len(seen[0] | seen[1]) == 16
    before = RunFiles(stack.home, first.id).ledger()

    later = await start(
        client,
        steps=4,
        overrides=own(policy, prompts, **{"train.learning_rate": 1e-4}),
        begin_from={"run": first.id},
    )
    done = await finish(later)
    assert (done.step, done.weight_version) == (4, 4)
    files = RunFiles(stack.home, later.id)
    assert [e.result.step for e in files.ledger().entries] == [1, 2, 3, 4]
    assert [e.digest for e in files.ledger().entries[:2]] == [e.digest for e in before.entries]
    assert {sample.weight_version for sample in samples_of(stack, later, 3)} == {2}
    assert prompts_of(stack, later, 3) | prompts_of(stack, later, 4) == seen[0] | seen[1]
    assert RunFiles(stack.home, first.id).ledger() == before
    evaluation = files.record(4).result.evaluation
    assert evaluation is not None
    assert (evaluation.problems, evaluation.weight_version) == (8, 4)


def samples_of(stack: Stack, handle: Handle, step: int) -> list[Any]:
    files = RunFiles(stack.home, handle.id)
    shards = files.shards(step, "generated").values()
    return [sample for name in shards for sample in from_table(files.store.peek(name))]


def prompts_of(stack: Stack, handle: Handle, step: int) -> set[str]:
    return {sample.prompt for sample in samples_of(stack, handle, step)}
