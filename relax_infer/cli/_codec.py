"""``relax-infer codec``: opens sealed payloads for the Temporal web UI and the temporal CLI."""

from typing import Annotated, Any

import typer

from relax_infer.cli._errors import CommandError
from relax_infer.cli._examples import epilog
from relax_infer.cli._options import app

_LOCAL = "127.0.0.1"
_LARGEST = 64 << 20


@app.command(epilog=epilog("codec"))
def codec(
    port: Annotated[int, typer.Option(min=1, max=65535, help="To listen on, on loopback.")] = 8888,
    origin: Annotated[
        str, typer.Option(metavar="URL", help="Of the web UI, whose pages may ask.")
    ] = "http://127.0.0.1:8233",
) -> None:
    """Open what RELAX_PAYLOAD_KEYS sealed, for the web UI in this machine's browser."""
    from aiohttp import web

    from relax_infer.security.sealing import FILE, load_sealer

    sealer = load_sealer()
    if sealer is None:
        raise CommandError(
            f"{FILE} is not set: nothing is sealed.", cure="Name the file with the keys."
        )
    typer.echo(f"Codec on http://{_LOCAL}:{port} for {origin}")
    web.run_app(codec_app(sealer, origin), host=_LOCAL, port=port, print=None, access_log=None)


def codec_app(sealer: Any, origin: str) -> Any:
    """``POST /encode`` and ``/decode`` of Temporal's remote codec protocol. A page of another
    origin, and one that a name other than loopback's led here, is refused: the browser of somebody
    who may read payloads must not read them out for others."""
    from aiohttp import web
    from google.protobuf import json_format
    from temporalio.api.common.v1 import Payloads

    from relax_infer.security.codec import SealingCodec
    from relax_infer.security.sealing import NotSealedError

    made = SealingCodec(sealer)
    allowed = {
        "Access-Control-Allow-Origin": origin,
        "Access-Control-Allow-Methods": "POST, OPTIONS",
        "Access-Control-Allow-Headers": "content-type, x-namespace",
        "Vary": "Origin",
    }

    async def answer(request: web.Request) -> web.Response:
        asked = request.headers.get("Origin")
        host = request.host.rpartition(":")[0]
        if (asked is not None and asked != origin) or host not in (_LOCAL, "localhost"):
            return web.Response(status=403, text="Only for the web UI and this machine")
        if request.method == "OPTIONS":
            return web.Response(status=204, headers=allowed)
        try:
            given = json_format.Parse(await request.text(), Payloads()).payloads
            work = made.decode if request.path == "/decode" else made.encode
            text = json_format.MessageToJson(Payloads(payloads=await work(given)))
        except (json_format.ParseError, NotSealedError, UnicodeDecodeError) as error:
            return web.Response(status=400, text=str(error), headers=allowed)
        return web.Response(text=text, content_type="application/json", headers=allowed)

    application = web.Application(client_max_size=_LARGEST)
    for path in ("/encode", "/decode"):
        application.router.add_route("POST", path, answer)
        application.router.add_route("OPTIONS", path, answer)
    return application
