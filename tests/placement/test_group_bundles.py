"""Which of the bound bundles an engine group gets, and when they are of no use to it."""

from pathlib import Path

import pytest

from activities import placement
from activities.placement import bundles_of
from relax_infer.config import load_recipe
from relax_infer.contracts.engines import BundleBinding, EngineGroupSpec
from relax_infer.contracts.failures import PermanentError
from relax_infer.contracts.refs import RunRef
from relax_infer.contracts.run import Binding
from relax_infer.placement import InferencePlacementPlan, plan_inference_placement
from tests.engines.checkpoints import group_spec
from tests.workflows.scripted_world import plan as run_plan


def group(**sizes: int) -> EngineGroupSpec:
    return group_spec(Path("/nowhere"), bundles=(), **sizes)


def pool(*nodes: int) -> list[BundleBinding]:
    """So many GPUs on each node."""
    places = [(node, gpu) for node, count in enumerate(nodes) for gpu in range(count)]
    return [
        BundleBinding(bundle=k, node_id=f"n{node}", node_ip=f"10.0.0.{node}", gpu_id=gpu)
        for k, (node, gpu) in enumerate(places)
    ]


def test_a_group_gets_the_first_bundles_of_the_pool():
    rows = pool(8, 8)
    assert bundles_of(group(replicas=2, gpus_per_replica=4), rows) == tuple(rows[:8])
    wide = group(replicas=1, gpus_per_replica=16, nodes_per_replica=2)
    assert bundles_of(wide, rows) == tuple(rows)


@pytest.mark.parametrize(
    ("nodes", "sizes"),
    [
        ((7, 9), {"gpus_per_replica": 16, "nodes_per_replica": 2}),
        ((16,), {"gpus_per_replica": 16, "nodes_per_replica": 2}),
        ((1, 1), {"gpus_per_replica": 2}),
    ],
)
def test_parts_of_a_replica_that_are_not_on_nodes_of_their_own_are_refused(nodes, sizes):
    with pytest.raises(PermanentError, match="policy/replica-0 needs"):
        bundles_of(group(replicas=1, **sizes), pool(*nodes))


async def test_the_whole_plan_is_in_the_result_of_binding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """What the activity returns is what the run's history has."""
    recipe = load_recipe("quickstart")
    made = run_plan("run-1")
    names = {"rollout": "policy", "genrm": "judge", "teacher": "teacher"}
    groups = tuple(g.model_copy(update={"model": names[g.role]}) for g in made.groups)
    made = made.model_copy(update={"groups": groups})
    rows = pool(2)
    asked: list[object] = []

    async def bind(run: str, plan: InferencePlacementPlan, timeout: float, tell: object):
        asked.append((run, dict(plan.pool_sizes), timeout))
        return {"pool": rows}

    async def free(run: object, devices: list[BundleBinding]) -> None:
        asked.append(devices)

    async def keep(run: RunRef, pools: dict[str, list[BundleBinding]]) -> None:
        asked.append((run, pools))

    monkeypatch.setattr(placement, "keep_pools", keep)
    monkeypatch.setattr(placement, "recipe_of", lambda run: recipe)
    monkeypatch.setattr(placement, "bind_plan", bind)
    monkeypatch.setattr(placement, "need_free_devices", free)
    bound = await placement.bind_placement(made)
    wanted = ("run-1", {"pool": 2}, recipe.cluster.bind_timeout)
    assert asked == [wanted, rows, (made.run, {"pool": rows})]
    assert bound.placement == plan_inference_placement(recipe).to_dict()
    again = Binding.model_validate_json(bound.model_dump_json())
    assert again == bound
    assert InferencePlacementPlan.from_dict(again.placement or {}).mode == "defer"
    assert [len(group.bundles) for group in bound.plan.groups] == [2, 1, 1]
    assert bound.plan.trainer.bundles == (rows[0],)
