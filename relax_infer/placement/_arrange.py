"""Bundles for every demand: a pool for each role, or one pool by mode or by layout script."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from relax_infer.config import Recipe
from relax_infer.config.placed import Scalar
from relax_infer.contracts.counted import counted
from relax_infer.placement._demands import SCORERS, Demand, deferred_roles, mode_of
from relax_infer.placement._engine_rules import tensor_parallel
from relax_infer.placement._size_rules import raised
from relax_infer.placement.alignment import Row, line_up
from relax_infer.placement.layout import (
    Block,
    Fault,
    Layout,
    LayoutError,
    parse_layout,
    plan_layout,
)
from relax_infer.placement.layout_order import order_faults
from relax_infer.placement.phases import turns
from relax_infer.placement.placed import POOL, Mode, Placement, TrainingPlacement, Violation
from relax_infer.placement.ray_shares import PREFERRED


@dataclass
class Arrangement:
    """Who is where, and what does not fit. ``placements`` has one for each demand, in order."""

    mode: Mode
    pools: dict[str, int]
    placements: list[Placement]
    training: list[TrainingPlacement]
    turns: list[tuple[str, ...]] = field(default_factory=list[tuple[str, ...]])
    """Roles of each phase."""
    violations: list[Violation] = field(default_factory=list[Violation])


def arrange(
    recipe: Recipe, demands: Sequence[Demand], training: Sequence[TrainingPlacement]
) -> Arrangement:
    """By the recipe's mode, or by its layout where roles share a pool."""
    if mode_of(recipe) == "decoupled":
        return _own_pools(recipe, demands, training)
    alone = {t.role: t.num_gpus for t in training if t.pool != POOL}
    pool = max(0, recipe.cluster.gpus - sum(alone.values()))
    made = Arrangement(mode_of(recipe), {POOL: pool, **alone}, [], list(training))
    if recipe.layout is None:
        _by_mode(recipe, demands, made)
    else:
        _by_layout(recipe, recipe.layout, demands, made)
    return made


def _own_pools(
    recipe: Recipe, demands: Sequence[Demand], training: Sequence[TrainingPlacement]
) -> Arrangement:
    made = Arrangement("decoupled", {}, [], list(training))
    for role in dict.fromkeys(d.role for d in demands):
        mine = [d for d in demands if d.role == role]
        starts, needed = line_up(_rows(mine), 0, _node(recipe))
        made.pools[role] = needed
        if role == "rollout":
            made.pools[role] = max(needed, recipe.rollout.num_gpus or 0)
        for demand, start in zip(mine, starts, strict=True):
            made.placements.append(_placement(recipe, demand, start, role))
    made.pools.update({t.pool: t.num_gpus for t in training})
    made.turns = turns(made.mode, made.placements, made.training)
    total = sum(made.pools.values())
    if total > recipe.cluster.gpus:
        parts = ", ".join(f"{pool}={size}" for pool, size in made.pools.items())
        rule = (
            f"the pools need {counted(total, 'GPU')} ({parts}), the cluster has"
            f" {recipe.cluster.gpus}."
        )
        lower = "Lower replicas and ranks."
        cure, settings = raised(
            recipe, total, f"Raise it to {total}, or lower replicas and ranks.", lower, demands
        )
        made.violations.append(Violation("cluster.gpus", rule, cure, settings))
    return made


def _by_mode(recipe: Recipe, demands: Sequence[Demand], made: Arrangement) -> None:
    """Beside the rollout with one cursor, each deferred role from bundle 0 again."""
    deferred = deferred_roles(recipe)
    groups = [[d for d in demands if d.role not in deferred]]
    groups += [[d for d in demands if d.role == role] for role in deferred]
    starts: dict[str, int] = {}
    for group in groups:
        found, needed = line_up(_rows(group), 0, _node(recipe))
        starts.update({d.field: start for d, start in zip(group, found, strict=True)})
        made.violations += _too_large(recipe, group, needed, made.pools)
    for demand in demands:
        late = demand.role in deferred
        made.placements.append(_placement(recipe, demand, starts[demand.field], POOL, late=late))
    made.violations += _ranks(recipe, made)
    made.turns = turns(made.mode, made.placements, made.training)


def _by_layout(recipe: Recipe, script: str, demands: Sequence[Demand], made: Arrangement) -> None:
    made.violations += _ranks(recipe, made)
    try:
        phases = parse_layout(script)
    except LayoutError as error:
        made.violations += [_layout_violation(f, demands, made.training) for f in error.faults]
        made.violations += _each_too_large(demands, made.pools)
        return
    blocks = _blocks(recipe, demands, made.training)
    turns = [[h.role for h in phase if h.role in blocks] for phase in phases]
    early = {r for there in turns if "rollout" in there for r in there}
    scorers = {r for there in turns for r in there if r in SCORERS}
    deferred = scorers - early
    layout = plan_layout(script, made.pools[POOL], blocks)
    faults = order_faults(phases)
    if not isinstance(layout, Layout):
        faults += layout
        made.violations += _each_too_large(demands, made.pools)
    made.violations += [
        _layout_violation(fault, demands, made.training)
        for fault in sorted(faults, key=lambda fault: fault.position)
    ]
    made.violations += _layout_mode(recipe, deferred, scored=bool(scorers))
    if not isinstance(layout, Layout):
        return
    for role in dict.fromkeys(d.role for d in demands):
        mine = [d for d in demands if d.role == role]
        for demand, start in zip(mine, layout.starts[role], strict=True):
            late = role in deferred
            made.placements.append(_placement(recipe, demand, start, POOL, late=late))
    made.training = [
        replace(t, bundle_start=layout.starts[t.role][0]) if t.pool == POOL else t
        for t in made.training
    ]
    made.turns = list(layout.phases)


def _node(recipe: Recipe) -> int:
    return recipe.cluster.gpus_per_node or recipe.cluster.gpus


def _rows(demands: Iterable[Demand]) -> tuple[Row, ...]:
    return tuple(Row(d.replicas, d.gpus_per_replica) for d in demands)


def _placement(
    recipe: Recipe, demand: Demand, start: int, pool: str, *, late: bool = False
) -> Placement:
    tp, pp = tensor_parallel(demand)
    share = demand.engine.ray_gpu_fraction
    return Placement(
        role=demand.role,
        model_id=demand.model_id,
        num_gpus=demand.num_gpus,
        gpus_per_engine=demand.gpus_per_replica,
        bundle_start=start,
        pool=pool,
        owner="controller" if pool == POOL else pool,
        phase=f"{demand.role}_score" if late else "inference",
        deferred=late,
        num_gpus_per_node=_node(recipe),
        tp=tp,
        pp=pp,
        ray_gpu_fraction=PREFERRED if share == "auto" else share,
        group_id=demand.group_id,
        worker_type=demand.worker_type,
    )


def _each_too_large(demands: Sequence[Demand], pools: Mapping[str, int]) -> list[Violation]:
    """Whoever has no room alone."""
    pool, alone = pools[POOL], _alone(pools)
    return [
        Violation(
            f"{d.field}.replicas",
            f"its engines need {counted(d.num_gpus, 'GPU')} ({d.replicas} x {d.gpus_per_replica}),"
            f" the pool has {_size(pool, alone)}.",
            f"Lower replicas or gpus_per_replica, or raise cluster.gpus to {d.num_gpus + alone}.",
            (("cluster.gpus", d.num_gpus + alone),),
        )
        for d in demands
        if d.num_gpus > pool
    ]


def _too_large(
    recipe: Recipe, demands: Sequence[Demand], needed: int, pools: Mapping[str, int]
) -> list[Violation]:
    """Of one phase: each demand on its own, and all together."""
    pool, alone = pools[POOL], _alone(pools)
    found = _each_too_large(demands, pools)
    if needed <= pool or (found and len(demands) == 1):
        return found
    by_role: dict[str, int] = {}
    for demand in demands:
        by_role[demand.role] = by_role.get(demand.role, 0) + demand.num_gpus
    if by_role.get("rollout") == by_role.get("genrm") == pool:
        rule = f"Same-phase Rollout and GenRM would share the same {counted(pool, 'GPU')}."
        if mode_of(recipe) == "defer":
            cure = "Leave defer_roles out, to let them take turns."
            settings: tuple[tuple[str, Scalar], ...] = (("defer_roles", None),)
        else:
            cure = "Set mode to defer and leave defer_roles out, to enable explicit defer."
            settings = (("mode", "defer"), ("defer_roles", None))
        return [*found, Violation("mode", rule, cure, settings)]
    parts = ", ".join(f"{role}={gpus}" for role, gpus in by_role.items())
    if lost := needed - sum(by_role.values()):
        parts += f", {lost} unused so that engines begin where their nodes allow"
    if mode_of(recipe) != "defer":
        turns = ", or let roles take turns (mode defer)"
    elif recipe.defer_roles is not None:
        turns = ", or let all roles take turns (defer_roles left out)"
    else:
        turns = ""
    larger = f"Raise it to {needed + alone}, {'' if turns else 'or '}lower replicas{turns}."
    cure, settings = raised(recipe, needed + alone, larger, f"Lower replicas{turns}.", demands)
    if needed - lost <= pool:
        cure += " Key layout may place what the fixed order of roles cannot."
    found.append(
        Violation(
            "cluster.gpus",
            f"Combined inference needs {counted(needed, 'GPU')} ({parts}), the pool has"
            f" {_size(pool, alone)}.",
            cure,
            settings,
        )
    )
    return found


def _alone(pools: Mapping[str, int]) -> int:
    """GPUs of the pools that belong to one role."""
    return sum(size for pool, size in pools.items() if pool != POOL)


def _size(pool: int, alone: int) -> str:
    return f"{pool} beside {alone} of other pools" if alone else f"{pool}"


def _ranks(recipe: Recipe, made: Arrangement) -> list[Violation]:
    pool = made.pools[POOL]
    ranks, alone = recipe.train.ranks, _alone(made.pools)
    if ranks <= pool:
        return []
    return [
        Violation(
            "train.ranks",
            f"each rank needs a GPU, {ranks} in all; the pool has {_size(pool, alone)}.",
            f"Lower it, or raise cluster.gpus to {ranks + alone}.",
            (("cluster.gpus", ranks + alone),),
        )
    ]


def _blocks(
    recipe: Recipe, demands: Sequence[Demand], training: Sequence[TrainingPlacement]
) -> dict[str, Block]:
    blocks: dict[str, Block] = {}
    for role in dict.fromkeys(d.role for d in demands):
        mine = [d for d in demands if d.role == role]
        about = " + ".join(f"{counted(d.replicas, 'replica')} x {d.gpus_per_replica}" for d in mine)
        blocks[role] = Block(_rows(mine), _node(recipe), about)
    for t in training:
        if t.pool == POOL:
            blocks[t.role] = Block(
                (Row(t.num_gpus, 1),), _node(recipe), counted(t.num_gpus, "rank")
            )
    return blocks


def _layout_violation(
    fault: Fault, demands: Sequence[Demand], training: Sequence[TrainingPlacement]
) -> Violation:
    settings = _resize(fault, demands, training)
    if settings:
        said = " and ".join(f"{key} to {value}" for key, value in settings)
        cure = f"Change the share, or set {said}."
    else:
        settings, cure = (("layout", None),), "Change it, or leave layout out: mode then decides."
    return Violation("layout", str(fault), cure, settings)


def _resize(
    fault: Fault, demands: Sequence[Demand], training: Sequence[TrainingPlacement]
) -> tuple[tuple[str, Scalar], ...]:
    """Settings that make a role as large as its share; none where that is not one setting."""
    if not fault.gpus:
        return ()
    sharing = [t.role for t in training if t.pool == POOL]
    if fault.role == "trainer" and sharing == ["trainer"]:
        return (("train.ranks", fault.gpus),)
    mine = [d for d in demands if d.role == fault.role]
    if len(mine) != 1 or fault.gpus % mine[0].gpus_per_replica:
        return ()
    return ((f"{mine[0].field}.replicas", fault.gpus // mine[0].gpus_per_replica),)


def _layout_mode(recipe: Recipe, deferred: set[str], *, scored: bool) -> list[Violation]:
    found: list[Violation] = []
    wanted = "defer" if deferred else "split"
    if scored and recipe.mode != wanted:
        found.append(
            Violation(
                "mode",
                f"the layout is of mode {wanted}, the recipe says {recipe.mode}.",
                f"Set mode to {wanted}, or change the layout.",
                (("mode", wanted),),
            )
        )
    if recipe.defer_roles is not None and set(recipe.defer_roles) != deferred:
        found.append(
            Violation(
                "defer_roles",
                f"the layout defers {', '.join(sorted(deferred)) or 'no role'}.",
                "Leave it out: the layout says it.",
                (("defer_roles", None),),
            )
        )
    return found


def unused_layout(recipe: Recipe) -> list[Violation]:
    """A layout where nothing is shared."""
    if recipe.layout is None or mode_of(recipe) != "decoupled":
        return []
    cure = "Leave it out, or set mode to defer or split (and debug to nothing)."
    rule = "a layout divides a shared pool; in mode decoupled every role has its own."
    return [Violation("layout", rule, cure, (("layout", None),))]
