"""What one replica more or less costs beside its engine: ``python -m tests.bench.scaling``.

Operations over the scripted world, whose engines answer at once, on a real Temporal dev server with
its database in a file: all that is left is signals, activities and decisions. Told are the median,
as a multiple of an update that does nothing (a dry run, a workflow of its own) at the same moment,
processor time of worker and client, and events of history. Then the tables of a group of 1,000
replicas: time for each replica against a group of 8, and bytes against the 2 MiB that Temporal
takes in one message.
"""

import asyncio
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from temporalio.client import Client
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.testing import WorkflowEnvironment
from temporalio.worker import Interceptor, Worker

from relax_infer.contracts.engines import AddedReplica, BundleBinding, ReplicaReport
from relax_infer.contracts.fence import FenceToken
from relax_infer.contracts.policies import QUEUES
from relax_infer.contracts.scale import Members
from relax_infer.discovery import InferenceRegistry
from relax_infer.machines import GroupState, ReplicaState
from tests.bench.discovery import microseconds
from tests.workflows.scaled_role import ScaledRole, scaled_role
from tests.workflows.scripted_world import ScriptedWorld, plan
from workers._runner import FAILS_WORKFLOW, workflow_runner
from workers._temporal import DYNAMIC
from workflows import WORKFLOWS
from workflows._group_book import GroupBook
from workflows._registry import models_of
from workflows._visible import REWARD, ROLE, RUN, STATE, STEP, WEIGHT_VERSION

TIMES = 5
MESSAGE = 2 << 20
"""Bytes that Temporal takes in one message."""
LIMIT = 12.0
"""Times a dry run that an operation may take."""


@asynccontextmanager
async def working(
    world: ScriptedWorld,
    interceptors: Sequence[Interceptor] = (),
    *,
    cached_workflows: int = 1000,
) -> AsyncIterator[Client]:
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        environment = await stack.enter_async_context(
            await WorkflowEnvironment.start_local(
                dev_server_existing_path=str(Path(sys.executable).parent / "temporal"),
                data_converter=pydantic_data_converter,
                search_attributes=[RUN, STEP, ROLE, STATE, WEIGHT_VERSION, REWARD],
                dev_server_database_filename=f"{folder}/temporal.db",
                dev_server_extra_args=list(DYNAMIC),
            )
        )
        for queue in QUEUES:
            worker = Worker(
                environment.client,
                task_queue=queue,
                workflows=WORKFLOWS if queue == "relax" else [],
                activities=world.activities(),
                workflow_runner=workflow_runner(),
                max_cached_workflows=cached_workflows,
                workflow_failure_exception_types=FAILS_WORKFLOW,
                interceptors=interceptors,
            )
            await stack.enter_async_context(worker)
        yield environment.client


class Cost:
    """Of one kind of operation."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.processor: list[float] = []
        self.events: list[int] = []

    def told(self, name: str, base: "Cost") -> float:
        ratio = statistics.median(self.seconds) / statistics.median(base.seconds)
        work = statistics.median(self.processor)
        print(
            f"  {name:<24} {ratio:>5.1f} x a dry run  {1000 * work:>6.0f} ms of processor"
            f"  {statistics.median(self.events):>5.0f} events"
        )
        return ratio


async def measured(role: ScaledRole, cost: Cost, operation_id: str, **fields: object) -> None:
    began, worked = time.perf_counter(), time.process_time()
    status = await role.scale(operation_id, **fields)
    cost.seconds.append(time.perf_counter() - began)
    cost.processor.append(time.process_time() - worked)
    assert status.ended, status
    history = await role.operation(operation_id).fetch_history()
    cost.events.append(len(history.events))


async def operations() -> bool:
    """Whether one takes too many times a dry run."""
    dry, out, inward, three = Cost(), Cost(), Cost(), Cost()
    async with scaled_role(working, ScriptedWorld()) as role:
        for k in range(TIMES + 1):  # the first warms up
            costs = (dry, out, inward, three) if k else (Cost(), Cost(), Cost(), Cost())
            await measured(role, costs[0], f"dry-{k}", num_replicas=3, dry_run=True)
            await measured(role, costs[1], f"out-{k}", num_replicas=3)
            await measured(role, costs[2], f"in-{k}", num_replicas=2)
            await measured(role, costs[3], f"three-{k}", num_replicas=5)
            await role.scale(num_replicas=2)
        await role.stop()
    print(f"operations, median of {TIMES}:")
    dry.told("dry run", dry)
    ratios = [out.told("one more", dry), inward.told("one less", dry)]
    three.told("three more, side by side", dry)
    return max(ratios) > LIMIT


def book_of(replicas: int) -> GroupBook:
    """A READY group of which all replicas but two were added."""
    (spec,) = [g for g in plan("run-1").groups if g.role == "rollout"]
    book = GroupBook(spec)
    added = [
        AddedReplica(
            replica=k,
            placement_group=f"added-rollout-policy-{k}",
            bundles=(
                BundleBinding(
                    bundle=0,
                    node_id=f"{k:056x}",
                    node_ip=f"10.{k >> 8}.{k & 255}.1",
                    gpu_id=0,
                    gpu_uuid=f"GPU-00000000-0000-0000-0000-{k:012x}",
                ),
            ),
        )
        for k in range(2, replicas)
    ]
    book.spec = spec.with_added(*added)
    book.state = GroupState.READY
    fence = FenceToken(counter=7, grant_id="grant-7")
    book.fence.admit(fence, loads=True)
    book.generations = [1] * replicas
    for k in range(replicas):
        book.replicas[k] = ReplicaReport(
            replica=k,
            engine_id=spec.engine_id(k),
            state=ReplicaState.READY,
            base_url=f"http://10.{k >> 8}.{k & 255}.1:30000",
            incarnation=f"{k:032x}",
            weight_version=12,
            weights_digest="0" * 64,
            fence=fence,
        )
        book.outsiders.urls[k] = f"http://10.{k >> 8}.{k & 255}.1:30000"
    return book


def members_of(book: GroupBook) -> Members:
    return Members(
        spec=book.spec,
        state=book.state,
        fence=book.fence.seen,
        replicas=tuple(book.replicas.values()),
        urls=book.outsiders.urls,
        snapshot=book.snapshot(),
    )


def tables() -> bool:
    """Whether a message about 1,000 replicas is too large, or its time not in proportion."""
    small, large = book_of(8), book_of(1000)
    print("tables, time for each replica of 1,000 against each of 8, and bytes of 1,000:")

    def publish(book: GroupBook) -> Callable[[], object]:
        registry = InferenceRegistry("rollout", "epoch")
        groups = (book.snapshot(),)
        return lambda: registry.publish(models_of(groups, "http://127.0.0.1:1"))

    made: dict[str, Callable[[GroupBook], Callable[[], object]]] = {
        "snapshot of the group": lambda book: book.snapshot,
        "route table, published": publish,
        "answer to an operation": lambda book: members_of(book).model_dump_json,
        "kept over continue-as-new": lambda book: book.carry,
    }
    sizes = {
        "snapshot of the group": len(large.snapshot().model_dump_json()),
        "answer to an operation": len(members_of(large).model_dump_json()),
    }
    wrong = False
    for name, call in made.items():
        one, many = microseconds(call(small)) / 8, microseconds(call(large)) / 1000
        size = sizes.get(name)
        share = "" if size is None else f"  {size:>9} bytes, {size / MESSAGE:.0%} of a message"
        print(f"  {name:<28} {many:>7.2f} µs each, {many / one:>4.1f} x{share}")
        wrong |= many > 3 * one or (size or 0) > MESSAGE
    return wrong


if __name__ == "__main__":
    logging.disable(logging.WARNING)  # of watches that end with their operations
    failed = tables()
    sys.stdout.flush()
    failed |= asyncio.run(operations())
    sys.exit(int(failed))
