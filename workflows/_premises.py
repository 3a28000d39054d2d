"""The long-lived workflows of a run: lease and roles, and the trainer that the lease drives.

They are started with parent-close policy ABANDON: they outlive every continue-as-new of the run.
"""

import asyncio

from temporalio import workflow

from relax_infer.contracts.lease import LeaseInput, RoleInput, RoleOperation, RoleResult
from relax_infer.contracts.run import RunPlan
from relax_infer.contracts.training import TrainerOperation
from workflows._calls import STOP_TRAINER
from workflows._lease_client import LeaseClient
from workflows._mailbox import Mailbox
from workflows._visible import attributes


def inference_roles(plan: RunPlan) -> tuple[str, ...]:
    return tuple(role for role in plan.roles if role != "trainer")


async def start_lease(plan: RunPlan) -> None:
    run = plan.run.run
    await workflow.start_child_workflow(
        "GpuLease",
        LeaseInput(
            run=plan.run,
            roles=plan.roles,
            operation_timeout=plan.operation_timeout,
            reconcile_timeout=plan.reconcile_timeout,
            trainer=plan.trainer,
            apart=plan.apart,
        ),
        id=f"{run}.lease",
        parent_close_policy=workflow.ParentClosePolicy.ABANDON,
        search_attributes=attributes(run=run),
        static_summary=f"who may use the GPUs of {run}",
    )


async def start_roles(plan: RunPlan, restarts: int = 0) -> None:
    """``restarts``: how often the roles of this run were started anew; orders what they publish."""
    await asyncio.gather(*(_start_role(plan, role, restarts) for role in inference_roles(plan)))


async def _start_role(plan: RunPlan, role: str, restarts: int) -> None:
    run = plan.run.run
    await workflow.start_child_workflow(
        "InferenceRole",
        RoleInput(
            run=plan.run,
            role=role,
            groups=tuple(g for g in plan.groups if g.role == role),
            operation_timeout=plan.operation_timeout,
            restarts=restarts,
        ),
        id=f"{run}.{role}",
        parent_close_policy=workflow.ParentClosePolicy.ABANDON,
        search_attributes=attributes(run=run, role=role),
        static_summary=f"{role} of {run}",
    )


async def stop_role(mail: Mailbox, run: str, role: str, attempt: str) -> None:
    """Every process of the role is gone, by proof, and its workflows have ended."""
    await mail.ask(
        f"{run}.{role}",
        "stop",
        RoleOperation(method="stop", fence=None),
        RoleResult,
        operation_id=f"{workflow.info().run_id}:{role}:stop:{attempt}",
    )


async def resolve_role(mail: Mailbox, run: str, role: str, word: str, attempt: str) -> None:
    """Carry a person's word to a role that could not be stopped."""
    await mail.ask(
        f"{run}.{role}",
        "resolve",
        RoleOperation(method="resolve", fence=None, word=word),
        RoleResult,
        operation_id=f"{workflow.info().run_id}:{role}:resolve:{attempt}",
    )


async def stop_trainer(plan: RunPlan, lease: LeaseClient, attempt: str = "1") -> None:
    last = await lease.take("deactivate", "trainer")
    if last.fence is None:
        return
    await STOP_TRAINER(
        TrainerOperation(
            trainer=plan.trainer,
            operation_id=f"{workflow.info().run_id}:trainer:stop:{attempt}",
            fence=last.fence,
        ),
        summary="stop the trainer",
    )
