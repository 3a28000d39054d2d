"""What a person asks of a run, and what the answer means."""

import asyncio
from collections.abc import Sequence
from typing import Literal

import typer
from temporalio.client import WorkflowUpdateFailedError, WorkflowUpdateRPCTimeoutOrCancelledError
from temporalio.service import RPCError, RPCStatusCode

from relax_infer.cli._errors import CommandError, UnansweredError
from relax_infer.cli._pollers import Notice
from relax_infer.cli._runs import NobodyAnswersError, Runs, words_of
from relax_infer.contracts.base import Message
from relax_infer.contracts.run import ResolveRun, RunStatus
from relax_infer.machines import RUN, RunEvent, RunState

Request = Literal["pause", "resume", "stop", "resolve"]

PATIENCE = 90.0
"""Seconds for which a worker that does not answer is asked again before anything is sent."""
_UPDATE = 120.0
"""Seconds that a sent request may take."""
_EVENTS: dict[Request, RunEvent] = {
    "pause": RunEvent.PAUSE_ASKED,
    "resume": RunEvent.RESUME_ASKED,
    "stop": RunEvent.STOP_ASKED,
    "resolve": RunEvent.RESOLVED_BY_OPERATOR,
}
_WHY_NOT: dict[tuple[Request, RunState], str] = {
    ("pause", RunState.STARTING): "it can be paused once it is RUNNING",
    ("pause", RunState.PAUSING): "it pauses already, after the step at work",
    ("pause", RunState.PAUSED): "it is paused already",
    ("pause", RunState.BLOCKED): "it waits for a person and begins nothing by itself",
    ("pause", RunState.STOPPING): "it is being taken down",
    ("resume", RunState.RUNNING): "it goes on already",
    ("resume", RunState.STARTING): "it has not been paused",
    ("resume", RunState.BLOCKED): "it waits for a decision, not for the end of a pause",
    ("resume", RunState.STOPPING): "it is being taken down; a new run begins anew",
    ("stop", RunState.STOPPING): "it is being taken down already",
}


async def ask(
    runs: Runs, run: str, request: Request, resolution: ResolveRun | None = None
) -> RunStatus:
    """Ask, and say what the run answered. While no worker is there for it, that is said once.

    Raises:
        CommandError: it is not legal now, with what would be.
        NobodyAnswersError: no worker answers; nothing was sent.
        UnansweredError: it was sent and nobody said what became of it.
    """
    async with runs.notice() as notice:
        before = await _status(runs, run, notice)
        if before.state in RUN.terminal:
            raise CommandError(
                f"Run {run} is over ({before.state}): {request} comes too late.",
                cure=f"A new run goes on where it ended: `relax-infer run RECIPE --from {run}`.",
            )
        if not RUN.allows(before.state, _EVENTS[request]):
            raise refusal(run, before.state, request)
        arguments: Sequence[Message] = (resolution,) if resolution is not None else ()
        return await _send(runs, run, request, arguments)


async def _status(runs: Runs, run: str, notice: Notice) -> RunStatus:
    """Where the run stands. A worker that is busy, or was there minutes ago, is waited for; where
    there was none, nobody waits."""
    try:
        return (await runs.status(run))[0]
    except NobodyAnswersError:
        pollers = await runs.pollers()
        if not pollers.remembered:
            raise
        if not pollers.asking:
            notice.say(pollers)
        else:
            typer.echo(
                f"No worker answers for {run} yet, or it is busy; asks again for up to"
                f" {PATIENCE:.0f} s (Ctrl-C gives up).",
                err=True,
            )
    return (await runs.status(run, patience=PATIENCE))[0]


def refusal(run: str, state: RunState, request: Request) -> CommandError:
    """In the words of a person, not of the table."""
    why = _WHY_NOT.get((request, state))
    if request == "resolve":
        why = "there is nothing to resolve; that is for a run that is BLOCKED"
    legal = [
        f"`{command_of(run, name)}`" for name, event in _EVENTS.items() if RUN.allows(state, event)
    ]
    cure = f"What can be done now: {', '.join(legal)}." if legal else ""
    return CommandError(
        f"Run {run} is {state}: {why or f'{request} is not possible now'}", cure=cure
    )


def command_of(run: str, request: Request) -> str:
    more = " --who NAME --why TEXT" if request == "resolve" else ""
    return f"relax-infer {request} {run}{more}"


async def _send(runs: Runs, run: str, request: Request, arguments: Sequence[Message]) -> RunStatus:
    handle = runs.client.get_workflow_handle(run)
    look = f"`relax-infer status {run}` says where it stands."
    try:
        async with asyncio.timeout(_UPDATE):
            return await handle.execute_update(request, args=arguments, result_type=RunStatus)
    except WorkflowUpdateFailedError as error:
        now, _ = await runs.status(run, patience=PATIENCE)
        if now.state not in RUN.terminal and not RUN.allows(now.state, _EVENTS[request]):
            raise refusal(run, now.state, request) from error
        raise CommandError(f"Run {run}: {_plain(words_of(error.cause))}.") from error
    except (TimeoutError, WorkflowUpdateRPCTimeoutOrCancelledError) as error:
        raise UnansweredError(
            f"Run {run} did not answer `{request}` within {_UPDATE:.0f} s: no worker answers, or it"
            " is busy. It may yet do it.",
            cure=look,
        ) from error
    except RPCError as error:
        if error.status is RPCStatusCode.NOT_FOUND:
            raise CommandError(f"Run {run} has just ended: {request} came too late.") from error
        raise UnansweredError(
            f"Run {run}, `{request}`: Temporal says {error.message}.", cure=look
        ) from error


def _plain(text: str) -> str:
    """The workflow speaks of its own fields; here they are options."""
    return text.replace("with confirm_released", "with --confirm-released")
