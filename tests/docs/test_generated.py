"""Pages that are made from the code are what the code says."""

from collections.abc import Callable
from pathlib import Path

import pytest

from relax_infer.config import reference
from relax_infer.gateway import openapi
from relax_infer.machines import diagrams
from relax_infer.placement.__main__ import pictures
from relax_infer.telemetry import catalogue

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(
    ("name", "page", "target"),
    [
        ("state-machines.md", diagrams.page, "diagrams"),
        ("recipe.md", reference.page, "reference"),
        ("openapi.json", openapi.page, "reference"),
        ("metrics.md", catalogue.page, "reference"),
    ],
)
def test_a_generated_page_is_current(name: str, page: Callable[[], str], target: str):
    assert (DOCS / name).read_text() == page(), f"run `make {target}`"


def test_the_pictures_of_shipped_recipes_are_current():
    kept = {path.stem: path.read_text() for path in (DOCS / "placement").glob("*.svg")}
    assert kept == pictures(), "run `make pictures`"


def test_every_picture_is_shown_on_the_page_about_placement():
    page = (DOCS / "placement.md").read_text()
    assert all(f"](placement/{name}.svg)" in page for name in pictures())
