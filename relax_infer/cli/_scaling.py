"""A scale request on its way to a role, and what its answer means for a person."""

import asyncio
from pathlib import Path

from temporalio.client import WorkflowUpdateFailedError, WorkflowUpdateRPCTimeoutOrCancelledError
from temporalio.service import RPCError, RPCStatusCode

from relax_infer.cli._errors import Code, CommandError, UnansweredError
from relax_infer.cli._runs import runs_of, words_of
from relax_infer.cli._server import connected
from relax_infer.contracts.counted import counted
from relax_infer.contracts.scale import ScaleRequest, ScaleStatus
from relax_infer.machines import ScaleState

_ACCEPTED = 120.0
"""Seconds for the role to take the request in."""
_WELL = (ScaleState.ACTIVE, ScaleState.COMPLETED, ScaleState.NOOP)


async def ask_role(home: Path, run: str, role: str, request: ScaleRequest) -> ScaleStatus:
    """Have the role take the request in, or carry it out where the request waits.

    Raises:
        CommandError: it is refused, or there is no such run or role.
        UnansweredError: nobody said what became of it.
    """
    async with connected(home) as server, (runs := runs_of(server)).notice():
        await runs.status(run, patience=30.0)  # says so where nobody is at work
        handle = server.client.get_workflow_handle(f"{run}.{role}")
        look = f"Ask again with --id {request.operation_id}: it is done once."
        try:
            async with asyncio.timeout(None if request.wait else _ACCEPTED):
                return await handle.execute_update("scale", request, result_type=ScaleStatus)
        except WorkflowUpdateFailedError as error:
            raise CommandError(f"{run}, {role}: {words_of(error.cause)}") from error
        except (TimeoutError, WorkflowUpdateRPCTimeoutOrCancelledError) as error:
            raise UnansweredError(f"{run}, {role} did not answer.", cure=look) from error
        except RPCError as error:
            if error.status is RPCStatusCode.NOT_FOUND:
                raise CommandError(
                    f"Run {run} has no role {role} at work.", cure=f"`relax-infer status {run}`"
                ) from error
            raise UnansweredError(f"Temporal says {error.message}.", cure=look) from error


def told(status: ScaleStatus) -> list[str]:
    """Lines for a person."""
    counts = "" if status.before is None else f"  {counted(status.before, 'replica')} before"
    if status.after is not None:
        counts += f", {status.after} now"
    what = "would be done" if status.dry_run and not status.why else status.state
    lines = [f"{status.role} {status.model}  scale {status.operation_id}  {what}{counts}"]
    if status.why:
        lines.append(f"  {status.why}")
    for row in status.replicas:
        name = row.engine_id or row.url or "a new replica"
        why = ": ".join(part for part in (row.failure, row.why) if part)
        lines.append(f"  {name}  {row.outcome}" + (f"  {why}" if why else ""))
    if not status.ended:
        lines.append(
            f"How it stands: relax-infer scale {status.run} {status.role}"
            f" {status.target if status.target is not None else '--url …'}"
            f" --id {status.operation_id}"
        )
    return lines


def exit_code(status: ScaleStatus) -> Code:
    """Of the command: what was refused is bad input, and what was reached in part only failed."""
    if status.state is ScaleState.REJECTED:
        return Code.BAD_INPUT
    well = not status.ended or status.dry_run or status.state in _WELL
    return Code.DONE if well else Code.FAILED
