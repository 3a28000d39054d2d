"""An engine that answers at once, with or without the fence before it:
``python -m tests.bench.fenced PORT [fence]``. ``tests.bench.gateway`` measures both.
"""

import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import uvicorn

from relax_infer.contracts.fence import FenceToken
from relax_infer.engines.fence import Fence
from relax_infer.engines.request_log import RequestLog

ANSWER = b'{"text": "42"}'
HEADERS = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(ANSWER))]


class AtOnce:
    """App and backend in one; nothing is ever under way in it."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        await send({"type": "http.response.body", "body": ANSWER})

    def request_ids(self) -> list[str]:
        return []

    def abort(self, rid: str) -> None: ...

    def abort_all(self) -> None: ...

    def noting(self, note: Callable[[str], None]) -> AbstractContextManager[None]:
        return nullcontext()

    async def idle(self) -> bool:
        return True

    async def flush(self) -> bool:
        return True

    def silent_for(self) -> float:
        return 0.0


def main(port: int, fenced: bool) -> None:
    engine = AtOnce()
    with tempfile.TemporaryDirectory() as folder:
        app: Any = engine
        if fenced:
            log = RequestLog(Path(folder) / "requests.jsonl")
            app = Fence(engine, engine, log, FenceToken(counter=1, grant_id="bench"))
            app.gate.open()
        uvicorn.run(
            app,
            port=port,
            interface="asgi3",
            lifespan="off",
            ws="none",
            log_level="warning",
            access_log=False,
        )


if __name__ == "__main__":
    main(int(sys.argv[1]), "fence" in sys.argv[2:])
