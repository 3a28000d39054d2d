"""Steps that have begun end on the code that they began with; what lives for long moves on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from temporalio.api.enums.v1 import VersioningBehavior

from relax_infer.contracts.failures import PermanentError
from tests.deploy.versioned_run import MAKE_CURRENT
from workers._versions import deployment_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "deploy.md").read_text()
PINNED = {"TrainingStep", "WeightSync", "ReplicaRecovery", "ScaleRole"}
TELL = """
from workflows import WORKFLOWS
for each in WORKFLOWS:
    print(each.__name__, each.__temporal_workflow_definition.versioning_behavior.name)
"""


def python(*words: str, **variables: str) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RELAX_")}
    done = subprocess.run(
        (sys.executable, *words),
        cwd=ROOT,
        env={**environment, **variables},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_nobody_who_does_not_ask_is_versioned():
    assert deployment_of({}) is None
    told = [line.split()[1] for line in python("-c", TELL).splitlines()]
    assert set(told) == {"UNSPECIFIED"}, "the server refuses a behaviour of unversioned workers"


@pytest.mark.parametrize(
    ("given", "wrong"),
    [
        ({"RELAX_DEPLOYMENT": "relax"}, "RELAX_BUILD_ID is not set"),
        ({"RELAX_BUILD_ID": "abc"}, "RELAX_DEPLOYMENT is not set"),
        ({"RELAX_DEPLOYMENT": "relax.prod", "RELAX_BUILD_ID": "abc"}, "must not have a dot"),
    ],
)
def test_half_a_version_is_refused_by_name(given: dict[str, str], wrong: str):
    with pytest.raises(PermanentError, match=wrong):
        deployment_of(given)


def test_every_workflow_of_a_build_says_whether_it_moves_to_new_code():
    lines = python("-c", TELL, RELAX_BUILD_ID="one").splitlines()
    told: dict[str, str] = dict(line.split() for line in lines)  # type: ignore[misc]
    assert {name for name, behavior in told.items() if behavior == "PINNED"} == PINNED
    assert {b for name, b in told.items() if name not in PINNED} == {"AUTO_UPGRADE"}
    for name, behavior in told.items():
        assert f"| `{name}` | {behavior} |" in PAGE


def test_the_page_makes_a_build_current_by_the_command_that_is_tested():
    assert f"temporal {MAKE_CURRENT} " in PAGE


@pytest.mark.real
@pytest.mark.wide
def test_a_step_ends_on_its_build_and_the_next_one_begins_on_the_new_one(tmp_path: Path):
    told = tmp_path / "told.json"
    variables = {"RELAX_DEPLOYMENT": "relax", "RELAX_BUILD_ID": "one"}
    python("-m", "tests.deploy.versioned_run", str(told), **variables)
    run = json.loads(told.read_text())
    assert (run["state"], run["weights"], run["broken"]) == ("DONE", 4, [])
    seen = {name: tuple(placed) for name, placed in run["seen"].items()}
    pinned = VersioningBehavior.VERSIONING_BEHAVIOR_PINNED
    assert seen[".step-1"] == (pinned, "one")
    assert seen[".step-2"] == (pinned, "one"), "it was at work when the code changed"
    assert seen[".step-4"] == (pinned, "two")
    moved = VersioningBehavior.VERSIONING_BEHAVIOR_AUTO_UPGRADE
    assert {seen[name] for name in ("", ".lease", ".rollout")} == {(moved, "two")}
