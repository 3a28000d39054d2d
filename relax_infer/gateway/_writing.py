"""An answer's head and chunks as bytes."""

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
