"""Judging: a generative reward model says of each sample whether it is right."""

from typing import Any

import pyarrow as pa

from relax_infer.config.recipe import Recipe
from relax_infer.contracts.batch import PhaseResult
from relax_infer.contracts.failures import PermanentError
from relax_infer.contracts.refs import StagedRef
from relax_infer.samples import layout
from relax_infer.samples.phase import Asker, Beat, Limits, Settle, run_phase, together
from relax_infer.samples.sample import Sample
from relax_infer.samples.store import StagingStore
from relax_infer.samples.tasks import Task, UnparsableVerdict
from relax_infer.scoring.channels import JUDGED
from relax_infer.scoring.grouping import groups_of


async def score_with_genrm(
    *,
    store: StagingStore,
    step: int,
    task: Task,
    recipe: Recipe,
    weight_version: int,
    settle: Settle,
    beat: Beat,
    source: StagedRef,
    gateway_url: str,
) -> PhaseResult:
    """One verdict per sample, greedy, through the gateway.

    A response that hit its token limit takes ``reward.unfinished`` by the task's rule and is not
    asked about. A verdict that cannot be read is no score: its reward is null, with the judge's
    words beside it; write-back decides by the recipe what becomes of the group.

    Raises:
        TransientError: the gateway or the judge did not answer.
        PermanentError: the judge refused the request or answered something malformed.
    """
    genrm = recipe.genrm
    if genrm is None:
        raise PermanentError("there is no genrm section in the recipe to judge with")
    groups = await groups_of(store, source, recipe)
    url = f"{gateway_url.rstrip('/')}/genrm/generate"
    sampling = {"temperature": 0, "max_new_tokens": genrm.max_new_tokens}

    async def judge(asker: Asker, sample: Sample) -> dict[str, Any]:
        prompt = task.judge_prompt(sample.prompt_ids, sample.response_ids)
        if prompt is None:
            return _row(sample, recipe.reward.unfinished, "rule:unfinished", None)
        payload = {"model": genrm.model_id, "input_ids": prompt, "sampling_params": sampling}
        answer = await asker.post(url, payload, sample.group, sample.sample)
        try:
            output = [int(token) for token in answer["output_ids"]]
        except (KeyError, TypeError, ValueError) as error:
            raise PermanentError(f"{sample.name}: the judge's answer lacks {error}") from error
        source_name = f"genrm:{genrm.model_id}"
        try:
            return _row(sample, task.verdict(output), source_name, task.decode(output))
        except UnparsableVerdict as error:
            return _row(sample, None, source_name, f"unparsable verdict: {error}")

    async def group_of(asker: Asker, group: int) -> pa.Table:
        rows = await together(judge(asker, sample) for sample in groups[group])
        return pa.Table.from_pylist(rows, schema=JUDGED)

    limits = Limits(genrm.max_concurrency, genrm.request_timeout)
    return await run_phase(
        store, step, layout.JUDGED, range(len(groups)), group_of, limits, settle, beat
    )


def _row(sample: Sample, reward: float | None, source: str, detail: str | None) -> dict[str, Any]:
    return {
        "run": sample.run,
        "step": sample.step,
        "group": sample.group,
        "sample": sample.sample,
        "reward": reward,
        "reward_source": source,
        "reward_detail": detail,
    }
