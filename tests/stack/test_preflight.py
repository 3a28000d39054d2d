"""What is refused before anything starts, and ports that nobody else takes."""

import fcntl
import os
import socket
from pathlib import Path

import pytest

from tests.stack.conftest import marked_home
from workers import _preflight, _stack_file, local
from workers._preflight import HOST, Ports, StackError, free_memory
from workers._stack_file import StackRecord
from workers.local import Stack, down, main, up

OUTGOING = Path("/proc/sys/net/ipv4/ip_local_port_range")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def refused(capsys: pytest.CaptureFixture[str], home: Path, *options: str) -> str:
    """What ``up`` says on stderr when it refuses, having left nothing behind."""
    assert main(["up", "--home", str(home), *options]) == 2
    assert not (home / "stack.json").exists()
    assert not marked_home(home)
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "what"),
    [("--temporal-port", "Temporal"), ("--ui-port", "Temporal's web UI"), ("--ray-port", "Ray")],
)
def test_a_port_in_use_is_named_with_what_wanted_it(
    home: Path, capsys: pytest.CaptureFixture[str], option: str, what: str
):
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        said = refused(capsys, home, option, port, "--memory-gib", "0")
    assert f"Port {port} for {what} is in use" in said


def test_too_little_memory_says_how_much_there_is_and_was_wanted(
    home: Path, capsys: pytest.CaptureFixture[str]
):
    said = refused(capsys, home, "--memory-gib", "100000")
    assert "GiB of memory are free, 100000 GiB are wanted" in said
    assert "--memory-gib" in said


@pytest.mark.parametrize("program", ["temporal", "ray"])
def test_a_missing_program_is_named(
    home: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    program: str,
):
    monkeypatch.setattr(_preflight.sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    (tmp_path / "path").mkdir()
    for present in {"temporal", "ray"} - {program}:
        (tmp_path / "path" / present).touch(mode=0o755)
    assert f"The program `{program}` is missing" in refused(capsys, home, "--memory-gib", "0")


def test_a_home_that_cannot_be_a_folder_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "file").touch()
    assert main(["up", "--home", str(tmp_path / "file" / "home")]) == 2
    assert "cannot be used" in capsys.readouterr().err


@pytest.mark.parametrize("change", [up, down])
def test_one_up_or_down_at_a_time(home: Path, change: object):
    home.mkdir()
    descriptor = os.open(home / "stack.lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with pytest.raises(StackError, match="Another `up` or `down` is at work"):
            change(home)  # type: ignore[operator]
    finally:
        os.close(descriptor)


def test_down_of_nothing_is_done_and_says_so(home: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["down", "--home", str(home)]) == 0
    assert f"No local stack in {home}" in capsys.readouterr().out
    assert not home.exists()


def test_loading_a_stack_that_is_not_there_says_how_to_start_one(home: Path):
    with pytest.raises(StackError, match="relax-infer up"):
        Stack.load(home)


def test_a_damaged_record_is_not_guessed_at(home: Path):
    home.mkdir()
    (home / "stack.json").write_text('{"stack": 1}')
    with pytest.raises(StackError, match="not the record of a local stack"):
        down(home)
    assert (home / "stack.json").exists()


def test_no_port_is_chosen_twice_while_somebody_starts():
    with Ports() as mine, Ports() as theirs:
        chosen = [ports.choose("a server") for ports in (mine, theirs) for _ in range(20)]
        with pytest.raises(StackError, match="in use"):
            theirs.choose("a server", asked=chosen[0])
    assert len(set(chosen)) == len(chosen)
    with Ports() as later:
        assert later.choose("a server", asked=chosen[0]) == chosen[0]


def test_ports_lie_where_no_outgoing_connection_is_given_one():
    with Ports() as ports:
        port = ports.choose("a server")
    assert port < int(OUTGOING.read_text().split()[0])


def test_a_preferred_port_is_taken_if_free_and_left_if_not():
    with Ports() as ports:
        wanted = ports.choose("a server")
        assert ports.choose("another", 0, wanted) != wanted
    with Ports() as ports:
        assert ports.choose("a server", 0, 0, wanted) == wanted


def test_free_memory_is_bytes_and_not_more_than_the_machine_has():
    assert 1 << 20 < free_memory() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_the_lock_is_let_go_after_a_failure(home: Path):
    with pytest.raises(RuntimeError), _stack_file.locked(home):
        raise RuntimeError
    with _stack_file.locked(home):
        pass


def a_record(home: Path, gpus: int = 2) -> StackRecord:
    return StackRecord(
        stack="s",
        home=str(home),
        boot="b",
        temporal_address="127.0.0.1:7301",
        temporal_ui="http://127.0.0.1:8301",
        temporal_metrics="http://127.0.0.1:1/metrics",
        ray_address="127.0.0.1:6",
        ray_folder="/none",
        ray_token_file="/none",
        gpus=gpus,
        worker=True,
        ready=True,
    )


def test_the_next_stack_of_a_home_is_where_the_last_one_was(tmp_path: Path):
    """Who watches a run finds it there; nothing is kept of a home that never had a stack."""
    assert _stack_file.last_stack(tmp_path) == _stack_file.LastStack()
    _stack_file.remove(tmp_path)
    assert list(tmp_path.iterdir()) == []
    _stack_file.write(a_record(tmp_path, gpus=5))
    _stack_file.remove(tmp_path)
    assert _stack_file.read(tmp_path) is None
    last = _stack_file.last_stack(tmp_path)
    assert (last.temporal, last.ui, last.gpus) == (7301, 8301, 5)


class _BegunError(Exception):
    """In place of the servers."""


@pytest.mark.parametrize(
    ("asked", "at_least", "last", "of_the_machine", "expected"),
    [
        (None, 0, 0, 0, 2),
        (None, 0, 0, 8, 8),
        (None, 0, 5, 0, 5),  # runs that have not ended are bound to them
        (None, 0, 5, 8, 5),
        (None, 2, 5, 0, 5),
        (None, 5, 2, 0, 5),
        (None, 1, 0, 0, 1),
        (3, 0, 5, 0, 3),
    ],
)
def test_the_next_stack_has_gpus_for_the_runs_of_the_last_one(
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    asked: int | None,
    at_least: int,
    last: int,
    of_the_machine: int,
    expected: int,
):
    if last:
        home.mkdir()
        _stack_file.write(a_record(home, gpus=last))
        _stack_file.remove(home)
    begun: list[int] = []

    def begin(stack: Stack, say: object) -> None:
        begun.append(Stack.load(stack.home).gpus)
        raise _BegunError

    monkeypatch.setattr(local, "_real_gpus", lambda: of_the_machine)
    monkeypatch.setattr(Stack, "start", begin)
    said: list[str] = []
    with pytest.raises(_BegunError):
        up(home, gpus=asked, at_least=at_least, memory_gib=0.1, say=said.append)
    assert begun == [expected]
    told = [line for line in said if "its runs that need them wait" in line]
    assert bool(told) == (expected < last)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, ""),
        ({"gpus": 2, "temporal_port": 7301, "at_least": 1}, ""),
        ({"gpus": 4}, "it has 2 GPUs, not 4."),
        ({"gpus": 1}, "it has 2 GPUs, not 1."),
        ({"at_least": 5}, "it has 2 GPUs, 5 are needed."),
        ({"temporal_port": 301}, "Temporal is at 127.0.0.1:7301, not at port 301."),
        ({"ui_port": 8, "ray_port": 9}, "127.0.0.1:8301, not at port 8; Ray is at 127.0.0.1:6, "),
    ],
)
@pytest.mark.parametrize("missing", [(), ("worker",)])
def test_what_a_stack_that_runs_cannot_be_asked_for_is_said(
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    missing: tuple[str, ...],
    options: dict[str, int],
    told: str,
):
    home.mkdir(exist_ok=True)
    _stack_file.write(a_record(home))
    monkeypatch.setattr(Stack, "missing", lambda _: missing)
    monkeypatch.setattr(Stack, "start", lambda *_: None)
    said: list[str] = []
    up(home, say=said.append, **options)
    unchanged = [line for line in said if line.startswith("Unchanged: ")]
    assert bool(unchanged) == bool(told)
    assert told in "".join(unchanged)
