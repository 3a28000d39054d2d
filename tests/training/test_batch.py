"""Rows as padded tensors, and the order in which they are trained on."""

import itertools

import torch

from relax_infer.training.batch import MICRO_BATCH_TOKENS, build_batch, mini_batches
from relax_infer.transfer import rows_of_table
from tests.transfer.tables import scored_table


def test_what_is_known_of_a_token_is_at_the_position_that_predicts_it() -> None:
    rows = rows_of_table(scored_table())
    batch = build_batch(rows)
    for row, (prompt, response, log_probs, teacher) in enumerate(
        zip(
            *(
                rows.ragged(name).rows()
                for name in ("prompt_ids", "response_ids", "rollout_log_probs", "teacher_log_probs")
            ),
            strict=True,
        )
    ):
        trained = batch.mask[row] == 1
        assert batch.labels[row][trained].tolist() == response.tolist()
        assert batch.rollout_log_probs[row][trained].tolist() == log_probs.tolist()
        assert batch.teacher_log_probs[row][trained].tolist() == teacher.tolist()
        assert batch.ids[row][: len(prompt)].tolist() == prompt.tolist()
        if len(response):
            assert trained.nonzero()[0].item() == len(prompt) - 1
        assert not batch.rollout_log_probs[row][~trained].any()


def test_a_mask_of_the_environment_is_kept() -> None:
    table = scored_table()
    masks = [[0] * len(mask) for mask in table.column("loss_mask").to_pylist()]
    where = table.schema.get_field_index("loss_mask")
    import pyarrow as pa

    field = table.schema.field(where)
    table = table.set_column(where, field, pa.array(masks, type=field.type))
    assert not build_batch(rows_of_table(table)).mask.any()


def test_micro_batches_are_bounded_and_lose_nothing() -> None:
    batch = build_batch(rows_of_table(scored_table(groups=500, samples=8)))
    micro = batch.micro_batches()
    assert len(micro) > 1
    assert all(part.ids.numel() <= MICRO_BATCH_TOKENS for part in micro)
    assert torch.equal(torch.cat([part.ids for part in micro]), batch.ids)


def test_mini_batches_are_a_permutation_that_seed_and_step_decide() -> None:
    def parts(seed: int, step: int) -> list[list[int]]:
        return [part.tolist() for part in mini_batches(10, 3, seed, step)]

    first = parts(0, 1)
    assert sorted(itertools.chain(*first)) == list(range(10))
    assert [len(part) for part in first] == [4, 3, 3]
    assert parts(0, 1) == first
    assert first not in (parts(0, 2), parts(1, 1))


def test_more_mini_batches_than_samples_leave_none_empty() -> None:
    assert [len(part) for part in mini_batches(2, 5, 0, 1)] == [1, 1]
