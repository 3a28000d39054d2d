"""What is refused before anything starts, and ports that nobody else takes."""

import fcntl
import os
import socket
from pathlib import Path

import pytest

from tests.stack.conftest import marked_home
from workers import _preflight, _stack_file
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


def test_the_next_stack_of_a_home_is_where_the_last_one_was(tmp_path: Path):
    """Who watches a run finds it there; nothing is kept of a home that never had a stack."""
    assert _stack_file.last_ports(tmp_path) == _stack_file.LastPorts()
    _stack_file.remove(tmp_path)
    assert list(tmp_path.iterdir()) == []
    record = StackRecord(
        stack="s",
        home=str(tmp_path),
        boot="b",
        temporal_address="127.0.0.1:7301",
        temporal_ui="http://127.0.0.1:8301",
        temporal_metrics="http://127.0.0.1:1/metrics",
        ray_address="127.0.0.1:6",
        ray_folder="/none",
        ray_token_file="/none",
        gpus=2,
        worker=True,
    )
    _stack_file.write(record)
    _stack_file.remove(tmp_path)
    assert _stack_file.read(tmp_path) is None
    last = _stack_file.last_ports(tmp_path)
    assert (last.temporal, last.ui) == (7301, 8301)
