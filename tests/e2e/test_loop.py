"""The loop on real parts: SGLang, sglang-router, Ray, TransferQueue, Megatron, Temporal."""

import json
import os
import signal
import uuid
from pathlib import Path
from typing import Any

import pytest
from ray import get_actor
from ray.util import list_named_actors
from temporalio.client import Client

from relax_infer.contracts.engines import EngineGroupSpec
from relax_infer.contracts.lease import LifecycleInput
from relax_infer.contracts.run import RunStatus
from relax_infer.engines import EngineGroup
from relax_infer.gateway.front import Front
from relax_infer.machines import RunState, StepPhase
from relax_infer.report import write_report
from tests.e2e.looking import (
    Handle,
    RunFiles,
    finish,
    run_documented_program,
    start,
    start_as_typed,
    status,
    until,
)
from workers.local import Stack
from workflows._visible import REWARD, STATE, STEP, WEIGHT_VERSION

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(1800),
    pytest.mark.asyncio(loop_scope="session"),
]

LIFECYCLES = ("rollout.policy", "genrm.judge")
SETS = [
    {"name": "greedy", "problems": 512},
    {"name": "many", "problems": 32, "samples": 4, "temperature": 1.0, "pass_at": [4]},
]


async def test_three_steps_from_prompts_to_new_weights(
    stack: Stack, client: Client, tmp_path: Path
):
    """The quickstart, shorter: every part real, each thing that the step promised is on record. It
    is started by the Python program of the documents."""
    run = f"run-{uuid.uuid4().hex[:8]}"
    overrides = {"evaluation.every": 3, "evaluation.sets": SETS}
    await run_documented_program(stack, run, f"steps=3, overrides={overrides}")
    done = await client.get_workflow_handle(run, result_type=RunStatus).result()
    assert done.state is RunState.DONE
    assert done.step == 3
    assert set(done.progress[-1].evaluated) == {"greedy", "many", "many pass@4"}
    files = RunFiles(stack.home, run)

    first = files.record(0).result.evaluation
    assert first is not None
    assert first.problems == 512
    assert 0.25 <= first.accuracy <= 0.45
    assert first.weight_version == 0

    for step in (1, 2, 3):
        record = files.record(step)
        assert record.outcome is StepPhase.DONE
        batch, training = record.result.batch, record.result.training
        assert batch is not None
        assert training is not None
        assert batch.groups + batch.dropped_groups == 32
        assert batch.samples == 8 * batch.groups == training.rows
        assert batch.reward_mean is not None
        assert batch.exact_share is not None
        # The GenRM agrees with the exact checker on nearly every sample.
        assert abs(batch.reward_mean - batch.exact_share) < 0.05
        assert training.logprob_gap < 0.02
        assert record.result.weights.version == step

    last = files.record(3).result.evaluation
    assert last is not None
    assert last.accuracy > first.accuracy + 0.1
    many = last.sets[1]
    assert many.accuracy < many.pass_at[4] <= 1.0
    assert last.unanswered == 0
    assert [entry.result.step for entry in files.ledger().entries] == [1, 2, 3]
    await steps_are_seen_in_the_web_ui(client, run, files)

    page = write_report((stack.home / "store").as_uri(), run, tmp_path / "report.html")
    text = page.read_text()
    assert run in text
    assert "<svg" in text
    assert "many pass@4" in text
    assert '"prompt":"' in text


async def steps_are_seen_in_the_web_ui(client: Client, run: str, files: RunFiles) -> None:
    """As rows of a list, by search attributes; and each in words and by the names of its bars."""
    query = f"WorkflowType = 'TrainingStep' AND RelaxRun = '{run}'"
    rows = [found async for found in client.list_workflows(query)]
    shown = {row.typed_search_attributes[STEP]: row.typed_search_attributes for row in rows}
    assert sorted(shown) == [0, 1, 2, 3]
    for step, attributes in shown.items():
        result = files.record(step).result
        assert attributes[STATE] == "DONE"
        assert attributes[WEIGHT_VERSION] == result.weights.version
        if result.batch is not None:
            assert attributes[REWARD] == pytest.approx(result.batch.reward_mean)
    step = client.get_workflow_handle(f"{run}.step-2")
    metadata: Any = await step.query("__temporal_workflow_metadata")
    assert "**DONE**" in metadata.current_details
    names = {
        json.loads(event.user_metadata.summary.data)
        async for event in step.fetch_history_events()
        if event.user_metadata.summary.data
    }
    assert {"generate, attempt 1", "train, attempt 1", "publish"} <= names, names


async def test_a_run_outlives_server_gateway_and_five_continue_as_news(
    stack: Stack, client: Client, ray: None
):
    """Killed while it runs: the Temporal server, the gateway and the router. The lease, the roles,
    the engines and the trainer are the same ones before and after. It was started by Temporal's
    command line, as the documents say."""
    plan = {"evaluation.every": 0, "distillation": None, "rollout.prompts_per_step": 8}
    run = f"run-{uuid.uuid4().hex[:8]}"
    document = {"recipe": "quickstart", "steps": 7, "overrides": plan, "steps_per_history": 1}
    start_as_typed(stack, run, document)
    handle: Handle = client.get_workflow_handle(run, result_type=RunStatus)
    await until(lambda: at_step(handle, 1), 1000, "the first step")
    began, histories = await who_is_there(client, run), await histories_of(client, run)

    front = await Front(run).describe()
    assert front is not None
    kill(front["gateway_pid"])
    kill(front["router_pid"])
    await until(lambda: at_step(handle, 2), 200, "a step after gateway and router died")

    stack.kill("temporal", signal.SIGKILL)
    assert not stack.alive("temporal")
    stack.start_temporal()
    await until(lambda: at_step(handle, 6), 300, "steps after the server died")
    assert await who_is_there(client, run) == began
    assert len(await histories_of(client, run)) >= len(histories) + 5

    done = await finish(handle)
    assert done.step == 7
    steps = [entry.result.step for entry in RunFiles(stack.home, run).ledger().entries]
    assert steps == [1, 2, 3, 4, 5, 6, 7]


async def who_is_there(client: Client, run: str) -> dict[str, str]:
    """The run's lasting workflows, its actors and its engines, and which incarnation each is."""
    names = ["lease", *LIFECYCLES, *(name.split(".")[0] for name in LIFECYCLES)]
    there = {
        f"workflow {name}": (await client.get_workflow_handle(f"{run}.{name}").describe()).run_id
        for name in names
    }
    for group in await plan_groups(client, run):
        for engine in await EngineGroup(group).describe():
            there[f"engine {engine.engine_id}"] = str(engine.incarnation)
    named: list[Any] = list_named_actors(all_namespaces=True)
    for actor in named:
        if run in actor["namespace"] or run in actor["name"]:
            found = get_actor(actor["name"], namespace=actor["namespace"])
            there[f"actor {actor['name']}"] = found._actor_id.hex()
    assert any("trainer" in name for name in there)
    return there


async def histories_of(client: Client, run: str) -> set[str]:
    listed = client.list_workflows(f"WorkflowId = '{run}'")
    return {found.run_id async for found in listed}


async def at_step(handle: Handle, step: int) -> bool:
    seen = await status(handle)
    assert seen is None or seen.state is not RunState.BLOCKED, seen
    return seen is not None and seen.step >= step


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


async def plan_groups(client: Client, run: str) -> list[EngineGroupSpec]:
    """The specs that the run's EngineLifecycles were started with."""
    groups = []
    for name in LIFECYCLES:
        history = await client.get_workflow_handle(f"{run}.{name}").fetch_history()
        payload = history.events[0].workflow_execution_started_event_attributes.input.payloads[0]
        groups.append(LifecycleInput.model_validate_json(payload.data).group)
    return groups


@pytest.mark.slow
async def test_restarted_engines_let_go_by_a_proved_stop(stack: Stack, client: Client):
    """Offload kind ``restart``: on a CPU the only release that is real."""
    overrides = {
        "evaluation.every": 0,
        "distillation": None,
        "rollout.engine.replicas": 1,
        "rollout.engine.offload": "restart",
        "genrm.engine.offload": "restart",
        "rollout.prompts_per_step": 4,
    }
    handle = await start(client, steps=3, overrides=overrides)
    done = await finish(handle)
    assert done.state is RunState.DONE
    files = RunFiles(stack.home, handle.id)
    proofs = [
        item["proof"]
        for path in files.folder.glob("engines/evidence/*.json")
        for item in evidence(path)
    ]
    assert proofs.count("process_gone") >= 3 * 3
    assert files.record(3).result.weights.version == 3


def evidence(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())
