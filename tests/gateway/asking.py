"""Asking a gateway over real HTTP, by a client and by hand."""

import asyncio
import contextlib
import io
import json
from dataclasses import dataclass
from typing import Any

import aiohttp
from multidict import CIMultiDict


@dataclass(frozen=True)
class Reply:
    status: int
    headers: CIMultiDict[str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def detail(self) -> Any:
        return self.json["detail"]


_LARGE = 1 << 20
"""Bytes from which on aiohttp warns of bytes that are sent as they are."""


async def ask(
    method: str,
    url: str,
    payload: Any = None,
    headers: dict[str, str] | None = None,
) -> Reply:
    """One request with a client of its own; a payload that is not bytes is sent as JSON."""
    sent = dict(headers or {})
    data = payload
    if payload is not None and not isinstance(payload, bytes | io.BytesIO):
        data = json.dumps(payload).encode()
        sent.setdefault("Content-Type", "application/json")
    if isinstance(data, bytes) and len(data) > _LARGE:
        data = io.BytesIO(data)
    async with (
        aiohttp.ClientSession(auto_decompress=False) as session,
        session.request(method, url, data=data, headers=sent) as answer,
    ):
        return Reply(answer.status, CIMultiDict(answer.headers), await answer.read())


async def get(url: str, headers: dict[str, str] | None = None) -> Reply:
    return await ask("GET", url, headers=headers)


async def by_hand(port: int, sent: bytes, *, finish: bool = False) -> bytes:
    """Everything that comes back until the gateway hangs up, or until a whole answer is there."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    if finish:
        with contextlib.suppress(OSError):  # the gateway has hung up already
            writer.write_eof()
    got = b""
    try:
        async with asyncio.timeout(20):
            while chunk := await reader.read(65536):
                got += chunk
                head, blank, body = got.partition(b"\r\n\r\n")
                length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
                if blank and length and len(body) >= int(length):
                    break
    except ConnectionError:
        pass
    finally:
        writer.close()
    return got


def status_of(raw: bytes) -> int:
    """Of an answer that came by hand."""
    return int(raw.split(b" ", 2)[1])
