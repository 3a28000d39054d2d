"""What the activities add to what a role's workflow has pushed."""

from pathlib import Path
from typing import Any

import pytest

from activities import front
from activities._run_files import store_of
from relax_infer.config import load_recipe
from relax_infer.contracts.batch import Judging, RegistryPush
from relax_infer.contracts.refs import RunRef
from relax_infer.contracts.run import FrontAddress


async def pushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str, **changes: Any
) -> RegistryPush:
    """What reaches the front of a run of the quickstart's recipe."""
    got: list[RegistryPush] = []

    class Front:
        def __init__(self, run: str) -> None:
            assert run == "run-1"

        async def ensure(self) -> FrontAddress:
            return FrontAddress(router_url="http://r:1", gateway_url="http://g:1")

        async def push(self, push: RegistryPush) -> None:
            got.append(push)

    monkeypatch.setattr(front, "Front", Front)
    run = RunRef(run="run-1", store=tmp_path.as_uri())
    recipe = load_recipe("quickstart", changes)
    store_of(run).write_json("recipe.json", recipe.model_dump(mode="json"))
    await front.push_registry(RegistryPush(run=run, role=role, term=1, document={}))
    return got[0]


async def test_a_judges_registry_goes_out_with_how_the_recipe_has_messages_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {
        "genrm.chat_template_kwargs": {"enable_thinking": False},
        "genrm.max_new_tokens": 77,
    }
    push = await pushed(tmp_path, monkeypatch, "genrm", **changes)
    assert push.judging == Judging(
        template_kwargs={"judge": {"enable_thinking": False}}, max_new_tokens=77
    )


async def test_of_other_roles_nothing_is_said_of_judging(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await pushed(tmp_path, monkeypatch, "teacher")).judging is None
