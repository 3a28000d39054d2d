"""What is published of a scored table, and its digest."""

import numpy as np
import pyarrow as pa
import pytest

from relax_infer.contracts.failures import PermanentError
from relax_infer.transfer import PublishedRows, Ragged, rows_digest, rows_of_table
from tests.transfer.tables import scored_table, with_column


def test_rows_are_in_order_of_group_and_sample_as_numbers() -> None:
    table = scored_table(groups=12, samples=2)
    shuffled = table.take(np.random.default_rng(1).permutation(table.num_rows))
    rows = rows_of_table(shuffled)
    assert rows.keys[:3] == ["0/0", "0/1", "1/0"]
    assert rows.keys[-1] == "11/1"
    assert rows_digest(rows) == rows_digest(rows_of_table(table))


def test_every_value_survives_with_its_sample() -> None:
    table = scored_table()
    rows = rows_of_table(table)
    for name in ("prompt_ids", "response_ids", "rollout_log_probs", "teacher_log_probs"):
        published = [row.tolist() for row in rows.ragged(name).rows()]
        assert published == table.column(name).to_pylist(), name
    assert rows.scalar("reward").tolist() == table.column("reward").to_pylist()


def test_a_channel_that_no_sample_has_is_no_column() -> None:
    rows = rows_of_table(scored_table(teacher=False, reward=False))
    assert not {"reward", "teacher_log_probs"} & rows.columns.keys()


def test_the_digest_sees_a_changed_value_a_moved_boundary_and_a_missing_channel() -> None:
    rows = rows_of_table(scored_table())
    digests = {rows_digest(rows)}
    log_probs = rows.ragged("rollout_log_probs")
    changed = log_probs.values.copy()
    changed[0] = np.nextafter(changed[0], np.float32(1))
    digests.add(_digest_with(rows, "rollout_log_probs", Ragged(changed, log_probs.lengths)))
    prompts = rows.ragged("prompt_ids")
    moved = prompts.lengths.copy()
    moved[0], moved[1] = moved[0] + 1, moved[1] - 1
    digests.add(_digest_with(rows, "prompt_ids", Ragged(prompts.values, moved)))
    fewer = {k: v for k, v in rows.columns.items() if k != "teacher_log_probs"}
    digests.add(rows_digest(PublishedRows(fewer)))
    assert len(digests) == 4


def _digest_with(rows: PublishedRows, name: str, column: Ragged) -> str:
    return rows_digest(PublishedRows({**rows.columns, name: column}))


@pytest.mark.parametrize(
    ("name", "spoil", "told"),
    [
        ("reward", lambda values: [None, *values[1:]], "0/0 .* reward has no value"),
        ("reward", lambda values: [*values[:-1], float("nan")], "3/3 .* reward is nan"),
        ("loss_mask", lambda values: [*values[:5], [1] * 9, *values[6:]], "1/1 .* 9 entries"),
        ("prompt_ids", lambda values: [[], *values[1:]], "0/0 .* prompt_ids is empty"),
        ("sample", lambda values: [1, *values[1:]], "0/1 .* comes twice"),
    ],
)
def test_a_wrong_sample_is_refused_by_name(name: str, spoil: object, told: str) -> None:
    table = scored_table()
    assert callable(spoil)
    spoilt = with_column(table, name, spoil(table.column(name).to_pylist()))
    with pytest.raises(PermanentError, match=told):
        rows_of_table(spoilt)


def test_a_table_without_rows_or_without_a_column_is_refused() -> None:
    table = scored_table()
    with pytest.raises(PermanentError, match="no rows"):
        rows_of_table(table.slice(0, 0))
    with pytest.raises(PermanentError, match="no column rollout_log_probs"):
        rows_of_table(table.drop_columns(["rollout_log_probs"]))


def test_slices_and_chunks_of_a_table_are_read_right() -> None:
    table = scored_table(groups=3)
    pieces = pa.concat_tables([table.slice(0, 5), table.slice(5, 3), table.slice(8)])
    assert rows_digest(rows_of_table(pieces)) == rows_digest(rows_of_table(table))
