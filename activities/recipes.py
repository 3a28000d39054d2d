"""From what a person typed to a plan that workflows can carry."""

import asyncio
import os
from itertools import combinations
from pathlib import Path

from temporalio import activity

from activities._progress import teller
from activities._run_files import store_of
from relax_infer.config import Recipe, RecipeError, read_recipe, recipe_sha256, require_runnable
from relax_infer.config.placed import Engine
from relax_infer.config.scoring import GenRM, Teacher
from relax_infer.contracts.alarms import LogProbBound
from relax_infer.contracts.algorithm import AlgorithmSpec, ScheduleSpec
from relax_infer.contracts.autoscale import AutoscalePolicy
from relax_infer.contracts.engines import EngineGroupSpec, LeaseRole, Role
from relax_infer.contracts.failures import PermanentError
from relax_infer.contracts.refs import RUN_ID, RunRef, WeightsRef
from relax_infer.contracts.run import BeginFrom, ResolveRequest, RunPlan
from relax_infer.contracts.training import CriticSpec, TrainerSpec
from relax_infer.contracts.weights import WeightTransport
from relax_infer.placement import (
    InferencePlacementPlan,
    PlacementError,
    model_placement,
    plan_inference_placement,
)
from relax_infer.placement.device import cluster_device
from relax_infer.placement.here import lacking_here
from relax_infer.placement.malformed import with_the_rest
from relax_infer.placement.sharing import roles_apart
from relax_infer.samples import StagingStore, load_task, make_problems
from relax_infer.samples.prompt_file import file_sha256
from relax_infer.scoring import require_usable
from relax_infer.tiny.models import ensure_models
from relax_infer.training import Heritage, find_heritage, take_over, weights_digest

OWNER = "owner.json"
_ELSEWHERE = ("genrm.", "teacher.", "rollout.extra_models.")
"""Sections whose models engines alone read."""
_LAUNCHED = 60.0
"""Seconds that an onload may take beyond the launch of its engines."""


@activity.defn
async def resolve_recipe(request: ResolveRequest) -> RunPlan:
    """A checked recipe with its models on disk, written down once for the whole run."""
    return await asyncio.to_thread(_resolve, request)


def _resolve(request: ResolveRequest) -> RunPlan:
    if not RUN_ID.fullmatch(request.run):
        raise PermanentError(
            f"{request.run!r} cannot be a run id: folders and actors are named after it.",
            cure="Start it under 1 to 64 letters, digits, - and _, a letter or digit first.",
        )
    try:
        recipe = read_recipe(request.start.recipe, dict(request.start.overrides))
    except RecipeError as error:
        raise with_the_rest(error) from None
    if request.start.steps is not None:
        recipe = recipe.model_copy(update={"steps": request.start.steps})
    placed = plan_inference_placement(recipe)
    require_runnable(recipe)
    require_usable(recipe.reward.source)
    _require_here(recipe)
    recipe = _with_its_data(recipe)
    home = Path(os.environ.get("RELAX_HOME", ".relax")).absolute()
    run = RunRef(run=request.run, store=recipe.staging.url or (home / "store").as_uri())
    store = store_of(run)
    earlier, heritage = _heritage(request.start.begin_from, run, recipe)
    _claim(store, request)
    if not store.exists("recipe.json"):
        store.write_json("recipe.json", recipe.model_dump(mode="json"))
    models = {model for _, _, model, _ in _served(recipe)}
    plan = _plan(run, recipe, placed, _folders(models, home / "models", recipe.seed))
    if earlier is None or heritage is None:
        return plan
    teller()(f"takes over step {heritage.step} of run {earlier.run}")
    own = take_over(earlier, run, heritage)
    return plan.model_copy(update={"initial_weights": own.weights, "begins_after": own.step})


def _require_here(recipe: Recipe) -> None:
    """The files that this worker reads itself; engines may have theirs on other hosts.

    Raises:
        PlacementError: names every field whose folder or file is not there.
    """
    missing = [each for each in lacking_here(recipe) if not each.field.startswith(_ELSEWHERE)]
    if missing:
        raise PlacementError(missing, "this worker cannot read what the recipe names")


def _with_its_data(recipe: Recipe) -> Recipe:
    """Task and sets can be made, and files of problems are these files to the end of the run.

    Raises:
        PermanentError: one cannot; names the field or set, and for a file the line.
    """
    data, plan = recipe.data, recipe.evaluation
    data = data.model_copy(update={"sha256": data.sha256 or _sha256(data.path)})
    sets = tuple(
        each.model_copy(update={"sha256": each.sha256 or _sha256(each.path)}) for each in plan.sets
    )
    plan = plan.model_copy(update={"sets": sets})
    recipe = recipe.model_copy(update={"data": data, "evaluation": plan})
    load_task(recipe).prompts(recipe.seed, 1, 1)
    for each in sets:
        if each.source is not None:
            make_problems(recipe, each)
    return recipe


def _sha256(path: str | None) -> str | None:
    return None if path is None else file_sha256(path)


def _heritage(
    begin_from: BeginFrom | None, run: RunRef, recipe: Recipe
) -> tuple[RunRef | None, Heritage | None]:
    """The run that this one goes on from, and what it left.

    Raises:
        PermanentError: it left nothing to go on from, or the recipe ends before that.
    """
    if begin_from is None:
        return None, None
    earlier = RunRef(run=begin_from.run, store=begin_from.store or run.store)
    if earlier == run:
        raise PermanentError(
            f"begin_from: a run cannot begin from itself, {run.run}.",
            cure="Choose another id for the new run.",
        )
    return earlier, find_heritage(earlier, begin_from.step, target=recipe.steps)


def _claim(store: StagingStore, request: ResolveRequest) -> None:
    """A run's id is used once: the files of an earlier run are never gone on with by accident.

    Raises:
        PermanentError: another execution has begun in this store under this id.
    """
    owner = store.read_json(OWNER)["execution"] if store.exists(OWNER) else None
    if owner == request.execution:
        return
    if owner is not None or store.exists("recipe.json"):
        raise PermanentError(
            f"The id {request.run} was used by an earlier run: its files are in"
            f" {store.url('').rstrip('/')}.",
            cure="Choose another id for this run; the earlier one's files stay as they are.",
        )
    store.write_json(OWNER, {"execution": request.execution})


def _served(recipe: Recipe) -> list[tuple[Role, str, str, Engine]]:
    """Role, id, folder and engines of every model that we serve, the policy first."""
    served: list[tuple[Role, str, str, Engine]] = [
        ("rollout", "policy", recipe.rollout.model, recipe.rollout.engine)
    ]
    parts: list[tuple[Role, GenRM | Teacher | None]] = [
        ("genrm", recipe.genrm),
        ("teacher", recipe.teacher),
    ]
    for role, section in parts:
        if section is not None and recipe.serves(role):
            models = (section, *section.extra_models)
            served.extend((role, m.model_id, m.model, m.engine) for m in models)
    return served


def _folders(models: set[str], folder: Path, seed: int) -> dict[str, Path]:
    """Where each model is; the tiny ones are made if they are not there yet."""
    tiny = sorted(m.partition(":")[2] for m in models if m.startswith("tiny:"))
    tell = teller()
    made = (
        ensure_models(
            folder,
            seed=seed,
            names=tiny,
            progress=lambda line: tell(f"trains the tiny models (once for this machine): {line}"),
        )
        if tiny
        else {}
    )
    tell()
    return {m: made[m.partition(":")[2]] if m.startswith("tiny:") else Path(m) for m in models}


def _plan(
    run: RunRef, recipe: Recipe, placed: InferencePlacementPlan, folders: dict[str, Path]
) -> RunPlan:
    device = cluster_device(recipe.cluster.device)
    residual = round(recipe.lease.residual_gib * (1 << 30))
    transport = WeightTransport.model_validate(recipe.train.weights.model_dump())

    def group(role: Role, model_id: str, path: Path, engine: Engine) -> EngineGroupSpec:
        placement = model_placement(placed, role, model_id)
        if placement is None:
            raise PermanentError(f"the placement plan lacks {role}/{model_id}.")
        assert engine.offload != "none", "require_runnable has refused it"
        return EngineGroupSpec(
            run=run.run,
            role=role,
            model=model_id,
            model_path=str(path),
            weight_source="ACTOR" if role == "rollout" else "STATIC",
            replicas=engine.replicas,
            gpus_per_replica=engine.gpus_per_replica,
            nodes_per_replica=placement.nodes_per_engine,
            offload=engine.offload,
            ray_gpu_fraction=placement.ray_gpu_fraction,
            placement_group=placement.pool,
            bundles=(),
            device=device,
            python=engine.python,
            server_args=engine.server_args,
            launch_timeout=engine.launch_timeout,
            health_timeout=engine.health_timeout,
            drain_timeout=engine.drain_timeout,
            store=run.store,
            weights=transport if role == "rollout" else WeightTransport(),
            residual_memory=residual,
        )

    groups = [
        group(role, model_id, folders[model], engine)
        for role, model_id, model, engine in _served(recipe)
    ]
    roles: list[LeaseRole] = list(dict.fromkeys(each.role for each in groups))
    policy = folders[recipe.rollout.model]
    train = recipe.train
    (trained,) = [t for t in placed.training if t.role == "trainer"]
    trainer = TrainerSpec(
        run=run,
        model_path=str(policy),
        ranks=train.ranks,
        placement_group=trained.pool,
        bundles=(),
        ray_gpu_fraction=train.ray_gpu_fraction,
        device=device,
        seed=recipe.seed,
        learning_rate=train.learning_rate,
        betas=train.betas,
        weight_decay=train.weight_decay,
        grad_clip=train.grad_clip,
        clip_low=train.clip_low,
        clip_high=train.clip_high,
        mini_batches=train.mini_batches,
        advantage_eps=train.advantage_eps,
        use_reward=recipe.reward.source != "none",
        distillation=recipe.distillation.coefficient if recipe.distillation else 0.0,
        keep_checkpoints=train.keep_checkpoints,
        # An engine that is rebuilt loads the version of the batch at work once more.
        keep_weights=max(train.keep_checkpoints, recipe.max_staleness + 2),
        keep_every=train.keep_every,
        distillation_mode=recipe.distillation.mode if recipe.distillation else "student_sampled",
        divergence=recipe.distillation.divergence if recipe.distillation else "reverse_kl",
        top_k=recipe.distillation.top_k if recipe.distillation else 0,
        algorithm=AlgorithmSpec.model_validate(train.algorithm.model_dump()),
        schedule=ScheduleSpec(
            **train.schedule.model_dump(exclude={"decay_steps"}),
            decay_steps=train.schedule.decay_steps or recipe.steps,
        ),
        longest_response=recipe.rollout.sampling.max_new_tokens,
        precision=train.precision,
        critic=CriticSpec(**recipe.critic.model_dump(include={"learning_rate", "value_clip"}))
        if recipe.critic and train.algorithm.estimator == "ppo"
        else None,
        tensor_parallel=train.tensor_parallel,
        pipeline_parallel=train.pipeline_parallel,
        sequence_parallel=train.sequence_parallel,
        packed=train.packed,
        micro_batch_tokens=train.micro_batch_tokens,
        residual_memory=residual,
    )
    apart = {frozenset(pair) for pair in roles_apart(placed)}
    pairs: list[tuple[LeaseRole, LeaseRole]] = list(combinations((*roles, "trainer"), 2))
    in_place = recipe.train.weights.in_place and all(
        frozenset(pair) in apart for pair in pairs if "rollout" in pair
    )
    return RunPlan(
        run=run,
        recipe_name=recipe.name,
        recipe_sha256=recipe_sha256(recipe),
        steps=recipe.steps,
        roles=(*roles, "trainer"),
        groups=tuple(groups),
        trainer=trainer,
        initial_weights=WeightsRef(version=0, uri=str(policy), digest=weights_digest(policy)),
        judged_by_genrm=recipe.judged,
        distilled=recipe.distilled,
        evaluation_every=recipe.evaluation.every,
        operation_timeout=max(
            recipe.lease.operation_timeout,
            *(each.launch_timeout + _LAUNCHED + _before(each, in_place) for each in groups),
        ),
        reconcile_timeout=recipe.lease.reconcile_timeout,
        phase_attempts=recipe.phase_attempts,
        apart=tuple(pair for pair in pairs if frozenset(pair) in apart),
        max_staleness=recipe.max_staleness,
        logprob_bound=LogProbBound.model_validate(recipe.train.logprob_bound.model_dump()),
        autoscale=autoscale_policies(recipe, groups),
        updates_in_place=in_place,
    )


def autoscale_policies(
    recipe: Recipe, groups: list[EngineGroupSpec]
) -> dict[str, dict[str, AutoscalePolicy]]:
    """Role, model and policy."""
    rules = dict(recipe.autoscale.rules()) if recipe.autoscale is not None else {}
    found: dict[str, dict[str, AutoscalePolicy]] = {}
    for group in groups:
        rule = rules.get(group.role)
        if rule is not None and (not rule.models or group.model in rule.models):
            found.setdefault(group.role, {})[group.model] = rule.policy()
    return found


def _before(group: EngineGroupSpec, in_place: bool) -> float:
    """Seconds that may pass before new weights are read from the disk."""
    weights = group.weights
    drained = weights.drain_deadline if in_place and group.role == "rollout" else 0.0
    return drained + (0.0 if weights.transport == "disk" else weights.timeout)


ACTIVITIES = (resolve_recipe,)
