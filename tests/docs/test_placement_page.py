"""The page about placement: what its tables say of messages is what the code says."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from relax_infer.placement import Violation
from tests.placement.recipes import document, engine, refused
from tests.placement.test_rejections import CASES

ROOT = Path(__file__).parents[2]
ROOM = ROOT / "relax_infer"
SOURCES = [
    *sorted((ROOM / "placement").glob("*.py")),
    *(ROOM / name for name in ("config/placed.py", "config/rules.py", "contracts/faults.py")),
    *(ROOM / "engines" / name for name in ("static.py", "orphans.py")),
]
READ = (
    "must be a positive whole number",
    "must be a name without /",
    "must be of printable characters",
    "is no flag",
)
"""Said when the recipe is read; it is not placed then."""
RULE = {"min_replicas": 1, "max_replicas": 9, "in_flight_high": 9, "in_flight_low": 1}
APART = document("decoupled", 16, ranks=4, rollout=engine(2), genrm=engine(2))
MORE: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (document(rollout=engine(16)), {}),
    (document(), {"layout": "rollout ->"}),
    (document(genrm=engine(4)), {"layout": "rollout + genrm -> actor", "defer_roles": ["genrm"]}),
    (document(genrm=engine(4, ray_gpu_fraction=0.9)), {}),
    (document(genrm=engine(4, server_args={"load-format": "dummy", "enable-lora": True})), {}),
    (document(genrm=engine(4, server_args={"enable-weights-cpu-backup": False})), {}),
    (document(), {"train__weights__transport": "process_group"}),
    (document(gpus=16, rollout=engine(16, 16)), {"train__weights__transport": "tensor"}),
    (
        document(rollout=engine(4, 4, server_args={"pp_size": 2})),
        {"train__weights__transport": "tensor"},
    ),
    (document(), {"autoscale": {"rollout": RULE}}),
    (document(), {"reference": {"ranks": 1 << 20}}),
    (APART, {"autoscale": {"rollout": RULE | {"min_replicas": 2, "max_replicas": 99}}}),
    (APART, {"autoscale": {"rollout": RULE, "teacher": RULE, "genrm": RULE | {"models": ["x"]}}}),
]


def rows(title: str) -> list[str]:
    """First cells of the table under a heading, one for each message that they name."""
    page = (ROOT / "docs" / "placement.md").read_text()
    part = page.partition(f"## {title}\n")[2].partition("\n## ")[0]
    cells = [line.split("|")[1].strip() for line in part.splitlines() if line.startswith("| ")]
    return [each for cell in cells[2:] for each in cell.split(", ")]


def pattern(row: str) -> re.Pattern[str]:
    return re.compile(".*".join(re.escape(part.strip()) for part in row.split("…")), re.DOTALL)


def texts(path: Path) -> list[str]:
    """Every string of a module; what is filled in is an ellipsis."""
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            parts = [p.value if isinstance(p, ast.Constant) else "…" for p in node.values]
            found.append("".join(map(str, parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return found


@pytest.fixture(scope="module")
def said() -> list[Violation]:
    """Every violation of many recipes that cannot be placed."""
    cases = [*((recipe, overrides) for recipe, overrides, _, _ in CASES), *MORE]
    return [v for recipe, overrides in cases for v in refused(recipe, **overrides)]


@pytest.mark.parametrize(
    "title", ["Refused: the recipe", "Refused: the cluster", "Refused: the devices"]
)
def test_a_message_on_the_page_is_one_of_the_code(title: str) -> None:
    known = [text for path in SOURCES for text in texts(path)]
    unknown = [row for row in rows(title) if not any(pattern(row).search(t) for t in known)]
    assert len(rows(title)) > 5
    assert unknown == []


def test_a_reason_why_a_recipe_is_refused_is_on_the_page(said: list[Violation]) -> None:
    table = [pattern(row) for row in rows("Refused: the recipe")]
    assert {v.rule for v in said if not any(row.search(v.rule) for row in table)} == set()


def test_a_row_of_the_page_is_a_reason_that_some_recipe_is_refused_for(
    said: list[Violation],
) -> None:
    table = [row for row in rows("Refused: the recipe") if row not in READ]
    assert [row for row in table if not any(pattern(row).search(v.rule) for v in said)] == []
