"""Answers to named sets of problems, with pinned weights.

A path of its own: sets and sampling are the evaluation's, nothing of it is trained on, and an
answer of any other weights ends it.
"""

import asyncio
import statistics
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from relax_infer.config.evaluation import HELD_OUT, EvaluationSet
from relax_infer.config.recipe import Recipe
from relax_infer.contracts.failures import PermanentError
from relax_infer.contracts.run import Evaluation, SetEvaluation
from relax_infer.samples import layout
from relax_infer.samples.answers import read_answer
from relax_infer.samples.pass_at import pass_at_k, standard_error
from relax_infer.samples.phase import (
    Asker,
    Beat,
    Limits,
    RefusedError,
    Settle,
    run_phase,
    together,
)
from relax_infer.samples.store import StagingStore
from relax_infer.samples.tasks import Problem, Task, load_task

_PER_SHARD = 32

SCHEMA = pa.schema(
    [
        ("group", pa.int64()),
        ("sample", pa.int64()),
        ("problem", pa.int64()),
        ("prompt", pa.string()),
        ("answer", pa.string()),
        ("response", pa.string()),
        ("right", pa.bool_()),
        ("tokens", pa.int64()),
        ("finish_reason", pa.string()),
        ("weight_version", pa.int64()),
    ]
)
"""``right`` is null where the engine refused the request."""


def task_of_set(recipe: Recipe, plan: EvaluationSet, task: Task | None) -> Task:
    """The run's own ``task`` (None: it is made), or that of the set's source."""
    if plan.source is None:
        return task if task is not None else load_task(recipe)
    own = {"source": plan.source, "held_out": plan.problems, "config": plan.config}
    own |= {"seed": plan.seed, "path": plan.path, "sha256": plan.sha256, "teacher_field": None}
    data = recipe.data.model_copy(update=own)
    return load_task(recipe.model_copy(update={"data": data}))


def make_problems(recipe: Recipe, plan: EvaluationSet) -> list[Problem]:
    """The problems of a set of another source.

    Raises:
        PermanentError: naming the set: they cannot be had.
    """
    try:
        return task_of_set(recipe, plan, None).held_out(plan.problems)
    except PermanentError as error:
        raise PermanentError(f"evaluation set {plan.name}: {error}") from error


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
    """Every set of the recipe, answered by the weights of ``step`` alone.

    Raises:
        TransientError: an engine or the router did not answer.
        PermanentError: an answer was made with other weights than ``weight_version``.
    """
    sets: list[SetEvaluation] = []
    for plan in recipe.evaluation.resolved(recipe.data.held_out):
        own = await asyncio.to_thread(task_of_set, recipe, plan, task)
        answering = _Answering(own, recipe, plan, step, weight_version, router_url)
        limits = Limits(recipe.rollout.max_concurrency, recipe.rollout.request_timeout)
        done = await run_phase(
            store,
            step,
            layout.evaluated(None if plan.name == HELD_OUT else plan.name),
            answering.groups,
            answering.shard_of,
            limits,
            settle,
            beat,
        )
        table = await asyncio.to_thread(store.read_table, done.staged)
        sets.append(measure(table, plan))
    first = sets[0]
    return Evaluation(
        step=step,
        weight_version=weight_version,
        problems=first.problems,
        accuracy=first.accuracy,
        unanswered=sum(each.unanswered for each in sets),
        sets=tuple(sets),
    )


def measure(table: pa.Table, plan: EvaluationSet) -> SetEvaluation:
    """Accuracy and pass@k of a set's answers. One that was refused counts as not right."""
    right: dict[int, list[bool]] = defaultdict(list)
    for row in table.select(["problem", "right"]).to_pylist():
        right[row["problem"]].append(bool(row["right"]))
    shares = [statistics.fmean(answers) for answers in right.values()]
    finished = table.column("finish_reason").to_pylist()
    return SetEvaluation(
        name=plan.name,
        problems=len(right),
        samples=plan.samples,
        accuracy=statistics.fmean(shares),
        accuracy_error=standard_error(shares),
        pass_at={
            k: statistics.fmean(pass_at_k(len(a), sum(a), k) for a in right.values())
            for k in plan.pass_at
        },
        unanswered=table.column("right").null_count,
        truncated=finished.count("length"),
        response_tokens=sum(table.column("tokens").to_pylist()),
    )


@dataclass
class _Answering:
    """One set: shards of whole problems, each with all its answers."""

    task: Task
    recipe: Recipe
    plan: EvaluationSet
    step: int
    weight_version: int
    router_url: str

    def __post_init__(self) -> None:
        plan, sampling = self.plan, self.recipe.rollout.sampling
        self.problems = self.task.held_out(plan.problems)
        self.url = f"{self.router_url.rstrip('/')}/generate"
        self.sampling = {
            "temperature": plan.temperature,
            "top_p": plan.top_p,
            "max_new_tokens": plan.max_new_tokens or sampling.max_new_tokens,
        }

    @property
    def groups(self) -> range:
        return range(-(-len(self.problems) // _PER_SHARD))

    async def shard_of(self, asker: Asker, group: int) -> pa.Table:
        here = min(_PER_SHARD, len(self.problems) - group * _PER_SHARD)
        rows = await together(
            self._one(asker, group, sample) for sample in range(here * self.plan.samples)
        )
        return pa.Table.from_pylist(rows, schema=SCHEMA)

    async def _one(self, asker: Asker, group: int, sample: int) -> dict[str, Any]:
        number = group * _PER_SHARD + sample // self.plan.samples
        problem = self.problems[number]
        row = {
            "group": group,
            "sample": sample,
            "problem": number,
            "prompt": problem.prompt,
            "answer": problem.answer,
            "weight_version": self.weight_version,
        }
        try:
            answer = await asker.post(self.url, self._payload(problem), group, sample)
        except RefusedError as refused:
            return {**row, "response": str(refused), "tokens": 0, "finish_reason": "refused"}
        where = f"evaluation of step {self.step}, set {self.plan.name}: {problem.prompt}"
        ids, _, version, finish = read_answer(answer, where)
        if version != self.weight_version:
            raise PermanentError(
                f"{where}: answered with weights {version}, not {self.weight_version}"
            )
        check = self.task.check
        right = await asyncio.to_thread(check, problem.answer, ids, problem.metadata)
        return {
            **row,
            "response": self.task.decode(ids),
            "right": right,
            "tokens": len(ids),
            "finish_reason": finish,
        }

    def _payload(self, problem: Problem) -> dict[str, Any]:
        return {
            "input_ids": list(problem.prompt_ids),
            "sampling_params": self.sampling,
            "return_logprob": True,
        }
