"""What a scale request means for the replicas that there are; without Temporal."""

from dataclasses import dataclass

from relax_infer.contracts.counted import are, counted
from relax_infer.contracts.external import ADDRESS
from relax_infer.contracts.scale import Direction, Members, ScaleReplica, ScaleRequest
from relax_infer.machines import ScaleEvent

_E = ScaleEvent


@dataclass(frozen=True)
class ScalePlan:
    """The first event of the operation and what follows from it."""

    event: ScaleEvent
    """OUT_STARTED, CONNECT_STARTED, IN_STARTED, TARGET_MET or REFUSED."""
    direction: Direction | None = None
    why: str | None = None
    create: int = 0
    remove: tuple[int, ...] = ()
    """Numbers, in the order in which they are chosen."""
    connect: tuple[str, ...] = ()
    """Addresses of engines that others started."""
    release: tuple[str, ...] = ()
    """Such engines, of those that were adopted."""
    unknown_urls: tuple[str, ...] = ()
    """Out: no addresses. In: nobody's."""


def plan_scale(request: ScaleRequest, members: Members) -> ScalePlan:
    """Decide; changes nothing."""
    by_number, by_url = request.num_replicas is not None, bool(request.engine_urls)
    if by_number == by_url:
        return _refused("give either num_replicas or engine_urls")
    there = len(members.spec.numbers)
    if request.num_replicas is None:
        if request.direction == "out":
            return _connect(request.engine_urls, members)
        return _by_url(request.engine_urls, members)
    direction = request.direction or ("out" if request.num_replicas > there else "in")
    if direction == "out":
        return _out(request.num_replicas, there)
    return _in(request.num_replicas, members)


def _out(target: int, there: int) -> ScalePlan:
    if target <= there:
        return ScalePlan(_E.TARGET_MET, "out", f"there {are(there)} {counted(there, 'replica')}")
    return ScalePlan(_E.OUT_STARTED, "out", create=target - there)


def _in(target: int, members: Members) -> ScalePlan:
    """What was left of others goes first, then the newest."""
    first, there = members.spec.replicas, len(members.spec.numbers)
    if target < first:
        return _refused(
            f"{target} is below the {counted(first, 'replica')} that the group began with; only"
            " added ones are removed",
            "in",
        )
    left = [record.replica for record in members.outsiders]
    added = [k for k in reversed(members.spec.numbers) if k >= first]
    remove = (*left, *added[: max(0, there - target)])
    if not remove:
        return ScalePlan(_E.TARGET_MET, "in", f"there {are(there)} {counted(there, 'replica')}")
    return ScalePlan(_E.IN_STARTED, "in", remove=remove)


def _connect(urls: tuple[str, ...], members: Members) -> ScalePlan:
    """Adopt what others started; what is known already is left as it is."""
    given = dict.fromkeys(url.rstrip("/") for url in urls)
    wrong = tuple(url for url in given if not ADDRESS.fullmatch(url))
    known = {engine.url for engine in members.externals if engine.state == "ADOPTED"}
    known |= {r.base_url.rstrip("/") for r in members.replicas if r.base_url}
    connect = tuple(url for url in given if url not in known and url not in wrong)
    if connect:
        return ScalePlan(_E.CONNECT_STARTED, "out", connect=connect, unknown_urls=wrong)
    if wrong:
        return _refused(f"{', '.join(wrong)}: write http://host:port", "out")
    return ScalePlan(_E.TARGET_MET, "out", "all of these are called already")


def _by_url(urls: tuple[str, ...], members: Members) -> ScalePlan:
    first = members.spec.replicas
    known = {url.rstrip("/"): k for k, url in members.urls.items()}
    known |= {r.url.rstrip("/"): r.replica for r in members.outsiders if r.url}
    known |= {r.base_url.rstrip("/"): r.replica for r in members.replicas if r.base_url}
    others = {engine.url for engine in members.externals}
    release = tuple(dict.fromkeys(u.rstrip("/") for u in urls if u.rstrip("/") in others))
    chosen = {url: known.get(url.rstrip("/")) for url in urls if url.rstrip("/") not in others}
    if began := [url for url, k in chosen.items() if k is not None and k < first]:
        return _refused(
            f"{', '.join(began)} are replicas that the group began with; only added ones are"
            " removed",
            "in",
        )
    unknown = tuple(url for url, k in chosen.items() if k is None)
    remove = tuple(dict.fromkeys(k for k in chosen.values() if k is not None))
    if not remove and not release:
        return _refused(f"no added replica has the address {', '.join(unknown)}", "in")
    return ScalePlan(_E.IN_STARTED, "in", remove=remove, release=release, unknown_urls=unknown)


def _refused(why: str, direction: Direction | None = None) -> ScalePlan:
    return ScalePlan(_E.REFUSED, direction, why)


def planned_rows(plan: ScalePlan, members: Members) -> list[ScaleReplica]:
    """The replicas as an operation begins with them."""
    rows = [
        ScaleReplica(
            replica=k,
            engine_id=members.spec.engine_id(k),
            url=url_of(members, k),
            outcome="planned",
        )
        for k in plan.remove
    ]
    rows += [ScaleReplica(url=url, outcome="planned") for url in (*plan.connect, *plan.release)]
    return rows + [ScaleReplica(outcome="planned") for _ in range(plan.create)]


def url_of(members: Members, replica: int) -> str | None:
    """The last address of a replica that was added."""
    left = {record.replica: record.url for record in members.outsiders}
    return members.urls.get(replica) or left.get(replica)
