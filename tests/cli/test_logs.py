"""relax-infer logs: which lines of which files, in which order."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from relax_infer.cli._log_files import clean, time_of
from relax_infer.contracts.refs import WeightsRef
from relax_infer.contracts.run import PhaseTime, StepRecord, StepResult
from relax_infer.machines import StepPhase
from tests.cli.conftest import Command, Watching

DAY = "2026-03-02"


def at(clock: str) -> float:
    return datetime.fromisoformat(f"{DAY}T{clock}").timestamp()


@pytest.fixture
def logs(home: Path) -> Path:
    folder = home / "logs"
    (folder / "run-1").mkdir(parents=True)
    (folder / "run-1" / "engine.genrm.judge.replica-0.0123abcd.log").write_text(
        f"[{DAY} 10:00:05] the judge begins\nits second line\n[{DAY} 10:00:20] the judge ends\n"
    )
    (folder / "run-1" / "engine.rollout.policy.replica-1.4567cdef.log").write_text(
        f"[{DAY} 10:00:01 TP0] the policy begins\n"
    )
    (folder / "run-1.gateway.log").write_text(f"{DAY} 10:00:07,250 INFO gateway answers\n")
    (folder / "run-1.router.log").write_text(
        f"\x1b[2m{DAY} 10:00:06\x1b[0m \x1b[33m WARN\x1b[0m router \x07warns\n"
    )
    (folder / "worker.log").write_text(
        f"{DAY} 10:00:08,000 INFO {{'workflow_id': 'run-1.step-3'}}\n"
        f"{DAY} 10:00:09,000 INFO {{'workflow_id': 'run-12.step-3'}}\n"
    )
    return folder


def shown(command: Command, *words: str) -> list[str]:
    ended = command("logs", "run-1", *words)
    assert ended.exit_code == 0, ended.output
    return ended.stdout.splitlines()


@pytest.mark.usefixtures("logs")
def test_every_part_is_told_in_the_order_of_time_without_what_steers_a_terminal(command: Command):
    assert shown(command) == [
        f"rollout policy/1 | [{DAY} 10:00:01 TP0] the policy begins",
        f"genrm judge/0 | [{DAY} 10:00:05] the judge begins",
        "genrm judge/0 | its second line",
        f"router | {DAY} 10:00:06  WARN router warns",
        f"gateway | {DAY} 10:00:07,250 INFO gateway answers",
        f"worker | {DAY} 10:00:08,000 INFO {{'workflow_id': 'run-1.step-3'}}",
        f"genrm judge/0 | [{DAY} 10:00:20] the judge ends",
    ]


@pytest.mark.usefixtures("logs")
@pytest.mark.parametrize(
    ("words", "sources"),
    [
        (["--role", "genrm"], {"genrm judge/0"}),
        (["--replica", "1"], {"rollout policy/1"}),
        (["--role", "gateway"], {"gateway"}),
        (["--role", "worker"], {"worker"}),
        (["--tail", "1"], {"genrm judge/0"}),
    ],
)
def test_a_part_is_chosen_by_role_and_replica(
    command: Command, words: list[str], sources: set[str]
):
    documents = [json.loads(line) for line in shown(command, *words, "--json")]
    assert {line["source"] for line in documents} == sources


@pytest.mark.usefixtures("logs")
def test_a_step_has_the_lines_of_its_time(command: Command, home: Path):
    folder = home / "store" / "run-1" / "steps" / "3"
    folder.mkdir(parents=True)
    phases = (
        PhaseTime(phase=StepPhase.GENERATING, started=at("10:00:05"), seconds=1.0),
        PhaseTime(phase=StepPhase.GENRM_SCORING, started=at("10:00:06"), seconds=0.5),
    )
    weights = WeightsRef(version=0, uri="/models/policy", digest="d0")
    record = StepRecord(
        run="run-1",
        step=3,
        outcome=StepPhase.DONE,
        result=StepResult(step=3, weights=weights, phases=phases),
    )
    (folder / "record.json").write_text(record.model_dump_json())
    assert [line.partition(" | ")[0] for line in shown(command, "--step", "3")] == [
        "genrm judge/0",
        "genrm judge/0",
        "router",
        "gateway",
    ]


def test_structured_lines_are_told_in_words_and_know_their_run_and_step(
    command: Command, home: Path
):
    folder = home / "logs" / "run-1"
    folder.mkdir(parents=True)

    def line(second: int, event: str, **fields: object) -> str:
        when = datetime.fromtimestamp(at("10:00:00") + second, UTC)
        about = {"run": "run-1", "step": None, "phase": None, "role": None, "replica": None}
        head = {"time": when.isoformat(), "level": "info", "event": event, "logger": "x"}
        return json.dumps({**head, **about, **fields}) + "\n"

    (folder / "trainer.rank-0.log").write_text(line(2, "has trained", step=3, role="trainer"))
    (folder / "engine.genrm.judge.replica-0.actor.log").write_text(
        line(1, "onload is \x1b[31mdone", role="genrm", replica=0, fence="7:g")
    )
    (home / "logs" / "worker.log").write_text(
        line(3, "another run's", run="run-12") + line(4, "late", step=3) + line(5, "next", step=4)
    )
    said = shown(command)
    assert said == [
        f"genrm judge/0 | {DAY} 10:00:01.000 INFO    onload is done"
        "  run=run-1 role=genrm replica=0 fence=7:g",
        f"trainer/0 | {DAY} 10:00:02.000 INFO    has trained  run=run-1 step=3 role=trainer",
        f"worker | {DAY} 10:00:04.000 INFO    late  run=run-1 step=3",
        f"worker | {DAY} 10:00:05.000 INFO    next  run=run-1 step=4",
    ]
    assert [json.loads(row)["fields"]["step"] for row in shown(command, "--json")] == [
        *(None, 3, 3, 4)
    ]
    steps = home / "store" / "run-1" / "steps" / "3"
    steps.mkdir(parents=True)
    phases = (PhaseTime(phase=StepPhase.TRAINING, started=at("10:00:02"), seconds=0.5),)
    weights = WeightsRef(version=0, uri="/models/policy", digest="d0")
    result = StepResult(step=3, weights=weights, phases=phases)
    record = StepRecord(run="run-1", step=3, outcome=StepPhase.DONE, result=result)
    (steps / "record.json").write_text(record.model_dump_json())
    assert shown(command, "--step", "3") == said[:3]


def test_a_level_leaves_what_is_as_bad_or_worse_with_its_traceback(command: Command, home: Path):
    folder = home / "logs" / "run-1"
    folder.mkdir(parents=True)

    def line(level: str, event: str) -> str:
        when = datetime.fromtimestamp(at("10:00:09"), UTC).isoformat()
        return json.dumps({"time": when, "level": level, "event": event, "run": "run-1"}) + "\n"

    (folder / "engine.genrm.judge.replica-0.0123abcd.log").write_text(
        f"[{DAY} 10:00:01] ERRORS: 0\n"
        f"[{DAY} 10:00:02] Scheduler hit an exception: Traceback (most recent call last):\n"
        "  File x, line 1\n\n"
        "torch.OutOfMemoryError: no memory\n"
        f"[{DAY} 10:00:03] goes on\n"
        "  indented\n"
        f"[{DAY} 10:00:04] WARNING is slow\n"
    )
    (folder / "trainer.rank-0.log").write_text(
        line("info", "an ERROR in words") + line("warning", "odd") + line("critical", "ends")
    )

    errors, warnings = (shown(command, "--level", level) for level in ("error", "warning"))
    ends = ("last):", "line 1", "no memory", "ends  run=run-1")
    assert [row.endswith(end) for row, end in zip(errors, ends, strict=True)] == [True] * 4
    assert [row for row in warnings if row not in errors] == [
        f"genrm judge/0 | [{DAY} 10:00:04] WARNING is slow",
        f"trainer/0 | {DAY} 10:00:09.000 WARNING odd  run=run-1",
    ]
    refused = command("logs", "run-1", "--level", "debug")
    assert refused.exit_code == 2
    assert "Levels: warning, error." in refused.stderr


def test_what_is_written_later_is_followed_also_by_a_replica_that_is_rebuilt(
    command: Command, logs: Path
):
    with Watching("logs", "run-1", "--role", "genrm", "--follow") as watching:
        watching.next_line("the judge ends")
        rebuilt = logs / "run-1" / "engine.genrm.judge.replica-0.89ab0123.log"
        rebuilt.write_text(f"[{DAY} 10:01:00] the judge is back\n[{DAY} 10:01:")
        watching.next_line("the judge is back")
        with rebuilt.open("a") as file:
            file.write("01] and judges\n")
        assert "[2026-03-02 10:01:01] and judges" in watching.next_line("and judges")
        watching.interrupt()
        code, output = watching.end()
    assert code == 130, output


def test_a_trainers_lines_are_in_the_files_of_ray(command: Command, logs: Path):
    (logs / "ray").mkdir()
    (logs / "ray" / "worker-1-01000000-7.err").write_text(
        ":job_id:01000000\n:actor_name:TrainerActor\na warning of torch\n"
    )
    (logs / "ray" / "worker-2-01000000-8.err").write_text(
        ":job_id:01000000\n:actor_name:EngineActor\nanother\n"
    )
    assert shown(command, "--role", "trainer") == ["trainer | a warning of torch"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["run-1", "--role", "judge"], "--role judge is no role. Roles: rollout, genrm,"),
        (["run-1", "--role", "teacher"], "Run run-1 has no log of teacher here. It has gateway,"),
        (["run-1", "--replica", "7"], "no log of replica 7 here"),
        (["run-1", "--role", "router", "--replica", "0"], "--replica is for engines"),
        (["run-9"], "There is no log of a run run-9 in"),
        (["run-1", "--step", "9"], "`relax-infer up`"),
        (["run 1"], "cannot be a run id"),
    ],
)
@pytest.mark.usefixtures("logs")
def test_what_is_not_there_is_refused_with_what_is(command: Command, words: list[str], says: str):
    ended = command("logs", *words)
    assert ended.exit_code == 2, ended.output
    assert says in ended.stderr
    assert ended.stdout == ""


@pytest.mark.usefixtures("logs")
def test_a_run_that_there_is_not_is_answered_with_those_that_there_are(
    command: Command, home: Path
):
    recipe = home / "store" / "run-1" / "recipe.json"
    recipe.parent.mkdir(parents=True, exist_ok=True)
    recipe.touch()
    assert f"The runs in {home} are run-1." in command("logs", "nosuch").stderr


def test_times_and_texts_are_read_as_each_program_writes_them():
    assert time_of("no time") is None
    assert time_of("[2026-99-99 10:00:00] nonsense") is None
    assert time_of(f"{DAY} 10:00:07,250 INFO") == at("10:00:07") + 0.25
    assert time_of(f"{DAY}\t10:00:07") is None
    assert clean("10%\r100%\x1b[K done\n".rstrip("\n")) == "100% done"
