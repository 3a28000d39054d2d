"""The table of rules and of the tests that show them names what is there."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PAGE = Path(__file__).with_name("contract.md").read_text()
NAMED = re.compile(r'`([\w/]+\.py)::(\w+)`((?: "[^"]+")*)')


def rows() -> list[tuple[str, str]]:
    """Section and row."""
    found: list[tuple[str, str]] = []
    for part in PAGE.split("\n## ")[1:]:
        title, _, table = part.partition("\n")
        lines = [line for line in table.splitlines() if line.startswith("| ")]
        found += [(title.split()[0], line) for line in lines[2:]]
    return found


def cells(row: str) -> list[str]:
    cells = [cell.strip() for cell in row.strip().strip("|").split("|")]
    assert len(cells) == 3, row
    return cells


@cache
def source(file: str) -> str:
    return (TESTS / file).read_text()


@cache
def functions_of(file: str) -> frozenset[str]:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(
        node.name for node in ast.walk(ast.parse(source(file))) if isinstance(node, functions)
    )


@cache
def texts_of(file: str) -> str:
    """Every string and every line of code, to find a message in."""
    tree = ast.walk(ast.parse(source(file)))
    said = [n.value for n in tree if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return "\n".join([*said, source(file)])


def test_every_section_has_rows() -> None:
    assert {section for section, _ in rows()} == {"8.2", "8.3", "8.4", "8.5", "8.6", "8.7"}
    assert len(rows()) > 60


@pytest.mark.parametrize(("section", "row"), rows())
def test_a_row_is_shown_by_tests_that_are_there(section: str, row: str) -> None:
    rule, shown, _ = cells(row)
    assert rule
    named = NAMED.findall(shown)
    assert named, f"{section}: no test shows: {rule}"
    assert not NAMED.sub("", shown).strip(), f"{section}: not understood: {shown}"
    for file, test, messages in named:
        assert test.startswith("test_")
        assert test in functions_of(file), f"{file} has no {test}"
        for message in re.findall(r'"([^"]+)"', messages):
            assert message in texts_of(file), f"{file} has no case of {message!r}"
