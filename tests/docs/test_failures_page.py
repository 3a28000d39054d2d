"""The page about failures: each row is shown by a test that is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "failures.md").read_text()
LINK = re.compile(r"\[`(\w+)`\]\(\.\./(tests/[\w/]+\.py)\)")
LINKS = sorted(set(LINK.findall(PAGE)))
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ") and " --- " not in line]
SHOWN = [row for row in ROWS if not row.rstrip(" |").endswith("Shown by")]


def names_in(path: Path) -> set[str]:
    return set(re.findall(r"^(?:async )?def (test_\w+)\(", path.read_text(), re.MULTILINE))


@pytest.mark.parametrize(("name", "path"), LINKS, ids=[name for name, _ in LINKS])
def test_a_test_that_is_named_is_in_the_file_that_is_linked(name: str, path: str) -> None:
    assert name in names_in(ROOT / path)


def test_every_row_names_a_test() -> None:
    assert len(SHOWN) > 40
    assert [row for row in SHOWN if LINK.search(row) is None] == []


def test_no_link_to_a_test_is_written_in_another_way() -> None:
    assert PAGE.count("](../tests/") == len(LINK.findall(PAGE))


def test_every_acceptance_test_is_on_the_page() -> None:
    named = {name for name, path in LINKS if path.startswith("tests/acceptance/")}
    there = {
        name for path in (ROOT / "tests/acceptance").glob("test_*.py") for name in names_in(path)
    }
    assert named == there
