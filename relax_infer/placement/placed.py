"""What a plan is made of: who has which bundles in which phase. Immutable, JSON both ways."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, TypeVar

from relax_infer.config.violation import Violation
from relax_infer.contracts.counted import are, counted
from relax_infer.contracts.engines import Role
from relax_infer.contracts.failures import PermanentError
from relax_infer.placement.alignment import may_begin

POOL = "pool"
"""The pool that roles share in modes defer and split."""

Mode = Literal["defer", "split", "decoupled"]
TrainingRole = Literal["trainer", "critic", "reference", "actor_fwd"]
WorkerType = Literal["regular", "prefill", "decode"]


class PlacementError(PermanentError, ValueError):
    """It cannot be placed; ``violations`` has every reason, not only the first."""

    def __init__(
        self, violations: Sequence[Violation], subject: str = "the recipe cannot be placed"
    ) -> None:
        self.violations = tuple(violations)
        self.subject = subject
        super().__init__(f"{subject}: {'; '.join(str(v) for v in self.violations)}")

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.violations, self.subject))


@dataclass(frozen=True)
class Placement:
    """The consecutive bundles of one model, or of one server group of it."""

    role: Role
    model_id: str
    num_gpus: int
    gpus_per_engine: int
    bundle_start: int
    pool: str
    owner: str
    """Who owns the pool: ``controller`` where roles share it, else the role."""
    phase: str
    """``inference``, or ``<role>_score`` for a deferred role."""
    deferred: bool
    num_gpus_per_node: int
    tp: int
    pp: int
    ray_gpu_fraction: float
    """What each worker reserves with Ray, in its first bundle."""
    group_id: str = "default"
    worker_type: WorkerType = "regular"

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
        return _from(cls, document)


@dataclass(frozen=True)
class TrainingPlacement:
    """The consecutive bundles of one training role, one for each rank."""

    role: TrainingRole
    num_gpus: int
    pool: str
    ray_gpu_fraction: float
    """What each rank reserves with Ray, in its bundle."""
    bundle_start: int = 0

    @property
    def bundle_stop(self) -> int:
        return self.bundle_start + self.num_gpus


@dataclass(frozen=True)
class Slot:
    """Bundles ``bundle_start`` to ``bundle_stop`` (exclusive) of a pool, held in a phase."""

    role: Role | TrainingRole
    model_id: str | None
    """None for a training role."""
    group_id: str | None
    pool: str
    bundle_start: int
    bundle_stop: int


@dataclass(frozen=True)
class Phase:
    """What happens at once."""

    name: str
    slots: tuple[Slot, ...]

    @property
    def roles(self) -> tuple[str, ...]:
        """Each once, in the order of their slots."""
        return tuple(dict.fromkeys(slot.role for slot in self.slots))


@dataclass(frozen=True)
class Transition:
    """From a phase of the cycle to the next; roles by name."""

    source: int
    """Number of the phase that ends."""
    target: int
    """Number of the phase that begins."""
    deactivate: tuple[str, ...]
    activate: tuple[str, ...]
    keep: tuple[str, ...]
    """Roles of both phases, in the same slots."""


@dataclass(frozen=True)
class InferencePlacementPlan:
    """Every model's bundles, checked against the pools."""

    mode: Mode
    placements: tuple[Placement, ...]
    total_required_gpus: int
    pool_sizes: tuple[tuple[str, int], ...]
    training: tuple[TrainingPlacement, ...]
    phases: tuple[Phase, ...]
    """One cycle, in order."""
    gpus_per_node: int

    @property
    def training_roles(self) -> tuple[TrainingRole, ...]:
        return tuple(t.role for t in self.training)

    @property
    def transitions(self) -> tuple[Transition, ...]:
        """One into each phase, the first from the last."""
        return tuple(_transition(self.phases, target) for target in range(len(self.phases)))

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "mode": self.mode,
            "placements": [p.to_dict() for p in self.placements],
            "total_required_gpus": self.total_required_gpus,
            "pool_sizes": dict(self.pool_sizes),
            "gpus_per_node": self.gpus_per_node,
            "training_roles": list(self.training_roles),
            "training": [asdict(t) for t in self.training],
            "phases": [
                {"name": p.name, "slots": [asdict(s) for s in p.slots]} for p in self.phases
            ],
            "transitions": [
                {name: _listed(value) for name, value in asdict(t).items()}
                for t in self.transitions
            ],
        }

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> "InferencePlacementPlan":
        """From ``to_dict``, whatever order the keys are in; what is derived is derived again.

        Raises:
            PlacementError: bundles that are in no pool, or a total that is none; with every fault.
        """
        placements = tuple(Placement.from_dict(p) for p in document["placements"])
        training = tuple(_from(TrainingPlacement, t) for t in document["training"])
        sizes: Mapping[str, int] = document["pool_sizes"]
        # JSON's mappings have no order: that of the planner is by who is in a pool first.
        pools = dict.fromkeys((*(part.pool for part in (*placements, *training)), *sizes))
        plan = cls(
            mode=document["mode"],
            placements=placements,
            total_required_gpus=document["total_required_gpus"],
            pool_sizes=tuple((pool, sizes[pool]) for pool in pools if pool in sizes),
            gpus_per_node=document["gpus_per_node"],
            training=training,
            phases=tuple(
                Phase(p["name"], tuple(_from(Slot, s) for s in p["slots"]))
                for p in document["phases"]
            ),
        )
        if faults := list(_faults(plan)):
            raise PlacementError(faults, "the plan is damaged")
        return plan


def model_placement(
    plan: InferencePlacementPlan | Mapping[str, Any] | None,
    role: str,
    model: str | None = None,
    group: str | None = None,
) -> Placement | None:
    """The placement of one model; None without a plan, or when there is not exactly one such.

    Args:
        plan: a plan, or its serialised form.
        role: rollout, genrm or teacher.
        model: its id; None or ``__default__`` takes the role's only one.
        group: id of a server group; None takes the model's only one.
    """
    if plan is None:
        return None
    if isinstance(plan, InferencePlacementPlan):
        placements = plan.placements
    else:
        placements = tuple(Placement.from_dict(p) for p in plan["placements"])
    found = [
        p
        for p in placements
        if p.role == role
        and model in (None, "__default__", p.model_id)
        and group in (None, p.group_id)
    ]
    return found[0] if len(found) == 1 else None


def _transition(phases: Sequence[Phase], target: int) -> Transition:
    source = (target - 1) % len(phases)
    before, after = phases[source].roles, phases[target].roles
    return Transition(
        source=source,
        target=target,
        deactivate=tuple(r for r in before if r not in after),
        activate=tuple(r for r in after if r not in before),
        keep=tuple(r for r in after if r in before),
    )


def _faults(plan: InferencePlacementPlan) -> Iterator[Violation]:
    """Of a plan that somebody hands in."""
    cure = "Plan the recipe again: plan_inference_placement."
    sizes = dict(plan.pool_sizes)
    slots = [slot for phase in plan.phases for slot in phase.slots]
    for part in (*plan.placements, *plan.training, *slots):
        if not 0 <= part.bundle_start < part.bundle_stop <= sizes.get(part.pool, 0):
            rule = (
                f"bundles {part.bundle_start} to {part.bundle_stop} (exclusive) are not in pool"
                f" {part.pool} of {sizes.get(part.pool, 0)}."
            )
            yield Violation(part.role, rule, cure)
    for placement in plan.placements:
        if placement.gpus_per_engine < 1 or placement.num_gpus % placement.gpus_per_engine:
            there = f"{counted(placement.num_gpus, 'GPU')} {are(placement.num_gpus)}"
            rule = f"{there} no whole engines of {placement.gpus_per_engine}."
            yield Violation(placement.role, rule, cure)
            continue
        if (bundle := _crosses(placement)) is not None:
            rule = (
                f"its engine of {counted(placement.gpus_per_engine, 'GPU')} may not begin at bundle"
                f" {bundle}: nodes have {placement.num_gpus_per_node}."
            )
            yield Violation(placement.role, rule, cure)
    if plan.total_required_gpus != sum(sizes.values()):
        rule = f"{plan.total_required_gpus} is not the sum of the pools, {sum(sizes.values())}."
        yield Violation("total_required_gpus", rule, cure)


def _crosses(placement: Placement) -> int | None:
    """The first bundle at which one of its engines begins and may not."""
    size, node = placement.gpus_per_engine, placement.num_gpus_per_node
    starts = range(placement.bundle_start, placement.bundle_stop, size)
    return next((start for start in starts if not may_begin(size, start, node)), None)


Part = TypeVar("Part", Placement, TrainingPlacement, Slot)


def _from(kind: type[Part], document: Mapping[str, Any]) -> Part:
    names = {f.name for f in fields(kind)}
    return kind(**{k: v for k, v in document.items() if k in names})


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
