"""A new run finds what an earlier one left on its GPUs, and touches none of it."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from relax_infer.contracts.engines import BundleBinding, EngineGroupSpec
from relax_infer.contracts.failures import UnconfirmedError
from relax_infer.contracts.refs import RunRef
from relax_infer.engines import EngineProcesses, host_processes
from relax_infer.engines.holder import Holder, HolderFiles
from relax_infer.engines.orphans import find_orphans, need_nobody_beside
from relax_infer.engines.release import MARKER
from tests.engines.checkpoints import group_spec

NEW = RunRef(run="new", store="file:///elsewhere")
DEVICE = "node-1/0"


@pytest.fixture
def left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """pains 5: a supervisor is gone and its engine lives on."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"],
        env=os.environ | {MARKER: "mark"},
        start_new_session=True,
    )
    row = host_processes.process(process.pid)
    assert row is not None
    HolderFiles(spec(tmp_path), 0).write_holder(
        Holder(
            engine_id="policy/replica-0",
            run="old",
            devices=(DEVICE,),
            processes=EngineProcesses(
                incarnation="mark",
                session=process.pid,
                tree=(row.stamp,),
                host=host_processes.this_host(),
                not_before=row.stamp.started,
            ),
            base_url=None,
            socket="s",
            log="l",
            request_log="r",
            model_path="m",
        )
    )
    yield process
    process.kill()
    process.wait()


def spec(folder: Path) -> EngineGroupSpec:
    return group_spec(folder).model_copy(update={"run": "old", "store": folder.as_uri()})


def test_an_engine_that_lives_on_a_wanted_device_is_named_with_its_run_and_processes(left):
    (orphan,) = find_orphans(NEW, {DEVICE}, "10.0.0.1")
    assert (orphan.run, orphan.pids) == ("old", (left.pid,))
    assert str(orphan) == (
        f"GPU {DEVICE} of node 10.0.0.1: engine policy/replica-0 of run old (processes {left.pid})"
    )
    assert left.poll() is None, "looking must not touch it"


def test_another_device_is_free(left):
    assert find_orphans(NEW, {"node-1/1", "node-2/0"}, "10.0.0.1") == []


def test_the_run_s_own_engines_are_its_own_affair(left, tmp_path: Path):
    again = RunRef(run="old", store=tmp_path.as_uri())
    assert find_orphans(again, {DEVICE}, "10.0.0.1") == []


def test_a_file_without_a_living_process_stops_nobody(left):
    left.kill()
    left.wait()
    assert find_orphans(NEW, {DEVICE}, "10.0.0.1") == []


def test_a_file_that_cannot_be_read_is_no_proof(left):
    (path,) = Path(tempfile.gettempdir()).glob("relax-*/*/*.holder.json")
    path.write_text("{")
    (orphan,) = find_orphans(NEW, {"node-9/0"}, "10.0.0.1")
    assert "cannot be read" in str(orphan)
    assert str(path) in str(orphan)


def test_nothing_is_started_on_a_gpu_where_an_engine_of_another_run_lives(
    left: subprocess.Popen[bytes],
) -> None:
    """An engine of two GPUs, of which Ray has lent one to another run since a node was lost."""
    first = BundleBinding(bundle=0, node_id="node-1", node_ip="127.0.0.1", gpu_id=7)
    second = first.model_copy(update={"bundle": 1, "gpu_id": 0})
    need_nobody_beside(NEW, "judge/replica-0", (first,))
    need_nobody_beside(NEW, "judge/replica-0", ())
    with pytest.raises(UnconfirmedError, match=rf"not started beside another: GPU {DEVICE}") as e:
        need_nobody_beside(NEW, "judge/replica-0", (first, second))
    assert "engine policy/replica-0 of run old" in str(e.value)
    left.kill()
    left.wait()
    need_nobody_beside(NEW, "judge/replica-0", (first, second))
