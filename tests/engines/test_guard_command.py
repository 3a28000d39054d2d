"""``relax-infer guard``: a process of its own before an engine of others."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from typer.testing import CliRunner

import relax_infer
from relax_infer.cli import app
from relax_infer.engines.control import EngineControl
from relax_infer.engines.request_log import read_request_log
from tests.engines.fake_engine import TOKEN, FakeEngine, Served, served
from tests.gateway.fakes import until

CHECKOUT = Path(relax_infer.__file__).parents[1]
SAY = "from relax_infer.cli import main; main()"


@contextlib.contextmanager
def started(log: Path, *words: str, **variables: str) -> Iterator[tuple[Any, str]]:
    """A guard process, its first line told; its log is ``log``."""
    with log.open("w") as errors:
        running = subprocess.Popen(
            (sys.executable, "-c", SAY, "guard", "--port", "0", *words),
            env={**os.environ, "PYTHONPATH": str(CHECKOUT), **variables},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    assert running.stdout is not None
    try:
        line = running.stdout.readline()
        assert line.startswith("Guard of http://"), log.read_text()
        yield running, line.split()[-1]
    finally:
        running.send_signal(signal.SIGTERM)
        code = running.wait(20)
        running.stdout.close()
    assert code == 0


async def test_it_waits_until_the_engine_is_idle_and_says_why_and_ends_what_runs(tmp_path: Path):
    fake, log = FakeEngine(), tmp_path / "log"
    fake.busy_scheduler = True
    rows = tmp_path / "requests"
    async with served(Served(fake)) as url, aiohttp.ClientSession() as client:
        words = ("--engine", url, "--request-log", str(rows))
        with started(log, *words) as (running, own):
            async with client.post(f"{own}/generate", json={"rid": "r"}) as answer:
                assert answer.status == 503
            await until(lambda: "scheduler is not idle" in log.read_text())
            fake.busy_scheduler = False

            async def post() -> int:
                async with client.post(f"{own}/generate", json={"rid": "r"}) as answer:
                    return answer.status

            async with asyncio.timeout(20):
                while True:
                    asked = asyncio.create_task(post())
                    await until(lambda asked=asked: asked.done() or "r" in fake.running)
                    if "r" in fake.running:
                        break
            running.send_signal(signal.SIGTERM)
            assert await asked == 200
            assert set(fake.aborted) == {"r"}, "again if it was slow to end"
            await until(lambda: running.poll() == 0)
    events = [(row["event"], row["reason"]) for row in read_request_log(rows) if "reason" in row]
    assert events[-1] == ("ended", "cancelled")


async def test_closed_it_is_opened_over_its_socket_and_brings_the_engine_s_key(tmp_path: Path):
    fake, keys = FakeEngine(), set[bytes | None]()

    async def keyed(scope: Any, receive: Any, send: Any) -> None:
        keys.add(dict(scope["headers"]).get(b"authorization"))
        await Served(fake)(scope, receive, send)

    async with served(keyed) as url:
        path = tmp_path / "s"
        words = ("--engine", url, "--closed", "--socket", str(path))
        with started(tmp_path / "log", *words, RELAX_ENGINE_API_KEY="a-long-secret") as (_, own):
            control = EngineControl(path)
            assert (await control.status())["ready"] is False
            await control.confirm_drained(TOKEN)
            await control.open(TOKEN)
            async with aiohttp.ClientSession() as client, client.get(f"{own}/v1/models") as answer:
                assert answer.status == 200
    assert keys == {b"Bearer a-long-secret"}
    assert "a-long-secret" not in (tmp_path / "log").read_text()


async def test_it_does_not_open_what_somebody_has_closed_over_its_socket(tmp_path: Path):
    fake, log = FakeEngine(), tmp_path / "log"
    fake.busy_scheduler = True
    async with served(Served(fake)) as url:
        path = tmp_path / "s"
        with started(log, "--engine", url, "--socket", str(path)):
            await until(lambda: "scheduler is not idle" in log.read_text())
            control = EngineControl(path)
            await control.close(TOKEN)
            fake.busy_scheduler = False
            await until(lambda: "over the socket from now on" in log.read_text())
            assert (await control.status())["ready"] is False
            await control.confirm_drained(TOKEN)
            await control.open(TOKEN)
            assert (await control.status())["ready"] is True


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--engine", "127.0.0.1:1"], "is not the address of an engine"),
        (["--engine", "http://h:1", "--host", "no such host"], "the guard cannot listen on"),
        (["--engine", "http://h:1", "--socket", "/" + "x" * 120], "longer than 100 bytes"),
        ([], "--engine"),
    ],
)
def test_what_cannot_be_used_ends_it_with_2(words: list[str], says: str):
    ended = CliRunner().invoke(app, ["guard", *words])
    assert ended.exit_code == 2, ended.output
    assert says in ended.stderr
    assert not ended.stdout
