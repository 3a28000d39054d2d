"""A follower: a further node of a replica. Its own actor there, and how the head's reaches it.

The actor is detached and named like the head's, sits in the first bundle of its node's share, and
does what the head's actor asks of it under a fence token that it remembers on its own.
"""

import asyncio
import os
from collections.abc import Callable
from typing import Any

from relax_infer.contracts.engines import EngineGroupSpec
from relax_infer.contracts.failures import PermanentError, UnconfirmedError
from relax_infer.contracts.fence import FenceToken, StaleFence
from relax_infer.engines.actors import ActorGone, answer, find_actor, node_actor
from relax_infer.engines.closed_grants import closed_grants
from relax_infer.engines.memory import NodeUse
from relax_infer.engines.node import EngineNode, NodeReport
from relax_infer.engines.process import Launch
from relax_infer.telemetry import configure_actor

LOOK_SECONDS = 5.0
"""For a follower's actor to say how its server is."""
READ_SECONDS = 30.0
START_SECONDS = 60.0
"""For a follower's actor to start a process."""
END_SECONDS = 150.0
"""For a follower's actor to end its server and prove it."""


class FollowerActor:
    """The Ray actor of one follower. Made again, it reports what the files of its host say."""

    def __init__(self, spec: EngineGroupSpec, replica: int, node: int, pool: str = "") -> None:
        """``pool``: Ray's id of the placement group that the actor is in."""
        name = f"{spec.actor_name(replica, node)}.actor"
        configure_actor(name, spec.run, role=spec.role, replica=replica)
        self._node = EngineNode(spec, replica, node, pool)
        self._fence = self._node.files.fence_memory()
        # Those of the whole replica, and of this node, which may have been silent alone.
        self._closed = (closed_grants(spec, replica), closed_grants(spec, replica, node))
        self._turn = asyncio.Lock()

    async def ping(self) -> int:
        return os.getpid()

    async def start(self, launch: Launch) -> NodeReport:
        """Raises :class:`StaleFence` also for a grant that has ended, here or by a person's word:
        the host may have been cut off while the call was on its way."""
        async with self._turn:
            self._node.check_place(loads=True)
            for closed in self._closed:
                await asyncio.to_thread(closed.check, launch.token)
            self._admit(launch.token, loads=True)
            await self._node.start(launch)
            return self._node.report()

    async def confirm(self, token: FenceToken) -> NodeReport:
        async with self._turn:
            self._admit(token)
            await self._node.confirm()
            return self._node.report()

    async def end(self, token: FenceToken, ends_grant: bool = False) -> NodeUse:
        async with self._turn:
            self._admit(token)
            use = await self._node.end()
            self._end_grant(ends_grant)
            return use

    async def forget(self, token: FenceToken, ends_grant: bool = False) -> NodeReport:
        async with self._turn:
            self._admit(token)
            await self._node.forget()
            self._end_grant(ends_grant)
            return self._node.report()

    async def report(self) -> NodeReport:
        self._node.check_place()
        return self._node.report()

    async def memory(self) -> NodeUse:
        self._node.check_place()
        return await self._node.memory()

    def _admit(self, token: FenceToken, *, loads: bool = False) -> None:
        self._node.check_place()
        known = self._fence.seen
        self._fence.admit(token, loads=loads)
        if token != known:
            self._node.files.write_fence(self._fence)

    def _end_grant(self, ends: bool) -> None:
        if ends:
            self._fence.end()
            self._node.files.write_fence(self._fence)


class Follower:
    """One follower as the head's actor sees it. Calls raise what its actor raises,
    :class:`UnconfirmedError`, which names the node, where no answer came, and
    :class:`PermanentError` where it has seen a later or a rival token."""

    def __init__(self, spec: EngineGroupSpec, replica: int, node: int) -> None:
        self.node = node
        self._spec, self._replica = spec, replica

    async def look(self) -> NodeReport:
        """How its server is, soon; makes no actor.

        Raises:
            ActorGone: it has none.
        """
        actor = await asyncio.to_thread(find_actor, self._spec, self._replica, self.node)
        if actor is None:
            raise ActorGone(f"{self._name} has no actor.")
        return await self._named(answer(actor.report.remote(), LOOK_SECONDS))

    async def report(self) -> NodeReport:
        return await self._ask(lambda actor: actor.report.remote(), READ_SECONDS)

    async def start(self, launch: Launch) -> NodeReport:
        return await self._ask(lambda actor: actor.start.remote(launch), START_SECONDS)

    async def confirm(self, token: FenceToken) -> NodeReport:
        return await self._ask(lambda actor: actor.confirm.remote(token), READ_SECONDS)

    async def end(self, token: FenceToken, ends_grant: bool = False) -> NodeUse:
        return await self._ask(lambda actor: actor.end.remote(token, ends_grant), END_SECONDS)

    async def forget(self, token: FenceToken, ends_grant: bool = False) -> NodeReport:
        return await self._ask(lambda actor: actor.forget.remote(token, ends_grant), READ_SECONDS)

    async def memory(self) -> NodeUse:
        return await self._ask(lambda actor: actor.memory.remote(), READ_SECONDS)

    async def _ask(self, call: Callable[[Any], Any], timeout: float) -> Any:
        async def ask() -> Any:
            actor = await node_actor(self._spec, self._replica, self.node)
            return await answer(call(actor), timeout)

        return await self._named(ask())

    async def _named(self, asking: Any) -> Any:
        """What went wrong, with the node's name in front."""
        try:
            return await asking
        except ActorGone as gone:
            raise ActorGone(f"{self._name}: {gone.message}", cure=gone.cure) from gone
        except UnconfirmedError as error:
            raise UnconfirmedError(f"{self._name}: {error.message}", cure=error.cure) from error
        except StaleFence as stale:
            raise PermanentError(f"{self._name} refused: {stale}.") from stale

    @property
    def _name(self) -> str:
        return f"{self._spec.engine_id(self._replica)} on its node {self.node}"
