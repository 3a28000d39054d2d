"""Rewards by rule: what an adapter says of itself, and what becomes of a rule that fails."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from relax_infer.config import Recipe, load_recipe
from relax_infer.contracts.failures import PermanentError, TransientError
from relax_infer.samples import Sample, StagingStore, Task, Unscored, from_table, generate
from relax_infer.scoring import RewardAdapter, get_reward, require_usable, write_back
from relax_infer.scoring.rewards import Score, scores_by_rule
from tests.samples.upstream import Upstream

EOS = 1


def samples(n: int) -> list[Sample]:
    return [
        Sample(
            run="r",
            step=1,
            group=k // 2,
            sample=k % 2,
            attempt=1,
            rid=f"r/{k}",
            prompt="4071>",
            prompt_ids=(6, 2, 9, 3, 23),
            answer="0147",
            response="0147",
            response_ids=(2, 3, 6, 9, EOS),
            rollout_log_probs=(-0.5,) * 5,
            loss_mask=(1,) * 5,
            weight_version=0,
            finish_reason="length" if k == 3 else "stop",
        )
        for k in range(n)
    ]


def scored(adapter: RewardAdapter, n: int = 4, unfinished: float = -1.0) -> list[Score]:
    return scores_by_rule(adapter, samples(n), None, unfinished=unfinished)  # type: ignore[arg-type]


async def slowly(sample: Sample, task: Task) -> float:
    await asyncio.sleep(0.001 * (3 - sample.group))
    return float(sample.group)


def together(samples: Sequence[Sample], task: Task) -> list[float]:
    return [float(len(samples))] * len(samples)


@pytest.mark.parametrize(
    ("adapter", "asynchronous", "batched", "rewards"),
    [
        (RewardAdapter("a", True, rule=lambda s, t: s.sample), False, False, [0, 1, 0, 1]),
        (RewardAdapter("a", True, async_rule=slowly), True, False, [0, 0, 1, 1]),
        (RewardAdapter("a", True, batch_rule=together), False, True, [4, 4, 4, 4]),
    ],
)
def test_an_adapter_declares_how_it_works_and_is_used_so(
    adapter: RewardAdapter, asynchronous: bool, batched: bool, rewards: list[float]
):
    assert (adapter.is_async, adapter.batched, adapter.by_rule) == (asynchronous, batched, True)
    assert [score.reward for score in scored(adapter)] == rewards


def test_an_adapter_has_one_rule():
    with pytest.raises(ValueError, match="one rule, or a GenRM"):
        RewardAdapter("a", True, rule=lambda s, t: 0.0, batch_rule=together)
    with pytest.raises(ValueError, match="one rule, or a GenRM"):
        RewardAdapter("a", True, needs_genrm=True, rule=lambda s, t: 0.0)


def failing(sample: Sample, task: Task) -> Any:
    match sample.sample + 2 * sample.group:
        case 0:
            return 0.5
        case 1:
            raise KeyError("label")
        case 2:
            raise Unscored("no label: of this kind")
        case _:
            return np.float32(0.25)


async def failing_async(sample: Sample, task: Task) -> Any:
    return failing(sample, task)


@pytest.mark.parametrize("how", ["rule", "async_rule"])
def test_a_rule_that_raises_gives_no_score_and_never_a_zero(how: str):
    """Pains 9 and 10; the other samples keep theirs."""
    rule = failing if how == "rule" else failing_async
    found = scored(RewardAdapter("mine", True, **{how: rule}))
    assert [score.reward for score in found] == [0.5, None, None, 0.25]
    assert found[1].detail == "the rule failed: KeyError: 'label'"
    assert found[2].detail == "no label: of this kind"


@pytest.mark.parametrize(
    "odd", [None, "1.0", "", float("nan"), float("inf"), [1.0], {"score": 1.0}, 10**400, 1 + 0j]
)
def test_what_is_no_finite_number_is_no_score(odd: Any):
    for adapter in (
        RewardAdapter("mine", True, rule=lambda s, t: odd),
        RewardAdapter("mine", True, batch_rule=lambda s, t: [odd] * len(s)),
    ):
        assert {score.reward for score in scored(adapter)} == {None}
        assert all(score.detail for score in scored(adapter))


def test_a_batch_rule_that_fails_scores_nobody_and_one_with_too_few_rewards_is_refused():
    def broken(samples: Sequence[Sample], task: Task) -> list[float]:
        raise RuntimeError("no disk")

    assert {s.reward for s in scored(RewardAdapter("mine", True, batch_rule=broken))} == {None}
    with pytest.raises(PermanentError, match="gave 1 rewards for 4 samples"):
        scored(RewardAdapter("mine", True, batch_rule=lambda s, t: [1.0]))


@pytest.mark.parametrize("how", ["rule", "async_rule", "batch_rule"])
def test_a_failure_that_is_no_fault_of_a_sample_goes_up(how: str):
    def away(*_: Any) -> Any:
        raise TransientError("the service is away")

    async def away_async(*_: Any) -> Any:
        away()

    rule = away_async if how == "async_rule" else away
    with pytest.raises(TransientError, match="is away"):
        scored(RewardAdapter("mine", True, **{how: rule}))


def test_an_unfinished_response_takes_its_rule_where_the_adapter_says_so():
    adapter = RewardAdapter("mine", True, needs_finished=True, rule=lambda s, t: 1.0)
    assert [s.reward for s in scored(adapter)] == [1.0, 1.0, 1.0, -1.0]
    assert scored(adapter)[3].source == "rule:unfinished"


LATER_ONLY = RewardAdapter("later", supports_deferred=False, rule=lambda s, t: 1.0)
MINE = RewardAdapter("mine", supports_deferred=True, rule=lambda s, t: 2.0)
NOT_ONE = "a string"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (f"{__name__}:LATER_ONLY", "does not declare supports_deferred"),
        (f"{__name__}:NOT_ONE", "is str, no RewardAdapter"),
        (f"{__name__}:ABSENT", "cannot be imported"),
        ("no.such.module:name", "cannot be imported"),
    ],
)
def test_a_reward_that_a_run_cannot_use_is_refused(name: str, says: str):
    with pytest.raises(PermanentError, match=says):
        require_usable(name)


@pytest.mark.parametrize("name", ["genrm", "exact", "reasoning_gym", "math_verify", "none"])
def test_the_shipped_rewards_are_usable(name: str):
    assert require_usable(name) is get_reward(name)


async def batch(phase: dict[str, Any], upstream: Upstream, source: str, **more: Any) -> Any:
    recipe = load_recipe("quickstart", {"reward.source": source, "distillation": None} | more)
    upstream.output = [3, EOS]
    generated = (await generate(**phase, router_url=upstream.url)).staged

    def join(recipe: Recipe) -> Any:
        return write_back(
            phase["store"],
            1,
            generated=generated,
            judged=None,
            taught=None,
            task=phase["task"],
            recipe=recipe,
        )

    return await asyncio.to_thread(join, recipe)


async def test_a_reward_of_ones_own_is_imported_by_its_path(
    phase: dict[str, Any], upstream: Upstream, store: StagingStore
):
    made = await batch(phase, upstream, f"{__name__}:MINE")
    rows = from_table(store.read_table(made.staged))
    assert {(row.reward, row.reward_source) for row in rows} == {(2.0, "rule:mine")}


ODD_ONE = RewardAdapter("odd", True, rule=lambda s, t: 1.0 if s.group != 2 else float("nan"))


async def test_a_rule_without_a_score_fails_the_batch_or_drops_its_group_by_recipe(
    phase: dict[str, Any], upstream: Upstream, store: StagingStore
):
    name = f"{__name__}:ODD_ONE"
    made = await batch(phase, upstream, name)
    assert made.dropped_groups == 1
    assert made.drop_reasons == {"the rule gave no finite number": 1}
    rows = from_table(store.read_table(made.staged))
    assert {row.group for row in rows} == {0, 1, 3}
    assert 0.0 not in {row.reward for row in rows}
    with pytest.raises(PermanentError, match="2 samples have no score: step 1 group 2 sample 0"):
        await batch(phase, upstream, name, **{"reward.on_unscored": "fail"})
