"""``relax-infer config convert``: a recipe from another project's launch script."""

import sys
import textwrap
from pathlib import Path
from typing import Annotated

import typer

from relax_infer.cli._errors import Code, CommandError, complain
from relax_infer.cli._examples import epilog
from relax_infer.cli._looks import config


@config.command(epilog=epilog("config convert"))
def convert(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="SCRIPT | - | -- FLAGS",
            help="A launch script, - for one on standard input, or its flags.",
        ),
    ],
    name: Annotated[str, typer.Option(help="Of the recipe.")] = "converted",
) -> None:
    """A recipe from the flags that Relax, slime and Megatron are started with.

    Prints YAML; comments at its top tell of every flag that is no field of it. Exit code 1 if the
    recipe still needs a hand, and what for.
    """
    import yaml

    from relax_infer.compat.flags import convert_flags, flags_of_script
    from relax_infer.config import RecipeError, read_recipe
    from relax_infer.placement import PlacementError, plan_inference_placement

    script = len(words) == 1 and not words[0].startswith("--")
    done = convert_flags(flags_of_script(_read(words[0])) if script else words, name=name)
    for flag, why in sorted(done.notes.items()):
        lines = textwrap.wrap(f"{flag}: {why}", 96, subsequent_indent="  ")
        typer.echo("\n".join(f"# {line}" for line in lines))
    typer.echo(yaml.safe_dump(done.recipe, sort_keys=False).rstrip())
    try:
        plan_inference_placement(read_recipe(done.recipe))
    except RecipeError as error:
        complain(str(error))
        raise typer.Exit(Code.FAILED) from None
    except PlacementError as error:
        reasons = "".join(f"\n  {violation}" for violation in error.violations)
        complain(f"{error.subject}:{reasons}")
        raise typer.Exit(Code.FAILED) from None


def _read(script: str) -> str:
    try:
        return sys.stdin.read() if script == "-" else Path(script).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(
            f"{script} cannot be read: {error}",
            cure="Name a launch script, or give its flags after --.",
        ) from error
