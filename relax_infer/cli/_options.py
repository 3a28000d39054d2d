"""The command's root, and the arguments that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

from relax_infer.cli._errors import Commands

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    help="Reinforcement-learning post-training as durable Temporal workflows.",
    epilog="Exit codes: 0 done, 1 failed, 2 bad input, 3 blocked on a person.",
)

Home = Annotated[
    Path, typer.Option(envvar="RELAX_HOME", help="Folder of the local stack: store, models, logs.")
]
Run = Annotated[str, typer.Argument(help="Run id.", metavar="RUN")]
Recipe = Annotated[str, typer.Argument(help="Name of a shipped recipe, or a YAML file.")]
Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Another value for a dotted recipe key."),
]
Json = Annotated[bool, typer.Option("--json", help="JSON on stdout, and nothing else.")]
Memory = Annotated[
    float | None, typer.Option(min=0, help="GiB that must be free to start the stack [10].")
]
HOME = Path(".relax")
