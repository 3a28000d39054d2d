"""What the actors of the runs that are at work hold, and whether their routers answer.

Ray's names say whose they are: namespace ``relax-<run>``, ``engine.<role>.<model>.replica-<k>``,
``trainer.rank-<n>``, ``front``. Nothing is changed, and nobody is waited for longer than
:data:`ASK_SECONDS`.
"""

import asyncio
import re
from collections.abc import Iterable
from typing import Any

from relax_infer.gateway.front import recorded_router
from relax_infer.placement.facts import ActorFacts, RouterFacts

ASK_SECONDS = 10.0
_NAMESPACE = "relax-"
_ENGINE = re.compile(r"engine\..*\.replica-\d+")
_TRAINER = re.compile(r"trainer\.rank-\d+")
_FRONT = "front"


async def look_at_actors() -> tuple[ActorFacts, ...]:
    """Of every engine's head and every trainer rank that Ray knows."""
    named = await asyncio.to_thread(_named)
    asked = [
        _holder(run, name)
        for run, name in named
        if _ENGINE.fullmatch(name) or _TRAINER.fullmatch(name)
    ]
    return tuple(await asyncio.gather(*asked))


async def look_at_routers() -> tuple[RouterFacts, ...]:
    """Of every front that Ray knows: whether the router that it has begun answers."""
    named = await asyncio.to_thread(_named)
    return tuple(await asyncio.gather(*(_router(run) for run, name in named if name == _FRONT)))


async def recorded_routers(cluster: str, runs: Iterable[str], host: str) -> list[RouterFacts]:
    """Those of runs without a front that this host has files of; asked like the others."""
    found: list[RouterFacts] = []
    for run in runs:
        there = await asyncio.to_thread(recorded_router, cluster, run)
        if there is None:
            continue
        # Where it listens depends on how many nodes there were when it was begun.
        urls = [f"http://{each}:{there.port}" for each in dict.fromkeys((host, "127.0.0.1"))]
        faults = await asyncio.gather(*map(_fault, urls)) if there.alive else []
        well = [url for url, fault in zip(urls, faults, strict=False) if fault is None]
        why = faults[0] if faults else "its process has ended"
        fault = None if well else f"its front is gone, and {why}"
        url = well[0] if well else ""
        found.append(RouterFacts(run=run, url=url, pid=there.pid, fault=fault))
    return found


def joined(*looks: Iterable[ActorFacts]) -> tuple[ActorFacts, ...]:
    """Looks one after the other as one: what an actor held at either of them is its own."""
    found: dict[tuple[str, str], ActorFacts] = {}
    for actor in (actor for look in looks for actor in look):
        key = (actor.run, actor.actor)
        earlier = found.get(key)
        if earlier is not None:
            holds = tuple(dict.fromkeys((*earlier.holds, *actor.holds)))
            silent = earlier.silent or actor.silent
            actor = actor.model_copy(update={"holds": holds, "silent": silent})
        found[key] = actor
    return tuple(found.values())


def _named() -> list[tuple[str, str]]:
    """Run and name of every actor of a run."""
    from ray.util import list_named_actors

    listed: list[Any] = list_named_actors(all_namespaces=True)
    return [
        (str(each["namespace"]).removeprefix(_NAMESPACE), str(each["name"]))
        for each in listed
        if str(each["namespace"]).startswith(_NAMESPACE)
    ]


async def _holder(run: str, name: str) -> ActorFacts:
    trainer = _TRAINER.fullmatch(name) is not None
    answer = await _ask(run, name, "ping" if trainer else "describe")
    if answer is None:
        return ActorFacts(run=run, actor=name, holds=(), silent=True)
    held = [str(answer)] if trainer else _incarnations(answer)
    return ActorFacts(run=run, actor=name, holds=tuple(held))


def _incarnations(described: Any) -> list[str]:
    """Of every node of an engine; as the actor describes itself."""
    held = (described.incarnation, *(node.incarnation for node in described.nodes))
    return list(dict.fromkeys(each for each in held if each is not None))


async def _router(run: str) -> RouterFacts:
    front = await _ask(run, _FRONT, "describe")
    if front is None:
        return RouterFacts(run=run, url="", fault="its front did not answer")
    url, pid = front["router_url"], front["router_pid"]
    fault = await _fault(url) if front["router_alive"] else "its process has ended"
    return RouterFacts(run=run, url=url, pid=pid, fault=fault)


async def _fault(url: str) -> str | None:
    import httpx

    async with httpx.AsyncClient(timeout=ASK_SECONDS) as client:
        try:
            answer = await client.get(f"{url}/health")
        except httpx.HTTPError as error:
            return f"{url}/health does not answer: {error or type(error).__name__}"
    # One without workers says 503: it answers, which is all that is asked.
    if answer.status_code < 500 or answer.status_code == 503:
        return None
    return f"{url}/health answers {answer.status_code}"


async def _ask(run: str, name: str, method: str) -> Any:
    """None: it is gone meanwhile, or did not answer."""
    import ray
    from ray.exceptions import RayError

    try:
        actor = await asyncio.to_thread(ray.get_actor, name, namespace=_NAMESPACE + run)
        return await asyncio.wait_for(getattr(actor, method).remote(), ASK_SECONDS)
    except (ValueError, TimeoutError, RayError):
        return None
