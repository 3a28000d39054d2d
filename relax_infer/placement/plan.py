"""Which bundles of the GPU pool each role uses: a pure function of the recipe."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from relax_infer.config import Recipe
from relax_infer.config.recipe import Engine
from relax_infer.contracts.engines import Role

POOL = "pool"
"""The one pool of mode defer."""

ALLOWANCE = 1e-9
"""Rounding that a sum of fractions is forgiven."""

RESERVED_ARGS = frozenset(
    {
        *("nnodes", "node_rank", "base_gpu_id", "gpu_id_step"),
        *("dist_init_addr", "host", "port", "nccl_port"),
    }
)
"""SGLang flags that placement itself decides."""


@dataclass(frozen=True)
class Violation:
    """One rule that the recipe breaks."""

    field: str
    """Dotted key of the recipe."""
    rule: str
    cure: str

    def __str__(self) -> str:
        return f"{self.field}: {self.rule} {self.cure}"


class PlacementError(ValueError):
    """The recipe cannot be placed; ``violations`` has every reason, not only the first."""

    def __init__(self, violations: Sequence[Violation]) -> None:
        self.violations = tuple(violations)
        super().__init__(self.violations)

    def __str__(self) -> str:
        return "the recipe cannot be placed: " + "; ".join(str(v) for v in self.violations)


@dataclass(frozen=True)
class Placement:
    """The consecutive bundles of one model."""

    role: Role
    model_id: str
    num_gpus: int
    gpus_per_engine: int
    bundle_start: int
    pool: str
    owner: Literal["controller"]
    """Who owns the pool; a colocated pool belongs to the controller, not to a role."""
    phase: str
    """``inference``, or ``<role>_score`` for a deferred role."""
    deferred: bool
    num_gpus_per_node: int
    tp: int
    pp: int
    ray_gpu_fraction: float
    """What each worker reserves with Ray, in its first bundle."""
    group_id: str = "default"
    worker_type: Literal["regular"] = "regular"

    @property
    def bundle_stop(self) -> int:
        return self.bundle_start + self.num_gpus

    @property
    def replicas(self) -> int:
        return self.num_gpus // self.gpus_per_engine

    @property
    def nodes_per_engine(self) -> int:
        return -(-self.gpus_per_engine // self.num_gpus_per_node)

    @property
    def gpus_per_worker(self) -> int:
        """GPUs of one engine on one node."""
        return self.gpus_per_engine // self.nodes_per_engine

    @property
    def num_worker_slots(self) -> int:
        return self.replicas * self.nodes_per_engine

    @property
    def heads(self) -> range:
        """First bundle of every worker: where it reserves its share with Ray."""
        return range(self.bundle_start, self.bundle_stop, self.gpus_per_worker)

    def to_dict(self) -> dict[str, Any]:
        derived = ("bundle_stop", "replicas", "nodes_per_engine", "num_worker_slots")
        return asdict(self) | {name: getattr(self, name) for name in derived}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> "Placement":
        """From ``to_dict``; what is derived is derived again."""
        return cls(**{k: v for k, v in document.items() if k in cls.__dataclass_fields__})


@dataclass(frozen=True)
class InferencePlacementPlan:
    """Every model's bundles, checked against the pool."""

    mode: Literal["defer"]
    placements: tuple[Placement, ...]
    total_required_gpus: int
    pool_sizes: tuple[tuple[str, int], ...]
    training_roles: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "mode": self.mode,
            "placements": [p.to_dict() for p in self.placements],
            "total_required_gpus": self.total_required_gpus,
            "pool_sizes": dict(self.pool_sizes),
            "training_roles": list(self.training_roles),
        }


def plan_inference_placement(recipe: Recipe) -> InferencePlacementPlan:
    """Place every role that takes part.

    In mode defer the roles take turns on one pool, so each one begins at bundle 0. What they
    reserve with Ray lasts over all turns: on no bundle may it add up to more than one GPU, because
    Ray would then wait for ever instead of failing.

    Raises:
        PlacementError: with every violation.
    """
    violations: list[Violation] = []
    sections: list[tuple[Role, str, Engine]] = [("rollout", "policy", recipe.rollout.engine)]
    if recipe.judged and recipe.genrm:
        sections.append(("genrm", recipe.genrm.model_id, recipe.genrm.engine))
    if recipe.distilled and recipe.teacher:
        sections.append(("teacher", recipe.teacher.model_id, recipe.teacher.engine))
    gpus = recipe.cluster.gpus
    for role, _, engine in sections:
        violations += _engine_violations(role, engine, gpus)
    if recipe.train.ranks > gpus:
        violations.append(
            Violation(
                "train.ranks",
                f"{recipe.train.ranks} ranks need as many GPUs, the pool has {gpus}.",
                f"Use at most {gpus}, or raise cluster.gpus.",
            )
        )
    placements = tuple(_place(role, model, engine, gpus) for role, model, engine in sections)
    violations += _reservation_violations(recipe, placements)
    if violations:
        raise PlacementError(violations)
    return InferencePlacementPlan(
        mode=recipe.mode,
        placements=placements,
        total_required_gpus=gpus,
        pool_sizes=((POOL, gpus),),
        training_roles=("trainer",),
    )


def model_placement(
    plan: InferencePlacementPlan | Mapping[str, Any] | None, role: str, model: str | None = None
) -> Placement | None:
    """The placement of one model; None without a plan, or when there is no such model.

    ``model``: None takes the role's only placement.
    """
    if plan is None:
        return None
    if isinstance(plan, InferencePlacementPlan):
        placements = plan.placements
    else:
        placements = tuple(Placement.from_dict(p) for p in plan["placements"])
    found = [p for p in placements if p.role == role and model in (None, p.model_id)]
    return found[0] if len(found) == 1 else None


def _place(role: Role, model: str, engine: Engine, gpus: int) -> Placement:
    args = _args(engine)
    return Placement(
        role=role,
        model_id=model,
        num_gpus=engine.replicas * engine.gpus_per_replica,
        gpus_per_engine=engine.gpus_per_replica,
        bundle_start=0,
        pool=POOL,
        owner="controller",
        phase="inference" if role == "rollout" else f"{role}_score",
        deferred=role != "rollout",
        num_gpus_per_node=gpus,
        tp=engine.gpus_per_replica // _whole(args.get("pp_size"), 1),
        pp=_whole(args.get("pp_size"), 1),
        ray_gpu_fraction=engine.ray_gpu_fraction,
    )


def _args(engine: Engine) -> dict[str, Any]:
    return {name.replace("-", "_"): value for name, value in engine.server_args.items()}


def _whole(value: object, default: int) -> int:
    return value if isinstance(value, int) and value > 0 else default


def _engine_violations(role: Role, engine: Engine, gpus: int) -> list[Violation]:
    where = f"{role}.engine"
    found: list[Violation] = []
    wanted = engine.replicas * engine.gpus_per_replica
    if wanted > gpus:
        found.append(
            Violation(
                f"{where}.replicas",
                f"{engine.replicas} replicas x {engine.gpus_per_replica} GPUs need {wanted} GPUs,"
                f" the pool has {gpus}.",
                f"Lower replicas or gpus_per_replica, or raise cluster.gpus to {wanted}.",
            )
        )
    args = _args(engine)
    found += [
        Violation(
            f"{where}.server_args.{name}",
            "placement decides this flag itself.",
            "Remove it; replicas and gpus_per_replica say the same.",
        )
        for name in sorted(RESERVED_ARGS & args.keys())
    ]
    tp, pp = _whole(args.get("tp_size"), 0), _whole(args.get("pp_size"), 1)
    if engine.gpus_per_replica % pp or (tp and tp * pp != engine.gpus_per_replica):
        found.append(
            Violation(
                f"{where}.server_args",
                f"tp_size {tp or 'unset'} x pp_size {pp} is not gpus_per_replica"
                f" {engine.gpus_per_replica}.",
                "Leave tp_size out, and let pp_size divide gpus_per_replica.",
            )
        )
    dp = _whole(args.get("dp_size"), 1)
    tensor = engine.gpus_per_replica // pp
    if args.get("enable_dp_attention") and tensor % dp:
        found.append(
            Violation(
                f"{where}.server_args.dp_size",
                f"DP attention splits the {tensor} tensor-parallel GPUs in {dp} parts.",
                f"Use a dp_size that divides {tensor}.",
            )
        )
    return found


def _reservation_violations(recipe: Recipe, placements: Sequence[Placement]) -> list[Violation]:
    claims: dict[int, list[tuple[str, float]]] = {b: [] for b in range(recipe.cluster.gpus)}
    for rank in range(min(recipe.train.ranks, recipe.cluster.gpus)):
        claims[rank].append(("trainer", recipe.train.ray_gpu_fraction))
    for placement in placements:
        for bundle in placement.heads:
            if bundle in claims:
                who = f"{placement.role}/{placement.model_id}"
                claims[bundle].append((who, placement.ray_gpu_fraction))
    found: list[Violation] = []
    for bundle, listed in claims.items():
        total = sum(share for _, share in listed)
        if total > 1 + ALLOWANCE:
            parts = " ".join(f"{who}={share:g}" for who, share in listed)
            found.append(
                Violation(
                    "ray_gpu_fraction",
                    f"bundle {bundle} would reserve {total:g} of its one GPU with Ray ({parts}).",
                    "Lower train.ray_gpu_fraction or the roles' engine.ray_gpu_fraction;"
                    " they reserve, they do not limit.",
                )
            )
    return found
