"""What a batch is trained towards does not depend on padding, nor on who stands beside whom."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_infer.contracts.failures import PermanentError
from relax_infer.contracts.training import TrainerSpec
from relax_infer.training.batch import Batch, build_batch
from relax_infer.training.targets import Before, with_targets
from relax_infer.transfer import PublishedRows, Ragged, rows_of_table
from tests.training.conftest import make_spec
from tests.transfer.tables import scored_table, with_support

ESTIMATORS = ["grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"]
algorithms = st.fixed_dictionaries(
    {
        "estimator": st.sampled_from(ESTIMATORS),
        "normalise_std": st.booleans(),
        "loss_aggregation": st.sampled_from(["token_mean", "sequence_mean", "sequence_sum"]),
        "gamma": st.sampled_from([1.0, 0.9]),
        "gae_lambda": st.sampled_from([1.0, 0.5]),
        "kl_coefficient": st.sampled_from([0.0, 0.3]),
        "kl_in": st.sampled_from(["loss", "reward"]),
        "old_log_probs": st.just("trainer"),
        "importance": st.sampled_from(["none", "token", "sequence"]),
    }
)


def spec_of(**changes: object) -> TrainerSpec:

    return make_spec(Path("/store"), Path("/model"), **changes)


def before(batch: Batch, seed: int) -> Before:
    generator = torch.Generator().manual_seed(seed)

    def random() -> torch.Tensor:
        return -torch.rand(batch.ids.shape, generator=generator)

    return Before(random(), random() * batch.mask, random())


def reordered(rows: PublishedRows, order: list[int]) -> PublishedRows:
    def of(column: object) -> object:
        if isinstance(column, Ragged):
            parts = [column.rows()[i] for i in order]
            return Ragged(np.concatenate(parts), column.lengths[order])
        return column[order]  # pyright: ignore[reportIndexIssue]

    return PublishedRows({name: of(column) for name, column in rows.columns.items()})  # pyright: ignore[reportArgumentType]


TARGETS = ("advantages", "weights", "importance", "old_log_probs")


@settings(deadline=None, max_examples=60)
@given(algorithm=algorithms, seed=st.integers(0, 1000))
def test_the_order_of_samples_changes_nothing(algorithm: dict[str, object], seed: int) -> None:
    spec = spec_of(algorithm=algorithm, longest_response=5)
    rows = rows_of_table(scored_table(groups=3, samples=3, seed=seed))
    order = np.random.default_rng(seed).permutation(len(rows)).tolist()
    batch = build_batch(rows)
    told = before(batch, seed)
    shuffled = Before(*(t[order] for t in (told.log_probs, told.reference_log_probs, told.values)))  # pyright: ignore[reportOptionalSubscript]
    straight = with_targets(batch, rows, spec, told)
    mixed = reordered(rows, order)
    other = with_targets(build_batch(mixed), mixed, spec, shuffled)
    for name in TARGETS:
        torch.testing.assert_close(
            getattr(other, name), getattr(straight, name)[order], atol=1e-4, rtol=1e-4
        )
    assert other.shares.tolist() == straight.shares[order].tolist()


@settings(deadline=None, max_examples=60)
@given(algorithm=algorithms, seed=st.integers(0, 1000), more=st.integers(1, 5))
def test_padding_changes_nothing(algorithm: dict[str, object], seed: int, more: int) -> None:
    spec = spec_of(algorithm=algorithm, longest_response=5)
    rows = rows_of_table(scored_table(groups=3, samples=3, seed=seed))
    batch = build_batch(rows)
    told = before(batch, seed)
    tokens = batch.ids.shape[1]
    longer = batch.padded_to(tokens + more)
    assert longer.ids.shape[1] == tokens + more
    filled = Before(
        *(
            torch.cat([t, torch.full((len(t), more), 7.0)], 1)  # pyright: ignore[reportArgumentType, reportCallIssue]
            for t in (told.log_probs, told.reference_log_probs, told.values)
        )
    )
    straight = with_targets(batch, rows, spec, told)
    padded = with_targets(longer, rows, spec, filled)
    for name in TARGETS:
        found = getattr(padded, name)
        torch.testing.assert_close(found[:, :tokens], getattr(straight, name))
        assert set(found[:, tokens:].unique().tolist()) <= {0.0 if name != "importance" else 1.0}
    assert padded.shares.tolist() == straight.shares.tolist()


@pytest.mark.parametrize(("mode", "ragged"), [("teacher_topk", False), ("union", True)])
def test_the_support_of_each_token_is_at_the_position_that_predicts_it(
    mode: str, ragged: bool
) -> None:
    table = with_support(scored_table(), k=3, ragged=ragged)
    batch = build_batch(rows_of_table(table), top_k=3)
    assert batch.support_ids is not None
    assert batch.support_teacher is not None
    for row, sample in enumerate(table.to_pylist()):
        start = len(sample["prompt_ids"]) - 1
        stop = start + len(sample["response_ids"])
        for token, position in enumerate(range(start, stop)):
            wanted = sample["opd_topk_token_ids"][token]
            found = batch.support_ids[row, position]
            assert found[found >= 0].tolist() == wanted
            teacher = batch.support_teacher[row, position][found >= 0]
            assert teacher.tolist() == pytest.approx(sample["opd_topk_teacher_log_probs"][token])
        assert (batch.support_ids[row, stop:] == -1).all()
        assert (batch.support_ids[row, :start] == -1).all()


@pytest.mark.parametrize(
    ("mode", "told"), [("teacher_topk", "no opd_topk_token_ids"), ("union", "no opd_topk_ksz")]
)
def test_a_support_that_the_recipe_distils_over_must_be_there(mode: str, told: str) -> None:
    table = scored_table()
    if mode == "union":
        table = with_support(table, k=3)
    rows = rows_of_table(table)
    batch = build_batch(rows, top_k=3)
    spec = spec_of(distillation_mode=mode)
    with pytest.raises(PermanentError, match=told):
        with_targets(batch, rows, spec, before(batch, 0))


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 1000), limit=st.integers(1, 60), multiple=st.sampled_from([1, 2, 4]))
def test_packs_hold_every_token_once_in_order(seed: int, limit: int, multiple: int) -> None:
    table = with_support(scored_table(groups=3, samples=3, seed=seed), ragged=True)
    batch = build_batch(rows_of_table(table))
    packs = batch.micro_batches(limit, packed=True, multiple=multiple)
    real = torch.arange(batch.ids.shape[1]) < batch.lengths[:, None]
    for name in ("ids", "labels", "mask", "rollout_log_probs", "weights", "support_ids"):
        wanted = getattr(batch, name)[real]
        parts: list[torch.Tensor] = []
        for pack in packs:
            tensor = getattr(pack, name)[0]
            kept = int(pack.lengths.sum()) - (int(pack.lengths[-1]) if _padded(pack) else 0)
            parts.append(tensor[:kept])
        assert torch.equal(torch.cat(parts), wanted)
    for pack in packs:
        assert pack.ids.shape[1] % multiple == 0
        assert pack.ids.shape[1] == pack.lengths.sum()
        sequences = len(pack.lengths) - _padded(pack)
        assert sequences == 1 or pack.lengths[:sequences].sum() <= limit
    assert sum(int(pack.shares.sum()) for pack in packs) == batch.shares.sum()


def _padded(pack: Batch) -> bool:
    """Whether the last sequence of the pack is padding."""
    return len(pack.lengths) > len(pack.shares)
