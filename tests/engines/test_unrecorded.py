"""An engine whose file a cleaner of temporary files removed is not taken for gone."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from relax_infer.contracts.engines import EngineGroupSpec, EngineOperation
from relax_infer.contracts.failures import PermanentError, UnconfirmedError
from relax_infer.contracts.fence import FenceToken
from relax_infer.engines import host_processes
from relax_infer.engines import node as node_module
from relax_infer.engines.command import ABOUT, about, environment
from relax_infer.engines.folders import REPLICA
from relax_infer.engines.holder import Holder, HolderFiles
from relax_infer.engines.node import EngineNode
from relax_infer.engines.orphans import find_unrecorded_of
from relax_infer.engines.release import MARKER, EngineProcesses
from relax_infer.engines.replica import EngineReplica
from relax_infer.machines import ReplicaState
from tests.engines.checkpoints import group_spec

Begin = Callable[[dict[str, str]], subprocess.Popen[bytes]]


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineGroupSpec:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return group_spec(tmp_path)


@pytest.fixture
def begin() -> Iterator[Begin]:
    begun: list[subprocess.Popen[bytes]] = []

    def begin(variables: dict[str, str]) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"]
        process = subprocess.Popen(
            command, env=variables, start_new_session=True, stdout=subprocess.PIPE
        )
        begun.append(process)
        assert process.stdout is not None
        process.stdout.readline()  # its environment can be read from now on
        return process

    yield begin
    for process in begun:
        end(process)


@pytest.fixture
def left(spec: EngineGroupSpec, begin: Begin) -> subprocess.Popen[bytes]:
    """An engine of the run's replica 0; its file is gone."""
    return begin(environment(spec, f"{os.getpid()}-left", ()))


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def operation(spec: EngineGroupSpec) -> EngineOperation:
    token = FenceToken(counter=1, grant_id="g")
    return EngineOperation(group=spec, operation_id="op", fence=token)


def pids(spec: EngineGroupSpec, replica: int = 0) -> list[int]:
    return [pid for each in find_unrecorded_of(spec, replica) for pid in each.pids]


def test_whose_engine_it_is_its_processes_say(spec: EngineGroupSpec, left: Any) -> None:
    assert pids(spec) == [left.pid]
    assert pids(spec, 1) == []
    for other in ({"run": "other"}, {"store": "file:///elsewhere"}, {"model": "another"}):
        assert pids(spec.model_copy(update=other)) == [], other


def test_an_engine_of_an_earlier_version_says_no_more_than_run_role_and_replica(
    spec: EngineGroupSpec, begin: Begin
) -> None:
    variables = environment(spec, f"{os.getpid()}-old", ())
    del variables[REPLICA]
    old = begin(variables)
    assert json.loads(variables[ABOUT]) == about(spec, 0)
    assert pids(spec) == [old.pid]
    assert pids(spec, 1) == []
    assert pids(spec.model_copy(update={"run": "other"})) == []


def test_one_that_has_its_file_is_known(spec: EngineGroupSpec, left: Any) -> None:
    write_holder(spec, left)
    assert pids(spec) == []


def write_holder(spec: EngineGroupSpec, process: subprocess.Popen[bytes]) -> None:
    row = host_processes.process(process.pid)
    assert row is not None
    HolderFiles(spec, 0).write_holder(
        Holder(
            engine_id=spec.engine_id(0),
            processes=EngineProcesses(
                incarnation=f"{os.getpid()}-left",
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


async def test_a_new_actor_launches_nothing_beside_it_and_proves_nothing(
    spec: EngineGroupSpec, left: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_server(*_: object) -> None:
        pytest.fail("a second server is started beside the first")

    monkeypatch.setattr(node_module, "start_server", no_server)
    replica = EngineReplica(spec, 0)
    assert replica.state is ReplicaState.FAILED
    report = await replica.reports.report()
    assert report.state is ReplicaState.FAILED, "a probe must not call it gone"
    assert f"processes {left.pid} on node 127.0.0.1 carry the mark" in str(report.error)
    for ask in (replica.launch, replica.stop, replica.offload, replica.onload):
        with pytest.raises(UnconfirmedError, match="have no file there any more") as raised:
            await ask(operation(spec))
        assert f"`kill -9 {left.pid}`" in str(raised.value)
        assert replica.state is ReplicaState.FAILED
    with pytest.raises(PermanentError, match=f"is not gone: processes {left.pid}"):
        await replica.forget(operation(spec))
    assert left.poll() is None, "nothing was ended on the strength of a mark"

    end(left)
    evidence = await replica.stop(operation(spec))
    assert (evidence.proof, replica.state) == ("process_gone", ReplicaState.DEAD)


async def test_a_person_s_word_stands_once_nothing_of_it_lives(
    spec: EngineGroupSpec, left: Any
) -> None:
    replica = EngineReplica(spec, 0)
    end(left)
    await replica.forget(operation(spec))
    assert replica.state is ReplicaState.DEAD


async def test_a_node_looks_again_before_it_starts_a_server(
    spec: EngineGroupSpec, begin: Begin
) -> None:
    node = EngineNode(spec, 0, 0)
    assert not node.holds
    left = begin(environment(spec, f"{os.getpid()}-late", ()))
    launch: Any = SimpleNamespace(group=spec)
    with pytest.raises(UnconfirmedError, match=f"processes {left.pid} on node"):
        await node.start(launch)


async def test_the_proof_of_one_incarnation_says_nothing_of_another_without_a_file(
    spec: EngineGroupSpec, left: Any, begin: Begin
) -> None:
    write_holder(spec, left)
    node = EngineNode(spec, 0, 0)
    other = begin(environment(spec, f"{os.getpid()}-other", ()))
    with pytest.raises(UnconfirmedError, match=f"processes {other.pid} on node"):
        await node.end()
    assert left.wait() != 0, "the proof ended it"
    assert other.poll() is None
    assert HolderFiles(spec, 0).holder() is None
    end(other)
    await node.end()
    assert not node.holds


def test_a_follower_reports_it_as_what_it_holds(spec: EngineGroupSpec, left: Any) -> None:
    report = EngineNode(spec, 0, 1).report()
    assert (report.incarnation, report.pids) == (f"{os.getpid()}-left", (left.pid,))


def test_of_thousands_of_processes_each_environment_is_read_once_and_nothing_else(
    tmp_path: Path, spec: EngineGroupSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is looked for at every launch, on hosts where much else runs."""
    for pid in range(1, 2001):
        folder = tmp_path / "proc" / str(pid)
        folder.mkdir(parents=True)
        (folder / "environ").write_bytes(b"HOME=/\0")
    read: list[int] = []
    environ = host_processes.environment

    def counted(pid: int) -> dict[bytes, bytes] | None:
        read.append(pid)
        return environ(pid)

    monkeypatch.setattr(host_processes, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(host_processes, "environment", counted)
    assert MARKER not in (tmp_path / "proc" / "1" / "environ").read_text()
    assert pids(spec) == []  # there is no stat that could be read
    assert sorted(read) == list(range(1, 2001))
