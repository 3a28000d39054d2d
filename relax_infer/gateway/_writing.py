"""An answer's head and chunks as bytes."""

import json
from http import HTTPStatus

from relax_infer.gateway._asgi import Headers

_LINES = {status: b"HTTP/1.1 %d \r\n" % status for status in range(100, 1000)} | {
    status.value: b"HTTP/1.1 %d %b\r\n" % (status, status.phrase.encode()) for status in HTTPStatus
}


def head_of(status: int, headers: Headers) -> bytes:
    """Values come from a parser that lets no end of line through, or from us."""
    return b"%b%b\r\n" % (_LINES[status], b"".join([b"%b: %b\r\n" % pair for pair in headers]))


def chunk(data: bytes) -> bytes:
    """With its length before it."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def refusal_of(status: int, detail: str) -> bytes:
    """A whole answer, the last of its connection, to what was not read as a request."""
    body = json.dumps({"detail": detail}).encode()
    return (
        b"HTTP/1.1 %d \r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
        b"connection: close\r\n\r\n%s" % (status, len(body), body)
    )
