"""The gateway without a run: ``relax-infer gateway --registry FILE``."""

from pathlib import Path
from typing import Annotated

import typer

from relax_infer.cli._errors import CommandError
from relax_infer.cli._examples import epilog
from relax_infer.cli._options import app
from relax_infer.discovery import Role

_LOCAL = "127.0.0.1"


@app.command(epilog=epilog("gateway"))
def gateway(
    port: Annotated[int, typer.Option(min=0, max=65535, help="To listen on; 0: any free one.")],
    registry: Annotated[
        Path, typer.Option(metavar="FILE", help="JSON or YAML: role to its schema 2 document.")
    ],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = _LOCAL,
    role: Annotated[
        list[Role] | None, typer.Option(help="Serve only this role; may be repeated.")
    ] = None,
    genrm_tokenizer: Annotated[
        list[str] | None,
        typer.Option(metavar="MODEL=PATH", help="Folder whose chat template renders messages."),
    ] = None,
    genrm_template_kwargs: Annotated[
        list[str] | None,
        typer.Option(metavar="MODEL=JSON", help="Given to that template besides the messages."),
    ] = None,
    genrm_max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Of messages that do not say.")
    ] = 1024,
    rollout_router: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Router that rollout's chat goes to, unchanged."),
    ] = None,
    request_timeout: Annotated[
        float, typer.Option(min=0.001, help="Seconds for one request, its stream included.")
    ] = 1800.0,
    connections: Annotated[
        int,
        typer.Option(min=1, help="Requests under way at once; others wait for their turn."),
    ] = 4096,
) -> None:
    """Serve engines that run already, from a file that says where they are.

    The file is read again when it changes. Ends with SIGINT or SIGTERM.
    """
    from relax_infer.gateway.serve import (
        GatewayOptions,
        named_folders,
        named_objects,
        serve_file,
    )
    from relax_infer.telemetry import configure_logs
    from relax_infer.telemetry.traces import configure_traces, end_traces

    configure_logs(role="gateway")
    configure_traces("relax-gateway")
    options = GatewayOptions(
        roles=tuple(role or Role),
        timeout=request_timeout,
        max_connections=connections,
        rollout_router=_address(rollout_router),
        tokenizers=named_folders(genrm_tokenizer or ()),
        template_kwargs=named_objects(genrm_template_kwargs or ()),
        judge_tokens=genrm_max_new_tokens,
    )

    def listening(url: str) -> None:
        typer.echo(f"Gateway on {url}")

    import uvloop

    serving = serve_file(
        host=host, port=port, registry=registry, options=options, listening=listening
    )
    try:
        uvloop.run(serving)
    finally:
        end_traces()


def _address(url: str | None) -> str | None:
    from relax_infer.discovery._fields import url as valid_url

    try:
        return None if url is None else valid_url(url)
    except ValueError as error:
        raise CommandError(f"--rollout-router: {error}.") from error
