"""What activities tell of themselves travels with every heartbeat."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from temporalio.testing import ActivityEnvironment

from activities import recipes
from activities._boundary import _beating
from activities._progress import teller
from tests.workflows.scripted_world import until


async def test_every_heartbeat_carries_what_was_told_last_from_any_thread(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("activities._boundary._BEAT", 0.01)
    environment = ActivityEnvironment()
    beats: list[tuple[Any, ...]] = []
    environment.on_heartbeat = lambda *details: beats.append(details)

    async def work() -> None:
        async with _beating():
            await until(lambda: beats)
            tell = teller()
            thread = threading.Thread(target=tell, args=("12 of 32 groups",))
            thread.start()
            await asyncio.to_thread(thread.join)
            await until(lambda: beats[-2:] == [("12 of 32 groups",)] * 2)
            tell()
            await until(lambda: beats[-1] == ())

    await environment.run(work)
    assert beats[0] == ()


def test_outside_an_activity_nobody_is_told():
    teller()("anything")


def test_models_that_are_trained_first_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    told: list[tuple[object, ...]] = []

    def made(folder: Path, *, progress: Any, names: list[str], **_: object) -> dict[str, Path]:
        progress("policy: update 100 of 400, loss 0.5")
        return {name: folder / name for name in names}

    monkeypatch.setattr(recipes, "ensure_models", made)
    monkeypatch.setattr(recipes, "teller", lambda: lambda *news: told.append(news))
    folders = recipes._folders({"tiny:policy", "/models/judge"}, tmp_path, seed=0)
    assert folders == {
        "tiny:policy": tmp_path / "policy",
        "/models/judge": Path("/models/judge"),
    }
    assert told == [
        ("trains the tiny models (once for this machine): policy: update 100 of 400, loss 0.5",),
        (),
    ]
