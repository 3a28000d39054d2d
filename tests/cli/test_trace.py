"""relax-infer trace: where the time of a step went."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from relax_infer.telemetry.step_trace import read_spans, shares
from relax_infer.telemetry.traces import configure_traces, end_traces
from tests.cli.conftest import Command
from tests.telemetry.steps import make_step


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / "traces.jsonl"
    monkeypatch.setenv("RELAX_TRACES", f"file:{path}")
    assert configure_traces("relax-test")
    yield path
    end_traces()


@pytest.mark.usefixtures("file")
def test_the_command_tells_the_share_and_hands_the_spans_on(command: Command, tmp_path: Path):
    make_step()
    end_traces()
    said = command("trace", "run-1", "3")
    assert said.exit_code == 0, said.output
    assert "10.00 s, of which control 3.00 s (30.0%)" in said.stdout
    out = tmp_path / "step.json"
    told = command("trace", "run-1", "3", "--json", "--out", str(out))
    assert json.loads(told.stdout)["control_share"] == pytest.approx(0.3)
    again = tmp_path / "again.jsonl"
    again.write_text(json.dumps(json.loads(out.read_text())) + "\n")
    assert shares(list(read_spans(again))).control_seconds == 3.0
    assert command("trace", "run-1", "4").exit_code == 2
    missing = command("trace", "run-1", "3", "--from", str(tmp_path / "none"))
    assert missing.exit_code == 2
    assert "RELAX_TRACES" in missing.stderr
