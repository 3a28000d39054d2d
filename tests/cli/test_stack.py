"""Which stack a command starts, uses and ends."""

import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from temporalio.client import Client

from relax_infer.cli import _local, _looks, _needs, _run
from tests.cli import stack_double
from tests.cli.conftest import Command, Temporal, Watching, eventually, record_of, stack_record
from tests.workflows.scripted_world import ScriptedWorld

Calls = Callable[[], list[list[str]]]


@pytest.fixture
def calls(
    command: Command,
    temporal: Temporal,
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Calls:
    """What workers.local was asked for, in a checkout where it is the double."""
    package = tmp_path / "checkout" / "relax_infer"
    workers = tmp_path / "checkout" / "workers"
    workers.mkdir(parents=True)
    (workers / "__init__.py").touch()
    shutil.copy(stack_double.__file__, workers / "local.py")
    monkeypatch.setattr(_local.relax_infer, "__file__", str(package / "__init__.py"))
    log = tmp_path / "calls"
    monkeypatch.setenv("STACK_CALLS", str(log))
    record = record_of(home, temporal.address, gpus=2)
    monkeypatch.setenv("STACK_RECORD", json.dumps(record))
    return lambda: [line.split() for line in log.read_text().splitlines()] if log.exists() else []


async def is_running(client: Client, run: str) -> bool:
    described = await client.get_workflow_handle(run).describe()
    return described.status is not None and described.status.name == "RUNNING"


async def open_runs(client: Client) -> list[str]:
    query = "WorkflowType = 'TrainingRun' AND ExecutionStatus = 'Running'"
    return [each.id async for each in client.list_workflows(query)]


def begin(temporal: Temporal, run: str) -> None:
    """A run that goes on, since nobody works on it; listed."""

    async def start(client: Client) -> None:
        await client.start_workflow("TrainingRun", {}, id=run, task_queue="nobody")

    temporal.do(start)
    eventually(lambda: run in temporal.do(open_runs))


def test_up_passes_its_options_on_and_says_where_everything_is(
    command: Command, temporal: Temporal, calls: Calls, home: Path
):
    eventually(lambda: not temporal.do(open_runs))
    ended = command("up", "--gpus", "4", "--memory-gib", "6", "--no-worker", "--ui-port", "8080")
    assert ended.exit_code == 0, ended.output
    options = ["--gpus", "4", "--memory-gib", "6.0", "--ui-port", "8080", "--no-worker"]
    assert calls() == [["up", "--home", str(home), *options]]
    assert "Temporal answers." in ended.stdout
    assert "Web UI:   http://127.0.0.1:8233" in ended.stdout
    assert "Next:     relax-infer run quickstart\n" in ended.stdout


def test_up_says_which_runs_go_on(
    command: Command, temporal: Temporal, calls: Calls, run_id: str, home: Path
):
    begin(temporal, run_id)
    eventually(lambda: temporal.do(open_runs) == [run_id])
    ended = command("up")
    assert ended.exit_code == 0, ended.output
    assert ended.stdout.endswith(
        f"Goes on:  {run_id}\nNext:     relax-infer status {run_id} --watch\n"
    )
    temporal.do(lambda client: client.get_workflow_handle(run_id).terminate())


def test_up_elsewhere_says_the_next_command_with_that_home(
    command: Command, temporal: Temporal, calls: Calls, tmp_path: Path
):
    eventually(lambda: not temporal.do(open_runs))
    other = tmp_path / "an other"
    ended = command("up", "--home", str(other))
    assert ended.exit_code == 0, ended.output
    assert f"Next:     relax-infer run quickstart --home '{other}'\n" in ended.stdout


def test_what_up_says_of_its_failure_is_the_error(
    command: Command, calls: Calls, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("STACK_REFUSES", "1.0 GiB of memory are free, 10 GiB are wanted.")
    for words in (["up"], ["run", "quickstart"]):
        ended = command(*words)
        assert ended.exit_code == 2
        assert ended.stderr == "Error: 1.0 GiB of memory are free, 10 GiB are wanted.\n"


def test_a_stack_process_that_breaks_exits_1_with_what_it_said(
    command: Command, calls: Calls, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("STACK_RECORD")
    ended = command("up")
    assert ended.exit_code == 1
    assert "KeyError: 'STACK_RECORD'" in ended.stderr
    assert "`relax-infer down`" in ended.stderr


def test_run_starts_a_stack_with_the_recipes_gpus_runs_and_ends_it(
    command: Command,
    temporal: Temporal,
    calls: Calls,
    home: Path,
    run_id: str,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(_run, "gpu_count", lambda: 0)
    eventually(lambda: not temporal.do(open_runs))
    words = ("--run-id", run_id, "--steps", "1", "--memory-gib", "1", "--down")
    with temporal.working(ScriptedWorld()):
        ended = command("run", "quickstart", *words)
    assert ended.exit_code == 0, ended.output
    page = f"Web UI: http://127.0.0.1:8233/namespaces/default/workflows/{run_id}"
    assert page in ended.stdout.splitlines()
    assert calls()[0] == ["up", "--home", str(home), "--at-least", "2", "--memory-gib", "1.0"]
    assert calls()[1:] == [["down", "--home", str(home)]]
    assert "The local stack stays up" not in ended.stdout


def test_down_waits_for_other_runs(
    command: Command, temporal: Temporal, calls: Calls, run_id: str, home: Path
):
    other = f"{run_id}-other"
    world = ScriptedWorld()
    world.faults["resolve_recipe"] = ["refuse"]

    async def start(client: Client) -> None:
        await client.start_workflow("TrainingRun", {}, id=other, task_queue="nobody")

    temporal.do(start)
    eventually(lambda: other in temporal.do(open_runs))
    with temporal.working(world):
        ended = command("run", "quickstart", "--run-id", run_id, "--down")
    assert ended.exit_code == 1, ended.output
    assert f"The local stack stays up: {other} still goes on." in ended.stdout
    assert "down" not in {call[0] for call in calls()}
    temporal.do(lambda client: client.get_workflow_handle(other).terminate())


def test_down_says_which_runs_go_on_once_the_stack_is_up_again(
    command: Command, temporal: Temporal, calls: Calls, run_id: str, home: Path
):
    assert command("up").exit_code == 0
    ended = command("down")
    assert ended.exit_code == 0, ended.output
    assert "had not ended" not in ended.stdout

    async def start(client: Client) -> None:
        await client.start_workflow("TrainingRun", {}, id=run_id, task_queue="nobody")

    assert command("up").exit_code == 0
    temporal.do(start)
    eventually(lambda: run_id in temporal.do(open_runs))
    ended = command("down")
    assert f"{run_id} had not ended: `relax-infer up` goes on with it." in ended.stdout
    temporal.do(lambda client: client.get_workflow_handle(run_id).terminate())


def test_a_stack_that_is_down_says_what_is_in_its_store(command: Command, home: Path):
    none = command("status")
    assert none.exit_code == 2
    assert f"No local stack in {home}" in none.stderr
    for number in range(7):
        recipe = home / "store" / f"run-{number}" / "recipe.json"
        recipe.parent.mkdir(parents=True)
        recipe.touch()
        os.utime(recipe, (number, number))
    told = command("status")
    assert told.exit_code == 2
    assert f"The local stack in {home} is down" in told.stderr
    assert "run-6, run-5, run-4, run-3, run-2 and 2 more" in told.stderr
    assert "`relax-infer up` starts it again" in told.stderr


def test_a_host_with_gpus_is_not_told_how_many(
    command: Command,
    temporal: Temporal,
    calls: Calls,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(_run, "gpu_count", lambda: 8)
    ended = command("run", "quickstart", "--no-follow")
    assert ended.exit_code == 0, ended.output
    assert calls() == [["up", "--home", str(home)]]
    run = ended.stdout.split("Run ")[1].split()[0]
    temporal.do(lambda client: client.get_workflow_handle(run).terminate())


def test_a_stack_that_was_started_in_vain_is_down_again(
    command: Command, temporal: Temporal, calls: Calls, home: Path
):
    (home / "store" / "run-x").mkdir(parents=True)
    ended = command("run", "quickstart", "--run-id", "run-x")
    assert ended.exit_code == 2
    assert f"its files are in {home / 'store' / 'run-x'}" in ended.stderr
    assert [call[0] for call in calls()] == ["up", "down"]
    assert not (home / "stack.json").exists()


def test_what_the_engines_need_is_looked_for_before_anything_starts(
    command: Command, calls: Calls, home: Path, monkeypatch: pytest.MonkeyPatch
):
    there = importlib.util.find_spec
    monkeypatch.setattr(
        _needs.importlib.util, "find_spec", lambda n: None if n == "sglang" else there(n)
    )
    ended = command("run", "quickstart", "--set", "genrm.engine.python=/nowhere/python")
    assert ended.exit_code == 2
    assert "  recipe: sglang is not installed." in ended.stderr
    assert "  genrm.engine.python: there is no program /nowhere/python." in ended.stderr
    assert calls() == []


OWN = """
name: mine
cluster: {gpus: 8, device: cuda}
data: {source: file, path: /nowhere/math.jsonl, grader: exact}
rollout: {model: POLICY, engine: {replicas: 4, gpus_per_replica: 2}}
genrm:
  model: /nowhere/judge
  model_id: judge
  prompt: "{response}"
  verdict: {pattern: "(?P<score>[01])", lowest: 0, highest: 1}
reward: {source: exact}
train: {ranks: 8, tensor_parallel: 2}
"""


def test_everything_that_a_recipe_of_ones_own_lacks_here_is_told_at_once(
    command: Command, calls: Calls, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """With no stack begun for it, no GPU pretended in the place of a real one, and no id spent."""
    monkeypatch.setattr(_needs, "gpu_count", lambda: 0)
    recipe, policy = tmp_path / "mine.yaml", tmp_path / "policy"
    recipe.write_text(OWN.replace("POLICY", str(policy)))
    told = command("run", str(recipe), "--run-id", "math")
    assert told.exit_code == 2
    assert "This machine cannot run recipe mine:" in told.stderr
    assert "  cluster.device: cuda, and this machine has no GPU" in told.stderr
    assert f"  rollout.model: {policy} is no folder of this machine." in told.stderr
    assert "  data.path: /nowhere/math.jsonl cannot be read: " in told.stderr
    assert "genrm.model" not in told.stderr, "nobody is judged by it: reward.source is exact"
    policy.mkdir()
    assert "has no config.json." in command("run", str(recipe)).stderr
    (policy / "config.json").touch()
    assert "has no *.safetensors." in command("run", str(recipe)).stderr
    (policy / "model.safetensors").touch()
    judged = command("run", str(recipe), "--set", "reward.source=genrm")
    assert "rollout.model" not in judged.stderr
    assert "  genrm.model: /nowhere/judge is no folder of this machine." in judged.stderr
    assert calls() == []
    assert not (home / "store").exists()


def test_a_stack_with_fewer_gpus_is_told_with_the_runs_that_it_has(
    command: Command, temporal: Temporal, calls: Calls, home: Path, run_id: str
):
    stack_record(home, temporal.address, gpus=1)

    begin(temporal, run_id)
    ended = command("run", "quickstart")
    assert ended.exit_code == 2
    assert f"cluster.gpus: 2, and the local stack in {home} has 1." in ended.stderr
    assert "run `relax-infer down` and this command again." in ended.stderr
    assert f"{run_id} would stand still meanwhile, and go on then." in ended.stderr
    assert calls() == []
    temporal.do(lambda client: client.get_workflow_handle(run_id).terminate())


def test_a_run_that_goes_on_is_watched_whatever_this_machine_lacks(
    command: Command,
    temporal: Temporal,
    calls: Calls,
    home: Path,
    run_id: str,
    monkeypatch: pytest.MonkeyPatch,
):
    stack_record(home, temporal.address)

    begin(temporal, run_id)
    monkeypatch.setattr(_needs, "gpu_count", lambda: 0)
    words = ("--run-id", run_id, "--no-follow", "--set", "cluster.device=cuda")
    ended = command("run", "quickstart", *words)
    assert ended.exit_code == 0, ended.output
    assert "goes on already" in ended.stdout
    temporal.do(lambda client: client.get_workflow_handle(run_id).terminate())


def test_runs_of_a_local_stack_are_numbered_past_those_that_left_files(
    command: Command, temporal: Temporal, calls: Calls, home: Path, monkeypatch: pytest.MonkeyPatch
):
    stack_record(home, temporal.address)
    (home / "store" / "run-1").mkdir(parents=True)
    started = [command("run", "quickstart", "--no-follow").stdout for _ in range(2)]
    runs = [text.split("Run ")[1].split()[0] for text in started]
    numbers = [int(run.removeprefix("run-")) for run in runs]
    assert numbers[0] >= 2
    assert numbers[1] == numbers[0] + 1
    for run in runs:
        assert temporal.do(lambda client, run=run: is_running(client, run))
        temporal.do(lambda client, run=run: client.get_workflow_handle(run).terminate())


def test_a_server_of_the_environment_is_used_without_a_stack(
    remote: Command, temporal: Temporal, calls: Calls, run_id: str
):
    ended = remote("run", "quickstart", "--run-id", run_id, "--no-follow")
    assert ended.exit_code == 0, ended.output
    assert calls() == []
    temporal.do(lambda client: client.get_workflow_handle(run_id).terminate())


def test_an_interrupt_while_the_stack_starts_reaches_it_and_is_waited_for(
    calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    waits = tmp_path / "waits"
    monkeypatch.setenv("STACK_WAITS", str(waits))
    package = str(tmp_path / "checkout" / "relax_infer" / "__init__.py")
    with Watching("up", package=package) as watching:
        eventually(waits.exists)
        watching.interrupt()
        code, output = watching.end()
    assert code == 130, output
    assert [call[0] for call in calls()] == ["up"]


def test_a_worker_of_the_local_stack_points_at_it_alone(
    command: Command, temporal: Temporal, home: Path, monkeypatch: pytest.MonkeyPatch
):
    seen: list[tuple[object, ...]] = []
    monkeypatch.setattr(
        _looks.os, "execve", lambda _, words, variables: seen.append((words, variables))
    )
    monkeypatch.setenv("RAY_ADDRESS", "elsewhere:1")
    monkeypatch.setenv("TEMPORAL_API_KEY", "of another server")
    stack_record(home, temporal.address, ray_token_file=str(home / "ray.token"))
    ended = command("worker", "--queue", "relax-train")
    assert ended.exit_code == 0, ended.output
    [(words, variables)] = seen
    assert isinstance(variables, dict)
    assert words == [sys.executable, "-P", "-m", "workers.worker", "--queues", "relax-train"]
    assert variables["RAY_ADDRESS"] == "127.0.0.1:6379"
    assert variables["RAY_AUTH_TOKEN_PATH"] == str(home / "ray.token")
    assert variables["TEMPORAL_ADDRESS"] == temporal.address
    assert "TEMPORAL_API_KEY" not in variables
    assert variables["PYTHONPATH"].split(os.pathsep)[0] == str(_local.checkout())
