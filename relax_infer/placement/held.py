"""Who is on GPUs that Ray would hand out: pure, on what nodes and actors say."""

from collections.abc import Iterable, Iterator, Mapping

from relax_infer.contracts.counted import are, counted
from relax_infer.engines.orphans import Orphan
from relax_infer.placement.facts import ActorFacts, ClusterFacts, NodeFacts
from relax_infer.placement.findings import Finding
from relax_infer.placement.room import NodeRoom

_SHOWN = 8
"""Characters of an incarnation."""


def held(cluster: ClusterFacts) -> Iterator[Finding]:
    """Engines, trainers and other processes on devices.

    What a run with a placement group has there is at work, and Ray counts its GPUs as taken, as
    long as the run's own actor holds just that incarnation.
    """
    rooms: Mapping[str, NodeRoom] = {node.node_id: node for node in cluster.nodes}
    actors = {(actor.run, actor.actor): actor for actor in cluster.actors}
    for node in cluster.facts:
        where = f"node {node.node_ip}"
        for orphan in node.orphans:
            if any(name.startswith(f"relax-{orphan.run}.") for name in cluster.groups):
                yield _of_a_run(where, orphan, actors.get((orphan.run, orphan.actor)))
                continue
            cure = (
                f"No such run has GPUs in this cluster any more: {_end(orphan)}, or stop that run"
                " where it belongs (`relax-infer stop RUN`)."
            )
            yield Finding(where, "missing", f"{orphan} is an orphan.", cure)
        yield from _unrecorded(where, node, cluster.actors)
        room = rooms[node.node_id]
        reserved = room.gpus - room.free_gpus
        devices = {process.gpu for process in node.processes}
        listed = "; ".join(str(process) for process in node.processes)
        if len(devices) > reserved:
            used = f"{counted(len(devices), 'GPU')} {are(len(devices))} in use"
            text = f"{used} and Ray has {reserved:g} reserved: {listed}."
            cure = "End these processes, or take the GPUs out of Ray (CUDA_VISIBLE_DEVICES)."
            yield Finding(where, "missing", text, cure)
        elif devices:
            yield Finding(where, "note", f"in use on reserved GPUs: {listed}.")


def _of_a_run(where: str, orphan: Orphan, actor: ActorFacts | None) -> Finding:
    """The run has GPUs now; whether this is what it has on them is for its actor to say."""
    if actor is None or actor.silent:
        who = "has no actor" if actor is None else "has an actor that does not answer"
        text = f"{orphan} may be at work there: the run {who} for it."
        cure = (
            f"`relax-infer status {orphan.run}` says whether the run takes it up again; if the run"
            f" does not know it, {_end(orphan)}."
        )
        return Finding(where, "note", text, cure)
    if orphan.incarnation in actor.holds:
        return Finding(where, "note", f"{orphan} is at work there.")
    now = ", ".join(each[:_SHOWN] for each in actor.holds) or "none"
    text = (
        f"{orphan} is an orphan of an earlier incarnation, {orphan.incarnation[:_SHOWN]}: the run"
        f" is at work and has {now} now."
    )
    return Finding(where, "missing", text, f"The run does not know it: {_end(orphan)}.")


def _unrecorded(where: str, node: NodeFacts, actors: Iterable[ActorFacts]) -> Iterator[Finding]:
    """Nobody knows which devices are theirs, so one that computes on some stands in the way."""
    known = {held for actor in actors for held in actor.holds}
    computing = {process.pid for process in node.processes}
    for left in node.unrecorded:
        if left.incarnation in known:
            continue
        text = f"{left} has no file on this host any more, and no actor of a run holds it."
        result = "missing" if computing.intersection(left.pids) else "note"
        cure = f"If no other stack of this host has it: {_kill(node.node_ip, left.pids)}."
        yield Finding(where, result, text, cure)


def _end(orphan: Orphan) -> str:
    return _kill(orphan.node_ip, orphan.pids) if orphan.pids else "end its processes on the node"


def _kill(node_ip: str, pids: Iterable[int]) -> str:
    return f"end its processes on node {node_ip} (`kill {' '.join(map(str, pids))}`)"
