"""Write-back: scores joined to their samples in a new file, once every channel is valid.

Column by column: no sample becomes a Python object unless a rule has to look at it.
"""

from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa

from relax_infer.config.recipe import Recipe
from relax_infer.contracts.batch import WriteBackResult
from relax_infer.contracts.failures import PermanentError
from relax_infer.contracts.refs import StagedRef
from relax_infer.samples import layout
from relax_infer.samples.sample import SCHEMA, from_table
from relax_infer.samples.store import StagingStore
from relax_infer.samples.tasks import Task
from relax_infer.scoring import top_k
from relax_infer.scoring.channels import IDS, LOG_PROBS
from relax_infer.scoring.grouping import check_capacity
from relax_infer.scoring.rewards import RewardAdapter, require_usable, scores_by_rule
from relax_infer.scoring.validation import NAMED, list_lengths, sample_name, validate_table

_REWARD = ("reward", "reward_source", "reward_detail")
_RULED_AT_ONCE = 4096
"""Samples that are Python objects at the same time, unless the rule wants all of them."""


def write_back(
    store: StagingStore,
    step: int,
    *,
    generated: StagedRef,
    judged: StagedRef | None,
    taught: StagedRef | None,
    task: Task,
    recipe: Recipe,
) -> WriteBackResult:
    """Join rewards and the Teacher's channels to the samples; earlier files are never changed.

    A sample without a score fails the batch, or its group is dropped with the reason, as
    ``reward.on_unscored`` says; it never gets a number. Prompts issued = kept + dropped.

    Raises:
        PermanentError: names the samples and the field that is missing or wrong.
    """
    check_capacity(generated, recipe)
    table = _in_order(store.read_table(generated))
    adapter = require_usable(recipe.reward.source)
    if judged is not None:
        table = _with(table, _channel(store, judged, table), _REWARD)
    elif adapter.by_rule:
        table = _ruled(table, adapter, task, recipe)
    if taught is not None:
        table = _taught(table, _channel(store, taught, table), recipe)
    dropped: dict[int, str] = {}
    if recipe.reward.source != "none":
        dropped = _unscored_groups(table, recipe)
    kept = table
    if dropped:
        groups = table.column("group").to_numpy()
        kept = table.filter(pa.array(~np.isin(groups, list(dropped))))
    if not kept.num_rows:
        raise PermanentError(
            f"step {step}: every group was dropped: {dict(Counter(dropped.values()))}"
        )
    distillation = recipe.distillation
    validate_table(
        kept,
        needs_reward=recipe.reward.source != "none",
        needs_teacher=recipe.distilled,
        mode=distillation.mode if distillation else "student_sampled",
        top_k=distillation.top_k if distillation else 0,
        vocab_size=task.vocab_size,
    )
    return WriteBackResult(
        staged=store.write_table(layout.scored(step), kept),
        dropped_groups=len(dropped),
        drop_reasons=dict(Counter(dropped.values())),
    )


def _keys(table: pa.Table) -> Any:
    """(group, sample) of each row, [n, 2]."""
    return np.stack([table.column(c).to_numpy() for c in ("group", "sample")], axis=1)


def _in_order(table: pa.Table) -> pa.Table:
    """By (group, sample); a copy only where it is not."""
    keys = _keys(table)
    order = np.lexsort((keys[:, 1], keys[:, 0]))
    if (order == np.arange(len(order))).all():
        return table
    return table.take(pa.array(order))


def _channel(store: StagingStore, staged: StagedRef, samples: pa.Table) -> pa.Table:
    """A score file in the samples' order; it must speak of exactly the generated samples."""
    table = _in_order(store.read_table(staged))
    given, expected = _keys(table), _keys(samples)
    if len(given) != len(expected) or (given != expected).any():
        there = set(map(tuple, given.tolist()))
        missing = [key for key in map(tuple, expected.tolist()) if key not in there][:NAMED]
        raise PermanentError(
            f"{staged.uri} has {len(given)} rows for {len(expected)} samples; missing (group,"
            f" sample): {missing}"
        )
    for name in ("run", "step"):
        due = samples.column(name)[0].as_py()
        if others := set(table.column(name).unique().to_pylist()) - {due}:
            raise PermanentError(f"{staged.uri} holds scores of {name} {others.pop()}, not {due}")
    return table


def _with(table: pa.Table, scores: pa.Table, names: tuple[str, ...]) -> pa.Table:
    for name in names:
        field = SCHEMA.field(name)
        table = table.set_column(
            table.schema.get_field_index(name), field, scores.column(name).cast(field.type)
        )
    return table


def _ruled(table: pa.Table, adapter: RewardAdapter, task: Task, recipe: Recipe) -> pa.Table:
    at_once = table.num_rows if adapter.batched else _RULED_AT_ONCE
    scores = [
        score
        for start in range(0, table.num_rows, at_once)
        for score in scores_by_rule(
            adapter,
            from_table(table.slice(start, at_once)),
            task,
            unfinished=recipe.reward.unfinished,
        )
    ]
    columns = {
        "reward": [score.reward for score in scores],
        "reward_source": [score.source for score in scores],
        "reward_detail": [score.detail for score in scores],
    }
    schema = pa.schema([SCHEMA.field(name) for name in _REWARD])
    return _with(table, pa.table(columns, schema=schema), _REWARD)


def _taught(table: pa.Table, lessons: pa.Table, recipe: Recipe) -> pa.Table:
    """The Teacher's channels; those over several tokens a position are put together here."""
    table = _with(table, lessons, ("teacher_log_probs",))
    distillation = recipe.distillation
    if distillation is None or distillation.mode == "student_sampled":
        return table
    response = list_lengths(table.column("response_ids"))

    def rows(source: pa.Table, name: str) -> Any:
        if name not in source.column_names or source.column(name).null_count:
            raise PermanentError(f"{name} is missing, distillation.mode is {distillation.mode}")
        column = source.column(name)
        if (off := np.nonzero(list_lengths(column) != response)[0]).size:
            where = sample_name(table, int(off[0]))
            raise PermanentError(f"{where}: {name} has not one row for each response token")
        try:
            return top_k.rectangle_of(column, distillation.top_k)
        except ValueError as error:
            raise PermanentError(f"{name}: {error}") from error

    match distillation.mode:
        case "student_topk":
            made = top_k.student_top_k(
                rows(table, "student_topk_token_ids"),
                rows(table, "student_topk_log_probs"),
                rows(lessons, "teacher_at_student_topk_log_probs"),
            )
        case "teacher_topk":
            made = top_k.teacher_top_k(
                rows(lessons, "teacher_topk_token_ids"), rows(lessons, "teacher_topk_log_probs")
            )
        case "union":
            made = top_k.union(
                rows(table, "student_topk_token_ids"),
                rows(table, "student_topk_log_probs"),
                rows(lessons, "teacher_at_student_topk_log_probs"),
                rows(lessons, "teacher_topk_token_ids"),
                rows(lessons, "teacher_topk_log_probs"),
            )
    columns = {
        "opd_topk_token_ids": top_k.nested(made.ids, made.ksz, response, IDS.value_type.value_type),
        "opd_topk_teacher_log_probs": top_k.nested(
            made.teacher, made.ksz, response, LOG_PROBS.value_type.value_type
        ),
    }
    if made.student is not None:
        columns["opd_topk_student_log_probs"] = top_k.nested(
            made.student, made.ksz, response, LOG_PROBS.value_type.value_type
        )
    if distillation.mode == "union":
        columns["opd_topk_ksz"] = top_k.per_token(made.ksz, response, pa.int32())
    for name, column in columns.items():
        table = table.append_column(name, column)
    return table


def _unscored_groups(table: pa.Table, recipe: Recipe) -> dict[int, str]:
    """Groups with a sample that has no reward, and why; an error when the recipe drops none."""
    rows = np.nonzero(table.column("reward").is_null().to_numpy())[0].tolist()
    reasons = {row: table.column("reward_detail")[row].as_py() or "no reward" for row in rows}
    if rows and recipe.reward.on_unscored == "fail":
        named = "; ".join(f"{sample_name(table, row)}: {reasons[row]}" for row in rows[:NAMED])
        raise PermanentError(
            f"{len(rows)} samples have no score: {named}",
            cure="Mend the judge and retry the step, or set reward.on_unscored to drop_group.",
        )
    return {
        table.column("group")[row].as_py(): reason.partition(":")[0]
        for row, reason in reasons.items()
    }
