"""Release proof against real processes."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from relax_infer.contracts.failures import UnconfirmedError
from relax_infer.engines import host_processes
from relax_infer.engines.release import (
    MARKER,
    EngineProcesses,
    check_marks,
    find_processes,
    prove_release,
)

SLEEP = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
PARENT = f"""
import os, subprocess, sys
environment = dict(os.environ)
if sys.argv[1] == "bare":
    environment.pop("{MARKER}")
child = subprocess.Popen(
    [sys.executable, "-c", {SLEEP!r}], env=environment, start_new_session=sys.argv[1] == "escaped"
)
print(child.pid, flush=True)
{SLEEP}
"""


class Tree:
    """A parent in its own session and one child, both deaf to SIGTERM."""

    def __init__(self, kind: str) -> None:
        self.incarnation = str(uuid.uuid4())
        before = host_processes.ticks_since_boot()
        self.parent = subprocess.Popen(
            [sys.executable, "-c", PARENT, kind],
            env={**os.environ, MARKER: self.incarnation},
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.parent.stdout is not None
        self.child = int(self.parent.stdout.readline())
        first = host_processes.process(self.parent.pid)
        assert first is not None
        self.engine = EngineProcesses(
            incarnation=self.incarnation,
            session=self.parent.pid,
            tree=(first.stamp,),
            host=host_processes.this_host(),
            not_before=before,
        )

    def end(self) -> None:
        for pid in (self.child, self.parent.pid):
            if host_processes.process(pid) is not None:
                os.kill(pid, signal.SIGKILL)
        self.parent.wait()
        assert self.parent.stdout is not None
        self.parent.stdout.close()


@pytest.fixture
def tree() -> Iterator[Callable[[str], Tree]]:
    made: list[Tree] = []

    def make(kind: str) -> Tree:
        made.append(Tree(kind))
        return made[-1]

    yield make
    for each in made:
        each.end()


def alive(*pids: int) -> list[int]:
    return [pid for pid in pids if host_processes.process(pid) is not None]


def test_it_ends_a_whole_tree_and_proves_it_with_two_empty_scans(tree):
    made = tree("usual")
    proof = prove_release(made.engine, timeout=20)
    assert set(proof.stopped) == {made.parent.pid, made.child}
    assert proof.scans >= 3
    assert alive(made.parent.pid, made.child) == []


def test_asked_again_it_proves_again_and_stops_nothing(tree):
    made = tree("usual")
    prove_release(made.engine, timeout=20)
    proof = prove_release(made.engine, timeout=20)
    assert (proof.scans, proof.stopped) == (2, ())


def test_a_child_that_left_the_session_is_found_by_its_marker_after_its_parent_died(tree):
    made = tree("escaped")
    made.parent.kill()
    made.parent.wait()
    assert [row.stamp.pid for row in find_processes(made.engine)] == [made.child]
    assert prove_release(made.engine, timeout=20).stopped == (made.child,)


def test_a_recorded_process_is_found_without_marker_and_session(tree):
    made = tree("usual")
    elsewhere = made.engine.model_copy(update={"incarnation": "another", "session": 0})
    assert [row.stamp.pid for row in find_processes(elsewhere)] == [made.parent.pid]


def test_a_process_of_the_session_without_a_mark_is_neither_killed_nor_called_gone(tree):
    made = tree("bare")
    with pytest.raises(UnconfirmedError, match=f"{made.child} "):
        prove_release(made.engine, timeout=2)
    assert alive(made.child) == [made.child]


def test_a_tree_with_an_unmarked_process_is_not_taken_for_ready(tree):
    assert len(check_marks(tree("usual").engine)) == 2
    with pytest.raises(UnconfirmedError, match="SPT_NOENV"):
        check_marks(tree("bare").engine)


def test_a_stranger_with_the_old_pid_is_left_alone(tree):
    stranger = tree("usual")
    engine = stranger.engine.model_copy(
        update={
            "incarnation": str(uuid.uuid4()),
            "tree": (host_processes.ProcessStamp(pid=stranger.parent.pid, started=1),),
        }
    )
    assert prove_release(engine, timeout=5).stopped == ()
    assert alive(stranger.parent.pid, stranger.child) == [stranger.parent.pid, stranger.child]


def test_what_does_not_die_is_unconfirmed(tree, monkeypatch):
    made = tree("usual")
    monkeypatch.setattr(host_processes, "send_signal", lambda stamp, number: True)
    with pytest.raises(UnconfirmedError, match="alive"):
        prove_release(made.engine, timeout=0.3)


def test_an_engine_of_which_only_the_plan_was_recorded_is_found_by_its_marker(tree):
    made = tree("usual")
    planned = made.engine.model_copy(update={"session": 0, "tree": ()})
    assert set(prove_release(planned, timeout=20).stopped) == {made.parent.pid, made.child}


def test_a_process_older_than_the_engine_may_hide_its_environment(tree, monkeypatch):
    older, made = tree("usual"), tree("usual")
    later = made.engine.model_copy(update={"not_before": made.engine.tree[0].started + 1})
    real = host_processes.environment

    def environment(pid: int) -> dict[bytes, bytes] | None:
        if pid == older.child:
            raise PermissionError
        return real(pid)

    monkeypatch.setattr(host_processes, "environment", environment)
    assert {row.stamp.pid for row in find_processes(later)} == {made.parent.pid, made.child}


def test_a_hidden_environment_of_a_later_process_of_ours_is_unconfirmed(tree, monkeypatch):
    made, hidden = tree("usual"), tree("usual")
    real = host_processes.environment

    def environment(pid: int) -> dict[bytes, bytes] | None:
        if pid == hidden.child:
            raise PermissionError
        return real(pid)

    monkeypatch.setattr(host_processes, "environment", environment)
    with pytest.raises(UnconfirmedError, match=f"{hidden.child} .*hides"):
        find_processes(made.engine)


def test_another_host_gives_no_proof(tree):
    made = tree("usual")
    for field in ("machine_id", "pid_namespace"):
        host = made.engine.host.model_copy(update={field: "other"})
        with pytest.raises(UnconfirmedError, match="own host"):
            prove_release(made.engine.model_copy(update={"host": host}), timeout=5)
    assert alive(made.parent.pid) == [made.parent.pid]


def test_every_doubt_names_the_node_also_where_several_share_a_host(tree, monkeypatch):
    """Who reads it must know where to look: contract 7.6."""
    node = "10.0.0.7 (Ray node abc)"
    named = f"on node/container {re.escape(node)}"
    usual, bare, hidden = tree("usual"), tree("bare"), tree("usual")
    at = {"node": node}
    with pytest.raises(UnconfirmedError, match=f"{bare.child} .*{named} is in its session"):
        prove_release(bare.engine.model_copy(update=at), timeout=2)
    with pytest.raises(UnconfirmedError, match=f"{named} do not show"):
        check_marks(bare.engine.model_copy(update=at))
    host = usual.engine.host.model_copy(update={"machine_id": "other"})
    with pytest.raises(UnconfirmedError, match=f"ran on host .*{named}, this is"):
        prove_release(usual.engine.model_copy(update=at | {"host": host}), timeout=5)
    monkeypatch.setattr(host_processes, "send_signal", lambda stamp, number: True)
    with pytest.raises(UnconfirmedError, match=f"{named} are alive"):
        prove_release(usual.engine.model_copy(update=at), timeout=0.3)
    real = host_processes.environment

    def environment(pid: int) -> dict[bytes, bytes] | None:
        if pid == hidden.child:
            raise PermissionError
        return real(pid)

    monkeypatch.setattr(host_processes, "environment", environment)
    with pytest.raises(UnconfirmedError, match=f"{hidden.child} .*{named} started later and hides"):
        find_processes(usual.engine.model_copy(update=at))


def test_a_record_of_an_earlier_version_names_no_node(tree):
    made = tree("usual")
    old = json.loads(made.engine.model_dump_json(exclude={"node"}))
    assert EngineProcesses.model_validate(old).where == ""


def test_a_boot_since_then_is_proof_by_itself_only_on_the_same_machine():
    here = host_processes.this_host().model_copy(update={"machine_id": "m"})
    earlier = here.model_copy(update={"boot_id": "earlier"})
    engine = EngineProcesses(incarnation="i", session=1, tree=(), host=earlier, not_before=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_processes, "this_host", lambda: here)
        assert prove_release(engine).scans == 0
        nameless = engine.host.model_copy(update={"machine_id": ""})
        with pytest.raises(UnconfirmedError):
            prove_release(engine.model_copy(update={"host": nameless}))


def test_a_signal_never_hits_a_later_process_with_the_same_pid(tree):
    made = tree("usual")
    stamp = host_processes.ProcessStamp(pid=made.child, started=1)
    assert host_processes.send_signal(stamp, signal.SIGKILL) is False
    assert alive(made.child) == [made.child]


def test_a_zombie_is_not_alive():
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    stat = Path(f"/proc/{child.pid}/stat")
    deadline = time.monotonic() + 10
    while stat.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline
    assert host_processes.process(child.pid) is None
    child.wait()
