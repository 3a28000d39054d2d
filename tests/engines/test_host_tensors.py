"""Tensors of a folder, cut into buckets and put where another process finds them."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from relax_infer.contracts.failures import PermanentError
from relax_infer.engines import shared_bucket
from relax_infer.engines.host_tensors import HostTensor, SentDigest, cut, host_tensors, size_of
from relax_infer.engines.shared_bucket import SharedBucket
from relax_infer.training.hf_folder import weights_digest
from tests.engines.checkpoints import make_checkpoint, tensors


def tensor(name: str, dtype: str, count: int) -> HostTensor:
    size = {"F32": 4, "BF16": 2}[dtype] * count
    return HostTensor(name, dtype, (count,), memoryview(bytes(range(size % 256)) * 1)[:size])


def test_every_tensor_of_every_file_is_there_in_name_order(tmp_path: Path):
    found = host_tensors(make_checkpoint(tmp_path / "m", seed=0))
    expected = tensors(0)
    assert [each.name for each in found] == sorted(expected)
    for each in found:
        array = np.frombuffer(each.data, np.float32).reshape(each.shape)
        assert np.array_equal(array, expected[each.name])


def test_buckets_keep_their_limit_but_for_a_tensor_that_is_larger(tmp_path: Path):
    found = host_tensors(make_checkpoint(tmp_path / "m", seed=0))
    made = cut(found, 20_000)
    assert [each for bucket in made for each in bucket] == found
    assert all(size_of(bucket) <= 20_000 or len(bucket) == 1 for bucket in made)
    assert any(size_of(bucket) > 20_000 for bucket in made)


def test_a_bucket_ends_where_numbers_would_not_be_aligned():
    made = cut([tensor("a", "BF16", 3), tensor("b", "F32", 2), tensor("c", "BF16", 1)], 1000)
    assert [[each.name for each in bucket] for bucket in made] == [["a"], ["b", "c"]]


def test_a_dtype_that_engines_are_not_sent_is_refused_by_name():
    packed = HostTensor("q", "F4", (2,), memoryview(b"x"))
    with pytest.raises(PermanentError, match="q has dtype F4"):
        cut([packed], 10)


def test_what_was_sent_has_the_digest_that_the_trainer_published(tmp_path: Path):
    folder = make_checkpoint(tmp_path / "m", seed=0)
    sent = SentDigest()
    for bucket in cut(host_tensors(folder), 20_000):
        sent.add(bucket)
    sent.check(weights_digest(folder), folder)
    with pytest.raises(PermanentError, match="the trainer published"):
        sent.check("0" * 64, folder)


_OPENER = """
import base64, pickle, sys
for text in sys.stdin.read().split():
    print(sum(float(t.sum()) for _, t in pickle.loads(base64.b64decode(text))))
"""


def opened(handles: list[str]) -> list[float]:
    """In a process that is no relative of this one's tensors, as an engine's ranks are."""
    found = subprocess.run(
        [sys.executable, "-c", _OPENER],
        input=" ".join(handles),
        capture_output=True,
        text=True,
        check=True,
        env=os.environ,
    )
    return [float(line) for line in found.stdout.split()]


def segments() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob(f"torch_{os.getpid()}_*")}


def test_each_rank_of_another_process_finds_the_tensors_and_nothing_is_left(tmp_path: Path):
    made = cut(host_tensors(make_checkpoint(tmp_path / "m", seed=0)), 20_000)
    memory = SharedBucket()
    for bucket in made[:2]:
        memory.fill(bucket)
        total = sum(float(np.frombuffer(t.data, np.float32).sum()) for t in bucket)
        assert opened(memory.handles(bucket, 2)) == pytest.approx([total, total], rel=1e-4)
        memory.opened()
    assert len(segments()) == 1
    memory.close()
    assert segments() == set()


def test_handles_that_nobody_opened_leave_no_memory(tmp_path: Path):
    (bucket, *_) = cut(host_tensors(make_checkpoint(tmp_path / "m", seed=0)), 20_000)
    memory = SharedBucket()
    memory.fill(bucket)
    memory.handles(bucket, 2)
    assert len(segments()) == 1
    memory.close()
    assert segments() == set()


def test_shared_memory_that_is_too_small_is_an_error_and_no_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (bucket, *_) = cut(host_tensors(make_checkpoint(tmp_path / "m", seed=0)), 20_000)
    full = os.statvfs_result((4096, 4096, 1, 0, 0, 1, 1, 1, 0, 255))
    monkeypatch.setattr(shared_bucket.os, "statvfs", lambda _: full)
    with pytest.raises(PermanentError, match="shm-size"):
        SharedBucket().fill(bucket)
