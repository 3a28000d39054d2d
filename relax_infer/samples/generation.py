"""Groups of samples from the policy, through the router, into staging."""

import asyncio
from typing import Any

import pyarrow as pa

from relax_infer.config.recipe import Recipe
from relax_infer.contracts.batch import PhaseResult
from relax_infer.contracts.failures import PermanentError, TransientError
from relax_infer.samples import layout
from relax_infer.samples.phase import Asker, Beat, Limits, Settle, run_phase, together
from relax_infer.samples.sample import Sample, to_table
from relax_infer.samples.store import StagingStore
from relax_infer.samples.tasks import Problem, Task
from relax_infer.samples.top_log_probs import pairs_of, top_log_probs


async def generate(
    *,
    store: StagingStore,
    step: int,
    task: Task,
    recipe: Recipe,
    weight_version: int,
    settle: Settle,
    beat: Beat,
    router_url: str,
) -> PhaseResult:
    """``rollout.prompts_per_step`` groups of ``samples_per_prompt`` samples.

    Raises:
        TransientError: an engine or the router did not answer, or a request was aborted.
        PermanentError: a sample was made with other weights than ``weight_version``, or the
            engine's answer is malformed.
    """
    rollout = recipe.rollout
    problems = await asyncio.to_thread(task.prompts, recipe.seed, step, rollout.prompts_per_step)
    sampling = {
        "temperature": rollout.sampling.temperature,
        "top_p": rollout.sampling.top_p,
        "max_new_tokens": rollout.sampling.max_new_tokens,
    }
    url = f"{router_url.rstrip('/')}/generate"
    top_k = recipe.student_top_k
    more = {"top_logprobs_num": top_k} if top_k else {}

    async def group_of(asker: Asker, group: int) -> pa.Table:
        async def one(sample: int) -> Sample:
            answer = await asker.post(
                url,
                {
                    "input_ids": list(problems[group].prompt_ids),
                    "sampling_params": sampling,
                    "return_logprob": True,
                    **more,
                },
                group,
                sample,
            )
            where = f"step {step} group {group} sample {sample}"
            ids, log_probs, version, finish = read_answer(answer, where)
            if version != weight_version:
                raise PermanentError(
                    f"{where} was made with weights {version}, not {weight_version}",
                    cure="An engine answered before its weights were current; nothing was kept.",
                )
            made = _sample(
                store.run,
                step,
                group,
                sample,
                asker,
                problems[group],
                task,
                ids,
                log_probs,
                version,
                finish,
            )
            return made.model_copy(update=_top_k(answer, made, top_k)) if top_k else made

        samples = await together(one(k) for k in range(rollout.samples_per_prompt))
        return to_table(samples)

    limits = Limits(rollout.max_concurrency, rollout.request_timeout)
    groups = range(rollout.prompts_per_step)
    return await run_phase(store, step, layout.GENERATED, groups, group_of, limits, settle, beat)


def read_answer(answer: Any, where: str) -> tuple[list[int], list[float], int, str]:
    """Token ids, their log-probs, weight version and finish reason of a ``/generate`` answer."""
    try:
        meta, ids = answer["meta_info"], answer["output_ids"]
        rows, version = meta["output_token_logprobs"], int(meta["weight_version"])
        finish = str(meta["finish_reason"]["type"])
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise PermanentError(f"{where}: the engine's answer lacks {error}") from error
    if finish not in ("stop", "length"):
        raise TransientError(f"{where}: the request ended with {finish}")
    pairs = pairs_of(rows, where, "rollout_log_probs")
    if [token for _, token in pairs] != ids:
        raise PermanentError(f"{where}: log-probs are of other tokens than those sampled")
    return [token for _, token in pairs], [log_prob for log_prob, _ in pairs], version, finish


def _top_k(answer: Any, sample: Sample, top_k: int) -> dict[str, Any]:
    """The policy's likeliest tokens at each position, as it sampled."""
    field = "student_topk_log_probs"
    rows = answer["meta_info"].get("output_top_logprobs")
    if not isinstance(rows, list) or len(rows) != len(sample.response_ids):
        raise PermanentError(f"{sample.name}: {field} has not one row for each response token")
    pairs = list(top_log_probs(rows, sample.name, field, top_k))
    return {
        "student_topk_token_ids": tuple(tuple(ids) for ids, _ in pairs),
        field: tuple(tuple(log_probs) for _, log_probs in pairs),
    }


def _sample(
    run: str,
    step: int,
    group: int,
    sample: int,
    asker: Asker,
    problem: Problem,
    task: Task,
    ids: list[int],
    log_probs: list[float],
    version: int,
    finish: str,
) -> Sample:
    return Sample(
        run=run,
        step=step,
        group=group,
        sample=sample,
        attempt=asker.attempt,
        rid=asker.rid(group, sample),
        prompt=problem.prompt,
        prompt_ids=problem.prompt_ids,
        answer=problem.answer,
        response=task.decode(ids),
        response_ids=tuple(ids),
        rollout_log_probs=tuple(log_probs),
        loss_mask=(1,) * len(ids),
        weight_version=version,
        finish_reason=finish,
        metadata=problem.metadata,
    )
