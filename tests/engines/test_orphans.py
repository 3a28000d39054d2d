"""A new run finds what an earlier one left on its GPUs, and touches none of it."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from relax_infer.contracts.engines import BundleBinding, EngineGroupSpec
from relax_infer.contracts.failures import UnconfirmedError
from relax_infer.contracts.fence import FenceToken
from relax_infer.contracts.refs import RunRef
from relax_infer.engines import EngineProcesses, host_processes, orphans
from relax_infer.engines.command import ABOUT
from relax_infer.engines.holder import Holder, HolderFiles, folder_of
from relax_infer.engines.orphans import find_orphans, find_unrecorded, need_nobody_beside
from relax_infer.engines.release import MARKER
from relax_infer.engines.trainer_process import Residence, pid_namespace
from tests.engines.checkpoints import group_spec

NEW = RunRef(run="new", store="file:///elsewhere")
DEVICE = "node-1/0"
MARK = f"{os.getpid()}-mark"
"""Other tests of this host may be at work on the same."""
ABOUT_IT = {"run": "old", "role": "rollout", "replica": 3}


@pytest.fixture
def left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """pains 5: a supervisor is gone and its engine lives on."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"],
        env=os.environ | {MARKER: MARK, ABOUT: json.dumps(ABOUT_IT)},
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
                incarnation=MARK,
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


def test_who_answers_for_an_orphan_in_its_run_and_of_which_incarnation_it_is(left, tmp_path: Path):
    HolderFiles(spec(tmp_path), 0, node=1).write_holder(
        Holder.model_validate_json(next(folder(tmp_path).glob("*.holder.json")).read_bytes())
    )
    found = find_orphans(NEW, {DEVICE}, "10.0.0.1")
    actor = spec(tmp_path).actor_name(0)
    assert [(each.actor, each.incarnation) for each in found] == [(actor, MARK)] * 2


def test_an_engine_whose_file_was_removed_is_found_by_its_mark(left):
    mine = [each for each in find_unrecorded() if left.pid in each.pids]
    assert mine == [], "its file is there"
    (path,) = Path(tempfile.gettempdir()).glob("relax-*/*/*.holder.json")
    path.unlink()
    (found,) = [each for each in find_unrecorded() if left.pid in each.pids]
    assert (found.incarnation, found.pids) == (MARK, (left.pid,))
    assert str(found) == (
        f"an engine of run old, rollout replica 3, incarnation {MARK[:8]} (processes {left.pid}),"
    )
    left.kill()
    left.wait()
    assert [each for each in find_unrecorded() if left.pid in each.pids] == []


def folder(store: Path) -> Path:
    return folder_of(store.as_uri(), "old")


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


def written_on(changed: dict[str, str], **more: object) -> Path:
    """The holder's file says that it was written on another host, or in an earlier life of one."""
    (path,) = Path(tempfile.gettempdir()).glob("relax-*/*/*.holder.json")
    holder = Holder.model_validate_json(path.read_bytes())
    host = host_processes.this_host().model_copy(update=changed)
    processes = holder.processes.model_copy(update={"host": host, **more})
    path.write_text(holder.model_copy(update={"processes": processes}).model_dump_json())
    return path


@pytest.mark.parametrize("elsewhere", [{"pid_namespace": "pid:[1]"}, {"machine_id": "another"}])
def test_an_engine_that_cannot_be_seen_from_here_is_no_proof(left, elsewhere):
    """Two containers share a GPU and the folder for temporary files: its pids say nothing here."""
    path = written_on(elsewhere, session=2**22 + 1, tree=(), incarnation="not to be seen")
    (orphan,) = find_orphans(NEW, {DEVICE}, "10.0.0.1")
    assert (orphan.run, orphan.devices, orphan.pids) == ("old", (DEVICE,), ())
    assert f"(processes {2**22 + 1} on another host or in another pid namespace;" in str(orphan)
    assert f"shows nobody on it, `rm {path}` here)" in str(orphan)
    assert find_orphans(NEW, {"node-1/1"}, "10.0.0.1") == []
    there = BundleBinding(bundle=0, node_id="node-1", node_ip="10.0.0.1", gpu_id=0)
    with pytest.raises(UnconfirmedError, match="in another pid namespace"):
        need_nobody_beside(NEW, "judge/replica-0", (there,))


@pytest.mark.parametrize("machine", ["m", ""], ids=["a host", "a container"])
def test_an_engine_whose_host_has_booted_since_is_gone_whoever_has_its_pid_now(
    left, monkeypatch, machine: str
):
    """A container over the same `/tmp` has another pid namespace, and mostly no machine id."""
    now = host_processes.this_host().model_copy(update={"machine_id": machine})
    monkeypatch.setattr(host_processes, "this_host", lambda: now)
    written_on({"boot_id": "an earlier boot", "pid_namespace": "pid:[1]", "machine_id": machine})
    assert find_orphans(NEW, {DEVICE}, "10.0.0.1") == []


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


TOKEN = FenceToken(counter=1, grant_id="g")


@pytest.fixture
def trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """The trainer of run ``old`` is on the device, and the file that says so."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(orphans, "DYING_SECONDS", 0.0)
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    there = Residence(
        pid=process.pid,
        started=psutil.Process(process.pid).create_time(),
        pid_namespace=pid_namespace(),
        resident_under=TOKEN,
        run="old",
        holder="trainer/rank-0",
        devices=(DEVICE,),
    )
    folder = folder_of(tmp_path.as_uri(), "old")
    folder.mkdir(parents=True)
    path = folder / "trainer.rank-0.residence.json"
    path.write_text(there.model_dump_json())
    yield process, path
    process.kill()
    process.wait()


def changed(path: Path, **what: object) -> None:
    there = Residence.model_validate_json(path.read_bytes())
    path.write_text(there.model_copy(update=what).model_dump_json())


@pytest.mark.parametrize("token", [TOKEN, None])
def test_a_trainer_of_another_run_is_found_on_its_device_also_while_it_sleeps(trainer, token):
    """It may wake at any moment, and it has a context there."""
    process, path = trainer
    changed(path, resident_under=token)
    (orphan,) = find_orphans(NEW, {DEVICE}, "10.0.0.1")
    assert str(orphan) == (
        f"GPU {DEVICE} of node 10.0.0.1: trainer/rank-0 of run old (processes {process.pid})"
    )
    assert process.poll() is None, "looking must not touch it"
    assert find_orphans(NEW, {"node-1/1"}, "10.0.0.1") == []


def test_the_run_s_own_trainer_is_its_own_affair(trainer, tmp_path: Path):
    assert find_orphans(RunRef(run="old", store=tmp_path.as_uri()), {DEVICE}, "ip") == []


def test_a_trainer_that_is_gone_or_whose_pid_is_another_s_stops_nobody(trainer):
    process, path = trainer
    started = psutil.Process(process.pid).create_time()
    changed(path, started=started + 1)
    assert find_orphans(NEW, {DEVICE}, "ip") == []
    changed(path, started=started)
    process.kill()
    process.wait()
    assert find_orphans(NEW, {DEVICE}, "ip") == []


def test_a_trainer_that_was_just_killed_may_take_a_moment(trainer, monkeypatch):
    """Its run has stopped: Ray has given up its name, the kernel not yet its pid."""
    process, _ = trainer
    monkeypatch.setattr(orphans, "DYING_SECONDS", 60.0)
    monkeypatch.setattr(orphans.time, "sleep", lambda _: (process.kill(), process.wait()))
    assert find_orphans(NEW, {DEVICE}, "ip") == []


def test_a_trainer_that_cannot_be_seen_from_here_is_no_proof(trainer):
    _, path = trainer
    changed(path, pid_namespace="pid:[1]")
    (orphan,) = find_orphans(NEW, {DEVICE}, "ip")
    assert "in another pid namespace; " in str(orphan)
    assert f"`rm {path}` here" in str(orphan)
    changed(path, resident_under=None)
    assert find_orphans(NEW, {DEVICE}, "ip") == [], "it said itself that it let go"
    changed(path, resident_under=TOKEN, started=psutil.boot_time() - 1)
    assert find_orphans(NEW, {DEVICE}, "ip") == [], "the host has booted since"


@pytest.mark.parametrize("shift", [-3600.0, -0.5])
def test_a_trainer_is_known_by_its_ticks_also_where_the_clock_was_set(trainer, shift: float):
    """By the clock of now it was created at another time, or before the last boot."""
    process, path = trainer
    row = host_processes.process(process.pid)
    now = host_processes.this_host()
    started = min(psutil.Process(process.pid).create_time(), psutil.boot_time()) + shift
    changed(path, started=started, ticks=row.stamp.started, boot_id=now.boot_id)
    (orphan,) = find_orphans(NEW, {DEVICE}, "ip")
    assert orphan.pids == (process.pid,)
    changed(path, ticks=row.stamp.started + 1)
    assert find_orphans(NEW, {DEVICE}, "ip") == [], "a later process with its pid"
    changed(path, pid_namespace="pid:[1]", boot_id="an earlier boot")
    assert find_orphans(NEW, {DEVICE}, "ip") == []


def test_a_trainer_s_file_of_an_earlier_version_is_read_and_stops_nobody(trainer):
    _, path = trainer
    old = json.loads(path.read_bytes())
    for name in ("run", "holder", "devices"):
        del old[name]
    path.write_text(json.dumps(old))
    assert find_orphans(NEW, {DEVICE}, "ip") == []


def test_a_trainer_s_file_that_cannot_be_read_is_no_proof(trainer):
    _, path = trainer
    path.write_text("{")
    (orphan,) = find_orphans(NEW, {"node-9/0"}, "ip")
    assert orphan.engine_id == "trainer/rank-0"
    assert f"{path} cannot be read; remove it once its trainer is gone" in str(orphan)


def test_nothing_is_started_on_a_gpu_where_a_trainer_of_another_run_lives(trainer):
    process, _ = trainer
    there = BundleBinding(bundle=0, node_id="node-1", node_ip="127.0.0.1", gpu_id=0)
    with pytest.raises(UnconfirmedError, match="trainer/rank-0 of run old"):
        need_nobody_beside(NEW, "judge/replica-0", (there,))
    process.kill()
    process.wait()
    need_nobody_beside(NEW, "judge/replica-0", (there,))
