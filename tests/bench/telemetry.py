"""What telemetry and the gateway's door cost: ``python -m tests.bench.telemetry``.

Processor time of one call, the best of five rounds: what else the machine does is not in it.
"""

import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from relax_infer.engines.guard_metrics import GuardMetrics
from relax_infer.gateway.gate import AdmissionGate
from relax_infer.security import Caller, Callers
from relax_infer.telemetry import configure_logs
from relax_infer.telemetry.traces import configure_traces, end_traces, span, trace_headers

ROUNDS = 5


def microseconds(call: Callable[[], object], times: int = 20_000) -> float:
    best = float("inf")
    for _ in range(ROUNDS):
        began = time.process_time()
        for _ in range(times):
            call()
        best = min(best, (time.process_time() - began) / times)
    return best * 1e6


def main() -> None:
    guard = GuardMetrics(AdmissionGate(), lambda: 1)
    digests = [hashlib.sha256(f"token-{n}".encode()).digest() for n in range(5)]
    roles = frozenset({"genrm"})
    known = Callers(Caller(f"c{n}", digest, roles, 1e9, 10**9) for n, digest in enumerate(digests))
    log = logging.getLogger("tests.bench.telemetry")

    def door() -> None:
        known.end(known.begin(b"Bearer token-3", "genrm"))

    def spanned() -> None:
        with span("x", tokens=1):
            pass

    def counted() -> None:
        guard.admitted()
        guard.ended("answered")

    def line() -> None:
        log.info("x is done", extra={"seconds": 1.5})

    for variable in ("RELAX_TRACES", "OTEL_EXPORTER_OTLP_ENDPOINT"):
        os.environ.pop(variable, None)
    told = {
        "a request counted by the guard": microseconds(counted),
        "a request at the door, five callers": microseconds(door),
        "a span while traces are off": microseconds(spanned),
        "headers of a request while traces are off": microseconds(trace_headers),
    }
    with tempfile.TemporaryDirectory() as folder:
        os.environ["RELAX_TRACES"] = f"file:{folder}/traces.jsonl"
        configure_traces("bench")
        told["a span while traces are on"] = microseconds(spanned, 3_000)
        end_traces()
        configure_logs(to=Path(folder) / "bench.log", only=log.name, run="bench")
        told["a line in a log"] = microseconds(line, 2_000)
    for what, cost in told.items():
        print(f"{what:44} {cost:8.2f} µs")


if __name__ == "__main__":
    main()
