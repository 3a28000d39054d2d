"""Spans: off unless somebody named a place, one file for all processes, the share of control."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from relax_infer.contracts.failures import PermanentError
from relax_infer.contracts.refs import WeightsRef
from relax_infer.contracts.run import PhaseTime, StepRecord, StepResult
from relax_infer.machines import StepPhase
from relax_infer.telemetry import about
from relax_infer.telemetry.step_trace import (
    exported,
    read_spans,
    shares,
    spans_of_step,
    write_step,
)
from relax_infer.telemetry.traces import (
    configure_traces,
    end_traces,
    span,
    step_traceparent,
    trace_headers,
    traceparent,
    tracing,
)
from tests.telemetry.steps import PARENT, make_step


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr("relax_infer.telemetry.subjects._process", {})  # of other tests
    path = tmp_path / "traces.jsonl"
    monkeypatch.setenv("RELAX_TRACES", f"file:{path}")
    assert configure_traces("relax-test")
    yield path
    end_traces()


def test_nothing_is_kept_or_imported_unless_somebody_named_a_place():
    program = (
        "import sys\n"
        "from relax_infer.telemetry.traces import *\n"
        "assert not configure_traces('x') and not tracing()\n"
        "with span('a', tokens=1) as note: note('b', 2); assert traceparent() is None\n"
        "assert trace_headers() == {}\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])\n"
    )
    program = program.replace(
        "import *", "import configure_traces, span, traceparent, trace_headers, tracing"
    )
    variables = {k: v for k, v in os.environ.items() if k != "RELAX_TRACES" and k[:5] != "OTEL_"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=variables, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_a_place_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RELAX_TRACES", "/tmp/traces")
    with pytest.raises(PermanentError, match="it must be file:PATH"):
        configure_traces("x")
    assert not tracing()


def test_a_span_says_what_it_is_about_and_below_what_it_is(file: Path):
    with about(run="run-1", step=3, fence="7:g"), span("outer", parent=PARENT, rows=8) as note:
        note("loss", -0.5)
        assert trace_headers() == {"traceparent": traceparent()}
        with span("inner"):
            pass
    with pytest.raises(ValueError, match="broken"), span("failed"):
        raise ValueError("broken")
    end_traces()
    found = {each.name: each for each in read_spans(file)}
    outer, inner = found["outer"], found["inner"]
    assert outer.attributes == {
        **{"relax.run": "run-1", "relax.step": 3, "relax.fence": "7:g"},
        **{"rows": 8, "loss": -0.5},
    }
    trace, parent = PARENT.split("-")[1:3]
    assert (outer.trace, outer.document["parentSpanId"]) == (trace, parent)
    assert inner.document["parentSpanId"] == outer.document["spanId"]
    assert found["failed"].document["status"]["message"] == "ValueError: broken"
    assert found["failed"].trace != trace
    assert (file.stat().st_mode & 0o777) == 0o600


def test_the_control_share_is_the_time_in_which_no_work_went_on(file: Path):
    make_step()
    end_traces()
    found = shares(spans_of_step(read_spans(file), "run-1", 3))
    assert (found.seconds, found.control_seconds) == (10.0, 3.0)
    assert found.control_share == pytest.approx(0.3)
    assert found.phases == {"GENERATING": 4.0, "TRAINING": 6.0}
    assert found.activities["train_step"] == 5.0


def test_a_step_tried_again_is_read_from_its_newest_trace(file: Path):
    make_step()
    again = step_traceparent("run-1.step-3", "another-execution")
    weights = WeightsRef(version=3, uri="/w", digest="d")
    phases = (PhaseTime(phase=StepPhase.GENERATING, started=200.0, seconds=1.0),)
    result = StepResult(step=3, weights=weights, phases=phases)
    write_step(again, StepRecord(run="run-1", step=3, outcome=StepPhase.DONE, result=result))
    end_traces()
    spans = spans_of_step(read_spans(file), "run-1", 3)
    assert {each.trace for each in spans} == {again.split("-")[1]}


def test_what_is_exported_is_what_was_read(file: Path):
    make_step()
    end_traces()
    spans = spans_of_step(read_spans(file), "run-1", 3)
    document = exported(spans)
    (resource,) = document["resourceSpans"]
    assert len(resource["scopeSpans"][0]["spans"]) == len(spans)


def test_spans_go_to_a_collector_that_the_standard_variable_names(
    monkeypatch: pytest.MonkeyPatch,
):
    got: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            return

    server = HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        monkeypatch.delenv("RELAX_TRACES", raising=False)
        endpoint = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
        assert configure_traces("relax-test")
        with span("sent to a collector"):
            pass
        end_traces()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    ((path, body),) = got
    assert path == "/v1/traces"
    assert b"sent to a collector" in body
