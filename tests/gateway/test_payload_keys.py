"""The keys of a payload, however they are spaced, escaped, doubled and surrounded."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_infer.gateway import _payload
from relax_infer.gateway._errors import GatewayError
from relax_infer.gateway._payload import read_object

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3)
    ),
    max_leaves=8,
)
PAIRS = st.lists(st.tuples(st.sampled_from(["a", "b", "ä", '"', "\\", "1"]), VALUES), max_size=5)
SPACE = st.sampled_from(["", " ", "\n", "\t ", " \r\n"])


@given(PAIRS, SPACE, SPACE, SPACE, st.booleans())
def test_a_payload_is_read_as_python_reads_it_or_has_a_key_twice(
    pairs: list[tuple[str, Any]], before: str, colon: str, comma: str, plain: bool
):
    members = f"{comma},{before}".join(
        f"{json.dumps(key, ensure_ascii=plain)}{colon}:{before}"
        f"{json.dumps(value, ensure_ascii=not plain)}"
        for key, value in pairs
    )
    body = f"{before}{{{comma}{members}{colon}}}{before}".encode()
    if len({key for key, _ in pairs}) < len(pairs):
        with pytest.raises(GatewayError, match="is there twice"):
            read_object(body)
    else:
        read = {key: json.loads(bytes(value)) for key, value in read_object(body).items()}
        assert read == dict(pairs)


def test_a_value_that_begins_as_the_last_one_of_its_key_is_another():
    for body in (b'{"a":12, "b":3, "a":1}', b'{"a" : [1], "a" : [1]}', b'{"a":1 ,"a":1.5}'):
        with pytest.raises(GatewayError, match="'a' is there twice"):
            read_object(body)


@pytest.mark.parametrize("around", [b'"x": [%s]', b'"x": {"y": [%s, [{}]]}', b'"x": [[[%s]], "]"]'])
def test_keys_inside_of_values_are_not_counted(monkeypatch: pytest.MonkeyPatch, around: bytes):
    monkeypatch.setattr(_payload, "MOST_KEYS", 10)
    monkeypatch.setattr(_payload, "_HUGE", 0)
    many = b", ".join(b'{"k%d": "}\\""}' % k for k in range(100))
    keys = b"".join(b', "%d": "v"' % k for k in range(9))
    assert len(read_object(b"{" + around % many + keys + b"}")) == 10
    for more in (10, 100):
        keys = b"".join(b', "%d": "v"' % k for k in range(more))
        with pytest.raises(GatewayError, match="more than 10 keys"):
            read_object(b"{" + around % many + keys + b"}")
