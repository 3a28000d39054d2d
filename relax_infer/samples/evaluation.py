"""Greedy answers to the held-out problems, with pinned weights."""

import asyncio

import pyarrow as pa

from relax_infer.config.recipe import Recipe
from relax_infer.contracts.failures import PermanentError
from relax_infer.contracts.run import Evaluation
from relax_infer.samples import layout
from relax_infer.samples.generation import read_answer
from relax_infer.samples.phase import Asker, Beat, Limits, Settle, run_phase, together
from relax_infer.samples.store import StagingStore
from relax_infer.samples.tasks import Task

_PER_SHARD = 32

_SCHEMA = pa.schema(
    [
        ("group", pa.int64()),
        ("sample", pa.int64()),
        ("prompt", pa.string()),
        ("answer", pa.string()),
        ("response", pa.string()),
        ("right", pa.bool_()),
        ("weight_version", pa.int64()),
    ]
)


async def evaluate(
    *,
    store: StagingStore,
    step: int,
    task: Task,
    recipe: Recipe,
    weight_version: int,
    settle: Settle,
    beat: Beat,
    router_url: str,
) -> Evaluation:
    """Share of ``data.held_out`` problems answered exactly right by the weights of ``step``."""
    problems = task.held_out(recipe.data.held_out)
    url = f"{router_url.rstrip('/')}/generate"
    sampling = {"temperature": 0, "max_new_tokens": recipe.rollout.sampling.max_new_tokens}

    async def shard_of(asker: Asker, group: int) -> pa.Table:
        async def one(sample: int) -> dict[str, object]:
            problem = problems[group * _PER_SHARD + sample]
            payload = {
                "input_ids": list(problem.prompt_ids),
                "sampling_params": sampling,
                "return_logprob": True,
            }
            answer = await asker.post(url, payload, group, sample)
            ids, _, version, _ = read_answer(answer, f"evaluation of step {step}: {problem.prompt}")
            if version != weight_version:
                raise PermanentError(
                    f"evaluation of step {step}: answered with weights {version},"
                    f" not {weight_version}"
                )
            right = await asyncio.to_thread(task.check, problem.answer, ids, problem.metadata)
            return {
                "group": group,
                "sample": sample,
                "prompt": problem.prompt,
                "answer": problem.answer,
                "response": task.decode(ids),
                "right": right,
                "weight_version": version,
            }

        here = range(min(_PER_SHARD, len(problems) - group * _PER_SHARD))
        rows = await together(one(k) for k in here)
        return pa.Table.from_pylist(rows, schema=_SCHEMA)

    groups = range(-(-len(problems) // _PER_SHARD))
    limits = Limits(recipe.rollout.max_concurrency, recipe.rollout.request_timeout)
    done = await run_phase(store, step, layout.EVALUATED, groups, shard_of, limits, settle, beat)
    table = await asyncio.to_thread(store.read_table, done.staged)
    right = sum(table.column("right").to_pylist())
    return Evaluation(
        step=step,
        weight_version=weight_version,
        problems=table.num_rows,
        accuracy=right / table.num_rows,
    )
