"""A run over the scripted world during which the workers' code changes; prints what ran where.

A process of its own, started with RELAX_DEPLOYMENT and RELAX_BUILD_ID: workflows read what they say
about versions once.
"""

import asyncio
import json
import os
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from temporalio.client import Client
from temporalio.testing import WorkflowEnvironment

from relax_infer.contracts.policies import QUEUES
from tests.workflows.scripted_world import ScriptedWorld, until
from tests.workflows.test_training_run import start
from workers import worker
from workers._converter import data_converter
from workers._temporal import DYNAMIC
from workflows._visible import REWARD, ROLE, RUN, STATE, STEP, WEIGHT_VERSION

TEMPORAL = str(Path(sys.executable).parent / "temporal")
MAKE_CURRENT = "worker deployment set-current-version --deployment-name relax --build-id"
"""As docs/deploy.md has it."""
DESCRIBE = "worker deployment describe-version --deployment-name relax --build-id"
_PATIENCE = 80.0
"""Seconds; who waits for this process waits longer, so that it ends its server itself."""
WATCHED = ("", ".lease", ".rollout", ".step-1", ".step-2", ".step-3", ".step-4")


async def temporal(client: Client, command: str, *words: str) -> tuple[int, str]:
    running = await asyncio.create_subprocess_exec(
        *(TEMPORAL, *command.split(), *words),
        *("--address", client.service_client.config.target_host),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    out, _ = await running.communicate()
    return running.returncode or 0, out.decode()


async def begin(client: Client, stack: AsyncExitStack, build: str) -> None:
    """Workers of a build on every queue; then it becomes the current one."""
    os.environ["RELAX_BUILD_ID"] = build
    for queue in QUEUES:
        await stack.enter_async_context(worker.make_worker(client, queue))

    async def known() -> bool:
        code, out = await temporal(client, DESCRIBE, build)
        return code == 0 and all(queue in out for queue in QUEUES)

    await until(known)
    code, out = await temporal(client, MAKE_CURRENT, build, "--yes")
    assert code == 0, out


async def placed(client: Client, workflow_id: str) -> tuple[int, str]:
    """Behaviour, and the build that the workflow's last task ran on."""
    told = await client.get_workflow_handle(workflow_id).describe()
    info = told.raw_description.workflow_execution_info.versioning_info
    return info.behavior, info.deployment_version.build_id


async def main() -> dict[str, Any]:
    world = ScriptedWorld()
    world.faults["generate_groups"] = ["", "hold"]
    worker.ACTIVITIES = tuple(world.activities())
    async with (
        await WorkflowEnvironment.start_local(
            dev_server_existing_path=TEMPORAL,
            data_converter=data_converter(),
            search_attributes=[RUN, STEP, ROLE, STATE, WEIGHT_VERSION, REWARD],
            dev_server_extra_args=list(DYNAMIC),
            dev_server_log_level="error",
        ) as environment,
        AsyncExitStack() as stack,
    ):
        client = environment.client
        await begin(client, stack, "one")
        handle = await start(client, steps=4)
        await asyncio.wait_for(world.held.wait(), _PATIENCE)
        await begin(client, stack, "two")
        world.go_on.set()
        try:
            done = await asyncio.wait_for(handle.result(), _PATIENCE)
        except TimeoutError:
            seen = [(w.id, str(w.status)) async for w in client.list_workflows()]
            raise AssertionError(f"it goes on: {world.calls}, {world.log[-6:]}, {seen}") from None
        seen = {name: await placed(client, f"{handle.id}{name}") for name in WATCHED}
    told = {"state": done.state, "weights": done.weight_version, "broken": world.violations}
    return {**told, "seen": seen}


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(asyncio.run(main())))
