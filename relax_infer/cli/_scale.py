"""``relax-infer scale``: more and fewer replicas of a role while its run goes on."""

import asyncio
import json
import uuid
from pathlib import Path
from typing import Annotated

import typer

from relax_infer.cli._errors import CommandError
from relax_infer.cli._examples import epilog
from relax_infer.cli._options import HOME, Home, Json, Run, app

ROLES = ("rollout", "genrm", "teacher")


def complete_scaled(incomplete: str) -> list[str]:
    """Roles that have replicas."""
    return [role for role in ROLES if role.startswith(incomplete)]


@app.command(epilog=epilog("scale"))
def scale(
    run: Run,
    role: Annotated[
        str,
        typer.Argument(
            help="rollout, genrm or teacher.", metavar="ROLE", autocompletion=complete_scaled
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
        typer.Option(help="Remove the replica or adopted engine with this address; repeatable."),
    ] = None,
    adopt: Annotated[
        list[str] | None,
        typer.Option(help="Call this SGLang server, which somebody else runs, too; repeatable."),
    ] = None,
    all_or_none: Annotated[
        bool, typer.Option("--all-or-none", help="Of several to adopt, all, or none of them.")
    ] = False,
    model: Annotated[str | None, typer.Option(help="Model, where the role has several.")] = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Do not wait for requests that a leaving replica admitted."),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be done; do nothing.")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until it has ended.")] = False,
    auto: Annotated[
        str | None,
        typer.Option(
            metavar="on|off", help="Switch the recipe's autoscale policies of this role on or off."
        ),
    ] = None,
    who: Annotated[str, typer.Option(help="With --auto: your name, for the record.")] = "",
    why: Annotated[str, typer.Option(help="With --auto: your reason, for the record.")] = "",
    id: Annotated[
        str | None,
        typer.Option(help="Id of the operation; the same id again tells how it stands."),
    ] = None,
    as_json: Json = False,
    home: Home = HOME,
) -> None:
    """Give a role more or fewer replicas while its run goes on.

    Without a number: how its operations and autoscale policies stand. Only for a role that has its
    GPUs for itself. Exit code 1 if not all of it was reached.
    """
    from relax_infer.cli._scaling import ask_role, exit_code, told
    from relax_infer.contracts.scale import ScaleRequest

    if role not in ROLES:
        raise CommandError(f"{role} has no replicas", cure=f"Roles: {', '.join(ROLES)}.")
    asked = replicas is not None or bool(url) or bool(adopt)
    if auto is not None and asked:
        raise CommandError(
            "--auto goes without a number and without --url",
            cure=f"`relax-infer scale {run} {role} --auto {auto}` first, then the other.",
        )
    if asked and sum((replicas is not None, bool(url), bool(adopt))) != 1:
        raise CommandError(
            "Say how many replicas there shall be, or whose address is to go",
            cure=f"`relax-infer scale {run} {role} 3`, --url or --adopt http://HOST:PORT.",
        )
    if not asked:
        _policies(home, run, role, model, auto, who, why, as_json=as_json)
        return
    try:
        request = ScaleRequest(
            operation_id=id or uuid.uuid4().hex[:12],
            model=model,
            direction="in" if url else "out" if adopt else None,
            num_replicas=replicas,
            engine_urls=tuple(url or adopt or ()),
            on_partial="rollback_all" if all_or_none else "keep",
            force=force,
            dry_run=dry_run,
            wait=wait or dry_run,
        )
    except ValueError as error:
        raise CommandError(
            f"--id {id} is no id of an operation", cure="Letters, digits, - and _; at most 64."
        ) from error
    status = asyncio.run(ask_role(home, run, role, request))
    typer.echo(
        json.dumps(status.model_dump(mode="json"), indent=2) if as_json else "\n".join(told(status))
    )
    raise typer.Exit(exit_code(status))


def _policies(
    home: Path,
    run: str,
    role: str,
    model: str | None,
    auto: str | None,
    who: str,
    why: str,
    *,
    as_json: bool,
) -> None:
    """Look, or switch and then look."""
    from relax_infer.cli._autoscaling import look, shown, switch
    from relax_infer.contracts.autoscale import AutoscaleSwitch

    if auto is not None:
        if auto not in ("on", "off") or not who.strip() or not why.strip():
            raise CommandError(
                f"--auto {auto} needs on or off, --who and --why",
                cure=f'`relax-infer scale {run} {role} --auto off --who ada --why "a test"`.',
            )
        wanted = AutoscaleSwitch(on=auto == "on", who=who, why=why, model=model)
        asyncio.run(switch(home, run, role, wanted))
    scaling = asyncio.run(look(home, run, role))
    text = scaling.model_dump_json(indent=2) if as_json else "\n".join(shown(scaling))
    typer.echo(text)
