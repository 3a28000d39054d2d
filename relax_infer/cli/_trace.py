"""``relax-infer trace``: where the time of one step went, from its exported trace."""

import json
from pathlib import Path
from typing import Annotated

import typer

from relax_infer.cli._errors import CommandError
from relax_infer.cli._examples import epilog
from relax_infer.cli._options import HOME, Home, Json, Run, Step, app

_DEFAULT = "traces.jsonl"


@app.command(epilog=epilog("trace"))
def trace(
    run: Run,
    step: Step,
    source: Annotated[
        Path | None,
        typer.Option("--from", metavar="FILE", help="What RELAX_TRACES=file:FILE has written."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the step's spans as OTLP JSON.")
    ] = None,
    as_json: Json = False,
    home: Home = HOME,
) -> None:
    """Where the time of a step went: its phases, its work, and the share of control."""
    from relax_infer.telemetry.step_trace import exported, read_spans, shares, spans_of_step
    from relax_infer.telemetry.traces import traces_file

    path = source or traces_file() or home / _DEFAULT
    try:
        spans = spans_of_step(read_spans(path), run, step)
    except OSError as error:
        raise CommandError(
            f"There are no traces in {path}: {error.strerror}",
            cure="Start the stack with RELAX_TRACES=file:FILE, or name the file with --from.",
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise CommandError(f"{path} is no file of OTLP as JSON: {error}.") from error
    if not spans:
        raise CommandError(
            f"{path} has no whole trace of step {step} of run {run}",
            cure="A step's own span is written when the step has ended.",
        )
    if out is not None:
        out.write_text(json.dumps(exported(spans), indent=1) + "\n")
    found = shares(spans)
    if as_json:
        typer.echo(json.dumps(found.document(), indent=2))
        return
    typer.echo(
        f"Step {step} of run {run}: {found.seconds:.2f} s, of which control"
        f" {found.control_seconds:.2f} s ({found.control_share:.1%}); trace {found.trace}"
    )
    for title, times in (("phase", found.phases), ("activity", found.activities)):
        for name, seconds in sorted(times.items(), key=lambda pair: -pair[1]):
            typer.echo(f"  {title:8} {name:26} {seconds:8.2f} s")
