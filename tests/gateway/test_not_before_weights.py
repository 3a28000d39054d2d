"""No caller meets an engine whose weights are not current: while it is launched, while it loads new
ones, and after it failed to prove them, neither router nor gateway leads to it, nor does its fence
let anybody in. One that sleeps and comes back with others stays in the router's list, and there it
is the fence alone.

The replica, its fence, the role's rules for its document and its router, router and gateway are the
real ones; SGLang behind the fence is scripted, and the router is a double as well as the real one.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from relax_infer.contracts.engines import EngineGroupSpec, EngineOperation, GroupSnapshot
from relax_infer.contracts.failures import PermanentError
from relax_infer.contracts.refs import WeightsRef
from relax_infer.discovery import InferenceRegistry
from relax_infer.engines import RouterAdapter
from relax_infer.engines.control import EngineControl
from relax_infer.engines.replica import EngineReplica
from relax_infer.machines import GroupState, ReplicaState
from relax_infer.machines.replica import REPLICA, ReplicaEvent
from tests.engines.fake_engine import TOKEN, FakeEngine, FencedFake, fenced_fake
from tests.engines.test_router import double, real
from tests.gateway.asking import ask
from tests.gateway.fakes import Gateway, free_port, gateway, until
from workflows._registry import models_of, router_workers, routing_of

Look = Callable[[str], Awaitable[None]]
Routers = Callable[[int], AbstractAsyncContextManager[RouterAdapter]]

pytestmark = pytest.mark.timeout(300)


class Loading(FakeEngine):
    """As much of SGLang as an onload needs. ``look`` is called within every call to it."""

    def __init__(self) -> None:
        super().__init__()
        self.version, self.log_prob = "3", -1.5
        self.look: Look | None = None
        self.answered: list[str] = []
        """Versions that answered callers."""
        self.asked = asyncio.Event()
        self.hold: asyncio.Event | None = None
        """Whoever calls waits for it."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope["path"]
        message = await receive() if scope["method"] == "POST" else {"body": b""}
        body: dict[str, Any] = json.loads(message["body"] or b"{}")
        if "rid" in body:  # a caller's
            await self._held(body["rid"])
            self.answered.append(self.version)
            await self._reply(send, 200, {"text": self.version})
            return
        if self.look is not None and scope["client"] is None:  # over the management socket
            await self.look(path)
        answer: dict[str, Any] = {"path": path, "model_path": "m", "weight_version": self.version}
        if path == "/update_weights_from_disk":
            self.version = body["weight_version"]
            answer["success"] = True
        elif path == "/weights_checker":
            answer["ranks"] = [{"per_gpu_checksum": f"digest-{self.version}"}]
        elif path == "/generate":
            row = [[self.log_prob, token] for token in body["input_ids"]]
            answer["meta_info"] = {"input_token_logprobs": row}
        await self._reply(send, 200, answer)

    async def _held(self, rid: str) -> None:
        self.asked.set()
        if self.hold is not None:
            self.running[rid] = self.hold
            await self.hold.wait()
            del self.running[rid]


class Replica(EngineReplica):
    """With a server that is there when it is launched."""

    def __init__(self, spec: EngineGroupSpec, fake: FencedFake) -> None:
        super().__init__(spec, 0)
        self.fake = fake

        async def nothing() -> None:
            return None

        async def unknown() -> tuple[()]:
            return ()

        self.nodes = SimpleNamespace(  # type: ignore[assignment]
            engine=None, lost=nothing, recollect=nothing, memory=unknown
        )

    async def _launch(self, op: EngineOperation) -> bool:
        if self.engine is not None:
            return False
        self.state = REPLICA.initial
        assert isinstance(self.fake.engine, Loading)
        assert self.fake.engine.look is not None
        await self.fake.engine.look("its start")
        holder = SimpleNamespace(
            base_url=self.fake.url, processes=SimpleNamespace(incarnation="one")
        )
        self.nodes.engine = SimpleNamespace(  # type: ignore[assignment]
            control=EngineControl(self.fake.socket),
            holder=holder,
            exited=lambda: False,
            lost=lambda: None,
        )
        self._advance(ReplicaEvent.LAUNCHED)
        assert op.weights is not None
        self.resident.begin(Path(op.weights.uri), op.weights)
        return True


class Room:
    """A rollout role of one engine, and everything that leads to it."""

    def __init__(
        self, folder: Path, fake: FencedFake, router: RouterAdapter, front: Gateway
    ) -> None:
        self.folder, self.fake, self.router, self.front = folder, fake, router, front
        assert isinstance(fake.engine, Loading)
        self.engine = fake.engine
        self.spec = EngineGroupSpec.model_validate(
            {
                **{"run": "weights", "role": "rollout", "model": "policy", "replicas": 1},
                **{"model_path": str(folder), "weight_source": "ACTOR", "gpus_per_replica": 2},
                **{"offload": "memory_saver", "ray_gpu_fraction": 0.2, "placement_group": "p"},
                **{"bundles": (), "device": "cpu", "store": "memory://store"},
            }
        )
        self.replica = Replica(self.spec, fake)
        self.registry = InferenceRegistry("rollout", "epoch")
        self.real = False
        self.seen: list[tuple[str, ReplicaState]] = []
        self.routed: tuple[str, ...] = ()
        self.sleeps = False
        """Its role gives the GPUs away, or comes back to them: nothing is published meanwhile."""

    def operation(self, version: int) -> EngineOperation:
        return EngineOperation(
            operation_id=f"load-{version}",
            group=self.spec,
            fence=TOKEN,
            weights=WeightsRef(version=version, uri=str(self.folder), digest=""),
        )

    async def publish(self) -> ReplicaState:
        """What the role does with a report, of whatever moment it is."""
        report = await self.replica.reports.report()
        up = report.state is ReplicaState.READY
        state = GroupState.SLEEPING if self.sleeps else GroupState.ONLOADING
        group = GroupSnapshot(
            role="rollout",
            model="policy",
            state=GroupState.READY if up else state,
            weight_source="ACTOR",
            weight_version=report.weight_version,
            replicas=(report,),
            generations=(1,),
        )
        workers = router_workers((group,))
        if workers is not None:
            self.routed = workers
            await self.router.set_workers(workers)
        models = models_of((group,), self.router.url)
        document = self.registry.publish(models, routing=routing_of((self.spec,)))
        self.front.intake.offer("rollout", 1, document)
        return report.state

    async def ask(self) -> set[int]:
        """By gateway, by router, and past both."""
        ways = [self.fake.url]
        if self.real:  # the double passes nothing on
            ways += [f"{self.front.url}/rollout", self.router.url]
        return {
            (await ask("POST", f"{way}/generate", {"text": "x", "rid": f"r-{n}"})).status
            for n, way in enumerate(ways)
        }

    async def look(self, during: str) -> None:
        """Within an operation: whoever asks is refused."""
        state = self.replica.state if self.sleeps else await self.publish()
        self.seen.append((during, state))
        assert state is not ReplicaState.READY
        if not self.sleeps:
            assert self.routed == ()
            assert await self.router.workers() == {}
        assert await self.ask() == {503}


@pytest.fixture(params=["double", pytest.param("real", marks=pytest.mark.real)])
async def room(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Room]:
    monkeypatch.setenv("RELAX_HOME", str(tmp_path))
    routers: Routers = double if request.param == "double" else real
    async with contextlib.AsyncExitStack() as stack:
        fake, _ = await stack.enter_async_context(fenced_fake(tmp_path, Loading()))
        fake.fence.gate.close()  # as a server starts
        router = await stack.enter_async_context(routers(free_port()))
        front = await stack.enter_async_context(gateway())
        made = Room(tmp_path, fake, router, front)
        made.real = request.param == "real"
        made.engine.look = made.look
        yield made


async def test_an_engine_that_is_launched_and_then_loads_is_called_only_with_proved_weights(
    room: Room,
) -> None:
    await room.look("nothing")
    await room.replica.onload(room.operation(3))
    assert room.engine.answered == []
    assert {"its start", "/weights_checker", "/generate"} <= {path for path, _ in room.seen}
    assert await room.publish() is ReplicaState.READY
    assert await room.ask() == {200}

    room.seen.clear()
    room.engine.answered.clear()
    await room.replica.load_weights(room.operation(4))
    assert room.engine.answered == []
    loaded = [path for path, _ in room.seen]
    assert loaded.index("/update_weights_from_disk") < loaded.index("/weights_checker")
    assert loaded.index("/weights_checker") < loaded.index("/generate")
    assert await room.publish() is ReplicaState.READY
    assert await room.ask() == {200}
    assert set(room.engine.answered) == {"4"}


async def test_an_engine_that_sleeps_stays_listed_and_lets_nobody_in_before_its_new_weights(
    room: Room,
) -> None:
    await room.replica.onload(room.operation(3))
    await room.publish()
    listed = await room.router.workers()
    assert list(listed) == [room.fake.url]
    room.sleeps = True
    await room.replica.offload(room.operation(3))
    assert await room.publish() is ReplicaState.SLEEPING
    room.seen.clear()
    await room.look("asleep")
    await room.replica.onload(room.operation(4))
    during = [path for path, _ in room.seen]
    assert during.index("/update_weights_from_disk") < during.index("/weights_checker")
    assert room.engine.answered == []
    assert await room.router.workers() == listed, "it was never taken out"
    assert await room.publish() is ReplicaState.READY
    assert await room.ask() == {200}
    assert set(room.engine.answered) == {"4"}


@pytest.mark.parametrize("in_time", [True, False])
async def test_what_runs_at_an_update_in_place_ends_by_itself_or_at_the_deadline(
    room: Room, in_time: bool
) -> None:
    await room.replica.onload(room.operation(3))
    engine, room.engine.hold = room.engine, asyncio.Event()
    engine.look = None
    engine.abort = lambda rid: engine.hold.set() if engine.hold else None  # type: ignore[method-assign]
    weights = room.spec.weights.model_copy(update={"drain_deadline": 30.0 if in_time else 0.3})
    room.spec = room.spec.model_copy(update={"weights": weights})
    engine.asked.clear()
    running = asyncio.create_task(room.ask())
    await engine.asked.wait()
    loading = asyncio.create_task(room.replica.load_weights(room.operation(4)))
    await until(lambda: not room.fake.fence.gate.ready)
    refused = await ask("POST", f"{room.fake.url}/generate", {"text": "x", "rid": "late"})
    assert refused.status == 503
    assert engine.version == "3"
    if in_time:
        engine.hold.set()
    await running
    assert engine.answered == ["3"], "by the weights with which it began"
    await loading
    rows = [row["reason"] for row in room.fake.log() if row["event"] == "ended"]
    assert rows == ["answered" if in_time else "cancelled"]
    assert engine.version == "4"


@pytest.mark.parametrize("fault", ["version", "canary"])
async def test_an_engine_that_does_not_prove_its_weights_is_called_by_nobody(
    room: Room, fault: str
) -> None:
    if fault == "version":
        room.engine.version = "2"
    else:
        room.engine.log_prob = float("nan")
    with pytest.raises(PermanentError):
        await room.replica.onload(room.operation(3))
    await room.look("the fault")
    assert room.seen[-1][1] is ReplicaState.FAILED
    assert room.engine.answered == []
