"""The commands on a real local stack: what the double of workers.local stands for."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from relax_infer.cli._home import read_stack
from tests.cli.conftest import Command, Watching

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]


@pytest.fixture
def home() -> Iterator[Path]:
    """Short, since the stack's sockets live under it or beside it."""
    home = Path(tempfile.mkdtemp(prefix="relax-cli-"))
    yield home
    shutil.rmtree(home)


def test_up_status_doctor_and_down(command: Command, home: Path):
    try:
        started = command("up", "--no-worker", "--memory-gib", "2", "--gpus", "2")
        assert started.exit_code == 0, started.output
        stack = read_stack(home)
        assert stack is not None
        assert stack.dead == ()
        assert stack.gpus == 2
        assert f"Web UI:   {stack.temporal_ui}" in started.stdout
        again = command("up", "--no-worker")
        assert again.exit_code == 0, again.output
        assert read_stack(home) == stack
        none = command("status")
        assert none.exit_code == 0, none.output
        assert "`relax-infer run quickstart` starts one" in none.stdout
        unknown = command("status", "run-1")
        assert (unknown.exit_code, unknown.stdout) == (2, "")
        found = {f["name"]: f for f in json.loads(command("doctor", "--json").stdout)}
        assert found["stack"]["result"] == "ok"
        assert found["temporal server"]["result"] == "ok"
        assert found["worker"]["result"] == "missing"
        live = command("plan", "quickstart", "--live", "--json")
        assert live.exit_code == 2, live.output
        told = {f["name"]: f for f in json.loads(live.stdout)["live"]["findings"]}
        assert [name for name, f in told.items() if f["result"] == "missing"] == ["worker"]
        assert told["cluster"]["text"] == "2 GPUs are needed, 2 are free on 1 node"
        assert told["disk"]["result"] in ("ok", "note")
        assert told["router"]["text"].startswith("is begun with each run; sglang-router")
        names = {"rollout.model": "/no/policy", "data.source": "file", "data.path": "/no/a.jsonl"}
        names |= {"reward.source": "exact", "data.grader": "exact"}
        words = [word for key, value in names.items() for word in ("--set", f"{key}={value}")]
        lacking = command("plan", "quickstart", "--live", "--json", *words)
        assert lacking.exit_code == 2, lacking.output
        fields = {v["field"]: v for v in json.loads(lacking.stdout)["violations"]}
        assert "/no/policy is not on node" in fields["rollout.model"]["rule"]
        assert "/no/a.jsonl can be read on no node" in fields["data.path"]["rule"]
        assert all(v["cure"] for v in fields.values())
    finally:
        ended = command("down")
    assert ended.exit_code == 0, ended.output
    assert "Ended " in ended.stdout
    assert read_stack(home) is None
    assert command("down").exit_code == 0


def test_too_little_memory_exits_2_and_leaves_nothing(command: Command, home: Path):
    for words in (["up"], ["run", "quickstart"]):
        ended = command(*words, "--memory-gib", "1000000")
        assert ended.exit_code == 2, ended.output
        assert "GiB of memory are free" in ended.stderr
        assert read_stack(home) is None


def test_an_interrupted_up_leaves_nothing(command: Command, home: Path):
    with Watching("up", "--no-worker", "--memory-gib", "2") as watching:
        watching.next_line("Temporal answers")
        stack = read_stack(home)
        assert stack is not None
        watching.interrupt()
        code, output = watching.end()
    assert code == 130, output
    assert read_stack(home) is None
    assert set(stack.dead) == set(stack.processes)
