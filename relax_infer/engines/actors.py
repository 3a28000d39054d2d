"""The Ray actors of a group's nodes: found by name, or made where their node's GPUs are."""

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any, TypeVar

from relax_infer.contracts.engines import EngineGroupSpec
from relax_infer.contracts.failures import RelaxError, TransientError, UnconfirmedError
from relax_infer.contracts.fence import StaleFence
from relax_infer.contracts.refs import RunRef

T = TypeVar("T")

ACTOR_SECONDS = 90.0
"""For an actor to be placed, started and to answer its first call."""
DYING_SECONDS = 5.0
"""For Ray to give up the name of an actor that was killed."""

_GONE = (
    "Is {} up (`ray status`)? It is found again once it is back; if it never comes back and its"
    " processes are known to be gone, `relax-infer resolve` with --confirm-released goes on without"
    " it."
)


class ActorGone(UnconfirmedError):
    """The actor has died; its server may live."""


async def node_actor(spec: EngineGroupSpec, replica: int, node: int = 0) -> Any:
    """The actor of one node of a replica, made if there is none; it has answered once.

    Raises:
        TransientError: it did not answer, or dies at its start.
        UnconfirmedError: there is no placement group to make it in, and none can be made now.
    """
    from ray.exceptions import RayActorError

    bound = spec.node_bundles(replica, node)[0]
    name = f"{spec.actor_name(replica, node)}, bound to GPU {bound.gpu_id} of node {bound.node_ip},"
    dying_until = asyncio.get_running_loop().time() + DYING_SECONDS
    while True:
        actor = await asyncio.to_thread(find_actor, spec, replica, node)
        if actor is None:
            actor = await _make(spec, replica, node)
        try:
            await asyncio.wait_for(actor.ping.remote(), ACTOR_SECONDS)
        except TimeoutError as error:
            raise TransientError(
                f"Engine actor {name} did not answer within {ACTOR_SECONDS:.0f} s.",
                cure=_GONE.format(bound.node_ip),
            ) from error
        except RayActorError as error:
            # It was dying when it was found; nothing was asked of it yet.
            if asyncio.get_running_loop().time() > dying_until:
                told = " ".join(str(error).split())
                raise TransientError(
                    f"Engine actor {name} dies at its start: {told}",
                    cure=_GONE.format(bound.node_ip),
                ) from error
            await asyncio.sleep(0.1)
        else:
            return actor


def find_actor(spec: EngineGroupSpec, replica: int, node: int = 0) -> Any | None:
    """Blocks for one call to Ray's control plane."""
    import ray

    try:
        return ray.get_actor(spec.actor_name(replica, node), namespace=spec.namespace)
    except ValueError:
        return None


def living_heads(spec: EngineGroupSpec) -> dict[int, Any]:
    """The actor of every replica's head that Ray knows, also of replicas the spec does not name:
    some may have been added since it was written down. Blocks for calls to Ray's control plane."""
    import ray
    from ray.util import list_named_actors

    prefix = spec.actor_name(0).removesuffix("0")
    found: dict[int, Any] = {}
    named: list[Any] = list_named_actors(all_namespaces=True)
    for each in named:
        number = str(each["name"]).removeprefix(prefix)
        if each["namespace"] == spec.namespace and number.isdecimal():
            with suppress(ValueError):  # it died a moment ago
                found[int(number)] = ray.get_actor(each["name"], namespace=spec.namespace)
    return found


def end_actors(spec: EngineGroupSpec, replica: int) -> None:
    """End the actors of every node of a replica of which nothing is left."""
    import ray

    for node in range(spec.nodes_per_replica):
        actor = find_actor(spec, replica, node)
        if actor is not None:
            ray.kill(actor)


async def answer(call: Awaitable[T], timeout: float) -> T:
    """A Ray reply with a deadline; without one, nobody knows what was done.

    Raises:
        RelaxError, StaleFence: as the actor raised it.
        ActorGone: it died.
        UnconfirmedError: no answer.
    """
    from ray.exceptions import ActorDiedError, RayError, RayTaskError

    try:
        return await asyncio.wait_for(call, timeout)
    except TimeoutError as error:
        raise UnconfirmedError(f"The engine's actor did not answer within {timeout:.0f} s.") from (
            error
        )
    except RayTaskError as error:
        cause = error.as_instanceof_cause()
        if isinstance(cause, RelaxError | StaleFence):
            raise cause from error
        raise UnconfirmedError(f"The engine's actor failed: {error}") from error
    except RayError as error:
        kind = ActorGone if isinstance(error, ActorDiedError) else UnconfirmedError
        raise kind(
            f"The engine's actor is gone or cannot be reached: {error}",
            cure="Its server may still run; a probe makes a new actor that looks for it.",
        ) from error


async def _make(spec: EngineGroupSpec, replica: int, node: int) -> Any:
    from relax_infer.engines.actor import EngineActor
    from relax_infer.engines.follower import FollowerActor
    from relax_infer.placement.standing import standing_pool

    name = spec.actor_name(replica, node)
    run = RunRef(run=spec.run, store=spec.store)
    pool = await standing_pool(run, spec.pool_of(replica), spec.engine_id(replica))
    bundle = spec.node_bundles(replica, node)[0].bundle
    given = (spec, replica, node, pool.bound_as) if node else (spec, replica, pool.bound_as)
    kind = FollowerActor if node else EngineActor
    return await pool.make_actor(kind, name, spec.namespace, bundle, spec.ray_gpu_fraction, *given)
