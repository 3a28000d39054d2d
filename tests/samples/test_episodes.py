"""Samples that are episodes: the policy and an environment take turns."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from aiohttp import web

from relax_infer.config import Recipe, load_recipe
from relax_infer.contracts.failures import PermanentError, TransientError
from relax_infer.samples import StagingStore, Task, from_table, generate, load_task
from relax_infer.samples.environment import Turn
from relax_infer.samples.policy_text import PolicyText
from relax_infer.samples.sample import Sample
from relax_infer.samples.tasks import Problem
from relax_infer.scoring.rewards import require_usable, scores_by_rule
from tests.samples.byte_policy import byte_policy
from tests.samples.upstream import PLUS_ONE, Upstream, serving

HERE = "tests.samples.test_episodes"
AGAIN = {"again": "?", "discount": 0.5}


class Scripted:
    """Answers as ``config`` says; remembers what it was told, and that it was closed."""

    made: ClassVar[list["Scripted"]] = []

    def __init__(self, problem: Problem, task: Task, config: Mapping[str, Any]) -> None:
        self.config, self.told, self.closed = config, list[str](), 0
        self.made.append(self)

    async def step(self, text: str, ids: Sequence[int]) -> Turn:
        self.told.append(text)
        match self.config["does"]:
            case "raise":
                raise ValueError("the world ended")
            case "hang":
                await asyncio.sleep(60)
            case "mute":
                return Turn()
            case "none":
                return None  # type: ignore[return-value]
            case "words":
                return Turn(done=True, reward="much")  # type: ignore[arg-type]
            case "unworthy":
                return Turn(done=True)
            case _:
                pass
        return Turn("?", done=len(self.told) == self.config["turns"], reward=float(len(self.told)))

    async def close(self) -> None:
        self.closed += 1
        raise RuntimeError("already closed")


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scripted, "made", [])


def recipe_with(source: str, config: Mapping[str, Any], **more: Any) -> Recipe:
    environment = {"source": source, "config": dict(config), **more}
    return load_recipe(
        "quickstart",
        {
            "rollout.prompts_per_step": 2,
            "rollout.samples_per_prompt": 2,
            "rollout.environment": environment,
            "reward.source": "environment",
        },
    )


async def played(phase: dict[str, Any], recipe: Recipe, *upstreams: Upstream) -> list[Sample]:
    async def addresses() -> Sequence[str]:
        return [each.url for each in upstreams]

    document = phase | {"recipe": recipe, "task": load_task(recipe), "addresses": addresses}
    result = await generate(**document, router_url="http://127.0.0.1:1")
    store: StagingStore = phase["store"]
    return from_table(store.read_table(result.staged))


def rewards(samples: list[Sample], recipe: Recipe) -> list[tuple[float | None, str | None]]:
    adapter = require_usable("environment")
    scores = scores_by_rule(adapter, samples, load_task(recipe), unfinished=0.0)
    return [(score.reward, score.detail) for score in scores]


async def test_turns_follow_one_another_and_only_the_policy_s_own_tokens_are_trained_on(
    phase: dict[str, Any], upstream: Upstream
):
    recipe = recipe_with(f"{HERE}:Scripted", {"does": "talk", "turns": 3})
    samples = await played(phase, recipe, upstream)
    [word] = load_task(recipe).turn("?")
    for sample in samples:
        assert sample.response_ids == (3, 1, word, 3, 1, word, 3, 1)
        assert sample.loss_mask == (1, 1, 0, 1, 1, 0, 1, 1)
        assert sample.rollout_log_probs[2:4] == (0.0, PLUS_ONE)
        assert sample.finish_reason == "stop"
        assert json.loads(sample.metadata)["episode"]["turns"] == 3
    first = [p for p in upstream.payloads if "/g0/s0/" in p["rid"]]
    prompt = list(samples[0].prompt_ids)
    assert [p["input_ids"] for p in first] == [
        prompt,
        [*prompt, 3, 1, word],
        [*prompt, 3, 1, word, 3, 1, word],
    ]
    assert [p["rid"] for p in first] == [f"run-1/1/generated/g0/s0/a1/t{k}" for k in range(3)]
    assert rewards(samples, recipe) == [(3.0, None)] * 4
    assert [each.closed for each in Scripted.made] == [1] * 4


async def test_an_episode_ends_at_its_last_turn_or_where_no_room_is_left(
    phase: dict[str, Any], upstream: Upstream
):
    talks = {"does": "talk", "turns": 99}
    few = await played(phase, recipe_with(f"{HERE}:Scripted", talks, max_turns=2), upstream)
    assert {(len(s.response_ids), s.finish_reason) for s in few} == {(5, "stop")}
    short = recipe_with(f"{HERE}:Scripted", talks, max_turns=9, max_response_tokens=6)
    cut = await played(phase | {"step": 2}, short, upstream)
    assert {(len(s.response_ids), s.finish_reason) for s in cut} == {(5, "length")}
    assert [p["sampling_params"]["max_new_tokens"] for p in upstream.payloads[-2:]] == [3, 3]


async def test_an_answer_that_hit_its_limit_is_not_answered(
    phase: dict[str, Any], upstream: Upstream
):
    upstream.fault = lambda p: {
        "output_ids": [3],
        "meta_info": {
            "finish_reason": {"type": "length"},
            "weight_version": "3",
            "output_token_logprobs": [[PLUS_ONE, 3, None]],
        },
    }
    recipe = recipe_with(f"{HERE}:Scripted", {"does": "talk", "turns": 3})
    samples = await played(phase, recipe, upstream)
    assert {(s.response_ids, s.finish_reason) for s in samples} == {((3,), "length")}


@pytest.mark.parametrize(
    ("does", "why"),
    [
        ("raise", "environment: ValueError: the world ended"),
        ("hang", "environment: no answer within 0.1 s"),
        ("mute", "environment: it neither ended the episode nor said anything"),
        ("unworthy", "environment: it gave no reward"),
        ("none", "environment: TypeError: step gave None, and no Turn with a text"),
        ("words", "environment: ValueError: could not convert string to float: 'much'"),
    ],
)
async def test_an_environment_that_fails_leaves_a_sample_without_a_score_and_is_closed(
    phase: dict[str, Any], upstream: Upstream, does: str, why: str
):
    config = {"does": does, "turns": 3}
    recipe = recipe_with(f"{HERE}:Scripted", config, step_timeout=0.1)
    samples = await played(phase, recipe, upstream)
    assert rewards(samples, recipe) == [(None, why)] * 4
    assert {s.response_ids for s in samples} == {(3, 1)}
    assert [each.closed for each in Scripted.made] == [1] * 4


async def test_an_episode_stays_with_one_replica(phase: dict[str, Any], upstream: Upstream):
    recipe = recipe_with(f"{HERE}:Scripted", {"does": "talk", "turns": 4})
    async with serving() as another:
        await played(phase, recipe, upstream, another)
        asked = [{rid.rpartition("/")[0] for rid in each.asked} for each in (upstream, another)]
    assert len(asked[0] | asked[1]) == 4
    assert asked[0] & asked[1] == set()


async def test_an_engine_that_is_lost_in_the_middle_costs_the_phase_its_attempt(
    phase: dict[str, Any], upstream: Upstream
):
    upstream.fault = lambda p: web.Response(status=503) if p["rid"].endswith("t1") else None
    recipe = recipe_with(f"{HERE}:Scripted", {"does": "talk", "turns": 3})
    with pytest.raises(TransientError, match="503"):
        await played(phase, recipe, upstream)
    assert all(each.closed == 1 for each in Scripted.made)
    upstream.fault = lambda p: None
    assert len(await played(phase, recipe, upstream)) == 4
    with pytest.raises(TransientError, match="no engine"):
        await played(phase | {"step": 2}, recipe)


async def test_weights_that_change_between_turns_are_refused(
    phase: dict[str, Any], upstream: Upstream
):
    def changes(payload: dict[str, Any]) -> None:
        upstream.weight_version = "4" if payload["rid"].endswith("t1") else "3"

    upstream.fault = changes
    recipe = recipe_with(f"{HERE}:Scripted", {"does": "talk", "turns": 3})
    with pytest.raises(PermanentError, match="turn 1 was made with weights 4, not 3"):
        await played(phase, recipe, upstream)


async def test_whoever_tries_again_gets_less_for_it(phase: dict[str, Any], upstream: Upstream):
    recipe = recipe_with("retry", AGAIN, max_turns=2)
    task = load_task(recipe)
    right = {}

    def second_time(payload: dict[str, Any]) -> None:
        prompt = tuple(payload["input_ids"][:5])
        problem = next(p for p in task.prompts(recipe.seed, 1, 2) if p.prompt_ids == prompt)
        answer = [*task.turn(problem.answer), task.eos_id]
        group_0 = "/g0/" in payload["rid"]
        right[group_0] = True
        upstream.output = answer if not group_0 or payload["rid"].endswith("t1") else [3, 1]

    upstream.fault = second_time
    samples = await played(phase, recipe, upstream)
    assert set(right) == {True, False}
    assert rewards(samples, recipe) == [(0.5, None)] * 2 + [(1.0, None)] * 2


def test_what_retry_does_not_know_and_what_cannot_be_imported_is_named():
    recipe = recipe_with("retry", {"agian": "?"})
    assert recipe.rollout.environment is not None
    from relax_infer.samples.environment import environment_maker

    problem = Problem("p", (1,), "a")
    with pytest.raises(PermanentError, match="agian"):
        environment_maker(recipe.rollout.environment)(problem, load_task(recipe), {"agian": "?"})
    for source, words in (
        ("no.such:thing", "cannot be imported"),
        (f"{HERE}:AGAIN", "is dict and makes no environment"),
    ):
        plan = recipe.rollout.environment.model_copy(update={"source": source})
        with pytest.raises(PermanentError, match=words):
            environment_maker(plan)


def test_words_that_the_tiny_policy_cannot_read_are_refused():
    with pytest.raises(PermanentError, match=r"rollout\.environment says 'Try again\.'"):
        load_task(recipe_with("retry", {})).turn("Try again.")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"reward.source": "environment"}, "rollout has no environment section"),
        (
            {
                "rollout.environment": {"source": "retry"},
                "distillation.mode": "union",
                "teacher.max_logprob_cells": 100_000,
            },
            "distillation.mode: union",
        ),
        (
            {"rollout.environment": {"source": "retry", "max_response_tokens": 10_000_000}},
            "max_response_tokens",
        ),
        ({"rollout.environment": {"source": "re try"}}, "must be retry or"),
    ],
)
def test_recipes_that_cannot_be_are_refused(overrides: dict[str, Any], words: str):
    with pytest.raises(PermanentError, match=words):
        load_recipe("quickstart", overrides)


@pytest.mark.parametrize("chat", [False, True])
def test_a_turn_is_what_stands_between_two_answers_in_the_policy_s_own_words(
    tmp_path: Path, chat: bool
):
    folder = byte_policy(tmp_path, chat=chat, ends_turns=True)
    text = PolicyText(folder)
    turn = text.decode(text.encode_turn("wrong"))
    assert turn == ("<user>wrong<assistant>" if chat else "\n\nwrong\n\n")


def test_a_template_that_hides_the_end_of_an_answer_is_refused(tmp_path: Path):
    text = PolicyText(byte_policy(tmp_path, chat=True))
    with pytest.raises(PermanentError, match="chat template"):
        text.encode_turn("wrong")
