"""``relax-infer scale``: more and fewer replicas of a role while its run goes on."""

import asyncio
import json
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from temporalio.client import WorkflowUpdateFailedError, WorkflowUpdateRPCTimeoutOrCancelledError
from temporalio.service import RPCError, RPCStatusCode

from relax_infer.cli._completion import complete_role
from relax_infer.cli._errors import Code, CommandError, UnansweredError
from relax_infer.cli._examples import epilog
from relax_infer.cli._options import HOME, Home, Json, Run, app

if TYPE_CHECKING:
    from relax_infer.contracts.scale import ScaleRequest, ScaleStatus

ROLES = ("rollout", "genrm", "teacher")
_ACCEPTED = 120.0
"""Seconds for the role to take the request in."""


@app.command(epilog=epilog("scale"))
def scale(
    run: Run,
    role: Annotated[
        str,
        typer.Argument(
            help="rollout, genrm or teacher.", metavar="ROLE", autocompletion=complete_role
        ),
    ],
    replicas: Annotated[
        int | None,
        typer.Argument(
            min=0, metavar="N", help="Replicas that there shall be, the first ones included."
        ),
    ] = None,
    url: Annotated[
        list[str] | None,
        typer.Option(help="Remove the added replica with this address instead; repeatable."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model, where the role has several.")] = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Do not wait for requests that a leaving replica admitted."),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be done; do nothing.")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until it has ended.")] = False,
    id: Annotated[
        str | None,
        typer.Option(help="Id of the operation; the same id again tells how it stands."),
    ] = None,
    as_json: Json = False,
    home: Home = HOME,
) -> None:
    """Give a role more or fewer replicas while its run goes on.

    Only for a role that has its GPUs for itself. Exit code 1 if not all of it was reached.
    """
    from relax_infer.contracts.scale import ScaleRequest

    if role not in ROLES:
        raise CommandError(f"{role} has no replicas", cure=f"Roles: {', '.join(ROLES)}.")
    if (replicas is None) == (not url):
        raise CommandError(
            "Say how many replicas there shall be, or whose address is to go",
            cure=f"`relax-infer scale {run} {role} 3`, or --url http://HOST:PORT.",
        )
    try:
        request = ScaleRequest(
            operation_id=id or uuid.uuid4().hex[:12],
            model=model,
            direction="in" if url else None,
            num_replicas=replicas,
            engine_urls=tuple(url or ()),
            force=force,
            dry_run=dry_run,
            wait=wait or dry_run,
        )
    except ValueError as error:
        raise CommandError(
            f"--id {id} is no id of an operation", cure="Letters, digits, - and _; at most 64."
        ) from error
    status = asyncio.run(_ask(home, run, role, request))
    typer.echo(
        json.dumps(status.model_dump(mode="json"), indent=2) if as_json else "\n".join(told(status))
    )
    raise typer.Exit(exit_code(status))


async def _ask(home: Path, run: str, role: str, request: "ScaleRequest") -> "ScaleStatus":
    from relax_infer.cli._runs import Runs, words_of
    from relax_infer.cli._server import connected
    from relax_infer.contracts.scale import ScaleStatus

    async with connected(home) as server:
        runs = Runs(server.client, server.target.address)
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


def told(status: "ScaleStatus") -> list[str]:
    """Lines for a person."""
    counts = "" if status.before is None else f"  {status.before} replicas before"
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


def exit_code(status: "ScaleStatus") -> Code:
    """Of the command: REJECTED is bad input, and what was reached in part only has failed."""
    if str(status.state) == "REJECTED":
        return Code.BAD_INPUT
    failed = str(status.state) in ("FAILED", "PARTIAL", "CANCELLED")
    interrupted = status.ended and str(status.state) not in _WELL and not status.dry_run
    return Code.FAILED if failed or interrupted else Code.DONE


_WELL = ("ACTIVE", "COMPLETED", "NOOP")
