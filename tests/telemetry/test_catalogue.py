"""The table of metrics is what the parts serve."""

import asyncio
import re
import socket
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families
from temporalio.client import Client

from relax_infer.contracts.failures import PermanentError
from relax_infer.engines.guard_metrics import GuardMetrics
from relax_infer.gateway.gate import AdmissionGate
from relax_infer.gateway.intake import RegistryIntake
from relax_infer.gateway.metrics import Metrics
from relax_infer.telemetry.catalogue import METRICS
from workers._metrics import run_metrics, sdk_runtime

UNITS = {"_seconds": "seconds", "_seconds_total": "seconds", "_per_second": "tokens/s"}


def names(text: str) -> dict[str, str]:
    """Name as Prometheus shows it, and help, of every family."""
    found = {}
    for family in text_string_to_metric_families(text):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        if not name.endswith("_created"):  # when the client library began to count
            found[name] = family.documentation
    return found


def of(part: str) -> dict[str, str]:
    return {spec.name: spec.meaning for spec in METRICS.values() if spec.part == part}


@pytest.mark.parametrize("spec", METRICS.values(), ids=METRICS)
def test_a_name_says_its_kind_and_its_unit(spec):
    if spec.part == "sdk":
        return
    assert re.fullmatch(rf"relax_[a-z_]+{'_total' if spec.kind == 'counter' else ''}", spec.name)
    for end, unit in UNITS.items():
        if spec.name.endswith(end):
            assert spec.unit == unit


def test_the_guard_serves_what_the_table_says():
    guard = GuardMetrics(AdmissionGate(), lambda: 7)
    served = names(guard.text().decode())
    assert served == of("guard")


def test_the_gateway_serves_what_the_table_says():
    from relax_infer.discovery import Role

    metrics = Metrics(RegistryIntake())
    metrics.route(Role.GENRM, "/generate").end(200, 0.1)
    assert names(metrics.text().decode()) == of("gateway")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_nobody_listens_unless_somebody_asked():
    assert sdk_runtime({}) is None


@pytest.mark.parametrize("text", ["0", "metrics", "70000"])
def test_what_is_no_port_is_refused(text: str):
    with pytest.raises(PermanentError, match="RELAX_SDK_METRICS_PORT is"):
        sdk_runtime({"RELAX_SDK_METRICS_PORT": text})


async def test_a_worker_serves_its_metrics_until_it_ends(monkeypatch: pytest.MonkeyPatch):
    looked = asyncio.Event()

    async def look(self: object) -> None:
        looked.set()

    monkeypatch.setattr("workers._run_watch.RunWatch.look", look)
    port = free_port()
    client: Client = None  # type: ignore[assignment]
    given = {"RELAX_METRICS_PORT": str(port), "RELAX_METRICS_EVERY": "0.01"}
    url = f"http://127.0.0.1:{port}/metrics"

    def read() -> str:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.read().decode()

    async with run_metrics(client, given):
        await looked.wait()
        assert "relax_watch_runs 0.0" in await asyncio.to_thread(read)
        with pytest.raises(PermanentError, match="RELAX_METRICS_PORT"):
            async with run_metrics(client, given):
                pass
    with pytest.raises(OSError, match="refused"):
        await asyncio.to_thread(read)
