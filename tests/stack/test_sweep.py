"""Finding and ending what belongs to a stack, with small real processes."""

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from relax_infer.engines.host_processes import ProcessStamp, process
from workers import _processes
from workers._preflight import StackError

Spawn = Callable[..., ProcessStamp]

IGNORES = "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
READY_THEN_SLEEP = "sys.stdout.write('x'); sys.stdout.flush(); time.sleep(600)"


@pytest.fixture
def stack() -> str:
    return str(uuid.uuid4())


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    """Starts Python code in a session of its own, waits until it has printed something."""
    children: list[subprocess.Popen[bytes]] = []

    def start(code: str = "import sys, time; " + READY_THEN_SLEEP, **marks: str) -> ProcessStamp:
        bare = {k: v for k, v in os.environ.items() if not k.startswith("RELAX_")}
        child = subprocess.Popen(
            (sys.executable, "-S", "-c", code),
            env=bare | marks,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        children.append(child)
        assert child.stdout is not None
        assert child.stdout.read(1)
        row = process(child.pid)
        assert row is not None
        return row.stamp

    yield start
    for child in children:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


def pids(stack: str, *recorded: ProcessStamp) -> set[int]:
    return {row.stamp.pid for row in _processes.stack_processes(stack, recorded)}


def test_what_carries_the_marker_is_found_and_another_stacks_is_not(stack: str, spawn: Spawn):
    ours, theirs = spawn(RELAX_STACK=stack), spawn(RELAX_STACK=str(uuid.uuid4()))
    assert pids(stack) == {ours.pid}
    assert theirs.pid not in pids(stack)


def test_a_recorded_process_is_found_without_the_marker(stack: str, spawn: Spawn):
    bare = spawn()
    assert pids(stack) == set()
    assert pids(stack, bare) == {bare.pid}


def test_a_pid_that_was_given_to_a_stranger_is_left_alone(stack: str, spawn: Spawn):
    stranger = spawn()
    earlier = ProcessStamp(pid=stranger.pid, started=stranger.started - 100)
    assert pids(stack, earlier) == set()


def test_children_that_shed_marker_and_session_are_found_by_descent(stack: str, spawn: Spawn):
    code = (
        "import subprocess, sys, time; "
        "c = subprocess.Popen(['sleep', '600'], env={}, start_new_session=True); "
        "sys.stdout.write('x'); sys.stdout.flush(); time.sleep(600)"
    )
    parent = spawn(code, RELAX_STACK=stack)
    found = pids(stack)
    assert parent.pid in found
    assert len(found) == 2
    _, left = _processes.sweep(stack, (parent,), timeout=10)
    assert left == set()
    assert not any(process(pid) for pid in found)


def test_orphans_of_a_recorded_session_are_found_without_the_marker(stack: str, spawn: Spawn):
    code = (
        "import subprocess, sys, time; subprocess.Popen(['sleep', '600'], env={}, stdout=2); "
        "sys.stdout.write('x'); sys.stdout.flush(); time.sleep(600)"
    )
    leader = spawn(code)
    os.kill(leader.pid, signal.SIGKILL)
    os.waitid(os.P_PID, leader.pid, os.WEXITED | os.WNOWAIT)
    orphans = pids(stack, leader)
    assert len(orphans) == 1
    killed, left = _processes.sweep(stack, (leader,), timeout=10)
    assert (killed, left) == (orphans, set())


def test_this_process_is_spared_though_it_carries_the_marker(stack: str):
    code = (
        "import sys; from workers import _processes;"
        "print([row.stamp.pid for row in _processes.stack_processes(sys.argv[1], ())])"
    )
    looked = subprocess.run(
        (sys.executable, "-c", code, stack),
        env=os.environ | {"RELAX_STACK": stack},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert looked.stdout.strip() == "[]"


def test_one_that_ignores_sigterm_is_killed(stack: str, spawn: Spawn):
    deaf = spawn(IGNORES + READY_THEN_SLEEP, RELAX_STACK=stack)
    _processes.end((deaf,), grace=0.2)
    assert _processes.lives(deaf)
    assert _processes.sweep(stack, (), timeout=10) == ({deaf.pid}, set())
    assert not _processes.lives(deaf)


def test_engines_are_told_from_the_rest_by_their_first_process(stack: str, spawn: Spawn):
    code = (
        "import subprocess, sys, time; subprocess.Popen(['sleep', '600'], stdout=2); "
        "sys.stdout.write('x'); sys.stdout.flush(); time.sleep(600)"
    )
    engine = spawn(code, RELAX_STACK=stack, RELAX_ENGINE_INCARNATION="an-incarnation")
    other = spawn(RELAX_STACK=stack)
    rows = _processes.stack_processes(stack, ())
    assert len(rows) == 3
    assert other.pid in {row.stamp.pid for row in rows}
    assert [row.stamp for row in _processes.engine_leaders(rows)] == [engine]
    _, left = _processes.sweep(stack, (engine, other), timeout=10)
    assert left == set()


def test_a_process_that_ends_as_it_starts_is_told_with_the_end_of_its_log(tmp_path: Path):
    log = tmp_path / "logs" / "it.log"

    def start() -> None:
        stamp = _processes.launch("it", ("sh", "-c", "echo because; exit 3"), os.environ, log)
        assert _processes.wait_gone((stamp,), timeout=10)
        raise _processes.ended_early("it", log)  # as `launch` does where it is quick enough to see

    with pytest.raises(StackError, match=r"(?s)it ended while it started.*it\.log.*because"):
        start()
