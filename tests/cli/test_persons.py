"""What a person asks of a run, over the scripted world on a real Temporal server."""

import json
from datetime import timedelta

import pytest

from relax_infer.cli import _asking, _runs
from relax_infer.cli._pollers import pollers_of
from tests.cli.conftest import Command, Temporal, Watching, eventually
from tests.workflows.scripted_world import ScriptedWorld


def status(remote: Command, run: str) -> dict[str, object]:
    return json.loads(remote("status", run, "--json").stdout)


def test_a_run_that_gave_up_on_a_step_exits_3_and_goes_on_when_resolved(
    remote: Command, temporal: Temporal, run_id: str
):
    world = ScriptedWorld()
    world.faults["judge_samples"] = ["refuse"]
    with temporal.working(world):
        blocked = remote("run", "quickstart", "--run-id", run_id, "--steps", "1")
        assert blocked.exit_code == 3, blocked.output
        assert "judge_samples refused" in blocked.stdout
        assert f"relax-infer resolve {run_id} --who NAME --why TEXT --stop" in blocked.stdout
        assert remote("status", run_id).exit_code == 3
        answered = remote("resolve", run_id, "--who", "ada", "--why", "the judge is back")
        assert answered.exit_code == 0, answered.output
        again = remote("run", "quickstart", "--run-id", run_id)
    assert again.exit_code == 0, again.output
    assert f"{run_id}  DONE" in again.stdout
    assert sorted(world.ledger) == [1]


def test_a_blocked_lease_is_released_only_by_who_saw_that_its_holder_is_gone(
    remote: Command, temporal: Temporal, run_id: str
):
    world = ScriptedWorld(reconcile_timeout=0.2)
    world.engines.engines["genrm", 0].hides = True
    world.faults["judge_samples"] = ["kill_engine"]
    person = ("--who", "ada", "--why", "looked")
    with temporal.working(world):
        blocked = remote("run", "quickstart", "--run-id", run_id, "--steps", "1")
        assert blocked.exit_code == 3, blocked.output
        assert "may still hold its GPUs" in blocked.stdout
        refused = remote("resolve", run_id, *person)
        assert refused.exit_code == 2
        assert "then resolve with --confirm-released" in refused.stderr
        assert status(remote, run_id)["state"] == "BLOCKED"
        world.engines.end_all()
        answered = remote("resolve", run_id, *person, "--confirm-released")
        assert answered.exit_code == 0, answered.output
        eventually(lambda: status(remote, run_id)["state"] != "BLOCKED")
        assert remote("stop", run_id).exit_code == 0
        ended = remote("run", "quickstart", "--run-id", run_id)
    assert ended.exit_code in (0, 2), ended.output  # 2: it was over before we could attach
    assert status(remote, run_id)["state"] == "DONE"


def test_a_run_pauses_resumes_and_stops(remote: Command, temporal: Temporal, run_id: str):
    with temporal.working(ScriptedWorld()):
        remote("run", "quickstart", "--run-id", run_id, "--steps", "500", "--no-follow")
        too_early = remote("pause", run_id)
        assert too_early.exit_code == 2, too_early.output
        assert f"Run {run_id} is STARTING: it can be paused once it is RUNNING." in too_early.stderr
        assert f"What can be done now: `relax-infer stop {run_id}`." in too_early.stderr
        eventually(lambda: status(remote, run_id)["state"] == "RUNNING")
        paused = remote("pause", run_id)
        assert paused.exit_code == 0, paused.output
        assert f"{run_id}  PAUSING" in paused.stdout
        eventually(lambda: status(remote, run_id)["state"] == "PAUSED")
        twice = remote("pause", run_id)
        assert twice.exit_code == 2
        assert f"Run {run_id} is PAUSED: it is paused already." in twice.stderr
        assert f"`relax-infer resume {run_id}`, `relax-infer stop {run_id}`" in twice.stderr
        assert f"{run_id}  RUNNING" in remote("resume", run_id).stdout
        with Watching("run", "quickstart", "--run-id", run_id) as watching:
            watching.next_line("GPUs: ")
            assert f"{run_id}  STOPPING" in remote("stop", run_id).stdout
            code, output = watching.end()
        assert code == 0, output
        assert f"{run_id}  DONE" in output
        late = remote("stop", run_id)
    assert late.exit_code == 2
    assert f"Run {run_id} is over (DONE)" in late.stderr


@pytest.mark.wide
def test_nobody_is_left_waiting_when_no_worker_answers(
    remote: Command, temporal: Temporal, run_id: str, monkeypatch: pytest.MonkeyPatch
):
    """Temporal remembers workers of earlier tests, so one that is busy is thought of."""
    monkeypatch.setattr(_runs, "_QUERY", timedelta(seconds=1))
    monkeypatch.setattr(_asking, "PATIENCE", 1.0)
    remote("run", "quickstart", "--run-id", run_id, "--no-follow")
    asked = remote("pause", run_id)
    assert asked.exit_code == 2
    assert f"Run {run_id} is there; no worker answers, or it is busy." in asked.stderr
    assert "`relax-infer worker`" in asked.stderr
    temporal.do(lambda client: client.get_workflow_handle(run_id).terminate())


@pytest.mark.wide
def test_a_worker_that_is_busy_for_a_while_is_waited_for(
    remote: Command, temporal: Temporal, run_id: str
):
    with temporal.working(ScriptedWorld()):
        eventually(lambda: temporal.do(lambda client: pollers_of(client, None)).asking)
    remote("run", "quickstart", "--run-id", run_id, "--no-follow")
    with Watching("stop", run_id) as stopping:
        stopping.next_line(f"No worker answers for {run_id} yet, or it is busy")
        with temporal.working(ScriptedWorld()):
            code, output = stopping.end()
            assert code == 0, output
            assert f"{run_id}  STOPPING" in output
            eventually(lambda: status(remote, run_id)["state"] == "DONE")


def test_a_step_that_gave_up_is_tried_again_and_no_other(
    remote: Command, temporal: Temporal, run_id: str
):
    world = ScriptedWorld()
    world.faults["judge_samples"] = ["refuse"]
    person = ("--who", "ada", "--why", "the judge is back")
    with temporal.working(world):
        assert remote("run", "quickstart", "--run-id", run_id, "--steps", "1").exit_code == 3
        other = remote("step", "retry", run_id, "0", *person)
        assert other.exit_code == 2
        assert f"Run {run_id} waits at step 1, not at step 0." in other.stderr
        assert remote("step", "retry", run_id, "1", *person).exit_code == 0
        again = remote("run", "quickstart", "--run-id", run_id)
        assert again.exit_code in (0, 2), again.output  # 2: it was over before we could attach
        late = remote("step", "retry", run_id, "1", *person)
    assert late.exit_code == 2
    assert "only a step that gave up can be tried again" in late.stderr
    assert sorted(world.ledger) == [1]
