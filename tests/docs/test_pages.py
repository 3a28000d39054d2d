"""Links of the documentation lead somewhere; its examples are what the code takes."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from relax_infer.config import load_recipe, require_runnable
from relax_infer.config.reference import anchor
from relax_infer.contracts.run import RunInput
from relax_infer.discovery import RoleSnapshot
from relax_infer.placement import plan_inference_placement
from relax_infer.samples.environment import environment_maker
from relax_infer.samples.tasks import Problem
from relax_infer.tiny.task import Sort4Task
from tests.deploy.variables import OF_COMPOSE, OF_SCRIPTS, OURS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def anchors(page: Path) -> set[str]:
    bare = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    return {anchor(title.strip("`")) for title in re.findall(r"^#+ (.+)$", bare, re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_page_and_a_heading(page: Path):
    broken: list[str] = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        name, _, heading = target.partition("#")
        there = page.parent / name if name else page
        if not there.exists() or (heading and heading not in anchors(there)):
            broken.append(target)
    assert broken == []


def test_the_registry_of_the_gateways_page_is_valid_and_has_the_judge_that_is_asked():
    page = (ROOT / "docs" / "gateway.md").read_text()
    (text,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    registry = {role: RoleSnapshot.from_dict(d) for role, d in yaml.safe_load(text).items()}
    asked = set(re.findall(r"localhost:\d+/(genrm|teacher)/(?:generate|v1)", page))
    assert asked == registry.keys()
    assert "judge=" in page
    assert "judge" in registry["genrm"].models


def test_every_field_that_starts_a_run_is_on_the_page():
    section = (ROOT / "docs" / "python.md").read_text().partition("## What starts a run")[2]
    told = re.findall(r"^\| `(\w+)` \|", section.partition("\n## ")[0], re.MULTILINE)
    assert told == list(RunInput.model_fields)


def test_the_recipe_of_the_readme_can_be_run():
    (text,) = re.findall(
        r"```yaml\n(# mine.yaml\n.*?)```", (ROOT / "README.md").read_text(), re.DOTALL
    )
    recipe = load_recipe(yaml.safe_load(text))
    require_runnable(recipe)
    assert plan_inference_placement(recipe).total_required_gpus == 8


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_variable_that_a_page_names_is_read_by_something(page: Path):
    told = set(re.findall(r"\bRELAX_[A-Z_]*[A-Z]\b", page.read_text()))
    assert told <= OURS | OF_SCRIPTS | OF_COMPOSE


def test_every_variable_that_a_worker_reads_is_on_a_page():
    """But for those that parts of a run tell each other."""
    told = "\n".join(page.read_text() for page in PAGES)
    inner = {"RELAX_STACK", "RELAX_ABOUT"}
    assert sorted(name for name in OURS - inner if name not in told) == []


async def test_the_recipe_and_the_environment_of_the_page_on_episodes_work():
    page = (ROOT / "docs" / "episodes.md").read_text()
    (text,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    cluster = {"gpus": 2}
    recipe = load_recipe({"name": "page", "cluster": cluster, **yaml.safe_load(text)})
    plan = recipe.rollout.environment
    assert plan is not None
    require_runnable(recipe)
    problem, task = Problem("p", (1,), "a"), Sort4Task()
    environment_maker(plan)(problem, task, plan.config)

    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    world: dict[str, Any] = {}
    exec(program, world)
    maze = world["Maze"](problem, task, {"steps": 3})
    assert "2 steps" in (await maze.step("left", [])).observation
    assert (await maze.step("out\n", [])).reward == 1.0
