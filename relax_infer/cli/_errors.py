"""How commands end: the four exit codes, and errors that say what to do."""

import re
import sys
from enum import IntEnum
from typing import Any

import typer
from typer.core import TyperGroup

from relax_infer.contracts.failures import RelaxError

_UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""What typer raises for an option that there is not, which it does not export."""

ORDER = (
    *(
        "up",
        "run",
        "status",
        "pause",
        "resume",
        "stop",
        "resolve",
        "scale",
        "report",
        "samples",
        "logs",
    ),
    *(
        "step",
        "steps",
        "runs",
        "down",
        "plan",
        "config",
        "doctor",
        "env",
        "worker",
        "gateway",
        "guard",
    ),
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
        except _UsageError as error:
            option = str(getattr(error, "option_name", ""))
            if re.fullmatch(r"-\d+", option):
                complain(f"{option} is below 0; steps and replicas are counted from 0.")
                raise typer.Exit(Code.BAD_INPUT) from error
            raise


def complain(text: str) -> None:
    """One error, to stderr."""
    text = text if text[-1:] in ".:;!?…" else f"{text}."
    head = typer.style("Error:", fg="red", bold=True) if sys.stderr.isatty() else "Error:"
    typer.echo(f"{head} {text}", err=True)
