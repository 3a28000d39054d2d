"""What people ask of the lease and of roles that makes no sense, and what they are told."""

import pytest
from temporalio.client import WorkflowUpdateFailedError

from relax_infer.contracts.lease import LeaseRequest, RoleCommand
from relax_infer.machines import LeaseEvent, RunState
from tests.workflows.scripted_world import ScriptedWorld, until
from tests.workflows.test_lease_book import ROLES, bring_up
from tests.workflows.test_training_run import Working, nothing_was_broken, running, start
from workflows._lease_book import LeaseBook, LeaseRefused
from workflows._lease_sense import refuse_nonsense

WORD = {"who": "ada", "why": "looked", "confirm_released": True}


def told(book: LeaseBook, method: str, **fields: object) -> str:
    with pytest.raises(LeaseRefused) as refused:
        refuse_nonsense(asked(method, **fields), book)
    return str(refused.value)


def asked(method: str, **fields: object) -> LeaseRequest:
    return LeaseRequest.model_validate({"operation_id": "op", "method": method, **fields})


def in_doubt() -> LeaseBook:
    book = LeaseBook("default", ROLES)
    book.begin_batch("step-1")
    bring_up(book, "genrm")
    book.record("genrm", LeaseEvent.OPERATION_FAILED, at=0.0, reason="died")
    return book


@pytest.mark.parametrize("operation_id", ["", "  "])
def test_an_operation_needs_an_id(operation_id: str):
    text = told(LeaseBook("default", ROLES), "reconcile", operation_id=operation_id)
    assert "needs an operation_id" in text


@pytest.mark.parametrize("role", ["genrm", "rollout"])
def test_only_the_trainer_trains(role: str):
    book = LeaseBook("default", ROLES)
    assert "does not train" in told(book, "acquire", role=role, purpose="train", batch="step-1")
    refuse_nonsense(asked("acquire", role="trainer", purpose="train"), book)
    refuse_nonsense(asked("acquire", role=role, purpose="eval"), book)


def test_the_trainer_is_not_activated_in_a_pending_batch():
    assert "no part in a pending batch" in told(in_doubt(), "activate", role="trainer")


def test_only_what_is_blocked_is_resolved():
    text = told(in_doubt(), "resolve", role="teacher", **WORD)
    assert text.startswith("teacher is SLEEPING, not BLOCKED")
    assert text.endswith("BLOCKED is genrm")
    refuse_nonsense(asked("resolve", role="genrm", **WORD), in_doubt())
    refuse_nonsense(asked("resolve", **WORD), in_doubt())


def test_only_the_current_batch_is_abandoned():
    word = {**WORD, "abandon": True}
    assert "not the current batch (step-1)" in told(in_doubt(), "resolve", batch="step-2", **word)
    assert "no batch to abandon" in told(LeaseBook("default", ROLES), "resolve", **word)
    refuse_nonsense(asked("resolve", batch="step-1", **word), in_doubt())


@pytest.mark.asyncio(loop_scope="session")
async def test_a_role_refuses_what_makes_no_sense(working: Working):
    world = ScriptedWorld()
    weights = {"version": 1, "uri": "/w", "digest": "d"}
    async with working(world) as client:
        handle = await start(client, steps=1)
        await until(lambda: running(handle))
        role = client.get_workflow_handle(f"{handle.id}.genrm")
        for update, fields, text in (
            ("onload", {"operation_id": ""}, "an operation_id is needed"),
            ("offload", {"operation_id": " "}, "an operation_id is needed"),
            ("onload", {"operation_id": "a", "purpose": "train"}, "genrm does not train"),
            ("onload", {"operation_id": "a", "weights": weights}, "without weights"),
        ):
            with pytest.raises(WorkflowUpdateFailedError) as refused:
                await role.execute_update(update, RoleCommand.model_validate(fields))
            assert text in str(refused.value.cause)
        assert (await handle.result()).state is RunState.DONE
    nothing_was_broken(world)
