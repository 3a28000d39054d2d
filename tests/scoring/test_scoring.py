from typing import Any

import pyarrow as pa
import pytest
from aiohttp import web

from relax_infer.config import Recipe, load_recipe
from relax_infer.contracts.failures import PermanentError, TransientError
from relax_infer.contracts.refs import StagedRef
from relax_infer.samples import Sample, StagingStore, from_table, generate
from relax_infer.scoring import (
    RewardAdapter,
    batch_metrics,
    get_reward,
    register_reward,
    score_with_genrm,
    score_with_teacher,
    validate_scores,
    write_back,
)
from tests.samples.upstream import Upstream

YES, NO, EOS, COLON = [21, 1], [22, 1], 1, [17, 1]


async def staged(phase: dict[str, Any], upstream: Upstream) -> StagedRef:
    upstream.output = [3, EOS]
    made = (await generate(**phase, router_url=upstream.url)).staged
    upstream.asked.clear()
    upstream.payloads.clear()
    return made


async def judged(phase: dict[str, Any], upstream: Upstream, source: StagedRef) -> StagedRef:
    result = await score_with_genrm(**phase, source=source, gateway_url=upstream.url)
    return result.staged


async def taught(phase: dict[str, Any], upstream: Upstream, source: StagedRef) -> StagedRef:
    result = await score_with_teacher(**phase, source=source, gateway_url=upstream.url)
    return result.staged


def joined(
    phase: dict[str, Any],
    generated: StagedRef,
    judged: StagedRef | None,
    taught: StagedRef | None,
    recipe: Recipe | None = None,
):
    return write_back(
        phase["store"],
        1,
        generated=generated,
        judged=judged,
        taught=taught,
        task=phase["task"],
        recipe=recipe or phase["recipe"],
    )


async def test_the_judge_is_shown_prompt_and_response_and_its_verdict_is_the_reward(
    phase: dict[str, Any], upstream: Upstream, store: StagingStore
):
    source = await staged(phase, upstream)
    upstream.output = YES
    rows = store.read_table(await judged(phase, upstream, source)).to_pylist()
    assert {row["reward"] for row in rows} == {1.0}
    assert {row["reward_source"] for row in rows} == {"genrm:judge"}
    sample = from_table(store.read_table(source))[0]
    shown = upstream.payloads[0]["input_ids"]
    assert shown == [*sample.prompt_ids, 3, phase["task"].judge_prompt([], [EOS])[-1]]
    assert len(upstream.asked) == 8


async def test_an_unfinished_response_takes_its_rule_and_is_not_asked_about(
    phase: dict[str, Any], upstream: Upstream, store: StagingStore
):
    upstream.output = [3, 3]
    source = (await generate(**phase, router_url=upstream.url)).staged
    upstream.asked.clear()
    rows = store.read_table(await judged(phase, upstream, source)).to_pylist()
    assert {row["reward_source"] for row in rows} == {"rule:unfinished"}
    assert upstream.asked == []


async def test_a_failed_judge_is_never_a_reward_of_zero(phase: dict[str, Any], upstream: Upstream):
    """Pains 9 and 10: the batch gets no synthetic number."""
    source = await staged(phase, upstream)
    upstream.fault = lambda p: web.Response(status=500, text="boom")
    with pytest.raises(PermanentError, match="boom"):
        await judged(phase, upstream, source)
    assert phase["store"].shards(1, "judged") == {}


async def test_a_judge_that_is_away_for_a_moment_is_asked_again_by_the_next_attempt(
    phase: dict[str, Any], upstream: Upstream
):
    source = await staged(phase, upstream)
    upstream.fault = lambda p: web.Response(status=503)
    with pytest.raises(TransientError):
        await judged(phase, upstream, source)
    upstream.fault = lambda p: None
    upstream.output = NO
    assert (await judged(phase, upstream, source)).rows == 8


async def test_an_unparsable_verdict_fails_the_batch_or_drops_its_group_with_the_reason(
    phase: dict[str, Any], upstream: Upstream, store: StagingStore
):
    source = await staged(phase, upstream)
    upstream.output = YES

    def odd(payload: dict[str, Any]) -> dict[str, Any] | None:
        if "/g2/s1/" not in payload["rid"]:
            return None
        return upstream._good(payload) | {"output_ids": COLON}

    upstream.fault = odd
    verdicts = await judged(phase, upstream, source)
    upstream.fault = lambda p: None
    lessons = await taught(phase, upstream, source)
    row = [r for r in store.read_table(verdicts).to_pylist() if r["reward"] is None]
    assert [(r["group"], r["sample"]) for r in row] == [(2, 1)]
    result = joined(phase, source, verdicts, lessons)
    assert result.dropped_groups == 1
    assert result.drop_reasons == {"unparsable verdict": 1}
    kept = from_table(store.read_table(result.staged))
    assert {s.group for s in kept} == {0, 1, 3}
    strict = load_recipe("quickstart", {"reward.on_unscored": "fail"})
    with pytest.raises(PermanentError, match="step 1 group 2 sample 1"):
        joined(phase, source, verdicts, lessons, strict)


async def test_all_groups_dropped_is_an_error(phase: dict[str, Any], upstream: Upstream):
    source = await staged(phase, upstream)
    upstream.output = COLON
    verdicts = await judged(phase, upstream, source)
    with pytest.raises(PermanentError, match="every group was dropped"):
        joined(phase, source, verdicts, None)


async def test_the_teacher_gives_one_log_prob_per_sampled_token(
    phase: dict[str, Any], upstream: Upstream, store: StagingStore
):
    source = await staged(phase, upstream)
    rows = store.read_table(await taught(phase, upstream, source)).to_pylist()
    assert {tuple(row["teacher_log_probs"]) for row in rows} == {(-0.25, -0.25)}
    payload = upstream.payloads[0]
    assert payload["sampling_params"]["max_new_tokens"] == 0
    assert payload["logprob_start_len"] == 4


async def test_a_teacher_that_gives_too_few_log_probs_is_refused(
    phase: dict[str, Any], upstream: Upstream
):
    """Pain 14: nothing is filled with zeros."""
    source = await staged(phase, upstream)

    def short(payload: dict[str, Any]) -> dict[str, Any]:
        answer = upstream._good(payload)
        del answer["meta_info"]["input_token_logprobs"][-1]
        return answer

    upstream.fault = short
    with pytest.raises(PermanentError, match="2 log-probs, 3 were due"):
        await taught(phase, upstream, source)


async def test_the_last_token_of_the_vocabulary_is_taken_though_sglang_names_it_0(
    phase: dict[str, Any], upstream: Upstream, store: StagingStore
):
    upstream.output = [3, 31, EOS]
    source = (await generate(**phase, router_url=upstream.url)).staged

    def clipped(payload: dict[str, Any]) -> dict[str, Any]:
        answer = upstream._good(payload)
        for row in answer["meta_info"]["input_token_logprobs"]:
            row[1] = 0 if row[1] == 31 else row[1]
        return answer

    upstream.fault = clipped
    rows = store.read_table(await taught(phase, upstream, source)).to_pylist()
    assert {tuple(row["teacher_log_probs"]) for row in rows} == {(-0.25, -0.25, -0.25)}


async def test_log_probs_of_other_tokens_are_no_teaching(phase: dict[str, Any], upstream: Upstream):
    source = await staged(phase, upstream)

    def mixed(payload: dict[str, Any]) -> dict[str, Any]:
        answer = upstream._good(payload)
        answer["meta_info"]["input_token_logprobs"][-1][1] = 0
        return answer

    upstream.fault = mixed
    with pytest.raises(PermanentError, match="other tokens"):
        await taught(phase, upstream, source)


async def test_scores_of_another_step_are_refused(
    phase: dict[str, Any], upstream: Upstream, store: StagingStore
):
    source = await staged(phase, upstream)
    upstream.output = YES
    table = store.read_table(await judged(phase, upstream, source))
    other = table.set_column(1, "step", pa.array([9] * table.num_rows))
    ref = store.write_table("other.arrow", other)
    with pytest.raises(PermanentError, match="step 9"):
        joined(phase, source, ref, None)


async def test_a_missing_row_is_named(
    phase: dict[str, Any], upstream: Upstream, store: StagingStore
):
    source = await staged(phase, upstream)
    upstream.output = YES
    table = store.read_table(await judged(phase, upstream, source))
    ref = store.write_table("short.arrow", table.slice(1))
    with pytest.raises(PermanentError, match=r"7 rows for 8 samples.*\(0, 0\)"):
        joined(phase, source, ref, None)


async def test_write_back_changes_no_earlier_file(
    phase: dict[str, Any], upstream: Upstream, store: StagingStore
):
    source = await staged(phase, upstream)
    upstream.output = YES
    verdicts = await judged(phase, upstream, source)
    lessons = await taught(phase, upstream, source)
    result = joined(phase, source, verdicts, lessons)
    assert all(s.reward is None for s in from_table(store.read_table(source)))
    scored = from_table(store.read_table(result.staged))
    assert {s.reward for s in scored} == {1.0}
    assert {s.teacher_log_probs for s in scored} == {(-0.25, -0.25)}
    metrics = batch_metrics(store.read_table(result.staged), phase["task"])
    assert metrics.teacher_kl == pytest.approx(-0.25)
    assert metrics.reward_mean == 1.0
    (version,) = {s.weight_version for s in scored}
    assert metrics.staleness == scored[0].step - 1 - version


def sample(**changes: Any) -> Sample:
    return Sample.model_construct(
        **{
            "run": "r",
            "step": 1,
            "group": 0,
            "sample": 0,
            "response_ids": (3, 1),
            "rollout_log_probs": (-1.0, -1.0),
            "loss_mask": (1, 1),
            "reward": 1.0,
            "teacher_log_probs": (-1.0, -1.0),
        }
        | changes
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"reward": None}, "reward is None"),
        ({"reward": float("nan")}, "reward is nan"),
        ({"teacher_log_probs": None}, "teacher_log_probs is missing"),
        ({"teacher_log_probs": (-1.0,)}, "teacher_log_probs has 1 entries for 2 tokens"),
        ({"teacher_log_probs": (-1.0, float("inf"))}, "teacher_log_probs is not finite"),
        ({"rollout_log_probs": (-1.0, float("nan"))}, "rollout_log_probs is not finite"),
        ({"loss_mask": (1,)}, "loss_mask is not aligned"),
    ],
)
def test_a_faulty_channel_is_named_with_its_sample(changes: dict[str, Any], said: str):
    validate_scores([sample()], needs_reward=True, needs_teacher=True)
    with pytest.raises(PermanentError, match=f"step 1 group 0 sample 0: {said}"):
        validate_scores([sample(**changes)], needs_reward=True, needs_teacher=True)


def test_the_random_reward_is_a_fair_coin_that_depends_on_the_identity_only():
    rule = get_reward("random").rule
    assert rule is not None
    tosses = [rule(sample(sample=k), None) for k in range(2000)]  # type: ignore[arg-type]
    assert tosses == [rule(sample(sample=k), None) for k in range(2000)]  # type: ignore[arg-type]
    assert 0.45 < sum(tosses) / len(tosses) < 0.55


def test_a_reward_name_is_taken_once():
    register_reward(get_reward("exact"))
    with pytest.raises(ValueError, match="registered already"):
        register_reward(RewardAdapter("exact", supports_deferred=False))


def test_an_unknown_reward_names_the_known_ones():
    with pytest.raises(PermanentError, match="exact, genrm"):
        get_reward("dapo")


async def test_scorers_that_somebody_else_serves_are_asked_where_they_are(
    phase: dict[str, Any], upstream: Upstream, monkeypatch: pytest.MonkeyPatch
):
    """Without our names for their models: a bare engine has none. Nor are our gateway's token and
    certificates any business of theirs."""
    source = await staged(phase, upstream)
    monkeypatch.setenv("RELAX_GATEWAY_TOKEN", "a-token-of-our-own-gateway")
    monkeypatch.setenv("RELAX_GATEWAY_TLS_CA", "/nowhere")  # read for our gateway only
    urls = {"genrm.url": f"{upstream.url}/judge/", "teacher.url": upstream.url}
    own = {"rollout.prompts_per_step": 4, "rollout.samples_per_prompt": 2}
    recipe = load_recipe("quickstart", own | urls)
    elsewhere = phase | {"recipe": recipe}
    nobody = "http://127.0.0.1:1"
    upstream.output = YES
    await score_with_genrm(**elsewhere, source=source, gateway_url=nobody)
    await score_with_teacher(**elsewhere, source=source, gateway_url=nobody)
    assert len(upstream.payloads) == 16
    assert set(upstream.paths) >= {"/judge/generate", "/generate"}
    assert all("model" not in payload for payload in upstream.payloads)
    assert all("Authorization" not in headers for headers in upstream.headers[-16:])
    monkeypatch.delenv("RELAX_GATEWAY_TLS_CA")
    await score_with_genrm(**phase | {"step": 2}, source=source, gateway_url=upstream.url)
    assert upstream.headers[-1]["Authorization"] == "Bearer a-token-of-our-own-gateway"
