"""What is planned but not run yet is refused where a recipe is resolved for a run."""

import hashlib
from pathlib import Path
from typing import Any

import pytest

from activities import recipes
from activities._run_files import recipe_of, task_of
from activities.recipes import resolve_recipe
from relax_infer.config import RecipeError, load_recipe, require_runnable, shipped_recipes
from relax_infer.contracts.failures import PermanentError
from relax_infer.contracts.refs import RunRef, WeightsRef
from relax_infer.contracts.run import ResolveRequest, RunInput, RunPlan
from relax_infer.placement import PlacementError, plan_inference_placement
from relax_infer.training import Ledger
from relax_infer.training.ledger import Checkpoints, run_folder
from tests.samples.byte_policy import byte_policy
from tests.training.test_ledger import entry


def request(recipe: str, **overrides: Any) -> ResolveRequest:
    start = RunInput(
        recipe=recipe, overrides={key.replace("__", "."): v for key, v in overrides.items()}
    )
    return ResolveRequest(run="run-1", start=start)


RUNNABLE = ("quickstart", "defer-1x8-opd", "defer-2x8-genrm", "split-4x8")


@pytest.mark.parametrize("name", RUNNABLE)
def test_a_shipped_recipe_can_be_run(name: str) -> None:
    require_runnable(load_recipe(name))


@pytest.mark.parametrize("name", [n for n in shipped_recipes() if n not in RUNNABLE])
async def test_a_recipe_that_can_only_be_planned_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RELAX_HOME", str(tmp_path))
    assert plan_inference_placement(load_recipe(name))
    with pytest.raises(RecipeError, match=f"recipe {name} can be planned but not run yet"):
        await resolve_recipe(request(name))
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"critic": {"ranks": 1}, "cluster.gpus": 3}, "critic: "),
        ({"reference": {"ranks": 1}, "cluster.gpus": 3}, "reference: "),
        ({"rollout.server_groups": [{"replicas": 2}]}, "rollout.server_groups: "),
        ({"mode": "decoupled", "rollout.engine.offload": "none"}, "rollout.engine.offload: "),
        ({"mode": "decoupled", "genrm.engine.offload": "none"}, "genrm.engine.offload: "),
        (
            {
                "mode": "decoupled",
                "teacher.extra_models": [
                    {"model": "m", "model_id": "b", "engine": {"offload": "none"}}
                ],
            },
            "teacher.extra_models.0.engine.offload: ",
        ),
    ],
)
def test_each_field_that_runs_do_not_use_is_named(overrides: dict[str, Any], says: str) -> None:
    with pytest.raises(RecipeError) as caught:
        require_runnable(load_recipe("quickstart", overrides))
    assert says in str(caught.value)
    require_runnable(load_recipe("quickstart"))


async def test_engines_that_would_stay_are_refused_before_the_id_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mode decoupled can be planned with them; the one who takes no part is nobody's concern."""
    monkeypatch.setenv("RELAX_HOME", str(tmp_path))
    own = {"mode": "decoupled", "cluster__gpus": 8}
    with pytest.raises(RecipeError, match=r"rollout\.engine\.offload: none"):
        await resolve_recipe(request("quickstart", **own, rollout__engine__offload="none"))
    assert not (tmp_path / "store").exists()
    idle = {"reward.source": "exact", "genrm.engine.offload": "none"}
    require_runnable(load_recipe("quickstart", idle))


async def test_folders_and_files_that_are_not_there_are_told_before_the_id_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that the worker reads; the hosts of engines are asked by `plan --live`."""
    monkeypatch.setenv("RELAX_HOME", str(tmp_path))
    own = {
        "rollout__model": str(tmp_path / "policy"),
        "genrm__model": str(tmp_path / "judge"),
        "data__source": "file",
        "data__path": str(tmp_path / "prompts.jsonl"),
        "genrm__prompt": "{response}",
        "genrm__verdict": {"pattern": "(?P<score>[01])", "lowest": 0, "highest": 1},
        "distillation": None,
    }
    with pytest.raises(PlacementError, match="this worker cannot read what the recipe names") as e:
        await resolve_recipe(request("quickstart", **own))
    assert [violation.field for violation in e.value.violations] == ["rollout.model", "data.path"]
    assert all(violation.cure for violation in e.value.violations)
    assert not (tmp_path / "store").exists()


async def test_an_id_is_used_by_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run started with ``temporal workflow start`` under the id of a finished one is refused; a
    second attempt of the same run is not."""
    monkeypatch.setenv("RELAX_HOME", str(tmp_path))
    monkeypatch.setattr(recipes, "weights_digest", lambda folder: "digest")
    monkeypatch.setattr(recipes, "lacking_here", lambda recipe: [])
    own = {
        "rollout__model": str(tmp_path),
        "reward__source": "exact",
        "distillation": None,
        "cluster__device": "cpu",
    }
    first = request("quickstart", **own).model_copy(update={"execution": "first"})
    assert await resolve_recipe(first) == await resolve_recipe(first)
    later = request("quickstart", **own, steps=3).model_copy(update={"execution": "later"})
    with pytest.raises(PermanentError, match="run-1 was used by an earlier run") as refused:
        await resolve_recipe(later)
    assert str(tmp_path / "store" / "run-1") in str(refused.value)
    assert "Choose another id" in str(refused.value)


async def test_a_malformed_recipe_is_refused_with_what_is_wrong_with_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RELAX_HOME", str(tmp_path))
    with pytest.raises(RecipeError) as refused:
        await resolve_recipe(request("quickstart", train__packed="perhaps", train__ranks=9))
    assert [v.field for v in refused.value.violations] == ["train.packed", "train.ranks"]
    assert str(refused.value).startswith("recipe quickstart: train.packed: ")
    assert "train.ranks: with train.packed at its default: each rank" in str(refused.value)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("run", ["../evil", "bad id!", "a/b", "", "run-1.lease", "x" * 65])
async def test_an_id_that_folders_cannot_be_named_after_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: str
) -> None:
    """Also that of a run started with ``temporal workflow start``."""
    monkeypatch.setenv("RELAX_HOME", str(tmp_path / "home"))
    with pytest.raises(PermanentError, match="cannot be a run id"):
        await resolve_recipe(request("quickstart").model_copy(update={"run": run}))
    assert not (tmp_path / "home").exists()


async def test_a_run_reserves_the_computed_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RELAX_HOME", str(tmp_path))
    monkeypatch.setattr(recipes, "weights_digest", lambda folder: "digest")
    monkeypatch.setattr(recipes, "lacking_here", lambda recipe: [])
    plan = await resolve_recipe(
        request(
            "quickstart",
            rollout__model=str(tmp_path),
            reward__source="exact",
            distillation=None,
            cluster__device="cpu",
            train__ray_gpu_fraction=0.9,
            rollout__engine__ray_gpu_fraction="auto",
        )
    )
    assert [group.ray_gpu_fraction for group in plan.groups] == [0.1]


async def test_a_file_of_prompts_is_the_same_to_the_end_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it is when the run begins is written down; a faulty one is refused before that."""
    monkeypatch.setenv("RELAX_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(recipes, "weights_digest", lambda folder: "digest")
    monkeypatch.setattr(recipes, "lacking_here", lambda recipe: [])
    path = tmp_path / "prompts.jsonl"
    own = {
        "rollout__model": byte_policy(tmp_path / "policy"),
        "data__source": "file",
        "data__path": str(path),
        "data__held_out": 1,
        "reward__source": "exact",
        "distillation": None,
        "cluster__device": "cpu",
    }
    path.write_text('{"prompt": "1", "answer": "2"}\n{"prompt": "2"}\n')
    with pytest.raises(PermanentError, match="line 2 has no field answer"):
        await resolve_recipe(request("quickstart", **own))
    assert not (tmp_path / "home" / "store").exists()
    path.write_text('{"prompt": "1", "answer": "2"}\n{"prompt": "2", "answer": "3"}\n')
    sets = [{"name": "own", "source": "file", "path": str(path), "problems": 2}]
    plan = await resolve_recipe(request("quickstart", evaluation__sets=sets, **own))
    assert recipe_of(plan.run).evaluation.sets[0].sha256 == recipe_of(plan.run).data.sha256
    assert recipe_of(plan.run).data.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert [p.answer for p in task_of(plan.run).prompts(0, 1, 1)] in (["2"], ["3"])


async def test_every_model_that_takes_part_is_a_group_of_its_role(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two judges and two Teachers, side by side; a judge that nobody asks is not started."""
    monkeypatch.setenv("RELAX_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(recipes, "weights_digest", lambda folder: "digest")
    monkeypatch.setattr(recipes, "lacking_here", lambda recipe: [])
    folders = {name: str(tmp_path / name) for name in ("policy", "judge", "safety", "big", "code")}
    own = {
        "mode": "split",
        "cluster.gpus": 6,
        "cluster.device": "cpu",
        "rollout.model": folders["policy"],
        "genrm.model": folders["judge"],
        "genrm.extra_models": [{"model": folders["safety"], "model_id": "safety"}],
        "teacher.model": folders["big"],
        "teacher.extra_models": [{"model": folders["code"], "model_id": "code"}],
    }
    start = RunInput(recipe="quickstart", overrides=own)
    plan = await resolve_recipe(ResolveRequest(run="run-1", start=start))
    assert [(g.role, g.model, Path(g.model_path).name) for g in plan.groups] == [
        ("rollout", "policy", "policy"),
        ("genrm", "judge", "judge"),
        ("genrm", "safety", "safety"),
        ("teacher", "teacher", "big"),
        ("teacher", "code", "code"),
    ]
    assert plan.roles == ("rollout", "genrm", "teacher", "trainer")
    assert plan.operation_timeout == 360.0, "engines may take launch_timeout to come up"
    start = RunInput(recipe="quickstart", overrides=own | {"reward.source": "exact"})
    plan = await resolve_recipe(ResolveRequest(run="run-2", start=start))
    assert plan.roles == ("rollout", "teacher", "trainer")


async def test_a_scorer_that_somebody_else_serves_has_no_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RELAX_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(recipes, "weights_digest", lambda folder: "digest")
    monkeypatch.setattr(recipes, "lacking_here", lambda recipe: [])
    own = {
        "cluster__device": "cpu",
        "rollout__model": str(tmp_path / "policy"),
        "teacher__model": "/nowhere",
        "teacher__url": "http://teacher:30000",
        "genrm__model": "/nowhere",
        "genrm__url": "https://judges/genrm/",
    }
    plan = await resolve_recipe(request("quickstart", **own))
    assert plan.roles == ("rollout", "trainer")
    assert [g.role for g in plan.groups] == ["rollout"]
    assert (plan.judged_by_genrm, plan.distilled) == (True, True)
    with pytest.raises(RecipeError, match="url: must be http"):
        load_recipe("quickstart", {"teacher.url": "teacher:30000"})
    extra = {"genrm.extra_models": [{"model": "/m", "model_id": "second"}]}
    with pytest.raises(RecipeError, match=r"genrm\.extra_models would have no engines"):
        load_recipe("quickstart", {"genrm.url": "http://j", **extra})


async def test_a_run_may_go_on_from_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RELAX_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(recipes, "weights_digest", lambda folder: "digest")
    monkeypatch.setattr(recipes, "lacking_here", lambda recipe: [])
    own = {
        "rollout.model": str(tmp_path),
        "reward.source": "exact",
        "distillation": None,
        "cluster.device": "cpu",
    }

    async def resolved(run: str, **start: Any) -> RunPlan:
        given = {"recipe": "quickstart", "overrides": own, "steps": 9, **start}
        return await resolve_recipe(
            ResolveRequest(run=run, start=RunInput.model_validate(given), execution=run)
        )

    earlier = (await resolved("earlier")).run
    with pytest.raises(PermanentError, match="run earlier has no checkpoint"):
        await resolved("later", begin_from={"run": "earlier"})
    trained(earlier, 3)
    with pytest.raises(PermanentError, match="cannot begin from itself"):
        await resolved("earlier", begin_from={"run": "earlier"})
    with pytest.raises(
        PermanentError, match="has trained step 3, the new run is to end with step 3"
    ):
        await resolved("later", begin_from={"run": "earlier"}, steps=3)
    assert not (tmp_path / "home" / "store" / "later").exists()
    plan = await resolved("later", begin_from={"run": "earlier"})
    assert (plan.begins_after, plan.steps) == (3, 9)
    assert plan.initial_weights.uri == f"{plan.run.store}/later/weights/3"
    assert plan.trainer.model_path == str(tmp_path), "the reference is the first run's"
    assert plan.trainer.keep_weights == 2
    assert await resolved("later", begin_from={"run": "earlier"}) == plan


def trained(run: RunRef, steps: int) -> None:
    """Checkpoints of a run, without tensors."""
    ledger = Ledger()
    for step in range(1, steps + 1):
        (run_folder(run) / "weights" / str(step)).mkdir(parents=True)
        made = entry(step)
        weights = WeightsRef(version=step, uri=f"{run.store}/{run.run}/weights/{step}", digest="d")
        result = made.result.model_copy(update={"weights": weights})
        ledger = ledger.with_entry(made.model_copy(update={"result": result}))
        Checkpoints(run).begin(step)
        Checkpoints(run).commit(step, ledger, keep=2)
