"""Help, examples, version and completion."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from temporalio.client import Client
from typer.main import get_command

from relax_infer.cli import app
from relax_infer.cli._examples import EXAMPLES
from relax_infer.config import shipped_recipes
from tests.cli.conftest import Command, Temporal, eventually, stack_record

PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()


def commands(group: object = None, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Every command of the tree that does something, by the words that are typed."""
    for name, command in getattr(group or get_command(app), "commands", {}).items():
        words = f"{prefix}{name}"
        if getattr(command, "commands", None):
            yield from commands(command, f"{words} ")
        else:
            yield words, command


COMMANDS = dict(commands())


def test_every_command_has_examples_and_no_example_is_of_another():
    assert COMMANDS.keys() == EXAMPLES.keys()


@pytest.mark.parametrize(
    ("words", "typed"), [(words, typed) for words, told in EXAMPLES.items() for typed, _ in told]
)
def test_every_example_is_what_its_command_takes(words: str, typed: str):
    inner = re.fullmatch(r'eval "\$\((.*)\)"', typed)
    # What does not fit the command raises.
    program, *rest = shlex.split(inner[1] if inner else typed.partition(" > ")[0], comments=True)
    assert program == "relax-infer"
    count = len(words.split())
    assert " ".join(rest[:count]) == words
    COMMANDS[words].make_context(words, rest[count:])  # type: ignore[attr-defined]


@pytest.mark.parametrize("words", EXAMPLES)
def test_every_command_is_on_the_page_with_its_examples(words: str):
    assert f"`relax-infer {words}" in PAGE or f"relax-infer {words}" in PAGE
    for typed, _ in EXAMPLES[words]:
        assert typed in PAGE, typed


@pytest.mark.parametrize("words", EXAMPLES)
def test_help_ends_with_the_examples(command: Command, words: str):
    shown = command(*words.split(), "--help")
    assert shown.exit_code == 0
    told = " ".join(shown.stdout.split())
    for typed, what in EXAMPLES[words]:
        assert f"# {what} {typed}" in told


def test_every_option_of_every_command_has_a_help_text():
    silent = [
        f"{words} {parameter.name}"
        for words, command in COMMANDS.items()
        for parameter in command.params  # type: ignore[attr-defined]
        if not getattr(parameter, "help", None)
    ]
    assert silent == []


def test_the_version_is_told(command: Command):
    shown = command("--version")
    assert shown.exit_code == 0
    assert re.fullmatch(r"relax-infer \d+\.\d+\S*\n", shown.stdout)


def completed(typed: str) -> list[str]:
    """What bash is offered after ``typed``."""
    words = typed.split(" ")
    start = "import sys; sys.argv[0] = 'relax-infer'; from relax_infer.cli import main; main()"
    done = subprocess.run(
        (sys.executable, "-c", start),
        env={
            **os.environ,
            "_RELAX_INFER_COMPLETE": "complete_bash",
            "COMP_WORDS": typed,
            "COMP_CWORD": str(len(words) - 1),
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr == ""
    return done.stdout.split()


def test_recipes_roles_fields_and_commands_are_completed(command: Command):
    assert completed("relax-infer plan ")[: len(shipped_recipes())] == list(shipped_recipes())
    assert completed("relax-infer logs run-1 --role g") == ["genrm", "gateway"]
    assert completed("relax-infer plan quickstart --set train.lear") == ["train.learning_rate="]
    assert completed("relax-infer step ex") == ["explain"]


def test_runs_and_steps_are_completed_from_files_and_from_temporal(
    command: Command, temporal: Temporal, home: Path, run_id: str
):
    stack_record(home, temporal.address)
    for step in ("10", "2"):
        (home / "store" / f"{run_id}-kept" / "steps" / step).mkdir(parents=True)

    async def start(client: Client) -> None:
        await client.start_workflow("TrainingRun", {}, id=run_id, task_queue="nobody")

    temporal.do(start)
    wanted = [run_id, f"{run_id}-kept"]
    eventually(lambda: completed(f"relax-infer status {run_id}") == wanted)
    assert completed(f"relax-infer samples {run_id}-kept ") == ["2", "10"]
    temporal.do(lambda client: client.get_workflow_handle(run_id).terminate())


def test_completion_of_a_server_that_is_away_is_silent(
    command: Command, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TEMPORAL_ADDRESS", "127.0.0.1:1")
    assert completed("relax-infer status ") == []
