"""``relax-infer scale`` over the scripted world on a real Temporal server."""

import json

from relax_infer.machines import RunState
from tests.cli.conftest import Command, Temporal, eventually
from tests.workflows.scripted_world import ScriptedWorld

ROLES = ("rollout", "genrm", "teacher", "trainer")
APART = tuple((a, b) for k, a in enumerate(ROLES) for b in ROLES[k + 1 :])


def test_replicas_come_and_go_and_what_is_refused_says_why(
    remote: Command, temporal: Temporal, run_id: str
):
    world = ScriptedWorld(apart=APART)
    world.faults["generate_groups"] = ["hold"]
    with temporal.working(world):
        assert remote("run", "quickstart", "--run-id", run_id, "--no-follow").exit_code == 0
        eventually(world.held.is_set)
        planned = remote("scale", run_id, "rollout", "3", "--dry-run")
        assert planned.exit_code == 0, planned.output
        assert "would be done" in planned.stdout
        assert "a new replica  planned" in planned.stdout
        more = remote("scale", run_id, "rollout", "3", "--wait", "--json", "--id", "one")
        assert more.exit_code == 0, more.output
        assert json.loads(more.stdout)["state"] == "ACTIVE"
        again = remote("scale", run_id, "rollout", "3", "--id", "one")
        assert again.stdout.startswith(
            "rollout policy  scale one  ACTIVE  2 replicas before, 3 now"
        )
        other = remote("scale", run_id, "rollout", "4", "--id", "one")
        assert other.exit_code == 2
        assert "asked for something else" in other.stderr
        below = remote("scale", run_id, "rollout", "1", "--wait")
        assert below.exit_code == 2
        assert "below the 2 replicas that the group began with" in below.stdout
        world.faults["drain_engine"] = ["busy"]
        stuck = remote("scale", run_id, "rollout", "2", "--wait")
        assert stuck.exit_code == 1
        assert "policy/replica-2  left  DRAIN_TIMEOUT: 2 requests" in stuck.stdout
        forced = remote("scale", run_id, "rollout", "2", "--force", "--wait")
        assert forced.exit_code == 0, forced.output
        assert "policy/replica-2  removed" in forced.stdout
        world.go_on.set()
        assert remote("stop", run_id).exit_code == 0
        eventually(lambda: state(remote, run_id) == RunState.DONE)
    assert world.pools.there == {}


def state(remote: Command, run: str) -> str:
    return json.loads(remote("status", run, "--json").stdout)["state"]


def test_bad_input_is_told_before_anybody_is_asked(remote: Command, run_id: str):
    for typed, said in (
        (("trainer", "2"), "trainer has no replicas"),
        (("rollout",), f"There is no run {run_id}"),
        (("rollout", "--auto", "off"), "--auto off needs on or off, --who and --why"),
        (("rollout", "3", "--auto", "on"), "--auto goes without a number"),
        (("rollout", "2", "--url", "http://x"), "Say how many replicas there shall be"),
        (("rollout", "2", "--id", "a b"), "--id a b is no id of an operation"),
        (("rollout", "2"), f"There is no run {run_id}"),
    ):
        answered = remote("scale", run_id, *typed)
        assert answered.exit_code == 2, answered.output
        assert said in answered.stderr
