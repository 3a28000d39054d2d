"""How commands end: the four exit codes, and errors that say what to do."""

import sys
from enum import IntEnum
from typing import Any

import typer
from typer.core import TyperGroup

from relax_infer.contracts.failures import RelaxError

ORDER = (
    *("up", "run", "status", "pause", "resume", "stop", "resolve", "report", "samples", "down"),
    *("plan", "config", "doctor", "worker", "gateway"),
)
INTERRUPTED = 130
"""Ctrl-C, as shells report it."""


class Code(IntEnum):
    """Exit codes of every command."""

    DONE = 0
    FAILED = 1
    BAD_INPUT = 2
    """Nothing is left running that the command started."""
    BLOCKED = 3
    """A person must decide."""


class CommandError(RelaxError):
    """What a person asked for cannot be done; one line, with the cure."""

    code = Code.BAD_INPUT


class UnansweredError(CommandError):
    """The command was sent and nobody said what became of it."""

    code = Code.FAILED


class Commands(TyperGroup):
    """Turns errors meant for a person into a line on stderr and an exit code."""

    def list_commands(self, ctx: Any) -> list[str]:
        """In the order in which a person meets them."""
        order = {name: k for k, name in enumerate(ORDER)}
        return sorted(super().list_commands(ctx), key=lambda name: order.get(name, len(order)))

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except RelaxError as error:
            complain(str(error))
            raise typer.Exit(getattr(error, "code", Code.BAD_INPUT)) from error
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None


def complain(text: str) -> None:
    """One error, to stderr."""
    head = typer.style("Error:", fg="red", bold=True) if sys.stderr.isatty() else "Error:"
    typer.echo(f"{head} {text}", err=True)
