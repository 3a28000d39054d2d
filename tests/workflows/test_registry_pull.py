"""A gateway that starts empty asks the real role workflows; a stub of them answers as they do."""

import asyncio
import uuid

import pytest
from temporalio.client import Client

from relax_infer.contracts.batch import RegistryPush
from relax_infer.contracts.run import RunInput, RunStatus
from relax_infer.discovery import Role
from relax_infer.gateway import RegistryIntake, RegistryRefused, serve
from relax_infer.machines import RunState
from tests.gateway.asking import ask
from tests.gateway.fakes import gateway
from tests.gateway.test_gateway_process import PublishedRole
from tests.workflows.scripted_world import ScriptedWorld
from tests.workflows.test_in_place import decoupled
from tests.workflows.test_training_run import Handle, Working, nothing_was_broken
from workers.gateway import RoleWorkflows

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture
def roles(monkeypatch: pytest.MonkeyPatch, temporal: Client) -> RoleWorkflows:
    """As the process of a run's gateway has them: they find Temporal by its environment."""
    monkeypatch.setenv("TEMPORAL_ADDRESS", temporal.service_client.config.target_host)
    monkeypatch.setattr(serve, "_FIRST_PAUSE", 0.01)
    monkeypatch.setattr(serve, "_LONGEST_PAUSE", 0.05)
    return RoleWorkflows(f"run-{uuid.uuid4().hex[:8]}")


async def start(client: Client, roles: RoleWorkflows) -> Handle:
    given = RunInput.model_validate({"recipe": "scripted", "steps": 1})
    return await client.start_workflow(
        "TrainingRun", given, id=roles._run, task_queue="relax", result_type=RunStatus
    )


def pulling(intake: RegistryIntake, roles: RoleWorkflows) -> list[asyncio.Task[None]]:
    return [asyncio.create_task(serve._pull(intake, role, roles.pull)) for role in Role]


def offered(intake: RegistryIntake, push: RegistryPush) -> str:
    try:
        return intake.offer(push.role, push.term, push.document)
    except RegistryRefused as refused:
        return refused.reason


def last_pushes(world: ScriptedWorld) -> dict[str, RegistryPush]:
    return {push.role: push for push in world.pushes}


async def test_it_serves_what_was_published_last_and_takes_newer_pushes_only(
    working: Working, roles: RoleWorkflows
):
    world = decoupled()
    world.faults["load_engine_weights"] = ["hold"]
    async with working(world) as client, gateway() as front:
        handle = await start(client, roles)
        await world.held.wait()
        async with asyncio.timeout(30):
            await asyncio.gather(*pulling(front.intake, roles))
        pushed = last_pushes(world)
        assert pushed.keys() == {"rollout", "genrm", "teacher"}
        for role, push in pushed.items():
            held = front.intake.get(role)
            assert held is not None
            assert (held.term, held.snapshot.to_dict()) == (push.term, push.document)
            got = await ask("GET", f"{front.url}/{role}/engines")
            assert (got.status, got.json) == (200, push.document)
            assert front.intake.offer(role, push.term, push.document) == "unchanged"
        # What it was told is what it answers by: the policy is taking weights, the others are up.
        called = {
            role: (await ask("GET", f"{front.url}/{role}/health?schema=2")).json["ready"]
            for role in pushed
        }
        assert called == {"rollout": False, "genrm": True, "teacher": True}
        earlier = next(push for push in world.pushes if push.role == "rollout")
        with pytest.raises(RegistryRefused, match="older"):
            front.intake.offer("rollout", earlier.term, earlier.document)
        world.go_on.set()
        done = await handle.result()
        push = last_pushes(world)["rollout"]
        assert front.intake.offer("rollout", push.term, push.document) == "accepted"
    assert done.state is RunState.DONE
    nothing_was_broken(world)


async def test_one_that_is_there_before_its_run_asks_until_the_roles_begin(
    working: Working, roles: RoleWorkflows
):
    world, intake = decoupled(), RegistryIntake()
    async with working(world) as client:
        asking = pulling(intake, roles)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(asyncio.gather(*asking)), 0.5)
        assert intake.to_dict() == {}
        handle = await start(client, roles)
        async with asyncio.timeout(30):
            await asyncio.gather(*asking)
        assert intake.to_dict().keys() == {"rollout", "genrm", "teacher"}
        await handle.result()
        for push in world.pushes:
            assert offered(intake, push) in ("accepted", "unchanged", "older")
    for role, push in last_pushes(world).items():
        held = intake.get(role)
        assert held is not None
        assert held.snapshot.to_dict() == push.document
    nothing_was_broken(world)


async def test_the_stub_answers_as_a_real_role_does(working: Working, roles: RoleWorkflows):
    world = decoupled()
    async with working(world) as client:
        handle = await start(client, roles)
        await handle.result()
        answer = await roles.pull(Role.GENRM)
    assert answer is not None
    stub = PublishedRole()
    stub.document = dict(answer["document"])
    assert {k: type(v) for k, v in stub.registry().items()} == {
        k: type(v) for k, v in answer.items()
    }
