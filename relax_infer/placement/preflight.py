"""Whether a plan can run on a cluster as its nodes describe themselves: pure, every reason."""

from collections.abc import Iterable, Iterator, Sequence

from relax_infer.config import Recipe, RecipeError, require_runnable
from relax_infer.contracts.counted import are, counted
from relax_infer.placement.facts import ClusterFacts, NodeFacts, RouterFacts, Wanted
from relax_infer.placement.findings import Finding
from relax_infer.placement.held import held
from relax_infer.placement.named_files import (
    lacking_data,
    lacking_models,
    named_data,
    named_models,
)
from relax_infer.placement.placed import InferencePlacementPlan, PlacementError
from relax_infer.placement.room import NodeRoom, Undecided, shortage, unfit_shape

STATE_FACTOR = 7
"""Of the bytes of 16-bit weights: weights, 32-bit master weights and Adam's two moments."""
_GIB = 1 << 30
_STAGING = 1 * _GIB
"""For samples and records."""
_RUN_PORTS = 4
"""Of a run: router, gateway, and their own management."""
_WORKER_PORTS = 2
"""Of an engine's part on one node: the server and its rendezvous."""


def wanted(recipe: Recipe, plan: InferencePlacementPlan | None, store: str) -> Wanted:
    """What has to be asked of the nodes for this plan, or for a recipe that has none."""
    models = dict.fromkeys(model for _, model in named_models(recipe))
    files = dict.fromkeys(path for _, path in named_data(recipe))
    workers = 0
    if plan is not None:
        slots = {p: max(1, _nodes(plan, p.pool)) for p in plan.placements}
        workers = sum(-(-p.num_worker_slots // nodes) for p, nodes in slots.items())
    ports = _WORKER_PORTS * workers + _RUN_PORTS
    return Wanted(store=store, models=tuple(models), ports=ports, files=tuple(files))


def judge(
    recipe: Recipe, plan: InferencePlacementPlan | None, asked: Wanted, cluster: ClusterFacts
) -> list[Finding]:
    """Everything that stands in the way, everything worth a look, and what is in order.

    Without a plan the cluster is held against what the recipe says of it.
    """
    return [
        *_runnable(recipe),
        *_room(recipe, plan, cluster.nodes),
        *_device(recipe, cluster),
        *_silent(cluster.facts),
        *held(cluster),
        *_ports(cluster.facts, asked),
        *lacking_models(recipe, cluster.facts),
        *lacking_data(recipe, cluster),
        *_disk(recipe, cluster.facts),
        *_shared_memory(recipe, cluster.facts),
        *_router(cluster.facts),
        *_routers(cluster.routers),
    ]


def _nodes(plan: InferencePlacementPlan, pool: str) -> int:
    return -(-dict(plan.pool_sizes)[pool] // plan.gpus_per_node)


def _runnable(recipe: Recipe) -> Iterator[Finding]:
    try:
        require_runnable(recipe)
    except RecipeError as error:
        yield Finding("recipe", "missing", error.message, error.cure)


def _room(
    recipe: Recipe, plan: InferencePlacementPlan | None, nodes: Sequence[NodeRoom]
) -> Iterator[Finding]:
    total = recipe.cluster.gpus if plan is None else plan.total_required_gpus
    idle = [node.idle() for node in nodes]
    if never := shortage(total, idle):
        cure = "Add nodes, or lower cluster.gpus in the recipe."
        yield Finding("cluster", "missing", f"{_needed(total)}: {never}", cure)
        return
    shape = None if plan is None else unfit_shape(plan, idle)
    if isinstance(shape, PlacementError):
        for violation in shape.violations:
            text = f"{violation.field}: {violation.rule}"
            yield Finding("cluster", "missing", text, violation.cure)
        return
    if busy := shortage(total, nodes):
        cure = "Wait for those who hold the GPUs, or end them (relax-infer stop)."
        yield Finding("cluster", "missing", f"{_needed(total)}: {busy}", cure)
        return
    free = sum(node.free_bundles for node in nodes)
    text = f"{_needed(total)}, {free} {are(free)} free on {counted(len(nodes), 'node')}"
    yield Finding("cluster", "ok", text)
    if isinstance(shape, Undecided):
        yield _undecided(shape, "these nodes")
    elif plan is not None and (now := unfit_shape(plan, nodes)):
        if isinstance(now, Undecided):
            yield _undecided(now, "what is free now")
            return
        text = f"what is free now is in pieces; {now.violations[0]}"
        cure = "Wait until whole nodes are free."
        yield Finding("cluster", "note", text, cure)


def _needed(gpus: int) -> str:
    return f"{counted(gpus, 'GPU')} {are(gpus)} needed"


def _undecided(shape: Undecided, where: str) -> Finding:
    text = f"whether engines fit {where} could not be decided in {shape.looks} looks."
    return Finding("cluster", "note", text, "Binding will tell, before anything else begins.")


def _device(recipe: Recipe, cluster: ClusterFacts) -> Iterator[Finding]:
    if recipe.cluster.device == "cuda" and not cluster.accelerators:
        yield Finding(
            "device",
            "missing",
            "cluster.device is cuda, and the GPUs of this cluster are pretended: no node names an"
            " accelerator.",
            "Set cluster.device to cpu or auto, or join GPU nodes.",
        )


def _silent(facts: Iterable[NodeFacts]) -> Iterator[Finding]:
    for node in facts:
        if node.silent is not None:
            text = f"it did not describe itself: {node.silent}"
            yield Finding(f"node {node.node_ip}", "missing", text, "Look at `ray status`.")


def _ports(facts: Iterable[NodeFacts], asked: Wanted) -> Iterator[Finding]:
    told = [node for node in facts if node.silent is None]
    faulty = [node for node in told if node.port_fault is not None]
    for node in faulty:
        text = f"{counted(asked.ports, 'port')} cannot be had at {node.node_ip}: {node.port_fault}."
        yield Finding(f"node {node.node_ip}", "missing", text, "End what listens there.")
    if told and not faulty:
        yield Finding("ports", "ok", f"{asked.ports} {are(asked.ports)} free on every node")


def _disk(recipe: Recipe, facts: Sequence[NodeFacts]) -> Iterator[Finding]:
    known = [node for node in facts if node.disk_free is not None]
    if not known:
        if any(node.silent is None for node in facts):
            text = "the store is on no disk of the nodes; its room was not looked at."
            yield Finding("disk", "note", text)
        return
    policy = recipe.rollout.model
    weights = max((node.models.get(policy) or 0 for node in known), default=0)
    states = STATE_FACTOR * (recipe.train.keep_checkpoints + 1)
    needed = _STAGING + weights * (states + 2)
    least = min(known, key=lambda node: node.disk_free or 0)
    free = least.disk_free or 0
    if not weights and any(policy in node.models for node in known):
        text = (
            f"{free / _GIB:.1f} GiB free on node {least.node_ip}; how much checkpoints need cannot"
            " be told: the weights of rollout.model are on no node."
        )
        yield Finding("disk", "note", text)
        return
    about = f"{free / _GIB:.1f} GiB free on node {least.node_ip}, about {needed / _GIB:.1f} needed"
    if free >= needed:
        yield Finding("disk", "ok", about)
        return
    cure = "Free some, lower train.keep_checkpoints, or name another staging.url."
    yield Finding("disk", "missing", f"{about} for staging and checkpoints.", cure)


def _shared_memory(recipe: Recipe, facts: Iterable[NodeFacts]) -> Iterator[Finding]:
    """One bucket for each engine that takes new weights so; all of them may be on one node."""
    weights = recipe.train.weights
    if weights.transport != "tensor":
        return
    needed = weights.bucket_bytes * recipe.rollout.engine.replicas
    for node in facts:
        free = node.shared_memory_free
        if free is not None and free < needed:
            yield Finding(
                f"node {node.node_ip}",
                "missing",
                f"{free // 1_000_000} MB of shared memory are free, transport tensor needs"
                f" {needed // 1_000_000}.",
                "Make /dev/shm larger (docker: --shm-size), or lower train.weights.bucket_mb.",
            )


def _router(facts: Iterable[NodeFacts]) -> Iterator[Finding]:
    """Each run begins a router of its own, on the node of a worker: there is none to be reached
    before, and what can be known is whether it starts."""
    told = [node for node in facts if node.silent is None]
    for node in told:
        if node.router is None:
            text = "sglang-router is not installed for its Python."
        elif node.router_fault is not None:
            text = f"sglang-router {node.router} does not start: {node.router_fault}."
        else:
            continue
        cure = "Install lock/requirements.lock on every node."
        yield Finding(f"node {node.node_ip}", "missing", text, cure)
    able = (node.router for node in told if node.router_fault is None)
    versions = dict.fromkeys(version for version in able if version is not None)
    if versions:
        text = f"is begun with each run; sglang-router {', '.join(versions)} can be started"
        yield Finding("router", "ok", text)


def _routers(routers: Iterable[RouterFacts]) -> Iterator[Finding]:
    """Of the runs that are there. One that does not answer stands in the way of its own run."""
    for router in routers:
        named = f"that of run {router.run}"
        if router.fault is None:
            yield Finding("router", "ok", f"{named} answers at {router.url}")
            continue
        recorded = f" (process {router.pid})" if router.pid is not None else ""
        yield Finding(
            "router",
            "note",
            f"{named}{recorded} is recorded and not reachable: {router.fault}.",
            "Its run starts it again by itself once it asks for it; if it does not,"
            f" `relax-infer logs {router.run}` and `ray status` say why.",
        )
