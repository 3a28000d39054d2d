"""One role on GPUs of its own under a real lease, over the scripted world, and what it is asked."""

import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from temporalio.client import Client, WorkflowUpdateFailedError, WorkflowUpdateStage

from relax_infer.contracts.autoscale import AutoscaleStatus
from relax_infer.contracts.engines import BundleBinding, GroupSnapshot
from relax_infer.contracts.lease import (
    LeaseAnswer,
    LeaseCommand,
    LeaseInput,
    RoleInput,
    RoleResult,
)
from relax_infer.contracts.refs import RunRef, WeightsRef
from relax_infer.contracts.scale import OutsiderRecord, ScaleRequest, ScaleStatus
from relax_infer.machines import ReplicaState
from tests.workflows.scripted_world import ScriptedWorld, plan, until

Working = Callable[..., AbstractAsyncContextManager[Client]]


def weights(version: int) -> WeightsRef:
    return WeightsRef(version=version, uri=f"/weights/{version}", digest=f"d{version}")


class ScaledRole:
    """A role named ``<run>.<role>`` with one model, and the world under it."""

    def __init__(self, client: Client, world: ScriptedWorld, run: RunRef, role: str) -> None:
        self.client, self.world, self.run, self.role = client, world, run, role
        self.model = "policy" if role == "rollout" else role
        self.handle = client.get_workflow_handle(f"{run.run}.{role}")
        self.version = 0
        self._asked = 0

    async def bring_up(self, version: int = 0) -> LeaseAnswer:
        """As WeightSync does it: the role lets go, if it is up, and comes back with the weights."""
        self.version = version
        fields: dict[str, Any] = {"role": self.role, "purpose": "weight_sync"}
        if self.role == "rollout":
            fields["weights"] = weights(version)
        return await self.lease("acquire", **fields)

    async def lease(self, method: str, **fields: Any) -> LeaseAnswer:
        self._asked += 1
        command = LeaseCommand.model_validate({"operation_id": f"op-{self._asked}", **fields})
        handle = self.client.get_workflow_handle(f"{self.run.run}.lease")
        return await handle.execute_update(method, command, result_type=LeaseAnswer)

    accepted = WorkflowUpdateStage.ACCEPTED

    def weights_command(self, operation_id: str, version: int) -> LeaseCommand:
        """For the lease's update ``acquire``."""
        return LeaseCommand.model_validate(
            {
                "operation_id": operation_id,
                "role": self.role,
                "purpose": "weight_sync",
                "weights": weights(version),
            }
        )

    async def scale(self, operation_id: str = "", **fields: Any) -> ScaleStatus:
        """Ask and wait for the end."""
        return await self.begin(operation_id, wait=True, **fields)

    async def begin(self, operation_id: str = "", **fields: Any) -> ScaleStatus:
        self._asked += 1
        request = ScaleRequest.model_validate(
            {"operation_id": operation_id or f"scale-{self._asked}", **fields}
        )
        return await self.handle.execute_update("scale", request, result_type=ScaleStatus)

    async def refused(self, operation_id: str = "", **fields: Any) -> str:
        """The reason for which the role does not take the request."""
        try:
            status = await self.scale(operation_id, **fields)
        except WorkflowUpdateFailedError as error:
            return str(error.cause)
        raise AssertionError(f"it was taken: {status}")

    def operation(self, operation_id: str) -> Any:
        return self.client.get_workflow_handle(
            f"{self.run.run}.{self.role}.scale-{operation_id}", result_type=ScaleStatus
        )

    async def autoscaling(self) -> AutoscaleStatus:
        (told,) = await self.handle.query("autoscaling", result_type=list[AutoscaleStatus])
        return told

    async def status(self, operation_id: str) -> ScaleStatus:
        every = await self.handle.query("scaling", result_type=list[ScaleStatus])
        return next(each for each in every if each.operation_id == operation_id)

    async def cancel(self, operation_id: str) -> ScaleStatus:
        return await self.operation(operation_id).execute_update("cancel", result_type=ScaleStatus)

    async def outsiders(self) -> dict[int, OutsiderRecord]:
        group = self.client.get_workflow_handle(f"{self.run.run}.{self.role}.{self.model}")
        found = await group.query("outsiders", result_type=list[OutsiderRecord])
        return {record.replica: record for record in found}

    async def group(self) -> GroupSnapshot:
        group = self.client.get_workflow_handle(f"{self.run.run}.{self.role}.{self.model}")
        return await group.query("snapshot", result_type=GroupSnapshot)

    async def ready(self) -> list[int]:
        """Replicas that answer."""
        seen = await self.group()
        up = [r for r in seen.replicas if r.state is ReplicaState.READY]
        return [r.replica for r in up if r.replica not in seen.leaving]

    async def url(self, replica: int) -> str:
        (url,) = [r.base_url for r in (await self.group()).replicas if r.replica == replica]
        assert url is not None
        return url

    async def stop(self) -> None:
        """As at the end of a run: the lease takes the pool back, and the role ends with proof."""
        await self.lease("release", role=self.role)
        await self.handle.execute_update("shutdown", result_type=RoleResult)

    def engine(self, replica: int) -> Any:
        return self.world.engines.engines[self.role, replica]

    def pools(self) -> list[int]:
        """Replicas that have a placement group of their own."""
        return sorted(each.replica for each in self.world.pools.there.values())

    def routed(self) -> int:
        """Addresses that the router was last told."""
        told = [p.router_workers for p in self.world.pushes if p.router_workers is not None]
        return len(told[-1])

    def shown(self) -> dict[str, str]:
        """State of each replica in the document that was pushed last."""
        (model,) = self.world.pushes[-1].document["models"].values()  # type: ignore[attr-defined]
        return {each["engine_id"]: each["state"] for each in model["engines"]}

    async def holds_only(self, *replicas: int) -> None:
        """Table, engines, placement groups, router and document agree that these are there."""
        await until(lambda: set(self.shown()) == {f"{self.model}/replica-{k}" for k in replicas})
        assert await self.ready() == list(replicas)
        living = [k for (role, k), e in self.world.engines.engines.items() if e.holds]
        assert sorted(living) == list(replicas)
        assert self.pools() == [k for k in replicas if k >= 2]
        if self.role == "rollout":
            assert self.routed() == len(replicas)
        assert self.world.violations == []


@asynccontextmanager
async def scaled_role(
    working: Working,
    world: ScriptedWorld,
    role: str = "rollout",
    cached_workflows: int = 1000,
    **fields: Any,
) -> AsyncIterator[ScaledRole]:
    """Two replicas, up, with weights 0 where the role has any."""
    world.engines.routes_checked = True
    run = RunRef(run=f"run-{uuid.uuid4().hex[:8]}", store="memory://store")
    (group,) = [g for g in plan(run.run).groups if g.role == role]
    rows = tuple(
        BundleBinding(bundle=k, node_id="n", node_ip="127.0.0.1", gpu_id=k) for k in range(2)
    )
    group = group.model_copy(update={"bundles": rows, "replicas": 2})
    async with working(world, cached_workflows=cached_workflows) as client:
        await client.start_workflow(
            "GpuLease",
            LeaseInput(run=run, roles=(role,), operation_timeout=60.0, reconcile_timeout=1.0),
            id=f"{run.run}.lease",
            task_queue="relax",
        )
        start = {"run": run, "role": role, "groups": (group,), "shares_with": (), **fields}
        await client.start_workflow(
            "InferenceRole",
            RoleInput.model_validate({"operation_timeout": 60.0, **start}),
            id=f"{run.run}.{role}",
            task_queue="relax",
        )
        scaled = ScaledRole(client, world, run, role)
        await scaled.bring_up()
        yield scaled
