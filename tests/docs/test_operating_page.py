"""The operating guide has a row for every reason for which the code lets something wait."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from relax_infer.contracts import failures
from relax_infer.contracts.failures import UnconfirmedError
from relax_infer.machines import GROUP, LEASE, RECOVERY, RUN, STEP, Machine, StepEvent

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "operating.md").read_text()
SOURCES = [
    path
    for room in ("relax_infer", "workflows", "activities")
    for path in sorted((ROOT / room).rglob("*.py"))
    if "cpu_shim" not in path.parts
]
NODES = [node for path in SOURCES for node in ast.walk(ast.parse(path.read_text()))]


def section(title: str) -> str:
    found = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    assert found, title
    return found


def rows(title: str) -> list[list[str]]:
    """Cells of every row of a section's tables, heads left out."""
    lines = [line for line in section(title).splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]
    heads = {n - 1 for n, each in enumerate(lines) if set(each) <= set("| -")}
    return [row for n, row in enumerate(cells) if n not in heads and n - 1 not in heads]


def text_of(node: ast.AST) -> str:
    """What is written of a string; ``{}`` stands for what is filled in."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(text_of(part) for part in parts)
        case ast.BinOp(left=left, right=right):
            return text_of(left) + text_of(right)
        case _:
            return "{}"


def calls(name: str) -> Iterator[ast.Call]:
    for node in NODES:
        if isinstance(node, ast.Call) and name == ast.unparse(node.func).rpartition(".")[2]:
            yield node


def unconfirmed() -> set[str]:
    """Message of every failure that proves nothing, and so blocks a lease."""
    kinds = {
        name
        for name, kind in vars(failures).items()
        if isinstance(kind, type) and issubclass(kind, UnconfirmedError)
    } | {"ActorGone"}
    told = {text_of(call.args[0]) for kind in kinds for call in calls(kind) if call.args}
    told |= {
        text_of(call.args[1])
        for call in calls("fail")
        if ast.unparse(call.args[0]) in ("UNCONFIRMED", "'Unconfirmed'")
    }
    # What only hands on the words of another failure says nothing itself.
    return {text for text in told if re.search(r"[a-z]{3}", text)}


def phrases() -> list[str]:
    reasons = rows("A lease that is BLOCKED")
    return [
        phrase
        for row in reasons
        if not re.fullmatch(r"`[A-Z_]+`", row[0])
        for phrase in re.findall(r"`([^`]+)`", row[0])
    ]


PHRASES = phrases()
WRITTEN = "\n".join({text_of(n) for n in NODES if isinstance(n, ast.Constant | ast.JoinedStr)})
MESSAGES = sorted(unconfirmed())


def test_there_is_something_to_compare():
    assert len(PHRASES) > 30
    assert len(MESSAGES) > 25


@pytest.mark.parametrize("message", MESSAGES)
def test_every_reason_that_blocks_a_lease_has_a_row(message: str):
    told = message.replace("{}", " ")
    assert any(phrase in told for phrase in PHRASES), f"docs/operating.md has no row for: {message}"


@pytest.mark.parametrize("phrase", PHRASES)
def test_every_row_is_about_words_that_the_code_says(phrase: str):
    # The name of the operation is filled in.
    said = phrase.removesuffix(" onload").removesuffix(" offload")
    assert said in WRITTEN


@pytest.mark.parametrize(
    ("title", "machine"),
    [
        ("A lease that is BLOCKED", LEASE),
        ("An engine group that is BLOCKED", GROUP),
        ("A replica without proof", RECOVERY),
    ],
)
def test_every_event_that_leads_to_blocked_has_a_row(title: str, machine: Machine[Any, Any]):
    events = {
        event
        for (state, event), target in machine.transitions.items()
        if target == "BLOCKED" and state != "BLOCKED"
    }
    told = {row[0].strip("`") for row in rows(title) if re.fullmatch(r"`[A-Z_]+`", row[0])}
    assert told == events


def test_every_trouble_that_a_run_asks_a_person_about_has_a_row():
    told = [row[1] for row in rows("A run that waits") if row[0] == "BLOCKED"]
    heads = [
        text_of(call.args[1]).partition("{}")[0]
        for call in calls("_move")
        if "NEEDS_PERSON" in ast.unparse(call.args[0])
    ]
    heads = [head for head in heads if head]
    assert len(heads) == 2
    heads += [f"cannot take down {text_of(c.args[0])}" for c in calls("_take_down") if c.args]
    heads.append("cannot stop ")
    assert "cannot stop {role}" in (ROOT / "workflows" / "_premises.py").read_text()
    for head in heads:
        assert any(f"`{head}" in cell for cell in told), head


def test_every_state_in_which_a_run_waits_has_a_row():
    told = {state for row in rows("A run that waits") for state in row[0].split(", ")}
    assert {"PAUSING", "PAUSED", "BLOCKED"} <= told
    assert told <= set(RUN.states)


def test_every_phase_that_may_give_up_has_a_row():
    phases = {phase for phase, event in STEP.transitions if event is StepEvent.GAVE_UP}
    told = [phase for row in rows("A step that gave up") for phase in row[0].split(", ")]
    assert sorted(told) == sorted(phases)


def test_every_row_ends_with_what_to_do():
    for title in ("A run that waits", "A lease that is BLOCKED", "A replica without proof"):
        for row in rows(title):
            assert len(row[-1]) > 3, row
