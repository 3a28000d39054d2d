"""Judges over HTTP: prompts, hostile answers, several models. A score is right or not there."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from transformers import AutoTokenizer

from relax_infer.config import load_recipe
from relax_infer.contracts.failures import PermanentError, TransientError
from relax_infer.contracts.refs import StagedRef
from relax_infer.samples import Sample, StagingStore, from_table, generate
from relax_infer.scoring import score_with_genrm
from relax_infer.scoring.judge_prompts import filled
from tests.samples.byte_policy import byte_policy
from tests.samples.upstream import Upstream

EOS = 1
SMALL = {"rollout.prompts_per_step": 4, "rollout.samples_per_prompt": 2}
PROMPT = {
    "genrm.prompt": "Q {prompt} A {response} R {answer}",
    "genrm.verdict": {"pattern": r"Score: (?P<score>\S+)"},
    "genrm.max_new_tokens": 16,
}
SECOND = {"genrm.extra_models": [{"model": "m", "model_id": "strict"}]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return byte_policy(tmp_path_factory.mktemp("judge"), chat=True)


@pytest.fixture
async def source(phase: dict[str, Any], upstream: Upstream) -> StagedRef:
    upstream.output = [3, EOS]
    made = (await generate(**phase, router_url=upstream.url)).staged
    upstream.asked.clear()
    upstream.payloads.clear()
    return made


async def judged(
    phase: dict[str, Any],
    upstream: Upstream,
    source: StagedRef,
    overrides: dict[str, Any],
    judges: dict[str, str] | None = None,
) -> list[dict[str, Any]]:
    recipe = load_recipe("quickstart", SMALL | overrides)
    result = await score_with_genrm(
        **(phase | {"recipe": recipe}), source=source, gateway_url=upstream.url, judges=judges
    )
    return phase["store"].read_table(result.staged).to_pylist()


def saying(folder: str, upstream: Upstream, words: str) -> None:
    upstream.output = [*AutoTokenizer.from_pretrained(folder).encode(words), EOS]


async def test_a_judge_is_shown_the_recipes_prompt_in_its_own_chat_template(
    phase: dict[str, Any], upstream: Upstream, source: StagedRef, folder: str, store: StagingStore
):
    saying(folder, upstream, "fine. Score: 0.75")
    rows = await judged(
        phase, upstream, source, PROMPT | {"genrm.system": "Be fair."}, {"judge": folder}
    )
    assert {row["reward"] for row in rows} == {0.75}
    assert {row["reward_detail"] for row in rows} == {"fine. Score: 0.75"}
    sample = from_table(store.read_table(source))[0]
    (shown,) = [p["input_ids"] for p in upstream.payloads if "/g0/s0/" in p["rid"]]
    assert AutoTokenizer.from_pretrained(folder).decode(shown) == (
        f"<system>Be fair.\n<user>Q {sample.prompt} A {sample.response} R {sample.answer}\n"
        "<assistant>"
    )


async def test_a_plain_prompt_is_the_text_alone_and_a_missing_chat_template_is_refused(
    phase: dict[str, Any], upstream: Upstream, source: StagedRef, folder: str, tmp_path: Path
):
    plain = byte_policy(tmp_path / "plain")
    saying(plain, upstream, "Score: 1")
    with pytest.raises(PermanentError, match="tokenizer of judge has no chat template"):
        await judged(phase, upstream, source, PROMPT, {"judge": plain})
    assert upstream.asked == []
    await judged(phase, upstream, source, PROMPT | {"genrm.chat": False}, {"judge": plain})
    assert (
        AutoTokenizer.from_pretrained(plain)
        .decode(upstream.payloads[0]["input_ids"])
        .startswith("Q ")
    )


async def test_a_judge_without_a_tokenizer_is_refused_before_anything_is_asked(
    phase: dict[str, Any], upstream: Upstream, source: StagedRef, tmp_path: Path
):
    with pytest.raises(PermanentError, match="judge has no tokenizer in"):
        await judged(phase, upstream, source, PROMPT, {"judge": str(tmp_path)})
    with pytest.raises(PermanentError, match="tokenizer of judge is is not known"):
        await judged(phase, upstream, source, PROMPT)
    assert upstream.asked == []


def test_a_response_that_spells_a_place_is_not_filled_in():
    sample = Sample.model_construct(prompt="p", response="{answer} {prompt}", answer="secret")
    assert filled("{response}|{answer}|{other}", sample) == "{answer} {prompt}|secret|{other}"


WORDS = ["", "Score: nan", "Score: 1e999", "Score: 2", "no idea", "Score: 1 Score: 0"]


@pytest.mark.parametrize("words", WORDS)
async def test_a_hostile_verdict_has_no_reward_and_a_reason(
    phase: dict[str, Any], upstream: Upstream, source: StagedRef, folder: str, words: str
):
    """Pains 9 and 10: empty, not a number, huge, out of range, garbage, ambiguous."""
    saying(folder, upstream, words)
    rows = await judged(phase, upstream, source, PROMPT, {"judge": folder})
    assert {row["reward"] for row in rows} == {None}
    assert all(row["reward_detail"].startswith("unparsable verdict: ") for row in rows)


def finishing(kind: Any) -> Callable[[Upstream, dict[str, Any]], dict[str, Any]]:
    def fault(upstream: Upstream, payload: dict[str, Any]) -> dict[str, Any]:
        answer = upstream._good(payload)
        answer["meta_info"]["finish_reason"] = {"type": kind}
        return answer

    return fault


async def test_a_truncated_verdict_has_no_reward_though_it_could_be_read(
    phase: dict[str, Any], upstream: Upstream, source: StagedRef, folder: str
):
    saying(folder, upstream, "Score: 1")  # of 10, or of 0.1
    upstream.fault = lambda payload: finishing("length")(upstream, payload)
    rows = await judged(phase, upstream, source, PROMPT, {"judge": folder})
    assert {row["reward"] for row in rows} == {None}
    assert rows[0]["reward_detail"] == "truncated verdict: 'Score: 1'"


async def test_the_tasks_own_verdict_without_an_end_is_truncated_too(
    phase: dict[str, Any], upstream: Upstream, source: StagedRef
):
    upstream.output = [21]
    upstream.fault = lambda payload: finishing("length")(upstream, payload)
    rows = await judged(phase, upstream, source, {})
    assert {(row["reward"], row["reward_detail"]) for row in rows} == {
        (None, "truncated verdict: 'y'")
    }


async def test_what_an_aborted_judge_had_said_by_then_is_no_verdict(
    phase: dict[str, Any], upstream: Upstream, source: StagedRef
):
    upstream.output = [21, EOS]
    upstream.fault = lambda payload: finishing("abort")(upstream, payload)
    with pytest.raises(TransientError, match="aborted"):
        await judged(phase, upstream, source, {})
    assert phase["store"].shards(1, "judged") == {}


@pytest.mark.parametrize(
    "answer",
    [
        {},
        [],
        "y",
        None,
        17,
        {"output_ids": [21, 1]},
        {"output_ids": "21", "meta_info": {"finish_reason": {"type": "stop"}}},
        {"output_ids": [21.7, 1], "meta_info": {"finish_reason": {"type": "stop"}}},
        {"output_ids": [True, 1], "meta_info": {"finish_reason": {"type": "stop"}}},
        {"output_ids": [-3, 1], "meta_info": {"finish_reason": {"type": "stop"}}},
        {"output_ids": [10**30], "meta_info": {"finish_reason": {"type": "stop"}}},
        {"output_ids": [21, 1], "meta_info": {"finish_reason": {"type": None}}},
        {"output_ids": [21, 1], "meta_info": {"finish_reason": None}},
    ],
)
async def test_an_answer_of_the_wrong_types_fails_the_phase_and_leaves_no_row(
    phase: dict[str, Any], upstream: Upstream, source: StagedRef, answer: Any
):
    upstream.fault = lambda payload: web.json_response(answer)
    with pytest.raises(PermanentError, match="step 1 group"):
        await judged(phase, upstream, source, {})
    assert phase["store"].shards(1, "judged") == {}


async def test_an_answer_that_is_not_json_fails_the_phase(
    phase: dict[str, Any], upstream: Upstream, source: StagedRef
):
    upstream.fault = lambda payload: web.Response(text="<html>", content_type="text/html")
    with pytest.raises(PermanentError, match="not JSON"):
        await judged(phase, upstream, source, {})
    assert phase["store"].shards(1, "judged") == {}


async def test_a_slow_judge_is_a_transient_failure_and_no_reward(
    phase: dict[str, Any], upstream: Upstream, source: StagedRef
):
    upstream.hold.clear()
    with pytest.raises(TransientError, match="no answer"):
        await judged(phase, upstream, source, {"genrm.request_timeout": 0.2})
    upstream.hold.set()
    assert phase["store"].shards(1, "judged") == {}


async def test_a_sample_that_the_judge_refuses_has_no_score_and_the_others_have(
    phase: dict[str, Any], upstream: Upstream, source: StagedRef
):
    def too_long(payload: dict[str, Any]) -> web.Response | None:
        refused = "/g1/s0/" in payload["rid"]
        return web.Response(status=400, text="too long") if refused else None

    upstream.output = [21, EOS]
    upstream.fault = too_long
    rows = await judged(phase, upstream, source, {})
    assert [row["reward"] for row in rows] == [1.0, 1.0, None, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert rows[2]["reward_detail"].startswith("the judge refused: ")


async def test_a_judge_that_is_busy_is_asked_again_under_another_request_id(
    phase: dict[str, Any], upstream: Upstream, source: StagedRef
):
    upstream.output = [21, EOS]
    seen: set[str] = set()

    def busy_at_first(payload: dict[str, Any]) -> web.Response | None:
        sample = payload["rid"].partition("/a1")[0]
        first = sample not in seen
        seen.add(sample)
        return web.Response(status=429) if first else None

    upstream.fault = busy_at_first
    rows = await judged(phase, upstream, source, {})
    assert {row["reward"] for row in rows} == {1.0}
    assert len(set(upstream.asked)) == len(upstream.asked) == 16
    assert sorted(rid.rpartition("/")[2] for rid in upstream.asked) == ["a1"] * 8 + ["r1"] * 8


@pytest.mark.parametrize("status", [500, 502, 504, 404])
async def test_only_what_nobody_took_is_asked_again_at_once(
    phase: dict[str, Any], upstream: Upstream, source: StagedRef, status: int
):
    """Pain 2: after these a request may be in flight, or asking again cannot help."""
    upstream.fault = lambda payload: web.Response(status=status, text="boom")
    with pytest.raises((PermanentError, TransientError), match=f"status {status}"):
        await judged(phase, upstream, source, {"genrm.retries": 5})
    assert all(rid.endswith("/a1") for rid in upstream.asked)
    assert phase["store"].shards(1, "judged") == {}


def by_model(upstream: Upstream, **verdicts: list[int]) -> None:
    def fault(payload: dict[str, Any]) -> dict[str, Any]:
        return upstream._good(payload) | {"output_ids": verdicts[payload["model"]]}

    upstream.fault = fault


@pytest.mark.parametrize(("rule", "reward"), [("mean", 0.5), ("min", 0.0), ("max", 1.0)])
async def test_several_judges_make_one_reward_by_the_recipes_rule(
    phase: dict[str, Any], upstream: Upstream, source: StagedRef, rule: str, reward: float
):
    by_model(upstream, judge=[21, EOS], strict=[22, EOS])
    rows = await judged(phase, upstream, source, SECOND | {"reward.combine.rule": rule})
    assert {row["reward"] for row in rows} == {reward}
    assert {row["reward_source"] for row in rows} == {"genrm:judge+strict"}
    assert len(set(upstream.asked)) == 16


async def test_a_sample_that_one_of_several_judges_could_not_score_has_no_score(
    phase: dict[str, Any], upstream: Upstream, source: StagedRef
):
    by_model(upstream, judge=[21, EOS], strict=[17, EOS])
    rows = await judged(phase, upstream, source, SECOND)
    assert {row["reward"] for row in rows} == {None}
    assert rows[0]["reward_detail"].startswith("unparsable verdict: strict: ")
