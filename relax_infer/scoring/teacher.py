"""Teaching: the Teacher's log-probs of the tokens that the policy sampled.

On-policy distillation in the mode *student sampled* (spec of the teacher protocol: one prefill per
sample with ``max_new_tokens`` 0). Temperature does not enter: SGLang gives untempered input
log-probs, so the policy must sample at temperature 1 for the two to be comparable.
"""

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
from relax_infer.samples.tasks import Task
from relax_infer.scoring.channels import TAUGHT
from relax_infer.scoring.grouping import groups_of


async def score_with_teacher(
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
    """R log-probs per sample, through the gateway.

    Raises:
        TransientError: the gateway or the Teacher did not answer.
        PermanentError: the Teacher's log-probs are not of exactly the sampled tokens.
    """
    teacher = recipe.teacher
    if teacher is None:
        raise PermanentError("there is no teacher section in the recipe to be taught by")
    groups = await groups_of(store, source, recipe)
    url = f"{gateway_url.rstrip('/')}/teacher/generate"

    async def teach(asker: Asker, sample: Sample) -> dict[str, Any]:
        log_probs: list[float] = []
        if sample.response_ids:
            answer = await asker.post(
                url, _prefill(sample, teacher.model_id), sample.group, sample.sample
            )
            log_probs = input_log_probs(answer, sample, task.vocab_size)
        return {
            "run": sample.run,
            "step": sample.step,
            "group": sample.group,
            "sample": sample.sample,
            "teacher_log_probs": log_probs,
        }

    async def group_of(asker: Asker, group: int) -> pa.Table:
        rows = await together(teach(asker, sample) for sample in groups[group])
        return pa.Table.from_pylist(rows, schema=TAUGHT)

    limits = Limits(teacher.max_concurrency, teacher.request_timeout)
    return await run_phase(
        store, step, layout.TAUGHT, range(len(groups)), group_of, limits, settle, beat
    )


def _prefill(sample: Sample, model: str) -> dict[str, Any]:
    return {
        "model": model,
        "input_ids": [*sample.prompt_ids, *sample.response_ids],
        "sampling_params": {"temperature": 0, "max_new_tokens": 0, "skip_special_tokens": False},
        "return_logprob": True,
        "logprob_start_len": max(len(sample.prompt_ids) - 1, 0),
    }


def input_log_probs(answer: Any, sample: Sample, vocab_size: int) -> list[float]:
    """The R log-probs in a prefill's answer; its first entry is the last prompt token's.

    SGLang names the vocabulary's last token 0 in this list (it clips the padding values of image
    tokens so); the log-prob beside it is the token's own.
    """
    try:
        rows = answer["meta_info"]["input_token_logprobs"]
        tokens = [int(row[1]) for row in rows]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise PermanentError(f"{sample.name}: the Teacher's answer lacks {error}") from error
    expected = len(sample.response_ids) + 1
    if len(rows) != expected:
        raise PermanentError(
            f"{sample.name}: the Teacher gave {len(rows)} log-probs, {expected} were due"
        )
    named = [0 if token >= vocab_size - 1 else token for token in sample.response_ids]
    if tokens[1:] != named:
        raise PermanentError(f"{sample.name}: the Teacher's log-probs are of other tokens")
    return [float(row[0]) for row in rows[1:]]
