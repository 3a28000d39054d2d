"""Router and gateway of a run, owned by a detached Ray actor that outlives whoever made it.

Ray is imported on use; the caller has joined a cluster.
"""

import asyncio
import os
from collections.abc import Coroutine
from typing import Any, TypeVar

from relax_infer.contracts.base import Message
from relax_infer.contracts.batch import RegistryPush
from relax_infer.contracts.failures import TransientError
from relax_infer.contracts.run import FrontAddress
from relax_infer.engines import host_processes

T = TypeVar("T")

_ACTOR = "front"
_START_TIMEOUT = 150.0
_CALL_TIMEOUT = 60.0
_PUSH_TIMEOUT = 240.0
_POLL, _GONE_POLLS = 0.05, 600
_HANDED_ON = ("RELAX_", "TEMPORAL_")
"""Variables of the caller that the children get: where things are, and how to reach Temporal."""


class RecordedRouter(Message):
    """The router that a front of this host wrote down, whether that front lives or not."""

    pid: int
    port: int
    alive: bool


def recorded_router(cluster: str, run: str) -> RecordedRouter | None:
    """None: no front of the run is or was on this host, or it has begun no router.

    Args:
        cluster: address of Ray's control plane, as the run's workers know it.
    """
    from relax_infer.gateway._front_actor import FrontState, state_file

    try:
        state = FrontState.model_validate_json(state_file(cluster, run).read_bytes())
    except (OSError, ValueError):
        return None
    if state.router is None:
        return None
    living = host_processes.alive(state.router)
    return RecordedRouter(pid=state.router.pid, port=state.router_port, alive=living)


class Front:
    """The front of one run, from any process of the Ray cluster."""

    def __init__(self, run: str) -> None:
        self.run = run

    async def ensure(self) -> FrontAddress:
        """Router and gateway answer; idempotent.

        Makes the actor, or one that takes the place of a dead one: it adopts the children that
        live, and starts dead ones on their old ports as long as those are free.

        Raises:
            TransientError: something did not answer in time, or a child ended as it started.
        """
        return await self._call("ensure", timeout=_START_TIMEOUT)

    async def push(self, push: RegistryPush) -> dict[str, Any]:
        """Bring router and gateway to one role's registry; an older push changes nothing.

        The router's workers are set first (and confirmed), then the gateway takes the document.

        Returns:
            ``{"outcome": "accepted" | "unchanged" | "older", "held": {"term": ..., ...}}``.

        Raises:
            PermanentError: not a registry of that role, or another one under the same revision.
            TransientError: router or gateway did not get there in time.
        """
        return await self._call("push", push, timeout=_PUSH_TIMEOUT)

    async def describe(self) -> dict[str, Any] | None:
        """Pids, ports, socket, logs, the router's workers; None when there is no front."""
        return None if await self._find() is None else await self._call("describe")

    async def stop(self) -> None:
        """Router and gateway are gone, and the actor too; idempotent.

        Raises:
            UnconfirmedError: a child could not be ended.
        """
        import ray

        # Also without an actor: children that a dead one left are in its file, so make one.
        await self._call("stop")
        await asyncio.to_thread(ray.kill, await self._actor())
        for _ in range(_GONE_POLLS):
            if await self._find() is None:
                return
            await asyncio.sleep(_POLL)
        raise TransientError(f"Ray still shows the front of run {self.run} after it was killed.")

    @property
    def _namespace(self) -> str:
        return f"relax-{self.run}"

    async def _find(self) -> Any:
        import ray

        try:
            return await asyncio.to_thread(ray.get_actor, _ACTOR, namespace=self._namespace)
        except ValueError:
            return None

    async def _actor(self) -> Any:
        """The live actor; made if there is none."""
        return await _within(asyncio.to_thread(self._make), _CALL_TIMEOUT, "make the front")

    def _make(self) -> Any:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        from relax_infer.gateway._front_actor import FrontActor

        context = ray.get_runtime_context()
        several = sum(1 for node in ray.nodes() if node["Alive"]) > 1
        host = ray.util.get_node_ip_address() if several else "127.0.0.1"
        environment = {k: v for k, v in os.environ.items() if k.startswith(_HANDED_ON)}
        here = NodeAffinitySchedulingStrategy(context.get_node_id(), soft=False)
        remote = ray.remote(FrontActor).options(
            name=_ACTOR,
            namespace=self._namespace,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_concurrency=64,
            scheduling_strategy=here,
        )
        return remote.remote(self.run, context.gcs_address, host, environment)

    async def _call(self, method: str, *arguments: object, timeout: float = _CALL_TIMEOUT) -> Any:
        """Ask the actor; one that died meanwhile is replaced: every method may be repeated."""
        from ray.exceptions import RayActorError, RayError, RayTaskError

        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        while True:
            try:
                reference = getattr(await self._actor(), method).remote(*arguments)
                left = max(deadline - loop.time(), _POLL)
                return await _within(reference, left, f"{method} the front of run {self.run}")
            except RayTaskError as error:
                raise (error.cause if isinstance(error.cause, Exception) else error) from None
            except RayActorError as error:
                if loop.time() > deadline:
                    raise TransientError(
                        f"the front of run {self.run} keeps dying when asked to {method}: {error}"
                    ) from error
                await asyncio.sleep(_POLL)
            except RayError as error:
                raise TransientError(f"the front of run {self.run}: {error}") from error


async def _within(work: Coroutine[Any, Any, T] | Any, timeout: float, doing: str) -> Any:
    try:
        return await asyncio.wait_for(work, timeout)
    except TimeoutError:
        raise TransientError(f"could not {doing} within {timeout:g} s.") from None
