"""Whether a plan can run on a cluster as its nodes describe themselves: pure, every reason."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from relax_infer.config import Recipe, RecipeError, require_runnable
from relax_infer.placement.facts import ClusterFacts, NodeFacts, Wanted
from relax_infer.placement.placed import InferencePlacementPlan
from relax_infer.placement.room import NodeRoom, shortage, unfit_shape

Result = Literal["ok", "note", "missing"]
STATE_FACTOR = 7
"""Of the bytes of 16-bit weights: weights, 32-bit master weights and Adam's two moments."""
_GIB = 1 << 30
_STAGING = 1 * _GIB
"""For samples and records."""
_RUN_PORTS = 4
"""Of a run: router, gateway, and their own management."""
_WORKER_PORTS = 2
"""Of an engine's part on one node: the server and its rendezvous."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    name: str
    result: Result
    text: str
    cure: str = ""


def wanted(recipe: Recipe, plan: InferencePlacementPlan, store: str) -> Wanted:
    """What has to be asked of the nodes for this plan."""
    named = [recipe.rollout.model, *(m.model for m in recipe.rollout.extra_models)]
    for role, section in (("genrm", recipe.genrm), ("teacher", recipe.teacher)):
        if section is not None and recipe.serves(role):
            named += [section.model, *(m.model for m in section.extra_models)]
    models = dict.fromkeys(name for name in named if not name.startswith("tiny:"))
    workers = sum(-(-p.num_worker_slots // max(1, _nodes(plan, p.pool))) for p in plan.placements)
    return Wanted(store=store, models=tuple(models), ports=_WORKER_PORTS * workers + _RUN_PORTS)


def judge(
    recipe: Recipe, plan: InferencePlacementPlan, asked: Wanted, cluster: ClusterFacts
) -> list[Finding]:
    """Everything that stands in the way, everything worth a look, and what is in order."""
    return [
        *_runnable(recipe),
        *_room(plan, cluster.nodes),
        *_device(recipe, cluster),
        *_silent(cluster.facts),
        *_held(cluster),
        *_ports(cluster.facts, asked),
        *_models(cluster.facts),
        *_disk(recipe, cluster.facts),
        *_shared_memory(recipe, cluster.facts),
        *_router(cluster.facts),
    ]


def _nodes(plan: InferencePlacementPlan, pool: str) -> int:
    return -(-dict(plan.pool_sizes)[pool] // plan.gpus_per_node)


def _runnable(recipe: Recipe) -> Iterator[Finding]:
    try:
        require_runnable(recipe)
    except RecipeError as error:
        yield Finding("recipe", "missing", error.message, error.cure)


def _room(plan: InferencePlacementPlan, nodes: Sequence[NodeRoom]) -> Iterator[Finding]:
    total = plan.total_required_gpus
    idle = [node.idle() for node in nodes]
    if never := shortage(total, idle):
        cure = "Add nodes, or lower cluster.gpus in the recipe."
        yield Finding("cluster", "missing", f"{total} GPUs are needed: {never}", cure)
        return
    if refused := unfit_shape(plan, idle):
        for violation in refused.violations:
            text = f"{violation.field}: {violation.rule}"
            yield Finding("cluster", "missing", text, violation.cure)
        return
    if busy := shortage(total, nodes):
        cure = "Wait for those who hold the GPUs, or end them (relax-infer stop)."
        yield Finding("cluster", "missing", f"{total} GPUs are needed: {busy}", cure)
        return
    free = sum(node.free_bundles for node in nodes)
    text = f"{total} GPUs are needed, {free} are free on {len(nodes)} nodes"
    yield Finding("cluster", "ok", text)
    if refused := unfit_shape(plan, nodes):
        text = f"what is free now is in pieces; {refused.violations[0]}"
        yield Finding("cluster", "note", text, "Ray may still find a legal layout.")


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


def _held(cluster: ClusterFacts) -> Iterator[Finding]:
    """Engines and processes on GPUs that Ray would hand out.

    A run that has its placement group is at work there, and Ray counts its GPUs as taken.
    """
    rooms: Mapping[str, NodeRoom] = {node.node_id: node for node in cluster.nodes}
    for node in cluster.facts:
        where = f"node {node.node_ip}"
        for orphan in node.orphans:
            runs = any(name.startswith(f"relax-{orphan.run}.") for name in cluster.groups)
            if runs:
                yield Finding(where, "note", f"{orphan} is at work there.")
                continue
            cure = (
                "No such run has GPUs in this cluster any more: end the processes on the node, or"
                " stop that run where it belongs (`relax-infer stop RUN`)."
            )
            yield Finding(where, "missing", f"{orphan} is an orphan.", cure)
        room = rooms[node.node_id]
        reserved = room.gpus - room.free_gpus
        devices = {process.gpu for process in node.processes}
        listed = "; ".join(str(process) for process in node.processes)
        if len(devices) > reserved:
            text = f"{len(devices)} GPUs are in use and Ray has {reserved:g} reserved: {listed}."
            cure = "End these processes, or take the GPUs out of Ray (CUDA_VISIBLE_DEVICES)."
            yield Finding(where, "missing", text, cure)
        elif devices:
            yield Finding(where, "note", f"in use on reserved GPUs: {listed}.")


def _ports(facts: Iterable[NodeFacts], asked: Wanted) -> Iterator[Finding]:
    told = [node for node in facts if node.silent is None]
    faulty = [node for node in told if node.port_fault is not None]
    for node in faulty:
        text = f"{asked.ports} ports cannot be had at {node.node_ip}: {node.port_fault}."
        yield Finding(f"node {node.node_ip}", "missing", text, "End what listens there.")
    if told and not faulty:
        yield Finding("ports", "ok", f"{asked.ports} are free on every node")


def _models(facts: Iterable[NodeFacts]) -> Iterator[Finding]:
    lacking: dict[str, list[str]] = {}
    for node in facts:
        for folder, size in node.models.items():
            if size is None:
                lacking.setdefault(folder, []).append(node.node_ip)
    for folder, nodes in lacking.items():
        text = f"the folder {folder} is not on node {', '.join(dict.fromkeys(nodes))}."
        yield Finding("model", "missing", text, "Put it where every node sees it.")


def _disk(recipe: Recipe, facts: Sequence[NodeFacts]) -> Iterator[Finding]:
    known = [node for node in facts if node.disk_free is not None]
    if not known:
        if any(node.silent is None for node in facts):
            text = "the store is on no disk of the nodes; its room was not looked at."
            yield Finding("disk", "note", text)
        return
    weights = max((node.models.get(recipe.rollout.model) or 0 for node in known), default=0)
    states = STATE_FACTOR * (recipe.train.keep_checkpoints + 1)
    needed = _STAGING + weights * (states + 2)
    least = min(known, key=lambda node: node.disk_free or 0)
    free = least.disk_free or 0
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
    told = [node for node in facts if node.silent is None]
    for node in told:
        if node.router is None:
            text = "sglang-router is not installed for its Python."
            cure = "Install lock/requirements.lock on every node."
            yield Finding(f"node {node.node_ip}", "missing", text, cure)
    versions = dict.fromkeys(node.router for node in told if node.router is not None)
    if versions:
        yield Finding("router", "ok", f"sglang-router {', '.join(versions)} can be started")
