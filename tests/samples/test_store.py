import json
import struct
from pathlib import Path

import pyarrow as pa
import pytest

from relax_infer.contracts.failures import PermanentError, TransientError
from relax_infer.samples import StagingStore

TABLE = pa.table({"group": [1, 0], "sample": [0, 0], "x": ["b", "a"]})


def test_a_table_comes_back_as_it_was(store: StagingStore):
    assert store.read_table(store.write_table("t.arrow", TABLE)).equals(TABLE)


def test_a_staged_file_is_never_changed(store: StagingStore):
    store.write_table("t.arrow", TABLE)
    store.write_table("t.arrow", TABLE)
    with pytest.raises(PermanentError, match="never changed"):
        store.write_table("t.arrow", TABLE.slice(1))


def test_a_changed_file_is_noticed_when_it_is_read(store: StagingStore, tmp_path: Path):
    ref = store.write_table("t.arrow", TABLE)
    path = tmp_path / "run-1" / "t.arrow"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(PermanentError, match="changed after it was staged"):
        store.read_table(ref)


def test_a_lost_file_is_told_with_its_url(store: StagingStore, tmp_path: Path):
    ref = store.write_table("t.arrow", TABLE)
    (tmp_path / "run-1" / "t.arrow").unlink()
    with pytest.raises(PermanentError, match=r"t\.arrow is gone"):
        store.read_table(ref)


def test_a_file_that_was_only_half_written_is_not_there(
    store: StagingStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The writer dies between writing and moving: nothing readable is left under the name."""

    def die(*_: object) -> None:
        raise OSError("killed")

    monkeypatch.setattr(type(store._filesystem), "mv", die)
    with pytest.raises(OSError, match="killed"):
        store.write_shard(1, "generated", 0, 1, TABLE)
    assert store.shards(1, "generated") == {}
    [left] = store._filesystem.ls(f"{store._root}/steps/1/generated", detail=False)
    assert left.endswith(".tmp")


def test_attempts_are_numbered_and_never_given_twice(store: StagingStore):
    other = StagingStore.__new__(StagingStore)
    other.__dict__.update(store.__dict__)
    taken = [s.claim_attempt(1, "generated") for s in (store, other, store)]
    assert taken == [1, 2, 3]
    assert store.claim_attempt(2, "generated") == 1


def test_of_two_shards_of_a_group_the_earlier_attempt_counts(store: StagingStore):
    store.write_shard(1, "generated", 7, 2, TABLE)
    first = store.write_shard(1, "generated", 7, 1, TABLE)
    assert store.shards(1, "generated") == {
        7: f"steps/1/generated/group-000007.attempt-1.{first.sha256}.arrow"
    }


def test_compaction_sorts_and_is_the_same_again(store: StagingStore):
    store.write_shard(1, "generated", 1, 1, TABLE.slice(0, 1))
    store.write_shard(1, "generated", 0, 1, TABLE.slice(1, 1))
    ref = store.compact(1, "generated")
    assert store.read_table(ref).column("x").to_pylist() == ["a", "b"]
    assert store.compact(1, "generated") == ref


def test_a_shard_that_lands_after_compaction_changes_nothing(store: StagingStore):
    store.write_shard(1, "generated", 0, 2, TABLE.slice(0, 1))
    ref = store.compact(1, "generated")
    store.write_shard(1, "generated", 0, 1, TABLE.slice(1, 1))
    assert store.compact(1, "generated") == ref
    assert store.read_table(ref).num_rows == 1


def test_a_shard_that_was_changed_is_set_aside_and_its_group_is_missing(
    store: StagingStore, tmp_path: Path
):
    """One bit, which leaves a file that can be read and a number that looks like any other."""
    for group in (0, 1):
        store.write_shard(1, "judged", group, 1, pa.table({"group": [group], "sample": [1.0]}))
    name = store.shards(1, "judged")[1]
    path = tmp_path / "run-1" / name
    content = bytearray(path.read_bytes())
    content[content.index(struct.pack("<d", 1.0)) + 7] ^= 0x80
    path.write_bytes(content)
    assert store.peek(name).column("sample").to_pylist() == [-1.0]
    with pytest.raises(TransientError, match=r"was changed after it was staged"):
        store.compact(1, "judged")
    assert set(store.shards(1, "judged")) == {0}
    store.write_shard(1, "judged", 1, 2, pa.table({"group": [1], "sample": [1.0]}))
    ref = store.compact(1, "judged")
    assert store.read_table(ref).column("sample").to_pylist() == [1.0, 1.0]


def test_a_file_that_is_no_table_is_named(store: StagingStore):
    store.write_bytes("steps/1/scored.arrow", b"ARROW1 and then nothing")
    with pytest.raises(PermanentError, match=r"scored\.arrow is no Arrow file"):
        store.peek("steps/1/scored.arrow")


def test_what_a_phase_became_is_known_by_its_digest(store: StagingStore, tmp_path: Path):
    store.write_shard(1, "generated", 0, 1, TABLE)
    ref = store.compact(1, "generated")
    (tmp_path / "run-1" / "steps/1/generated.arrow").write_bytes(b"something else")
    assert store.compact(1, "generated") == ref
    with pytest.raises(PermanentError, match="its digest differs"):
        store.read_table(ref)


def test_json_is_written_with_its_digest(store: StagingStore, tmp_path: Path):
    ref = store.write_json("a/b.json", [{"x": 1}])
    assert store.read_json(ref) == [{"x": 1}]
    assert json.loads((tmp_path / "run-1" / "a" / "b.json").read_text()) == [{"x": 1}]
    assert ref.rows == 1


def test_a_step_s_samples_can_be_forgotten_and_its_record_stays(
    store: StagingStore, tmp_path: Path
):
    for step in (1, 2):
        store.write_shard(step, "generated", 0, 1, TABLE)
        store.compact(step, "generated")
        store.write_json(f"steps/{step}/record.json", {"step": step})
    store.forget_samples(1)
    store.forget_samples(1)
    store.forget_samples(7)
    first, second = (tmp_path / "run-1" / "steps" / str(step) for step in (1, 2))
    assert [path.name for path in first.iterdir()] == ["record.json"]
    assert len(list(second.iterdir())) == 3
