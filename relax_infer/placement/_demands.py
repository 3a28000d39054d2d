"""What the recipe's roles ask for: engines by model and server group, and training ranks."""

from collections.abc import Mapping
from dataclasses import dataclass

from relax_infer.config import Recipe
from relax_infer.config.placed import Engine, Scalar, ServerGroup
from relax_infer.config.scoring import GenRM, Teacher
from relax_infer.contracts.engines import Role
from relax_infer.engines.flags import flag_of, repeated
from relax_infer.placement.placed import POOL, Mode, TrainingPlacement, TrainingRole, WorkerType

SCORERS: tuple[Role, ...] = ("genrm", "teacher")


@dataclass(frozen=True)
class Flag:
    """One SGLang flag, and the dotted key of the recipe that gives it."""

    value: Scalar
    field: str


@dataclass(frozen=True)
class Demand:
    """Engines of one model, or of one server group of it."""

    role: Role
    model_id: str
    model_field: str
    """Dotted key of the section that names the model."""
    field: str
    """Dotted key of the section that has replicas and gpus_per_replica."""
    replicas: int
    gpus_per_replica: int
    engine: Engine
    flags: Mapping[str, Flag]
    """By SGLang's own name, with underscores."""
    repeated: tuple[tuple[str, ...], ...] = ()
    """Dotted keys that give one flag under several names."""
    group_id: str = "default"
    worker_type: WorkerType = "regular"

    @property
    def num_gpus(self) -> int:
        return self.replicas * self.gpus_per_replica

    @property
    def server_args(self) -> dict[str, Scalar]:
        """Of the engine's section, under those of its group."""
        return {name: flag.value for name, flag in self.flags.items()}

    @property
    def engine_field(self) -> str:
        return f"{self.model_field}.engine"

    def size(self, flag: str) -> int | None:
        """A parallel size that was given; None: left out, or not a positive whole number."""
        given = self.flags.get(flag)
        if given is None or isinstance(given.value, bool) or not isinstance(given.value, int):
            return None
        return given.value if given.value > 0 else None


def mode_of(recipe: Recipe) -> Mode:
    """The recipe's mode; without training roles nothing is shared."""
    return "decoupled" if recipe.debug == "rollout_only" else recipe.mode


def deferred_roles(recipe: Recipe) -> tuple[Role, ...]:
    """Scorers with a turn of their own, by ``mode`` and ``defer_roles``, in the order of turns."""
    if mode_of(recipe) != "defer":
        return ()
    chosen = SCORERS if recipe.defer_roles is None else recipe.defer_roles
    return tuple(role for role in SCORERS if recipe.serves(role) and role in chosen)


def inference_demands(recipe: Recipe) -> tuple[Demand, ...]:
    """Of every role that takes part and that we run: rollout, then genrm, then teacher."""
    if recipe.debug == "train_only":
        return ()
    found: list[Demand] = []
    if not recipe.rollout.external:
        rollout = recipe.rollout
        found += _of("rollout", "policy", "rollout", rollout.engine, rollout.server_groups)
        for n, model in enumerate(rollout.extra_models):
            where = f"rollout.extra_models.{n}"
            found += _of("rollout", model.model_id, where, model.engine, model.server_groups)
    scorers: list[tuple[Role, GenRM | Teacher | None]] = [
        ("genrm", recipe.genrm),
        ("teacher", recipe.teacher),
    ]
    for role, section in scorers:
        if section is None or not recipe.serves(role):
            continue
        found += _of(role, section.model_id, role, section.engine, None)
        for n, model in enumerate(section.extra_models):
            found += _of(role, model.model_id, f"{role}.extra_models.{n}", model.engine, None)
    return tuple(found)


def training_demands(recipe: Recipe) -> tuple[TrainingPlacement, ...]:
    """Trainer first. The critic shares its pool only when it has as many ranks."""
    if recipe.debug == "rollout_only":
        return ()
    shared = recipe.mode != "decoupled"
    train, critic = recipe.train, recipe.critic
    pool = POOL if shared else "trainer"
    found = [TrainingPlacement("trainer", train.ranks, pool, train.ray_gpu_fraction)]
    if critic is not None:
        shares = shared and critic.ranks == train.ranks
        pool = POOL if shares else "critic"
        found.append(TrainingPlacement("critic", critic.ranks, pool, critic.ray_gpu_fraction))
    forward: tuple[TrainingRole, ...] = ("reference", "actor_fwd")
    for role in forward:
        section = recipe.reference if role == "reference" else recipe.actor_fwd
        if section is not None:
            found.append(TrainingPlacement(role, section.ranks, role, section.ray_gpu_fraction))
    return tuple(found)


def _of(
    role: Role, model_id: str, where: str, engine: Engine, groups: tuple[ServerGroup, ...] | None
) -> list[Demand]:
    flags = _flags(engine.server_args, f"{where}.engine")
    twice = _repeated(engine.server_args, f"{where}.engine")
    if groups is None:
        alone = Demand(
            role=role,
            model_id=model_id,
            model_field=where,
            field=f"{where}.engine",
            replicas=engine.replicas,
            gpus_per_replica=engine.gpus_per_replica,
            engine=engine,
            flags=flags,
            repeated=twice,
        )
        return [alone]
    return [
        Demand(
            role=role,
            model_id=model_id,
            model_field=where,
            field=f"{where}.server_groups.{n}",
            replicas=group.replicas,
            gpus_per_replica=group.gpus_per_replica,
            engine=engine,
            flags=flags | _flags(group.server_args, f"{where}.server_groups.{n}"),
            repeated=twice + _repeated(group.server_args, f"{where}.server_groups.{n}"),
            group_id=f"{group.worker_type}-{n}",
            worker_type=group.worker_type,
        )
        for n, group in enumerate(groups)
    ]


def _flags(server_args: Mapping[str, Scalar], field: str) -> dict[str, Flag]:
    return {
        flag_of(name).replace("-", "_"): Flag(value, f"{field}.server_args.{name}")
        for name, value in server_args.items()
    }


def _repeated(server_args: Mapping[str, Scalar], field: str) -> tuple[tuple[str, ...], ...]:
    return tuple(
        tuple(f"{field}.server_args.{name}" for name in same) for same in repeated(server_args)
    )
