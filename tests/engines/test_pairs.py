"""A payload is looked through for its ids without being made into objects, and found to say what
Python's reader finds."""

import json
import random
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from relax_infer.engines._asgi import Refused
from relax_infer.engines._named import named
from relax_infer.engines._pairs import DEEPEST, MOST_KEYS, MOST_MARKS, length_of, pairs
from relax_infer.engines._rids import request_ids, with_other_ids

TEXTS = ("", "a", "rid", '"', "\\", '\\"', "]}", "{[", "\u2713", "\ud800", "n\n", "\t:,", "/")
KEYS = ("rid", "text", "input_ids", "stream", "x", "sampling_params", "r\u0131d", '"', "{")


def some(chance: random.Random, depth: int = 0) -> Any:
    kind = chance.randrange(7 if depth < 4 else 5)
    match kind:
        case 0:
            return chance.choice((True, False, None))
        case 1:
            return chance.choice((0, -1, 7, 10**30))
        case 2:
            return chance.choice((1.5, -1e300, float("nan"), float("inf")))
        case 3 | 4:
            return chance.choice(TEXTS)
        case 5:
            return [some(chance, depth + 1) for _ in range(chance.randrange(4))]
        case _:
            return {chance.choice(TEXTS): some(chance, depth + 1) for _ in range(3)}


def written(chance: random.Random) -> str:
    """A payload, spaced and escaped in some way, now and then with a key twice."""
    ascii_, space = chance.random() < 0.5, chance.choice(("", " ", "\r\n\t "))

    def say(value: Any) -> str:
        separators = (f"{space},{space}", f"{space}:{space}")
        return json.dumps(value, ensure_ascii=ascii_, separators=separators)

    inside = f"{space},{space}".join(
        f"{say(chance.choice(KEYS))}{space}:{space}{say(some(chance))}"
        for _ in range(chance.randrange(6))
    )
    return f"{space}{{{space}{inside}{space}}}{space}"


@pytest.mark.parametrize("seed", range(20))
def test_pairs_ids_and_lengths_are_those_that_python_reads(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(100):
        text = written(chance)
        told = json.loads(text)
        found = {key: text[start:end] for key, start, end in pairs(text)}
        assert found.keys() == told.keys()
        for key, value in found.items():
            assert json.dumps(json.loads(value)) == json.dumps(told[key])
            if isinstance(told[key], list):
                assert length_of(value) == len(told[key])
        for coding in ("utf-8", "utf-16"):
            body = text.encode(coding, "surrogatepass")
            rid = told.get("rid")
            rids = rid if isinstance(rid, list) else [rid]
            assert request_ids(body) == tuple(r for r in rids if isinstance(r, str) and r)
            assert named(body).stream is (told.get("stream") is True)


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{", "{}x", '{"a"}', '{"a":}', '{"a":1,}', '{"a":1 "b":2}', "{a:1}", '{"a":[}'),
        *('{"a":"', '{"a":["}', '{"a":1}{', '{"a" 1}', '{,"a":1}', "7"),
    ],
)
def test_what_is_no_object_is_told(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - nobody is shown why
        list(pairs(text))


def test_what_is_too_much_is_refused() -> None:
    for text, says in (
        ('{"a":' + "[" * (DEEPEST + 2) + "]" * (DEEPEST + 2) + "}", "nested too deeply"),
        ("{" + ",".join(['"a":1'] * (MOST_KEYS + 1)) + "}", f"more than {MOST_KEYS} keys"),
        ('{"a":[' + "[[]]," * (MOST_MARKS // 2 + 1) + "0]}", f"more than {MOST_MARKS} lists"),
    ):
        with pytest.raises(Refused, match=says):
            list(pairs(text))
    assert len(list(pairs('{"a":' + "[" * DEEPEST + "]" * DEEPEST + "}"))) == 1


BULK = {
    "empty lists": b"[" + b"[]," * 1_000_000 + b"0]",
    "texts": b"[" + b'"",' * 1_000_000 + b"0]",
    "tokens": b"[" + b"1000," * 600_000 + b"0]",
    "objects": b"[" + b'{"a":[]},' * 330_000 + b"0]",
}


@pytest.mark.parametrize("bulk", BULK.values(), ids=BULK)
@pytest.mark.parametrize(
    "lone", [b"", b'"y": "\\ud800", '], ids=["plain", "an escape that is no text"]
)
@pytest.mark.parametrize(
    "read",
    [request_ids, named, lambda body: with_other_ids(body, {"r": "other"})],
    ids=["read", "named", "written anew"],
)
def test_three_megabytes_of_small_things_cost_a_few_times_their_bytes(
    bulk: bytes, lone: bytes, read: Callable[[bytes], Any]
) -> None:
    body = b'{"rid": "r", ' + lone + b'"x": ' + bulk + b', "sampling_params": {}}'
    tracemalloc.start()
    try:
        assert read(body)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 6 * len(body)
