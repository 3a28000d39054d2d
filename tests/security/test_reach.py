"""The page about what an attacker can reach: each line of it has a test, and these are the last."""

import re
import socket
import stat
from pathlib import Path

import pytest

from relax_infer.gateway.listening import listen_unix
from relax_infer.telemetry.traces import configure_traces, end_traces, span
from workers import _metrics
from workers._preflight import HOST

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text()


def test_every_statement_about_what_is_reached_names_a_test_that_there_is():
    table = PAGE.partition("## What an attacker")[2].partition("**What tokens")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][2:]
    assert len(rows) >= 12
    for row in rows:
        (named,) = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", row)
        text = (ROOT / named[0]).read_text()
        assert re.search(rf"^(?:async )?def {named[1]}\(", text, re.MULTILINE), row


def test_every_variable_of_the_page_is_one_that_the_code_reads():
    code = "".join(
        path.read_text()
        for folder in ("relax_infer", "workers")
        for path in (ROOT / folder).rglob("*.py")
    )
    for name in set(re.findall(r"\bRELAX_[A-Z_]+\b", PAGE)):
        assert name.removesuffix("_FILE") in code, name


def test_the_gateways_control_socket_is_its_users_alone(tmp_path: Path):
    path = tmp_path / "private" / "gw.sock"
    with listen_unix(path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


async def test_metrics_are_served_on_loopback_unless_somebody_chose(
    monkeypatch: pytest.MonkeyPatch,
):
    asked: list[str] = []

    def server(port: int, host: str, registry: object) -> None:
        asked.append(host)
        raise OSError("not in this test")

    monkeypatch.setattr(_metrics, "start_http_server", server)
    for given in ({}, {"RELAX_METRICS_HOST": "10.0.0.7"}):
        with pytest.raises(Exception, match="cannot be served"):
            async with _metrics.run_metrics(None, {"RELAX_METRICS_PORT": "9464", **given}):  # type: ignore[arg-type]
                pass
    assert asked == ["127.0.0.1", "10.0.0.7"]
    assert HOST == "127.0.0.1"


def test_a_file_of_traces_is_its_users_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "traces.jsonl"
    monkeypatch.setenv("RELAX_TRACES", f"file:{path}")
    assert configure_traces("x")
    with span("a"):
        pass
    end_traces()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("command", ["gateway", "codec"])
def test_what_listens_listens_on_loopback_by_default(command: str):
    import inspect

    from typer.main import get_command

    from relax_infer.cli import app

    made = get_command(app).commands[command]  # type: ignore[attr-defined]
    hosts = [p.default for p in made.params if p.name == "host"]
    if command == "codec":
        from relax_infer.cli import _codec

        assert hosts == []
        hosts = [_codec._LOCAL]
        assert "host=_LOCAL" in inspect.getsource(_codec.codec)
    assert hosts == ["127.0.0.1"]
    with socket.socket() as probe:
        probe.bind((hosts[0], 0))
        assert probe.getsockname()[0].startswith("127.")
