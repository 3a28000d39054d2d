"""Requests that are wrong somewhere, and what a gateway answers to each kind."""

import json
import random
import string
from collections.abc import Iterator
from typing import NamedTuple

GOOD = b'{"text": "x"}'


def framed(body: bytes, *lines: bytes, path: bytes = b"/genrm/generate") -> bytes:
    head = [
        b"POST " + path + b" HTTP/1.1",
        b"host: x",
        *lines,
        b"content-length: %d" % len(body),
    ]
    return b"\r\n".join(head) + b"\r\n\r\n" + body


BODIES = {
    "deep list": b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep object": b'{"text": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}",
    "deep and unclosed": b'{"text": ' + b"[" * 500_000,
    "invalid UTF-8 in a value": b'{"text": "\xff\xfe"}',
    "invalid UTF-8 in a key": b'{"\xc3\x28": 1, "text": "x"}',
    "overlong UTF-8": b'{"text": "\xc0\xaf"}',
    "UTF-16": '{"text": "x"}'.encode("utf-16"),
    "a byte order mark": b"\xef\xbb\xbf" + GOOD,
    "a NUL": b'{"text": "\x00"}',
    "a doubled key": b'{"text": "x", "text": "y"}',
    "a doubled selector": b'{"model": "m","text":"x","model":"n"}',
    "a doubled key, once escaped": b'{"stream": false, "text": "x", "str\\u0065am": true}',
    "ten thousand keys": b'{"text": "x"' + b"".join(b', "%d": 1' % k for k in range(10_000)) + b"}",
    "a million objects": b'{"text": "x", "y": [' + b'{"y": {}},' * 400_000 + b"0]}",
    "NaN": b'{"text": NaN}',
    "Infinity": b'{"text": -Infinity}',
    "a number without an end": b'{"text": 1e}',
    "a leading zero": b'{"text": 01}',
    "two documents": GOOD + GOOD,
    "a trailing comma": b'{"text": "x",}',
    "single quotes": b"{'text': 'x'}",
    "a comment": b'{"text": "x" /* */}',
    "not an object": b"[1]",
    "nothing": b"",
    "ids without an end": b'{"text": "x", "rid": [' + b'"a",' * 4096 + b'"a"]}',
    "a huge key": b'{"model": "' + b"x" * 1_000_000 + b'", "text": "x"}',
}
_ASKED = b'{"messages": [{"role": "user", "content": "x"%b}], "sampling_params": {"seed": %b}}'
MESSAGES = {
    "digits without an end": _ASKED % (b"", b"7" * 5000),
    "digits without an end in a message": _ASKED % (b', "x": ' + b"7" * 5000, b"1"),
    "a float beyond all": _ASKED % (b"", b"1e400"),
    "a float beyond all in a message": _ASKED % (b', "x": -1e400', b"1"),
    "deep parameters": _ASKED % (b"", b"[" * 100_000 + b"]" * 100_000),
    "a deep message": _ASKED % (b', "x": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000, b"1"),
    "half a pair": _ASKED % (b', "x": "\\ud800"', b"1"),
    "NaN": _ASKED % (b"", b"NaN"),
}
"""For a judge, whose prompt the gateway makes: it reads all of them."""
HEADS: dict[str, bytes] = {
    "CRLF within a value": framed(GOOD, b"x-a: 1\r\n\r\nGET /healthz HTTP/1.1"),
    "a bare CR": framed(GOOD, b"x-a: 1\rx-b: 2"),
    "a NUL in a value": framed(GOOD, b"x-a: \x00"),
    "a header without a colon": framed(GOOD, b"nothing"),
    "a space in a name": framed(GOOD, b"x a: 1"),
    "a space before the colon": framed(GOOD, b"x-a : 1"),
    "two lengths": framed(GOOD, b"content-length: 5"),
    "a negative length": b"POST /genrm/generate HTTP/1.1\r\ncontent-length: -5\r\n\r\n",
    "a length that is no number": b"POST /genrm/generate HTTP/1.1\r\ncontent-length: 1_0\r\n\r\n",
    "a huge length": b"POST /genrm/generate HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % 10**30,
    "length and chunks": framed(GOOD, b"transfer-encoding: chunked"),
    "an unknown coding": b"POST /genrm/generate HTTP/1.1\r\ntransfer-encoding: x\r\n\r\n",
    "a chunk size that is none": (
        b"POST /genrm/generate HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n5;\r\nzz\r\n"
    ),
    "a length after the chunks": (
        b"POST /genrm/generate HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"
        b"d\r\n" + GOOD + b"\r\n0\r\ncontent-length: 99\r\n\r\n"
    ),
    "no HTTP at all": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "an unknown method": framed(GOOD).replace(b"POST", b"PWN", 1),
    "a path that is none": framed(GOOD, path=b"genrm/generate"),
    "a path with bytes": framed(GOOD, path=b"/genrm/\xff"),
    "CONNECT": b"CONNECT example.com:443 HTTP/1.1\r\nhost: x\r\n\r\n",
    "HTTP/2 by prior knowledge": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a head that is too large": b"GET /healthz HTTP/1.1\r\n" + b"x-a: " + b"y" * 300_000,
    "a head that is too large, whole and with its body": framed(GOOD, b"x-a: " + b"y" * 70_000),
    "headers that are too many, whole and with their body": framed(GOOD, *[b"x-a: 1"] * 20_000),
    "headers that are too many and short, whole and with their body": framed(
        GOOD, *[b"a:"] * 60_000
    ),
    "a target that is too large, whole and with its body": framed(
        GOOD, path=b"/genrm/generate?" + b"y" * 70_000
    ),
    "trailers that are too many": (
        b"POST /genrm/generate HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"
        b"d\r\n" + GOOD + b"\r\n0\r\n" + b"a:\r\n" * 60_000 + b"\r\n"
    ),
    "a trailer that does not end": (
        b"POST /genrm/generate HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"
        b"d\r\n" + GOOD + b"\r\n0\r\nx-a: " + b"y" * 700_000
    ),
    "a chunk extension that does not end": (
        b"POST /genrm/generate HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nd;" + b"y" * 300_000
    ),
    "too many headers": b"GET /healthz HTTP/1.1\r\n" + b"x-a: 1\r\n" * 60_000,
    "a request line that is too large": b"GET /" + b"y" * 300_000,
}
TOO_LARGE = frozenset(name for name in HEADS if "too" in name or "does not end" in name)
"""Of :data:`HEADS`: 431, and 400 for all others."""


def answered(name: str) -> int:
    """The status of one of :data:`HEADS`."""
    return 431 if name in TOO_LARGE else 400


class Hostile(NamedTuple):
    """One request as raw bytes."""

    kind: str
    sent: bytes
    statuses: frozenset[int]
    """It has one of these; 0: hung up on without words, by a gateway whose caller has left."""
    leaves: bool = False
    """Its caller closes its side then."""


def hostile(rng: random.Random) -> Iterator[Hostile]:
    """Every kind once, then again with other bytes, without end."""
    while True:
        for name, body in BODIES.items():
            yield Hostile(name, framed(body, b"connection: close"), frozenset({400}))
        for name, body in MESSAGES.items():
            yield Hostile(f"messages: {name}", framed(body, b"connection: close"), frozenset({400}))
        for name, sent in HEADS.items():
            yield Hostile(name, sent, frozenset({answered(name)}), name.endswith("at all"))
        for _ in range(8):
            yield Hostile("whole and well", written(rng), frozenset({200}))
            wrong = rng.choice([{"model": "n"}, {"model": 3}, {"stream": 0}, {"route_key": ""}])
            yield Hostile("a field that is wrong", written(rng, **wrong), frozenset({400}))
            flipped = bytearray(written(rng))
            for _ in range(rng.randrange(1, 8)):
                flipped[rng.randrange(len(flipped))] = rng.randrange(256)
            # Where that left it whole, or let it wait for more, the caller that left ended it.
            statuses = frozenset({0, 400, 404, 405})
            yield Hostile("bytes that are others", bytes(flipped), statuses, leaves=True)
            cut = written(rng)
            yield Hostile(
                "cut short", cut[: rng.randrange(10, len(cut))], frozenset({0}), leaves=True
            )


def written(rng: random.Random, **fields: object) -> bytes:
    """A request that is well, unless a field makes it wrong."""
    text = "".join(rng.choices(string.printable, k=rng.randrange(200)))
    payload = {"model": "m", "text": text, "stream": False, **fields}
    name = b"x-request-id: " + str(rng.random()).encode()
    return framed(json.dumps(payload).encode(), name, b"connection: close")
