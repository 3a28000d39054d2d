"""Asking for a path in every way that a proxy, a server or a router is known to take for it."""

import asyncio
from collections.abc import Iterable, Iterator
from types import TracebackType

METHODS = (
    *("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "post", "Get"),
    *("CONNECT", "PROPFIND", "QUERY", "SOURCE"),
)
OVERRIDES = (
    *("X-HTTP-Method-Override: {method}", "X-HTTP-Method: {method}", "X-Method-Override: {method}"),
    *("X-Original-URL: {path}", "X-Rewrite-URL: {path}", "X-Forwarded-Path: {path}"),
    *("X-Forwarded-Prefix: {path}", "X-Original-URI: {path}", "X-Script-Name: {path}"),
    "x-relax-fence: 9:z",
)
"""Headers that some servers take for the method or the path, and the fence's own."""


def spelled(path: str) -> Iterator[str]:
    """The path as a request line may write it, or nearly."""
    tail = path[1:]
    yield path
    yield path + "/"
    yield "/" + path
    yield "///" + tail + "//"
    yield path.upper()
    yield path.title()
    yield path + "?"
    yield path + "?path=/generate&_method=POST"
    yield path + "#x"
    yield path + ";v=1"
    yield f"/.{path}"
    yield f"/generate/..{path}"
    yield f"/generate/%2e%2e{path}"
    yield f"/generate/..%2f{tail}"
    yield f"/%2f{tail}"
    yield f"/%2F{tail}"
    yield f"/%5c{tail}"
    yield f"/\\{tail}"
    yield f"{path}%00"
    yield f"{path}%20"
    yield f"{path}%0d%0a"
    yield f"{path}/."
    yield f"{path}/%2e"
    yield f"/%c0%af{tail}"
    yield f"/%ef%bc%8f{tail}"
    if tail:
        first = f"{ord(tail[0]):02x}"
        yield f"/%{first}{tail[1:]}"
        yield f"/%{first.upper()}{tail[1:]}"
        yield f"/%25{first}{tail[1:]}"
        yield "/" + "".join(f"%{ord(c):02X}" for c in tail)
    yield f"http://127.0.0.1{path}"
    yield f"http://elsewhere.example{path}"
    yield f"http://127.0.0.1/{path}"
    yield f"https://127.0.0.1:443{path}"
    yield f"//127.0.0.1{path}"


class Walker:
    """Sends requests by hand over one connection for as long as the other side keeps it."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def __aenter__(self) -> "Walker":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._hang_up()

    async def ask(
        self, method: str, target: str, headers: Iterable[str] = (), body: bytes = b"{}"
    ) -> int:
        """The status; 0: hung up on without one."""
        for fresh in (False, True):
            if self._writer is None:
                fresh = True
                self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
            assert self._reader is not None
            lines = [f"{method} {target} HTTP/1.1", "Host: 127.0.0.1", *headers]
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
            try:
                self._writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
                async with asyncio.timeout(10):
                    status, stays = await _answer(self._reader, method)
            except (ConnectionError, TimeoutError, asyncio.IncompleteReadError):
                self._hang_up()
                if fresh:
                    return 0
                continue
            if not stays or method == "CONNECT":  # what follows would be another protocol
                self._hang_up()
            return status
        raise AssertionError

    def _hang_up(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None


async def _answer(reader: asyncio.StreamReader, method: str) -> tuple[int, bool]:
    """The status, and whether the next answer can be told from this one."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = head.partition(b"content-length: ")[2].partition(b"\r\n")[0]
    if method != "HEAD" and length:
        await reader.readexactly(int(length))
    framed = bool(length) or method == "HEAD"
    return int(head.split(b" ", 2)[1]), framed and b"connection: close" not in head
