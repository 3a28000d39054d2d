"""A run while it is at work: its board, its lines, and why a step is where it is."""

import io
import json
import os
import pty
import re
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta

import pytest
from rich.console import Console

from relax_infer.cli import _runs, _steps
from relax_infer.cli._follow import Panel
from relax_infer.cli._glance import Glance
from relax_infer.contracts.engines import GroupSnapshot, ReplicaReport
from relax_infer.contracts.lease import BatchRecord, LeaseStatus, RoleLease
from relax_infer.contracts.run import PhaseTime, RunProgress, RunStatus, StepStatus
from relax_infer.machines import (
    BatchState,
    GroupState,
    LeaseState,
    ReplicaState,
    RunState,
    StepPhase,
)
from tests.cli.conftest import Command, Temporal, Watching, eventually
from tests.workflows.scripted_world import ScriptedWorld


def words(text: str) -> str:
    return " ".join(text.split())


@pytest.fixture
def held(remote: Command, temporal: Temporal, run_id: str) -> Iterator[ScriptedWorld]:
    """A run of two steps whose second one stands in its judging, after one failure."""
    world = ScriptedWorld(evaluation_every=1)
    world.faults["generate_groups"] = ["", "flake"]
    world.faults["judge_samples"] = ["", "hold"]
    with temporal.working(world):
        remote("run", "quickstart", "--run-id", run_id, "--steps", "2", "--no-follow")
        eventually(world.held.is_set)
        yield world
        world.go_on.set()
        eventually(lambda: json.loads(remote("status", run_id, "--json").stdout)["state"] == "DONE")


def test_a_step_at_work_can_be_looked_at_from_every_side(
    remote: Command, held: ScriptedWorld, run_id: str
):
    status_shows_replicas_phases_and_what_to_expect(remote, run_id)
    a_step_is_explained_while_it_is_at_work_and_when_it_is_done(remote, run_id)
    the_steps_of_a_run_are_listed(remote, run_id)


def status_shows_replicas_phases_and_what_to_expect(remote: Command, run_id: str):
    shown = json.loads(remote("status", run_id, "--json").stdout)
    assert shown["at_work"]["phase"] == "GENRM_SCORING"
    assert shown["told"] == "12 of 32 groups"
    assert shown["gpus"]["holder"] == "genrm"
    assert shown["gpus"]["pool"] == "default"
    states = {
        f"{g['role']}/{r['replica']}": r["state"] for g in shown["groups"] for r in g["replicas"]
    }
    assert states == {
        "rollout/0": "SLEEPING",
        "rollout/1": "SLEEPING",
        "genrm/0": "READY",
        "teacher/0": "SLEEPING",
    }
    phases = [phase["phase"] for phase in shown["phases"]]
    assert phases == ["PREPARING", "GENERATING", "ROLLOUT_OFFLOADING", "GENRM_SCORING"]
    assert {"GENERATING", "TRAINING", "EVALUATING"} <= shown["expected_seconds"].keys()
    assert shown["tokens_per_second"] > 0
    board = remote("status", run_id).stdout
    assert "pool default genrm ACTIVE under token" in words(board)
    assert "genrm genrm/replica-0 READY" in words(board)
    assert "GENRM_SCORING: has the genrm score 256 samples (12 of 32 groups)" in words(board)


def a_step_is_explained_while_it_is_at_work_and_when_it_is_done(remote: Command, run_id: str):
    ended = remote("step", "explain", run_id, "2")
    assert ended.exit_code == 0, ended.output
    told = words(ended.stdout)
    assert f"Step 2 of {run_id} is in GENRM_SCORING: it has the genrm score 256 samples." in told
    assert "At work: judge_samples (score with genrm, attempt 1), for " in told
    assert "it says: 12 of 32 groups." in told
    assert "generate, attempt 1 failed: generate_groups flaked." in told
    assert "The GPUs of pool default are with genrm, which is ACTIVE." in told
    assert f"relax-infer logs {run_id} --step 2" in told
    assert "s so far, expected " in told

    done = remote("step", "explain", run_id, "1")
    assert done.exit_code == 0
    assert f"Step 1 of {run_id} is done; it took " in done.stdout
    assert "Its batch: 256 samples, reward 0.500, teacher KL 1.000, 0 groups dropped." in (
        done.stdout
    )
    later = remote("step", "explain", run_id, "9")
    assert f"Step 9 of {run_id} has not begun: the run ends with step 2." in later.stdout
    document = json.loads(remote("step", "explain", run_id, "2", "--json").stdout)
    assert [p["phase"] for p in document["phases"]][-1] == "GENRM_SCORING"


def the_steps_of_a_run_are_listed(remote: Command, run_id: str):
    listed = json.loads(remote("steps", "list", run_id, "--json").stdout)
    assert [(s["step"], s["phase"], s["reward"]) for s in listed] == [
        (0, "DONE", None),
        (1, "DONE", 0.5),
        (2, "GENRM_SCORING", None),
    ]
    lines = remote("steps", "list", run_id).stdout.splitlines()
    assert "reward 0.500" in lines[1]
    assert lines[2].split()[:3] == ["step", "2", "GENRM_SCORING"]
    listed = eventually(
        lambda: [
            r
            for r in json.loads(remote("runs", "list", "--open", "--json").stdout)
            if r["run"] == run_id
        ]
    )
    assert listed[0]["open"]


@pytest.mark.wide
def test_a_watch_without_a_terminal_tells_every_change_in_a_line(
    remote: Command, held: ScriptedWorld, run_id: str
):
    with Watching("status", run_id, "--watch") as watching:
        watching.next_line("step   2  GENERATING         took ")
        watching.next_line("genrm genrm/replica-0  READY")
        held.go_on.set()
        watching.next_line("step   2  GENRM_SCORING")
        code, output = watching.end()
    assert code == 0, output
    assert f"{run_id}  DONE" in output


def test_a_watch_on_a_terminal_is_a_board_that_ends_with_the_run(
    remote: Command, held: ScriptedWorld, run_id: str
):
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (60, 120))
    start = "from relax_infer.cli import main; main()"
    watching = subprocess.Popen(
        (sys.executable, "-c", start, "status", run_id, "--watch"),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm-256color"},
    )
    os.close(theirs)
    seen = b""
    try:
        with suppress(OSError):  # the terminal is closed when its last program has ended
            while part := os.read(ours, 65536):
                seen += part
                if b"role in flight" in seen:
                    held.go_on.set()
        assert watching.wait(60) == 0
    finally:
        watching.kill()
        watching.wait()
        os.close(ours)
    shown = words(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen.decode()))
    assert "pool default genrm ACTIVE under token" in shown
    assert f"{run_id} DONE" in shown


@pytest.mark.wide
def test_a_watch_for_programs_is_a_document_a_line(
    remote: Command, held: ScriptedWorld, run_id: str
):
    with Watching("status", run_id, "--watch", "--json") as watching:
        first = json.loads(watching.next_line(run_id))
        held.go_on.set()
        code, output = watching.end()
    assert code == 0, output
    assert first["at_work"]["phase"] == "GENRM_SCORING"
    assert json.loads(output.splitlines()[-1])["state"] == "DONE"


def test_a_step_that_gave_up_is_explained_with_what_to_do(
    remote: Command, temporal: Temporal, run_id: str
):
    world = ScriptedWorld()
    world.faults["judge_samples"] = ["refuse"]
    with temporal.working(world):
        remote("run", "quickstart", "--run-id", run_id, "--steps", "1")
        ended = remote("step", "explain", run_id, "1")
        assert ended.exit_code == 3, ended.output
        told = words(ended.stdout)
        assert f"Step 1 of {run_id} gave up in GENRM_SCORING after" in told
        assert "score with genrm, attempt 1 failed: judge_samples refused." in told
        assert f"Again: relax-infer step retry {run_id} 1 --who NAME --why TEXT" in told
        failed = json.loads(remote("steps", "list", run_id, "--json").stdout)[-1]
        assert failed["phase"] == "FAILED"
        assert "judge_samples refused" in failed["error"]
        person = ("--who", "ada", "--why", "enough", "--stop")
        assert remote("resolve", run_id, *person).exit_code == 0
        eventually(lambda: json.loads(remote("status", run_id, "--json").stdout)["state"] == "DONE")


@pytest.mark.wide
def test_a_step_is_explained_without_a_worker(
    remote: Command, temporal: Temporal, run_id: str, monkeypatch: pytest.MonkeyPatch
):
    with temporal.working(ScriptedWorld()):
        remote("run", "quickstart", "--run-id", run_id, "--steps", "500", "--no-follow")

        def step() -> int | None:
            shown = json.loads(remote("status", run_id, "--json").stdout)
            return shown["at_work"]["step"] if shown["at_work"] else None

        number = eventually(step)
    monkeypatch.setattr(_runs, "_QUERY", timedelta(seconds=1))
    monkeypatch.setattr(_steps, "_LOOK_PATIENCE", 0.0)
    ended = remote("step", "explain", run_id, str(number))
    assert ended.exit_code == 0, ended.output
    assert f"Step {number} of {run_id} is " in ended.stdout
    assert "No worker answers, or it is busy: this is what Temporal itself knows." in ended.stdout


@pytest.mark.wide
def test_a_run_whose_models_are_trained_first_says_so(
    remote: Command, temporal: Temporal, run_id: str
):
    world = ScriptedWorld()
    world.faults["resolve_recipe"] = ["hold"]
    with temporal.working(world), Watching("run", "quickstart", "--run-id", run_id) as watching:
        watching.next_line(
            f"{run_id}  STARTING  reads the recipe: trains the tiny models (once for this machine)"
        )
        world.go_on.set()
        watching.next_line("step   0")
        remote("stop", run_id)
        code, output = watching.end()
    assert code == 0, output


def glance() -> Glance:
    """Everything that a board can show."""
    return Glance(
        run=RunStatus(
            run="run-1",
            state=RunState.RUNNING,
            doing="step 3 of 40",
            step=2,
            target=40,
            weight_version=2,
            reward=0.5,
            progress=(RunProgress(step=2, reward=0.5, seconds=61.0),),
        ),
        step=StepStatus(step=3, phase=StepPhase.GENERATING, doing="generates"),
        told="12 of 32 groups",
        lease=LeaseStatus(
            pool="default",
            fence_counter=7,
            roles={
                "genrm": RoleLease(state=LeaseState.BLOCKED, reason="no answer to the offload"),
                "rollout": RoleLease(state=LeaseState.ACTIVE),
            },
            batch=BatchRecord(batch="step-3", state=BatchState.PENDING),
            holder="rollout",
        ),
        groups=(
            GroupSnapshot(
                role="rollout",
                model="policy",
                state=GroupState.READY,
                weight_source="ACTOR",
                replicas=(
                    ReplicaReport(
                        replica=0,
                        engine_id="policy/replica-0",
                        state=ReplicaState.READY,
                        weight_version=1,
                    ),
                    ReplicaReport(
                        replica=1,
                        engine_id="policy/replica-1",
                        state=ReplicaState.FAILED,
                        error="its scheduler is gone",
                    ),
                ),
                stuck="replica 1 cannot be proved gone",
            ),
        ),
        phases=(
            PhaseTime(phase=StepPhase.PREPARING, started=1.0, seconds=0.5),
            PhaseTime(phase=StepPhase.GENERATING, started=1.5, seconds=40.0),
        ),
        expected={"PREPARING": 0.4, "GENERATING": 8.0, "TRAINING": 5.0},
        load={"rollout": 64},
    )


def test_a_board_on_a_terminal_shows_everything_at_once():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120, height=60)
    view = Panel(console, "http://127.0.0.1:8233/run-1")
    view.show(glance())
    view.close()
    bare = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    for expected in (
        "rollout ACTIVE",
        "(no answer to the offload)",
        "step-3 PENDING",
        "weights 2, staleness 1",
        "its scheduler is gone",
        "replica 1 cannot be proved gone",
        "GENERATING: generates (12 of 32 groups)",
        "http://127.0.0.1:8233/run-1",
    ):
        assert expected in words(bare)
    rows = [line.split() for line in bare.splitlines()]
    assert ["GENERATING", "40.0", "8.0"] in rows
    assert ["TRAINING", "-", "5.0"] in rows
    assert ["rollout", "policy/replica-0", "READY", "1", "64"] in rows
