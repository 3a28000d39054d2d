"""The guard of an engine that somebody else launched: ``relax-infer guard --engine URL``."""

import logging
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from relax_infer.cli._examples import epilog
from relax_infer.cli._options import app
from relax_infer.contracts.fence import FenceToken, StaleFence

if TYPE_CHECKING:
    from relax_infer.engines.guard import EngineGuard

log = logging.getLogger(__name__)

KEY = "RELAX_ENGINE_API_KEY"
"""Of the engine; RELAX_ENGINE_API_KEY_FILE names a file that holds it."""
_AGAIN_SECONDS = 1.0
_ENDING = (signal.SIGINT, signal.SIGTERM)
_START = FenceToken(counter=0, grant_id="start")
"""Of the guard's own opening: whoever names a token at its socket comes after it."""


@app.command(epilog=epilog("guard"))
def guard(
    engine: Annotated[
        str, typer.Option(metavar="URL", help="The SGLang server that it stands before.")
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="To listen on; 0: any free one.")] = 0,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    socket: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Unix socket that opens, closes and manages it."),
    ] = None,
    request_log: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A JSON line for each request.")
    ] = None,
    closed: Annotated[
        bool, typer.Option("--closed", help="Admit nobody until the socket says so.")
    ] = False,
    request_timeout: Annotated[
        float, typer.Option(min=0.001, help="Seconds for one request, its stream included.")
    ] = 1800.0,
    connections: Annotated[
        int,
        typer.Option(min=1, help="Requests under way at once; others wait for their turn."),
    ] = 4096,
) -> None:
    """Guard an engine that others launched, as those of a run are.

    Admits requests once the engine says that it is idle. Ends with SIGINT or SIGTERM: the gate
    closes, what runs is aborted, and what the engine has not ended after 5 seconds is hung up on.
    """
    from relax_infer.engines.guard import EngineGuard
    from relax_infer.gateway.tls import is_loopback
    from relax_infer.security import secret
    from relax_infer.telemetry import configure_logs
    from relax_infer.telemetry.traces import configure_traces, end_traces

    configure_logs(role="guard")
    configure_traces("relax-guard")
    if not is_loopback(host):
        log.warning(
            "THE GUARD LISTENS ON %s AND ASKS NOBODY FOR A TOKEN: whoever reaches this address"
            " can use the engine. Keep it on a network of your own, behind a gateway with tokens.",
            host,
        )
    made = EngineGuard(
        engine,
        host=host,
        port=port,
        socket=socket,
        request_log=request_log,
        key=secret(KEY),
        timeout=request_timeout,
        max_connections=connections,
    )
    # Blocked before the guard's thread begins, so that they wait for this one to look.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        typer.echo(f"Guard of {made.engine} on {made.start()}")
        if closed or _opened(made):
            signal.sigwait(_ENDING)
    finally:
        made.stop()
        end_traces()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _opened(made: "EngineGuard") -> bool:
    """Once the engine is idle, unless somebody has taken the gate over by then; False: it is to end
    before that. Says each new reason why not."""
    said = ""
    while True:
        try:
            made.open(_START)
        except StaleFence as taken:
            log.warning("its gate is opened and closed over the socket from now on: %s", taken)
            return True
        except (RuntimeError, TimeoutError) as error:
            if str(error) != said:
                said = str(error)
                log.warning("admits nobody yet, and looks every second: %s", said)
        else:
            typer.echo("It admits requests")
            return True
        if signal.sigtimedwait(_ENDING, _AGAIN_SECONDS) is not None:
            return False
