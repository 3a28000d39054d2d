"""Log lines: one JSON object each, with what they are about, without secrets."""

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from relax_infer.telemetry import FIELDS, HIDDEN, about, configure_logs, redacted, remember_secret
from relax_infer.telemetry import subject as telemetry_subject
from relax_infer.telemetry.redaction import remember_environment
from relax_infer.telemetry.subjects import subject_of_workflow

log = logging.getLogger("relax_infer.tests.telemetry")


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the lines of ``log`` go."""
    monkeypatch.setattr("relax_infer.telemetry.subjects._process", {})
    path = tmp_path / "logs" / "part.log"
    configure_logs(to=path, only=log.name, run="run-1", role="rollout", replica=2)
    yield path
    for handler in log.handlers[:]:
        log.removeHandler(handler)
        handler.close()
    log.propagate = True


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_is_one_object_that_says_what_it_is_about(file: Path):
    with about(step=3, phase="GENERATING", fence="7:grant"):
        log.info("asks for %d groups", 4, extra={"groups": 4})
    log.info("is done")
    first, second = lines(file)
    assert list(first)[:4] == ["time", "level", "event", "logger"]
    assert [first[name] for name in FIELDS] == ["run-1", 3, "GENERATING", "rollout", 2, "7:grant"]
    assert (first["event"], first["groups"]) == ("asks for 4 groups", 4)
    assert [second[name] for name in FIELDS] == ["run-1", None, None, "rollout", 2, None]
    assert str(first["time"]).endswith("Z")


def test_an_exception_stays_on_its_line_and_has_no_secret(file: Path):
    try:
        raise ValueError("Authorization: Bearer abcdef123456")
    except ValueError:
        log.exception("could not ask")
    (line,) = lines(file)
    assert "ValueError" in str(line["exception"])
    assert "abcdef123456" not in file.read_text()


def test_what_is_no_field_of_a_subject_is_refused():
    with pytest.raises(ValueError, match="stage is none of run, step"), about(stage="x"):  # type: ignore[call-arg]
        pass


@pytest.mark.parametrize(
    "text",
    [
        "Authorization: Bearer abcdef123456",
        "authorization=basic YWxhZGRpbjpvcGVuc2VzYW1l",
        "postgresql://relax:hunter2secret@db.example.com/temporal",
        "--api-key=verysecretvalue",
        '{"password": "verysecretvalue"}',
        "RELAX_GATEWAY_TOKEN=verysecretvalue",
        "https://example.com/x?token=verysecretvalue&step=3",
        "downloads with hf_abcdefghijklmnopqrst",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJyZWxheCJ9.c2lnbmF0dXJl",
        "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBg\n-----END PRIVATE KEY-----",
    ],
)
def test_what_looks_like_a_secret_is_hidden(file: Path, text: str):
    log.warning("the caller sent %s", text)
    log.warning("also in a field", extra={"header": text, "nested": {"deep": [text]}})
    written = file.read_text()
    for secret in (
        *("abcdef123456", "YWxhZGRpbjpvcGVuc2VzYW1l", "hunter2secret", "verysecretvalue"),
        *("hf_abcdefghijklmnopqrst", "eyJzdWIiOiJyZWxheCJ9", "MIIEvQIBADANBg"),
    ):
        assert secret not in written
    assert HIDDEN in written


def test_what_the_environment_calls_a_secret_is_hidden_wherever_it_shows(
    file: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("relax_infer.telemetry.redaction._values", set())
    remember_environment({"TEMPORAL_API_KEY": "correct-horse-battery", "HOME": "/home/innocent"})
    remember_secret("read-from-a-file")
    log.info("xcorrect-horse-batteryx and read-from-a-file in /home/innocent")
    (line,) = lines(file)
    assert line["event"] == f"x{HIDDEN}x and {HIDDEN} in /home/innocent"


def test_a_field_named_like_a_secret_is_hidden_and_counts_of_tokens_are_not():
    told = redacted({"hub_token": "abc", "tokens": 12, "token": "x", "fence_token": "7:grant"})
    assert told == {"hub_token": HIDDEN, "tokens": 12, "token": HIDDEN, "fence_token": "7:grant"}
    words = "trained on 4096 tokens under fence token 7:grant; max_new_tokens: 64"
    assert redacted(words) == words


@pytest.mark.parametrize(
    ("workflow", "about_it"),
    [
        ("run-1", {"run": "run-1"}),
        ("run-1.step-12", {"run": "run-1", "step": 12}),
        ("run-1.weights-3", {"run": "run-1", "step": 3}),
        ("run-1.lease", {"run": "run-1"}),
        ("run-1.genrm", {"run": "run-1", "role": "genrm"}),
        ("run-1.genrm.judge", {"run": "run-1", "role": "genrm"}),
        (
            "run-1.genrm.judge.replica-4.recovery-2",
            {"run": "run-1", "role": "genrm", "replica": 4},
        ),
    ],
)
def test_a_workflows_id_tells_what_it_is_about(workflow: str, about_it: dict[str, object]):
    assert subject_of_workflow(workflow) == about_it


def test_a_person_can_have_words_instead_of_json():
    program = (
        "import logging; from relax_infer.telemetry import configure_logs, about\n"
        "configure_logs(run='run-1')\n"
        "with about(step=3): logging.getLogger('x').warning('waits for %s', 'the lease')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"RELAX_LOG_FORMAT": "text", "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stderr.rstrip().endswith("WARNING waits for the lease  run=run-1 step=3")


def test_tasks_side_by_side_do_not_share_what_they_are_about():
    import asyncio

    async def told(step: int) -> object:
        with about(step=step):
            await asyncio.sleep(0)
            return telemetry_subject()["step"]

    async def both() -> list[object]:
        return await asyncio.gather(told(1), told(2))

    assert asyncio.run(both()) == [1, 2]
