"""Teaching: the Teacher's log-probs along the responses that the policy sampled.

On-policy distillation, in four token modes (contract of the teacher protocol; DESIGN on stock
SGLang): of the sampled token, and beside it of the policy's K likeliest tokens, of the Teacher's
own, or of both. Temperature does not enter: SGLang gives untempered input log-probs, so the recipe
makes the policy sample at temperature 1, where the two can be compared. A Teacher that fails
leaves no row; nothing is filled with zeros (pain 14).
"""

import json
from typing import Any

import pyarrow as pa

from relax_infer.config.recipe import Recipe
from relax_infer.config.scoring import Distillation, Teacher
from relax_infer.contracts.batch import PhaseResult
from relax_infer.contracts.failures import PermanentError
from relax_infer.contracts.refs import StagedRef
from relax_infer.samples import layout
from relax_infer.samples.phase import Asker, Beat, Limits, Settle, run_phase, together
from relax_infer.samples.sample import Sample
from relax_infer.samples.store import StagingStore
from relax_infer.samples.tasks import TEACHER, Task
from relax_infer.scoring.channels import taught_schema
from relax_infer.scoring.grouping import groups_of
from relax_infer.scoring.prefills import (
    Piece,
    log_probs_at,
    own_log_probs,
    pieces,
    prefill,
    sampled_log_probs,
)
from relax_infer.security import gateway_headers

AFFINITY = "X-SMG-Routing-Key"
Columns = dict[str, list[Any]]


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
    """The channels of ``distillation.mode`` for each sample, through the gateway or at
    ``teacher.url``.

    The samples of a group go to one replica, whose cache holds their prompt: of the Teacher that
    their metadata names, else of the recipe's first.

    Raises:
        TransientError: the gateway or the Teacher did not answer.
        PermanentError: the Teacher's log-probs are not of exactly the tokens that were asked for;
            names sample and field.
    """
    teacher = recipe.teacher
    if teacher is None:
        raise PermanentError("there is no teacher section in the recipe to be taught by")
    plan = recipe.distillation or Distillation()
    schema = taught_schema(plan.mode)
    groups = await groups_of(store, source, recipe)
    url = f"{teacher.url or gateway_url.rstrip('/') + '/teacher'}/generate"

    async def teach(asker: Asker, sample: Sample) -> dict[str, Any]:
        asked = _Lesson(sample, plan, teacher, task.vocab_size)
        model = json.loads(sample.metadata).get(TEACHER, teacher.model_id)
        headers = {AFFINITY: json.dumps([model, sample.group])}

        async def ask(number: int, piece: Piece) -> Columns:
            answer = await asker.post(
                url,
                prefill(sample, None if teacher.url else model, piece, asked.own),
                sample.group,
                sample.sample,
                part=f"p{number}" if len(asked.pieces) > 1 else "",
                headers=headers if teacher.url else {**headers, **gateway_headers()},
            )
            return asked.read(answer, piece)

        parts = await together(ask(number, piece) for number, piece in enumerate(asked.pieces))
        identity = {name: getattr(sample, name) for name in ("run", "step", "group", "sample")}
        channels = [name for name in schema.names if name not in identity]
        return identity | {name: [r for part in parts for r in part[name]] for name in channels}

    async def group_of(asker: Asker, group: int) -> pa.Table:
        rows = await together(teach(asker, sample) for sample in groups[group])
        return pa.Table.from_pylist(rows, schema=schema)

    limits = Limits(teacher.max_concurrency, teacher.request_timeout)
    return await run_phase(
        store,
        step,
        layout.TAUGHT,
        range(len(groups)),
        group_of,
        limits,
        settle,
        beat,
        elsewhere=teacher.url is not None,
    )


class _Lesson:
    """What is asked about one sample. An empty response is asked nothing: its channels are empty,
    not missing."""

    def __init__(
        self, sample: Sample, plan: Distillation, teacher: Teacher, vocab_size: int
    ) -> None:
        self._sample, self._vocab_size, self._top_k = sample, vocab_size, plan.top_k
        self.own = plan.top_k if plan.mode in ("teacher_topk", "union") else 0
        self._wanted: tuple[tuple[int, ...], ...] | None = None
        if plan.mode in ("student_topk", "union"):
            self._wanted = _student_ids(sample, plan.top_k)
        tokens = len(sample.response_ids)
        self.pieces = (
            pieces(tokens, self._wanted, self.own, teacher.max_logprob_cells) if tokens else []
        )

    def read(self, answer: Any, piece: Piece) -> Columns:
        """Every channel of the piece, one entry for each of its tokens."""
        sample = self._sample
        found: Columns = {
            "teacher_log_probs": sampled_log_probs(answer, sample, piece, self._vocab_size)
        }
        if self._wanted is not None:
            found["teacher_at_student_topk_log_probs"] = log_probs_at(
                answer, sample, piece, self._wanted
            )
        if self.own:
            rows = own_log_probs(answer, sample, piece, self._top_k)
            found["teacher_topk_token_ids"] = [ids for ids, _ in rows]
            found["teacher_topk_log_probs"] = [log_probs for _, log_probs in rows]
        return found


def _student_ids(sample: Sample, top_k: int) -> tuple[tuple[int, ...], ...]:
    rows = sample.student_topk_token_ids
    if rows is None:
        raise PermanentError(
            f"{sample.name}: student_topk_token_ids is missing: the samples were generated in"
            " another distillation.mode"
        )
    if any(len(set(row)) != top_k or len(row) != top_k for row in rows):
        raise PermanentError(f"{sample.name}: student_topk_token_ids has a row not of {top_k}")
    return rows
