"""Judging: generative reward models say of each sample what it is worth.

Where a score can get lost, and what becomes of it (pains 9 and 10):

- a judge that is busy is asked again; one that is gone, silent or aborts is a failure of the
  attempt, which the step repeats; one that answers nonsense HTTP fails the phase. None of them
  leaves a row.
- a verdict that is empty, truncated, doubtful or out of range, or a sample that the judge refuses
  to look at, leaves a row without a reward, with the reason. Write-back decides by the recipe what
  becomes of its group.
"""

import json
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from relax_infer.config.recipe import Recipe
from relax_infer.config.scoring import GenRM
from relax_infer.contracts.batch import PhaseResult
from relax_infer.contracts.failures import PermanentError, TransientError
from relax_infer.contracts.refs import StagedRef
from relax_infer.samples import layout
from relax_infer.samples.phase import (
    Asker,
    Beat,
    Limits,
    RefusedError,
    Settle,
    run_phase,
    together,
)
from relax_infer.samples.sample import Sample
from relax_infer.samples.store import StagingStore
from relax_infer.samples.tasks import Task, UnparsableVerdict, Unscored
from relax_infer.scoring.channels import JUDGED
from relax_infer.scoring.combining import combine
from relax_infer.scoring.grouping import groups_of
from relax_infer.scoring.judge_prompts import JudgePrompts
from relax_infer.scoring.rewards import Score
from relax_infer.scoring.verdicts import read_verdict
from relax_infer.security import gateway_headers

_IDS = 1 << 31
"""No vocabulary has so many."""


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
    judges: Mapping[str, str] | None = None,
) -> PhaseResult:
    """One verdict of each judge per sample, through the gateway or at ``genrm.url``.

    A response that hit its token limit takes ``reward.unfinished`` by the task's rule and is not
    asked about. A verdict that cannot be read is no score: its reward is null, with the judge's
    words beside it.

    Args:
        judges: Hugging Face folder of each judge by its model id; only needed with a
            ``genrm.prompt``, for the tokenizers.

    Raises:
        TransientError: the gateway or a judge did not answer.
        PermanentError: a judge answered something malformed, or its prompt cannot be made.
    """
    genrm = recipe.genrm
    if genrm is None:
        raise PermanentError("there is no genrm section in the recipe to judge with")
    groups = await groups_of(store, source, recipe)
    models = (genrm.model_id, *(model.model_id for model in genrm.extra_models))
    prompts = _prompts(genrm, models, judges or {})
    url = f"{genrm.url or gateway_url.rstrip('/') + '/genrm'}/generate"
    sampling = {
        **genrm.sampling.model_dump(exclude_none=True),
        "max_new_tokens": genrm.max_new_tokens,
    }

    async def ask(asker: Asker, sample: Sample, model: str, shown: list[int]) -> Score:
        name = f"genrm:{model}"
        try:
            answer = await asker.post(
                url,
                {
                    **({} if genrm.url else {"model": model}),
                    "input_ids": shown,
                    "sampling_params": sampling,
                },
                sample.group,
                sample.sample,
                part=model if len(models) > 1 else "",
                headers=None if genrm.url else gateway_headers(),
                retries=genrm.retries,
            )
        except RefusedError as error:
            return Score(None, name, f"the judge refused: {error}")
        output, finish = read_output(answer, sample.name)
        try:
            if finish == "length" and (not output or output[-1] != task.eos_id or prompts):
                raise Unscored(f"truncated verdict: {_words(task, prompts, model, output)!r}")
            if genrm.verdict is None:
                return Score(task.verdict(output), name, task.decode(output))
            words = prompts[model].decode(output)
            return Score(read_verdict(words, genrm.verdict, recipe.reward.key), name, words)
        except UnparsableVerdict as error:
            return Score(None, name, f"unparsable verdict: {error}")
        except Unscored as error:
            return Score(None, name, str(error))

    async def judge(asker: Asker, sample: Sample) -> dict[str, Any]:
        shown = _shown(task, prompts, models, sample)
        if shown is None:
            return _row(sample, Score(recipe.reward.unfinished, "rule:unfinished"))
        scores = await together(ask(asker, sample, model, shown[model]) for model in models)
        return _row(sample, _combined(dict(zip(models, scores, strict=True)), recipe))

    async def group_of(asker: Asker, group: int) -> pa.Table:
        rows = await together(judge(asker, sample) for sample in groups[group])
        return pa.Table.from_pylist(rows, schema=JUDGED)

    limits = Limits(genrm.max_concurrency, genrm.request_timeout)
    return await run_phase(
        store,
        step,
        layout.JUDGED,
        range(len(groups)),
        group_of,
        limits,
        settle,
        beat,
        elsewhere=genrm.url is not None,
    )


def read_output(answer: Any, where: str) -> tuple[list[int], str]:
    """Token ids and finish reason of a judge's answer.

    Raises:
        TransientError: the request was aborted, so what it had said by then is no verdict.
        PermanentError: the answer is malformed.
    """
    try:
        output, finish = answer["output_ids"], answer["meta_info"]["finish_reason"]["type"]
    except (KeyError, TypeError, IndexError) as error:
        raise PermanentError(f"{where}: the judge's answer lacks {error}") from error
    if not isinstance(output, list) or not all(
        type(token) is int and 0 <= token < _IDS for token in output
    ):
        raise PermanentError(f"{where}: output_ids of the judge's answer are no token ids")
    if finish == "abort":
        raise TransientError(f"{where}: the judge's request was aborted")
    if finish not in ("stop", "length"):
        raise PermanentError(f"{where}: the judge's answer ended with {finish!r}")
    return output, finish


def _prompts(
    genrm: GenRM, models: tuple[str, ...], folders: Mapping[str, str]
) -> dict[str, JudgePrompts]:
    if genrm.prompt is None:
        return {}
    if missing := [model for model in models if model not in folders]:
        raise PermanentError(f"genrm.prompt: where the tokenizer of {missing[0]} is is not known")
    return {model: JudgePrompts(genrm, model, folders[model]) for model in models}


def _shown(
    task: Task, prompts: dict[str, JudgePrompts], models: tuple[str, ...], sample: Sample
) -> dict[str, list[int]] | None:
    """Prompt of each judge; None for a response that is not whole."""
    if prompts:
        return {m: prompts[m].ids(sample) for m in models} if sample.finished else None
    shown = task.judge_prompt(sample.prompt_ids, sample.response_ids)
    return None if shown is None else dict.fromkeys(models, shown)


def _words(task: Task, prompts: dict[str, JudgePrompts], model: str, output: list[int]) -> str:
    return prompts[model].decode(output) if prompts else task.decode(output)


def _combined(scores: dict[str, Score], recipe: Recipe) -> Score:
    if len(scores) == 1:
        return next(iter(scores.values()))
    source = f"genrm:{'+'.join(scores)}"
    for model, score in scores.items():
        if score.reward is None:
            kind, _, why = (score.detail or "no reward").partition(": ")
            return Score(None, source, f"{kind}: {model}: {why}")
    reward = combine({model: s.reward for model, s in scores.items()}, recipe.reward.combine)
    told = {model: {"score": s.reward, "said": s.detail} for model, s in scores.items()}
    return Score(reward, source, json.dumps(told))


def _row(sample: Sample, score: Score) -> dict[str, Any]:
    return {
        "run": sample.run,
        "step": sample.step,
        "group": sample.group,
        "sample": sample.sample,
        "reward": score.reward,
        "reward_source": score.source,
        "reward_detail": score.detail,
    }
