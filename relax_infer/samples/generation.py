"""Groups of samples from the policy, through the router, into staging."""

import asyncio
from typing import Any

import pyarrow as pa

from relax_infer.config.recipe import Recipe
from relax_infer.contracts.batch import PhaseResult
from relax_infer.contracts.failures import PermanentError
from relax_infer.samples import layout
from relax_infer.samples.answers import read_answer
from relax_infer.samples.episodes import Addresses, Episodes, Response, nobody
from relax_infer.samples.phase import Asker, Beat, Limits, Settle, run_phase, together
from relax_infer.samples.sample import Sample, to_table
from relax_infer.samples.store import StagingStore
from relax_infer.samples.tasks import Task
from relax_infer.samples.top_log_probs import top_log_probs


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
    addresses: Addresses = nobody,
) -> PhaseResult:
    """``rollout.prompts_per_step`` groups of ``samples_per_prompt`` samples.

    Args:
        addresses: of the policy's replicas; episodes stay with one.

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
    episodes = Episodes(recipe, task, addresses) if rollout.environment else None

    async def group_of(asker: Asker, group: int) -> pa.Table:
        async def one(sample: int) -> Sample:
            if episodes is not None:
                played = await episodes.play(asker, problems[group], group, sample, weight_version)
                return made(sample, *played)
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
            response = Response()
            response.said(read_answer(answer, where).require(weight_version, where))
            whole = made(sample, response, problems[group].metadata)
            return whole.model_copy(update=_top_k(answer, whole, top_k)) if top_k else whole

        def made(sample: int, response: Response, metadata: str) -> Sample:
            return Sample(
                run=store.run,
                step=step,
                group=group,
                sample=sample,
                attempt=asker.attempt,
                rid=asker.rid(group, sample),
                prompt=problems[group].prompt,
                prompt_ids=problems[group].prompt_ids,
                answer=problems[group].answer,
                response=task.decode(response.ids),
                response_ids=tuple(response.ids),
                rollout_log_probs=tuple(response.log_probs),
                loss_mask=tuple(response.mask),
                weight_version=weight_version,
                finish_reason=response.finish,
                metadata=metadata,
            )

        samples = await together(one(k) for k in range(rollout.samples_per_prompt))
        return to_table(samples)

    limits = Limits(rollout.max_concurrency, rollout.request_timeout)
    groups = range(rollout.prompts_per_step)
    return await run_phase(store, step, layout.GENERATED, groups, group_of, limits, settle, beat)


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
