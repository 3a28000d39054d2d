import asyncio
import time
from typing import Any

import pyarrow as pa
import pytest
from aiohttp import web

from relax_infer.contracts.failures import PermanentError, TransientError
from relax_infer.samples import StagingStore, from_table, generate
from tests.samples.conftest import Settled
from tests.samples.upstream import PLUS_ONE, Upstream


async def test_every_prompt_makes_a_group_of_whole_samples(
    phase: dict[str, Any], upstream: Upstream, store: StagingStore
):
    result = await generate(**phase, router_url=upstream.url)
    samples = from_table(store.read_table(result.staged))
    assert [(s.group, s.sample) for s in samples] == [(g, s) for g in range(4) for s in range(2)]
    assert {s.rollout_log_probs for s in samples} == {(PLUS_ONE, PLUS_ONE)}
    assert {s.weight_version for s in samples} == {3}
    assert samples[0].rid == "run-1/1/generated/g0/s0/a1"
    assert result.requested == 8
    assert len(set(upstream.asked)) == 8


async def test_as_many_requests_are_in_flight_as_the_recipe_says_and_no_more(
    phase: dict[str, Any], upstream: Upstream
):
    upstream.hold.clear()
    asking = asyncio.create_task(generate(**phase, router_url=upstream.url))
    await asyncio.wait_for(upstream.reached(2), 10)
    upstream.hold.set()
    await asking
    assert upstream.most_in_flight == 2


async def test_a_second_attempt_asks_only_for_what_no_shard_holds(
    phase: dict[str, Any], upstream: Upstream, settled: Settled, store: StagingStore
):
    upstream.fault = lambda p: web.Response(status=503) if "/g3/" in p["rid"] else None
    with pytest.raises(TransientError, match="group 3"):
        await generate(**phase, router_url=upstream.url)
    held = set(store.shards(1, "generated"))
    assert held
    assert 3 not in held
    assert settled.calls == []
    before = len(upstream.asked)
    upstream.fault = lambda p: None
    result = await generate(**phase, router_url=upstream.url)
    asked_again = {rid.split("/")[3] for rid in upstream.asked[before:]}
    assert asked_again.isdisjoint({f"g{group}" for group in held})
    assert all(rid.endswith("/a2") for rid in upstream.asked[before:])
    assert result.reused_groups == len(held)
    assert result.staged.rows == 8


async def test_a_failed_attempt_leaves_no_write_behind(
    phase: dict[str, Any],
    upstream: Upstream,
    store: StagingStore,
    monkeypatch: pytest.MonkeyPatch,
):
    begun: list[int] = []
    write = store.write_shard

    def slow_write(step: int, name: str, group: int, attempt: int, table: pa.Table) -> object:
        begun.append(group)
        time.sleep(0.3)
        return write(step, name, group, attempt, table)

    def fails_while_a_write_goes_on(payload: dict[str, Any]) -> web.Response | None:
        return web.Response(status=503) if begun else None

    monkeypatch.setattr(store, "write_shard", slow_write)
    upstream.fault = fails_while_a_write_goes_on
    with pytest.raises(TransientError, match="503"):
        await generate(**phase, router_url=upstream.url)
    assert begun
    assert sorted(store.shards(1, "generated")) == sorted(begun)


async def test_earlier_requests_are_confirmed_gone_before_anything_is_asked_again(
    phase: dict[str, Any], upstream: Upstream, settled: Settled
):
    upstream.fault = lambda p: web.Response(status=503)
    with pytest.raises(TransientError):
        await generate(**phase, router_url=upstream.url)
    upstream.fault = lambda p: None
    asked = len(upstream.asked)
    await generate(**phase, router_url=upstream.url)
    assert settled.calls == [("run-1/1/generated/", asked)]


async def test_nothing_is_asked_when_earlier_requests_cannot_be_settled(
    phase: dict[str, Any], upstream: Upstream
):
    upstream.fault = lambda p: web.Response(status=503)
    with pytest.raises(TransientError):
        await generate(**phase, router_url=upstream.url)
    asked = len(upstream.asked)

    async def unsettled(prefix: str) -> int:
        raise TransientError(f"{prefix} still runs")

    with pytest.raises(TransientError, match="still runs"):
        await generate(**(phase | {"settle": unsettled}), router_url=upstream.url)
    assert len(upstream.asked) == asked


@pytest.mark.parametrize("status", [429, 502, 503, 504])
async def test_a_status_that_says_later_is_transient(
    phase: dict[str, Any], upstream: Upstream, status: int
):
    upstream.fault = lambda p: web.Response(status=status)
    with pytest.raises(TransientError, match=f"status {status}"):
        await generate(**phase, router_url=upstream.url)


async def test_a_router_that_lost_its_engine_is_transient(
    phase: dict[str, Any], upstream: Upstream
):
    body = '{"error": {"code": "call_upstream_request_error"}}'
    upstream.fault = lambda p: web.Response(status=500, text=body)
    with pytest.raises(TransientError, match="call_upstream"):
        await generate(**phase, router_url=upstream.url)


@pytest.mark.parametrize("status", [400, 404, 500])
async def test_another_status_is_permanent(phase: dict[str, Any], upstream: Upstream, status: int):
    upstream.fault = lambda p: web.Response(status=status, text="no")
    with pytest.raises(PermanentError, match=f"status {status}: no"):
        await generate(**phase, router_url=upstream.url)


async def test_no_connection_is_transient(phase: dict[str, Any]):
    with pytest.raises(TransientError, match="no answer"):
        await generate(**phase, router_url="http://127.0.0.1:9")


async def test_a_post_is_never_replayed(phase: dict[str, Any], upstream: Upstream):
    upstream.fault = lambda p: web.Response(status=503)
    with pytest.raises(TransientError):
        await generate(**phase, router_url=upstream.url)
    assert len(upstream.asked) == len(set(upstream.asked))


async def test_a_sample_of_other_weights_is_refused(phase: dict[str, Any], upstream: Upstream):
    upstream.weight_version = "2"
    with pytest.raises(PermanentError, match="made with weights 2, not 3"):
        await generate(**phase, router_url=upstream.url)


async def test_an_aborted_request_is_no_sample(phase: dict[str, Any], upstream: Upstream):
    def aborted(payload: dict[str, Any]) -> dict[str, Any]:
        answer = upstream._good(payload)
        answer["meta_info"]["finish_reason"] = {"type": "abort"}
        return answer

    upstream.fault = aborted
    with pytest.raises(TransientError, match="abort"):
        await generate(**phase, router_url=upstream.url)


async def test_log_probs_of_other_tokens_are_refused(phase: dict[str, Any], upstream: Upstream):
    def mixed(payload: dict[str, Any]) -> dict[str, Any]:
        answer = upstream._good(payload)
        answer["meta_info"]["output_token_logprobs"][0][1] = 9
        return answer

    upstream.fault = mixed
    with pytest.raises(PermanentError, match="other tokens"):
        await generate(**phase, router_url=upstream.url)


@pytest.mark.parametrize("odd", [None, "-0.5", True, float("nan"), float("-inf")])
async def test_what_is_no_log_prob_is_refused_with_sample_and_field(
    phase: dict[str, Any], upstream: Upstream, odd: Any
):
    def broken(payload: dict[str, Any]) -> dict[str, Any]:
        answer = upstream._good(payload)
        if "/g1/s0/" in payload["rid"]:
            answer["meta_info"]["output_token_logprobs"][0][0] = odd
        return answer

    upstream.fault = broken
    with pytest.raises(PermanentError, match="step 1 group 1 sample 0: rollout_log_probs has"):
        await generate(**phase, router_url=upstream.url)
    assert 1 not in phase["store"].shards(1, "generated")


async def test_an_answer_without_its_parts_is_refused(phase: dict[str, Any], upstream: Upstream):
    upstream.fault = lambda p: {"text": "x"}
    with pytest.raises(PermanentError, match="lacks"):
        await generate(**phase, router_url=upstream.url)
