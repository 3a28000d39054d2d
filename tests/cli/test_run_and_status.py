"""``run`` and ``status`` over the scripted world, on a real Temporal server."""

import json
import re
import shlex
import subprocess
from pathlib import Path
from urllib.parse import unquote

import pytest
from temporalio.client import Client
from typer.testing import CliRunner, Result

from relax_infer.cli import app
from tests.cli.conftest import TEMPORAL, Command, Temporal, Watching, eventually, stack_record
from tests.workflows.scripted_world import ScriptedWorld

DONE = "run-done"
README = (Path(__file__).parents[2] / "README.md").read_text()


@pytest.fixture(scope="module")
def done(temporal: Temporal) -> Result:
    """How `run` of one step ended, under the id DONE; no worker is left."""
    words = ["run", "quickstart", "--run-id", DONE, "--steps", "1", "--home", "/nowhere"]
    with temporal.working(ScriptedWorld()):
        return CliRunner().invoke(app, words, env={"TEMPORAL_ADDRESS": temporal.address})


@pytest.fixture
def done_run(done: Result) -> str:
    return DONE


def test_run_follows_to_the_last_step_and_exits_0(done: Result):
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0] == f"Run {DONE} is started."
    finished = [line.split()[1] for line in lines if " done in " in line]
    assert finished == ["0", "1"]
    assert "reward 0.500  accuracy 0.500  teacher KL 1.000  loss 0.100" in done.stdout
    assert lines[-1].split()[:2] == [DONE, "DONE"]


def test_a_recipe_file_travels_as_its_content_with_overrides_and_steps(
    remote: Command,
    temporal: Temporal,
    run_id: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """Whoever reads it need not see the file, nor stand in the folder of its relative models."""
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        "{name: mine, cluster: {gpus: 2}, rollout: {model: model}, reward: {source: exact}}"
    )
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    words = ("--run-id", run_id, "--steps", "3", "--set", "train.learning_rate=1e-4")
    ended = remote("run", "mine.yaml", "--no-follow", *words)
    assert ended.exit_code == 0, ended.output
    assert temporal.do(lambda client: started_with(client, run_id)) == {
        "recipe": {
            "name": "mine",
            "cluster": {"gpus": 2},
            "rollout": {"model": "model"},
            "reward": {"source": "exact"},
        },
        "steps": 3,
        "overrides": {"train.learning_rate": 1e-4, "rollout.model": str(tmp_path / "model")},
        "begin_from": None,
        "steps_per_history": None,
        "carried": None,
    }
    temporal.do(lambda client: client.get_workflow_handle(run_id).terminate())


async def started_with(client: Client, run: str) -> dict[str, object]:
    history = await client.get_workflow_handle(run).fetch_history()
    payloads = history.events[0].workflow_execution_started_event_attributes.input.payloads
    return json.loads(payloads[0].data)


def test_a_used_id_is_refused(remote: Command, done_run: str):
    ended = remote("run", "quickstart", "--run-id", done_run)
    assert ended.exit_code == 2
    assert f"The run id {done_run} was used before" in ended.stderr
    assert "Choose another --run-id" in ended.stderr


def test_temporals_own_tool_refuses_a_used_id_as_the_readme_has_it_typed(
    done_run: str, temporal: Temporal
):
    line = re.search(r"^temporal (workflow start .*?)\ntemporal ", README, re.DOTALL | re.MULTILINE)
    assert line is not None
    words = shlex.split(line[1].replace("\\\n", " ").replace("run-2", done_run))
    typed = [TEMPORAL, *words, "--address", temporal.address]
    ended = subprocess.run(typed, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode != 0
    assert "already" in ended.stderr


def test_an_id_of_something_else_is_refused(remote: Command, temporal: Temporal, run_id: str):
    async def start(client: Client) -> None:
        await client.start_workflow("Other", id=run_id, task_queue="nobody")

    temporal.do(start)
    for words in (["run", "quickstart", "--run-id", run_id], ["status", run_id]):
        ended = remote(*words)
        assert ended.exit_code == 2
        assert f"{run_id} is no run: it is a Other" in ended.stderr


@pytest.mark.parametrize(
    "words",
    [
        "status RUN",
        "pause RUN",
        "stop RUN",
        "resolve RUN --who a --why b",
        "report RUN",
        "samples RUN 1",
        "step explain RUN 1",
        "scale RUN rollout",
    ],
)
def test_an_unknown_run_is_named(remote: Command, temporal: Temporal, words: str):
    ended = remote(*words.replace("RUN", "run-unknown").split())
    assert ended.exit_code == 2, ended.output
    assert f"There is no run run-unknown on {temporal.address}" in ended.stderr


def test_status_of_a_run_that_is_done_needs_no_worker(
    remote: Command, temporal: Temporal, done_run: str
):
    seen = remote("status", done_run, "--json")
    assert seen.exit_code == 0, seen.output
    document = json.loads(seen.stdout)
    assert (document["run"], document["state"], document["step"]) == (done_run, "DONE", 1)
    assert document["web_ui"] is None
    assert document["temporal_address"] == temporal.address


def test_status_shows_the_steps_and_where_the_web_ui_is(
    command: Command, temporal: Temporal, home: Path, done_run: str
):
    stack_record(home, temporal.address)
    seen = command("status", done_run)
    assert seen.exit_code == 0, seen.output
    assert f"http://127.0.0.1:8233/namespaces/default/workflows/{done_run}" in seen.stdout
    assert "1 of 1" in seen.stdout
    assert "0.500" in seen.stdout
    views = {line.split()[1]: line.split()[2] for line in seen.stdout.splitlines() if "?" in line}
    assert list(views) == ["all", "steps", "open", "waits"]
    page, _, query = views["steps"].partition("?query=")
    assert page == "http://127.0.0.1:8233/namespaces/default/workflows"
    found = eventually(lambda: temporal.do(lambda client: ids_of(client, unquote(query))))
    assert found == {f"{done_run}.step-0", f"{done_run}.step-1"}
    queries = [unquote(view.partition("?query=")[2]) for view in views.values()]
    for each in queries:  # whatever they show, the server takes them
        temporal.do(lambda client, query=each: ids_of(client, query))


async def ids_of(client: Client, query: str) -> set[str]:
    """What the web UI would list."""
    return {each.id async for each in client.list_workflows(query)}


def test_the_local_stack_goes_before_temporal_address_and_says_so(
    command: Command, temporal: Temporal, home: Path, done_run: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TEMPORAL_ADDRESS", "127.0.0.1:1")
    stack_record(home, temporal.address)
    seen = command("status", done_run)
    assert seen.exit_code == 0, seen.output
    assert "not TEMPORAL_ADDRESS=127.0.0.1:1" in seen.stderr


def test_all_runs_are_listed(remote: Command, done_run: str):
    listed = eventually(lambda: [r for r in runs_of(remote) if r["run"] == done_run])
    assert (listed[0]["state"], listed[0]["open"]) == ("DONE", False)
    assert (listed[0]["weight_version"], listed[0]["reward"]) == (1, 0.5)
    [line] = [line for line in remote("runs", "list").stdout.splitlines() if done_run in line]
    assert line.split()[1] == "DONE"
    assert line.endswith("weights 1  reward 0.500")


def runs_of(remote: Command) -> list[dict[str, object]]:
    return json.loads(remote("status", "--json").stdout)


def test_a_run_waits_for_a_worker_and_one_that_cannot_start_exits_1_with_its_reason(
    remote: Command, temporal: Temporal, run_id: str
):
    world = ScriptedWorld()
    world.faults["resolve_recipe"] = ["refuse"]
    with Watching("run", "quickstart", "--run-id", run_id) as watching:
        watching.next_line(f"Run {run_id} is started.")
        assert watching.running
        with temporal.working(world):
            code, output = watching.end()
    assert code == 1, output
    assert f"{run_id}  FAILED" in output
    assert "resolve_recipe refused" in output
    seen = remote("status", run_id)
    assert seen.exit_code == 1
    assert "resolve_recipe refused" in " ".join(seen.stdout.split())


def test_a_run_that_was_terminated_has_failed(remote: Command, temporal: Temporal, run_id: str):
    remote("run", "quickstart", "--run-id", run_id, "--no-follow")
    temporal.do(lambda client: client.get_workflow_handle(run_id).terminate())
    with temporal.working(ScriptedWorld()):
        seen = remote("status", run_id, "--json")
    assert seen.exit_code == 1, seen.output
    assert "ended from outside (TERMINATED)" in json.loads(seen.stdout)["error"]


def test_a_second_command_attaches_and_an_interrupt_leaves_the_run_alone(
    remote: Command, temporal: Temporal, run_id: str
):
    remote("run", "quickstart", "--run-id", run_id, "--no-follow")
    with Watching("run", "quickstart", "--run-id", run_id) as watching:
        watching.next_line(f"Run {run_id} goes on already")
        watching.interrupt()
        code, output = watching.end()
    assert code == 130, output
    assert f"`relax-infer status {run_id}`" in output
    assert temporal.do(lambda client: is_running(client, run_id))
    temporal.do(lambda client: client.get_workflow_handle(run_id).terminate())


async def is_running(client: Client, run: str) -> bool:
    described = await client.get_workflow_handle(run).describe()
    return described.status is not None and described.status.name == "RUNNING"


def test_a_run_may_go_on_from_anothers_checkpoint(remote: Command, temporal: Temporal, run_id: str):
    begun = remote("run", "quickstart", "--run-id", run_id, "--no-follow", "--from", "first")
    assert begun.exit_code == 0, begun.output
    started = temporal.do(lambda client: started_with(client, run_id))
    assert started["begin_from"] == {"run": "first", "step": None, "store": None}
    temporal.do(lambda client: client.get_workflow_handle(run_id).terminate())
    refused = remote("run", "quickstart", "--no-follow", "--from-step", "3")
    assert refused.exit_code == 2
    assert "--from-step needs --from" in refused.stderr
