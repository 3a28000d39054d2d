"""What the metrics say of runs is what their workflows say, whoever looks and whenever."""

import json
import uuid
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from temporalio.client import Client

from relax_infer.contracts.run import RunInput, RunStatus
from relax_infer.telemetry.run_metrics import RunMetrics
from tests.workflows.scripted_world import ScriptedWorld, until
from workers._run_watch import TARGETS, RunWatch

pytestmark = pytest.mark.asyncio(loop_scope="session")
Working = Callable[[ScriptedWorld], AbstractAsyncContextManager[Client]]


def text(metrics: RunMetrics) -> str:
    registry = CollectorRegistry()
    registry.register(metrics)
    return generate_latest(registry).decode()


async def test_a_look_tells_state_lease_and_replicas_of_every_open_run_and_of_no_other(
    working: Working, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("RELAX_HOME", str(tmp_path))
    world, metrics = ScriptedWorld(), RunMetrics()
    world.faults["resolve_recipe"] = ["hold"]
    async with working(world) as client:
        run = f"run-{uuid.uuid4().hex[:8]}"
        handle = await client.start_workflow(
            "TrainingRun",
            RunInput(recipe="scripted", steps=1000),
            id=run,
            task_queue="relax",
            result_type=RunStatus,
        )
        watch = RunWatch(client, metrics, every=60)

        async def status() -> RunStatus:
            return await handle.query("status", result_type=RunStatus)

        async def running() -> bool:
            return (await status()).state == "RUNNING"

        async def paused() -> bool:
            return (await status()).state == "PAUSED"

        async def told(words: str) -> bool:
            await watch.look()
            return words in text(metrics)

        # Before its lease and roles are there a run is told all the same.
        await until(lambda: told(f'relax_run_state{{run="{run}",state="STARTING"}} 1.0'))
        assert "relax_lease_state" not in text(metrics)
        world.go_on.set()
        await until(running)
        await handle.execute_update("pause")
        await until(paused)
        await until(lambda: told(f'relax_run_state{{run="{run}",state="PAUSED"}} 1.0'))
        seen = text(metrics)
        assert f'relax_lease_state{{role="trainer",run="{run}",state="SLEEPING"}} 1.0' in seen
        assert f'relax_replicas{{model="policy",role="rollout",run="{run}"' in seen
        jobs = [target["labels"]["job"] for target in json.loads((tmp_path / TARGETS).read_text())]
        assert jobs[0] == "relax-gateway"
        assert "relax_watch_failures_total 0.0" in seen
        await handle.execute_update("stop")
        await handle.result()

        async def gone() -> bool:
            return not await told(run)

        await until(gone)
        assert json.loads((tmp_path / TARGETS).read_text()) == []
