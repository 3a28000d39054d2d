"""A request's way through gateway and guard, as spans below its caller's."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from relax_infer.telemetry.step_trace import Span, read_spans
from relax_infer.telemetry.traces import configure_traces, end_traces
from tests.engines.fake_engine import fenced_fake
from tests.gateway.asking import ask
from tests.gateway.fakes import engine, gateway
from tests.gateway.test_gateway import echo

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / "traces.jsonl"
    monkeypatch.setenv("RELAX_TRACES", f"file:{path}")
    assert configure_traces("relax-test")
    yield path
    end_traces()


def only(file: Path) -> Span:
    end_traces()
    (span,) = read_spans(file)
    return span


async def test_the_gateway_puts_its_own_span_between_caller_and_backend(file: Path):
    async with gateway() as front, engine(echo) as upstream:
        front.publish("genrm", upstream.url)
        headers = {"traceparent": CALLER, "tracestate": "a=b"}
        answer = await ask("POST", f"{front.url}/genrm/generate", {"text": "x"}, headers)
        assert answer.status == 200
        ((sent, _),) = upstream.posts
    span = only(file)
    assert span.name == "gateway POST /genrm/generate"
    assert span.trace == CALLER.split("-")[1]
    assert span.document["parentSpanId"] == CALLER.split("-")[2]
    assert sent["traceparent"] == f"00-{span.trace}-{span.document['spanId']}-01"
    assert sent["tracestate"] == "a=b"
    assert span.attributes["http.response.status_code"] == 200


async def test_the_guard_tells_each_request_that_it_admits_or_refuses(file: Path, tmp_path: Path):
    async with fenced_fake(tmp_path) as (made, client):
        made.fence.gate.close()
        headers = {"traceparent": CALLER}
        async with client.post("/generate", json={"rid": "r"}, headers=headers) as answer:
            assert answer.status == 503
    span = only(file)
    assert (span.name, span.trace) == ("engine request", CALLER.split("-")[1])
    assert span.document["parentSpanId"] == CALLER.split("-")[2]
    assert span.attributes["http.response.status_code"] == 503


async def test_while_traces_are_off_the_callers_context_passes_as_it_is():
    async with gateway() as front, engine(echo) as upstream:
        front.publish("genrm", upstream.url)
        headers = {"traceparent": CALLER}
        await ask("POST", f"{front.url}/genrm/generate", {"text": "x"}, headers)
        ((sent, _),) = upstream.posts
    assert sent["traceparent"] == CALLER
