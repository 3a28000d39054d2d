"""Every command of the documentation is one that its program takes; none is run."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.cli.test_help import COMMANDS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
MEANT = {"RUN": "run-1", "STEP": "3", "N": "3", "RECIPE": "quickstart", "ROLE": "rollout"}
"""What stands for something to be filled in."""
ENDS = re.compile(r"\s(?:>|\||&&|;)\s|\)\"|$")
TEMPORAL = str(Path(sys.executable).parent / "temporal")


def lines(kind: str, block: str) -> Iterator[str]:
    """Of a block: what is typed, continued lines put together."""
    for line in re.sub(r"\\\n\s*", "", block).splitlines():
        if kind == "console":
            if line.startswith("$ "):
                yield line[2:]
        elif kind in ("bash", "sh"):
            yield line


def typed(program: str) -> Iterator[tuple[str, str]]:
    """Page, and every command of the program in a block of it, from its second word on."""
    for page in PAGES:
        for kind, block in FENCE.findall(page.read_text()):
            for line in lines(kind, block):
                for found in re.finditer(rf"(?:^|[\s(]){program} (?=\S)", line.partition(" # ")[0]):
                    rest = line.partition(" # ")[0][found.end() :]
                    command = rest[: ENDS.search(rest).start()]  # type: ignore[union-attr]
                    if "xargs" in line[: found.start()]:
                        command += " run-1"
                    yield str(page.relative_to(ROOT)), command.strip()


def inline(program: str) -> Iterator[tuple[str, str]]:
    for page in PAGES:
        bare = FENCE.sub("", page.read_text())
        for text in re.findall(rf"`{program} ([^`]+)`", bare):
            yield str(page.relative_to(ROOT)), " ".join(text.split())


def parse(command: str) -> None:
    """Raises what the command line would complain about."""
    words = [MEANT.get(word, word) for word in shlex.split(command)]
    if words in (["--version"], ["--help"], ["--install-completion"]):
        return
    name = next((n for n in (" ".join(words[:2]), words[0]) if n in COMMANDS), None)
    assert name is not None, f"there is no command `{' '.join(words[:2])}`"
    COMMANDS[name].make_context(name, words[len(name.split()) :])  # type: ignore[attr-defined]


BLOCKS, INLINE = sorted(set(typed("relax-infer"))), sorted(set(inline("relax-infer")))


def test_commands_are_found():
    assert len(BLOCKS) > 80
    assert len(INLINE) > 60


@pytest.mark.parametrize(("page", "command"), BLOCKS)
def test_a_command_in_a_block_is_taken_as_it_stands(page: str, command: str):
    parse(command)


@pytest.mark.parametrize(("page", "command"), INLINE)
def test_a_command_in_a_sentence_has_words_and_options_that_there_are(page: str, command: str):
    words = shlex.split(command.replace("…", ""))
    name = next((n for n in (" ".join(words[:2]), words[0]) if n in COMMANDS), None)
    groups = {n.split()[0] for n in COMMANDS if " " in n}
    if name is None:
        assert words[0] in groups or words[0].startswith("--"), f"no command `{command}`"
        return
    known = {opt for p in COMMANDS[name].params for opt in (*p.opts, *p.secondary_opts)}  # type: ignore[attr-defined]
    assert {w.partition("=")[0] for w in words if w.startswith("--")} <= known | {"--help"}


CURES = [(p, c) for p, c in INLINE if p.endswith("operating.md") and len(c.split()) > 1]


@pytest.mark.parametrize(("page", "command"), CURES)
def test_a_cure_can_be_typed_as_it_stands(page: str, command: str):
    parse(command)


@cache
def help_of(words: tuple[str, ...]) -> tuple[int, str]:
    done = subprocess.run(
        [TEMPORAL, *words, "--help"], capture_output=True, text=True, timeout=30, check=False
    )
    general = subprocess.run(
        [TEMPORAL, "options"], capture_output=True, text=True, timeout=30, check=False
    )
    return done.returncode, done.stdout + general.stdout


@pytest.mark.parametrize(
    ("page", "command"), sorted({*typed("temporal"), *inline("temporal")}), ids=str
)
def test_temporals_own_tool_has_the_command_and_its_options(page: str, command: str):
    words = shlex.split(command)
    name = tuple(
        w for n, w in enumerate(words) if not any(x.startswith("-") for x in words[: n + 1])
    )
    code, shown = help_of(name)
    assert code == 0
    # Of a group its commands would be listed instead.
    assert f"temporal {' '.join(name)} " in shown or "Available Commands" not in shown
    for option in (w for w in words if w.startswith("--")):
        assert re.search(rf"{re.escape(option.partition('=')[0])}\b", shown), option


def test_a_run_that_is_started_as_written_is_a_new_one_or_a_failure():
    """Else Temporal's tool says the id of the run that is there, and that all is well."""
    starts = [command for _, command in typed("temporal") if command.startswith("workflow start")]
    assert len(starts) >= 2
    for command in starts:
        assert "--fail-existing" in command
        assert "--id-reuse-policy RejectDuplicate" in command
