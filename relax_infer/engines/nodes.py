"""The servers of one replica on all of its nodes, as the head's actor drives them.

A replica of one node has the head's own server and nothing else. Weights, memory and requests go to
the head's server, and SGLang carries them to every rank; what concerns processes is each node's own
and is done and proved on its host. What a node has proved is not asked of it again.
"""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Iterable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from relax_infer.contracts.engines import EngineGroupSpec
from relax_infer.contracts.failures import (
    PermanentError,
    RelaxError,
    TransientError,
    UnconfirmedError,
)
from relax_infer.contracts.fence import FenceToken
from relax_infer.engines.actors import ActorGone
from relax_infer.engines.closed_grants import closed_grants
from relax_infer.engines.memory import NodeUse
from relax_infer.engines.node import EngineNode, NodeReport
from relax_infer.engines.process import (
    EngineProcess,
    Launch,
    PortTaken,
    failed_start,
    free_rendezvous,
    wait_for_answer,
)

SILENT_SECONDS = 15.0
"""Without an answer of its actor a follower counts as lost; less than a watcher waits for ours."""
_BETWEEN_LOOKS = 1.0
_PORT_ATTEMPTS = 3

T = TypeVar("T")


class FollowerNode(Protocol):
    """What the head asks of a follower; see :class:`relax_infer.engines.follower.Follower`."""

    node: int

    async def look(self) -> NodeReport: ...
    async def report(self) -> NodeReport: ...
    async def start(self, launch: Launch) -> NodeReport: ...
    async def confirm(self, token: FenceToken) -> NodeReport: ...
    async def end(self, token: FenceToken, ends_grant: bool = False) -> NodeUse: ...
    async def forget(self, token: FenceToken, ends_grant: bool = False) -> NodeReport: ...
    async def memory(self) -> NodeUse: ...


class ReplicaNodes:
    """The head's node and its followers. Not for two callers at once, but for what only looks."""

    def __init__(self, head: EngineNode, followers: Sequence[FollowerNode] = ()) -> None:
        self._head, self._followers = head, followers
        self.engine: EngineProcess | None = head.process
        """The head's server, from when every node's is ready until it is proved gone."""
        self._held = {0} if head.holds else set[int]()
        self._asked = not followers
        self._mark: str | None = None
        self._owing = {0} if head.owes else set[int]()
        """Nodes on which a server is gone whose memory nobody has seen back."""
        self._answered = dict[int, float]()
        self._uses = dict[int, NodeUse]()

    @property
    def owing(self) -> bool:
        """Whether memory of a server that is gone is not known to be back."""
        return bool(self._owing)

    @property
    def held(self) -> frozenset[int]:
        """Nodes on which something may be left, as far as is known."""
        return frozenset(self._held)

    async def recollect(self) -> str | None:
        """What an earlier actor of the head left with the followers; None where nothing is.

        They are asked until each of them has answered once.

        Raises:
            UnconfirmedError, TransientError: one of them did not.
        """
        if self._asked:
            return None
        reports = await _all(follower.report() for follower in self._followers)
        left = [report for report in reports if report.incarnation is not None]
        self._held.update(report.node for report in left)
        self._owing.update(report.node for report in reports if report.owes)
        self._asked = True
        if not left:
            return None
        return f"its follower on node {left[0].node} holds incarnation {left[0].incarnation}"

    async def start(
        self,
        spec: EngineGroupSpec,
        *,
        token: FenceToken,
        model_path: Path,
        weight_version: int | None,
    ) -> None:
        """Start a server on every node; wait until the head's answers and the others live.

        The gate is closed. On failure every node's is ended again; :attr:`held` has those where
        that is not proved.

        Raises:
            PermanentError: a server exited; the text has the last lines of its log.
            TransientError: the head's did not answer within ``spec.launch_timeout``, or a follower
                could not be asked and nothing was started.
            UnconfirmedError: it failed and what was started could not be proved gone.
        """
        # Before anything runs: a follower that cannot be reached would have to prove its release.
        for report in await _all(follower.report() for follower in self._followers):
            if report.incarnation is not None:
                self._held.add(report.node)
                raise UnconfirmedError(
                    f"{self._head.name} cannot start: its follower on node {report.node} holds"
                    f" incarnation {report.incarnation}.",
                    cure="Stop it with proof first.",
                )
        for attempt in range(1, _PORT_ATTEMPTS + 1):
            launch = Launch(
                group=spec,
                incarnation=str(uuid.uuid4()),
                token=token,
                model_path=str(model_path),
                weight_version=weight_version,
                rendezvous=self._rendezvous(spec),
            )
            try:
                await self._start_once(launch)
                return
            except PortTaken:
                if attempt == _PORT_ATTEMPTS:
                    raise

    def _rendezvous(self, spec: EngineGroupSpec) -> str | None:
        if not self._followers:
            return None
        return free_rendezvous(spec.node_bundles(self._head.replica, 0)[0].node_ip)

    async def _start_once(self, launch: Launch) -> None:
        self._held = {0, *(follower.node for follower in self._followers)}
        self._uses.clear()
        token = launch.token
        try:
            await _all((self._head.start(launch), *(f.start(launch) for f in self._followers)))
            await self._answers(launch)
            await _all((self._head.confirm(), *(f.confirm(token) for f in self._followers)))
        except BaseException:
            await asyncio.shield(self.end(token))
            raise
        self._mark = launch.incarnation
        self._owing.clear()  # each node has looked before it started
        self._answered = {f.node: time.monotonic() for f in self._followers}
        self.engine = self._head.process

    async def _answers(self, launch: Launch) -> None:
        """The head answers once the ranks of all nodes have met; a follower that exits before is
        told at once, since the others would wait for it."""
        assert self._head.process is not None
        answer = asyncio.ensure_future(
            wait_for_answer(self._head.process, launch.group.launch_timeout)
        )
        watch = [asyncio.ensure_future(self._until_exit(f)) for f in self._followers]
        try:
            await asyncio.wait({answer, *watch}, return_when=asyncio.FIRST_COMPLETED)
            for exited in watch:
                if exited.done() and not answer.done():
                    raise failed_start(exited.result())
            await answer
        finally:
            for task in (answer, *watch):
                task.cancel()
            await asyncio.gather(answer, *watch, return_exceptions=True)

    async def _until_exit(self, follower: FollowerNode) -> str:
        """Returns once its server is gone; one that cannot be asked is not judged."""
        while True:
            await asyncio.sleep(_BETWEEN_LOOKS)
            try:
                report = await follower.look()
            except ActorGone as gone:
                return str(gone)
            except UnconfirmedError:
                continue
            if report.lost:
                return f"{self._head.name}: its follower on node {report.node}: {report.lost}"

    async def end(self, token: FenceToken, *, ends_grant: bool = False) -> tuple[NodeUse, ...]:
        """End what any node may hold, each with proof on its own host; all at once. With
        ``ends_grant`` a follower that was ended starts nothing more under the token.

        Returns what every node that was ended measured of its devices, then and before.

        Raises:
            UnconfirmedError: not proved on the nodes that it names. The others are not asked again.
        """

        async def end(node: int, ending: Awaitable[NodeUse]) -> None:
            try:
                self._uses[node] = use = await ending
            except (PermanentError, TransientError) as error:
                raise UnconfirmedError(f"Node {node} gave no proof: {error}") from error
            self._held.discard(node)
            if use.owing is not None:
                self._owing.add(node)

        # A follower that was never asked may hold something.
        followers = [f for f in self._followers if f.node in self._held or not self._asked]
        self._held.update(f.node for f in followers)
        endings = [end(f.node, f.end(token, ends_grant)) for f in followers]
        if 0 in self._held:
            endings.insert(0, end(0, self._head.end()))
        try:
            await _all(endings)
        finally:
            self.engine = self._head.process
        self._asked = True
        uses = tuple(self._uses[node] for node in sorted(self._uses))
        self._uses.clear()
        return uses

    async def given_back(self, patience: float) -> dict[int, int | None]:
        """Wait until the memory of what was ended is seen to be back on every node, at most
        ``patience`` seconds; bytes in use there, by node. Nodes that owe nothing are not asked.

        Raises:
            UnconfirmedError: on some it is not; the text says which devices, and what to do.
        """
        until = time.monotonic() + patience
        found = dict[int, int | None]()
        while self._owing:
            nodes = [node for node in (self._head, *self._followers) if node.node in self._owing]
            uses = await _all(node.memory() for node in nodes)
            found.update((use.node, use.in_use) for use in uses)
            self._owing = {use.node for use in uses if use.owing is not None}
            if self._owing and time.monotonic() >= until:
                told = (f"on node {use.node} {use.owing}" for use in uses if use.owing is not None)
                raise UnconfirmedError(f"{self._head.name} has not let go: {'; '.join(told)}")
            if self._owing:
                await asyncio.sleep(_BETWEEN_LOOKS)
        return found

    async def forget(self, token: FenceToken, *, ends_grant: bool = False) -> None:
        """Take a person's word for every node that can be asked, and does not show otherwise.

        A node that is gone with its host cannot be asked; the word is about it above all. Should it
        come back, it starts nothing under the token: that is written where it looks.

        Raises:
            PermanentError: a process of it lives.
            TransientError: the store does not answer, so a node might still start something.
        """

        async def ask(follower: FollowerNode) -> None:
            closed = closed_grants(self._head.spec, self._head.replica, follower.node)
            await asyncio.to_thread(closed.close, token)
            wrong: PermanentError | None = None
            try:
                await follower.forget(token, ends_grant)
            except PermanentError as error:
                wrong = error
            except RelaxError:
                return
            # It was reached: its own memory says from here on what has ended.
            await asyncio.to_thread(closed.reopen, token)
            if wrong is not None:
                raise wrong

        await _all((self._head.forget(), *(ask(f) for f in self._followers)))
        self.engine = None
        self._held.clear()
        self._owing.clear()
        self._asked = True

    async def lost(self) -> str | None:
        """Which node's server is not what it was; None where all live. Changes nothing.

        A follower that gives no answer counts as lost after :data:`SILENT_SECONDS`, and its
        server may live: what follows must be a release proof.
        """
        if self.engine is not None and (lost := self.engine.lost()):
            return lost
        for wrong in await asyncio.gather(*(self._lost(f) for f in self._followers)):
            if wrong is not None:
                return wrong
        return None

    async def _lost(self, follower: FollowerNode) -> str | None:
        if self.engine is None:
            return None
        node = follower.node
        try:
            report = await follower.look()
        except ActorGone:
            return f"the actor of its follower on node {node} is gone"
        except UnconfirmedError as silent:
            since = time.monotonic() - self._answered.get(node, 0.0)
            return str(silent) if since > SILENT_SECONDS else None
        self._answered[node] = time.monotonic()
        if report.lost is not None:
            return f"its follower on node {node} lost its server: {report.lost}"
        if report.incarnation != f"{self._mark}.node-{node}":
            return f"its follower on node {node} holds incarnation {report.incarnation}"
        return None

    async def memory(self) -> tuple[NodeUse, ...]:
        """Every node's own measure."""
        uses = await _all((self._head.memory(), *(f.memory() for f in self._followers)))
        return tuple(uses)

    async def reports(self) -> tuple[NodeReport, ...]:
        """Every node, the head first; followers without an actor are left out."""

        async def ask(follower: FollowerNode) -> NodeReport | None:
            try:
                return await follower.look()
            except UnconfirmedError:
                return None

        found = await asyncio.gather(*(ask(f) for f in self._followers))
        return (self._head.report(), *(report for report in found if report is not None))


async def _all(calls: Iterable[Awaitable[T]]) -> list[T]:
    """Every result, once each call has ended; the errors of several are told in one.

    The worst kind wins: what is unconfirmed on one node is so for the replica.
    """
    results = await asyncio.gather(*calls, return_exceptions=True)
    errors = [result for result in results if isinstance(result, BaseException)]
    if not errors:
        return [result for result in results if not isinstance(result, BaseException)]
    unconfirmed = [error for error in errors if isinstance(error, UnconfirmedError)]
    if len(errors) == 1 or not unconfirmed:
        raise errors[0]
    raise UnconfirmedError("; ".join(str(error) for error in errors))
