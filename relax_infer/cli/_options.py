"""The command's root, and the arguments that several commands share."""

import os
import shlex
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from relax_infer.cli._completion import complete_field, complete_recipe, complete_run, complete_step
from relax_infer.cli._errors import Commands

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    help="Reinforcement-learning post-training as durable Temporal workflows.",
    epilog="\n\n".join(
        (
            "Begin with:  relax-infer run quickstart",
            "Complete with Tab:  relax-infer --install-completion",
            "Exit codes: 0 done, 1 failed, 2 bad input, 3 blocked on a person.",
        )
    ),
)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"relax-infer {version('relax-infer')}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show it and exit."),
    ] = False,
) -> None:
    """Reinforcement-learning post-training as durable Temporal workflows."""


Home = Annotated[
    Path, typer.Option(envvar="RELAX_HOME", help="Folder of the local stack: store, models, logs.")
]
Run = Annotated[str, typer.Argument(help="Run id.", metavar="RUN", autocompletion=complete_run)]
Step = Annotated[
    int,
    typer.Argument(min=0, help="Number of the step.", metavar="STEP", autocompletion=complete_step),
]
Recipe = Annotated[
    str,
    typer.Argument(
        help="Name of a shipped recipe, or a YAML file.",
        metavar="RECIPE",
        autocompletion=complete_recipe,
    ),
]
Assignments = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Another value for a dotted recipe key; repeatable.",
        autocompletion=complete_field,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="JSON on stdout, and nothing else.")]
Memory = Annotated[
    float | None, typer.Option(min=0, help="GiB that must be free to start the stack [10].")
]
Who = Annotated[str, typer.Option(help="Your name; it is kept with the run.")]
Why = Annotated[str, typer.Option(help="What you saw, or changed.")]
HOME = Path(".relax")


def said_home(home: Path) -> str:
    """`` --home X`` where the next command needs it to find the same stack, else nothing."""
    known = os.environ.get("RELAX_HOME", str(HOME))
    return "" if home == Path(known) else f" --home {shlex.quote(str(home))}"
