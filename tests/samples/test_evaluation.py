"""Evaluation: sets with sampling of their own, weights that are pinned, pass@k."""

from typing import Any

import pytest
from aiohttp import web

from relax_infer.config import RecipeError, load_recipe
from relax_infer.contracts.failures import PermanentError, TransientError
from relax_infer.samples import StagingStore, evaluate
from relax_infer.samples.evaluation import make_problems
from tests.samples.byte_policy import byte_policy
from tests.samples.conftest import Settled
from tests.samples.upstream import Upstream

GREEDY = {"name": "greedy", "problems": 40}
MANY = {
    "name": "many",
    "problems": 3,
    "samples": 4,
    "temperature": 0.7,
    "top_p": 0.9,
    "max_new_tokens": 9,
    "pass_at": [1, 2, 4],
}


class Pupil:
    """Answers the held-out problems right as often as it is told to, and else wrong."""

    def __init__(self, task: Any, upstream: Upstream, right: dict[int, int]) -> None:
        self._answers = {p.prompt_ids: (k, p.answer) for k, p in enumerate(task.held_out(512))}
        self._left, self._upstream = dict(right), upstream

    def __call__(self, payload: dict[str, Any]) -> dict[str, Any]:
        number, text = self._answers[tuple(payload["input_ids"])]
        if self._left.get(number, 0) > 0:
            self._left[number] -= 1
        else:
            text = "0"
        ids = [2 + int(digit) for digit in text] + [1]
        answer = self._upstream._good(payload)
        answer["output_ids"] = ids
        answer["meta_info"]["output_token_logprobs"] = [[-1.0, token, None] for token in ids]
        return answer


def with_sets(phase: dict[str, Any], *sets: dict[str, Any]) -> dict[str, Any]:
    overrides = {"evaluation.sets": list(sets), "rollout.max_concurrency": 8}
    return phase | {"recipe": load_recipe("quickstart", overrides)}


async def test_without_sets_every_held_out_problem_is_answered_once_and_greedy(
    phase: dict[str, Any], upstream: Upstream, store: StagingStore
):
    upstream.fault = Pupil(phase["task"], upstream, {0: 1})
    evaluation = await evaluate(**phase, router_url=upstream.url)
    assert evaluation.problems == 512
    assert evaluation.accuracy == 1 / 512
    assert evaluation.weight_version == 3
    assert evaluation.scores == {"held_out": 1 / 512}
    assert {p["sampling_params"]["temperature"] for p in upstream.payloads} == {0}
    assert store.exists("steps/1/evaluated.arrow")


async def test_each_set_has_its_own_problems_sampling_and_pass_at_k(
    phase: dict[str, Any], upstream: Upstream, store: StagingStore
):
    """Of four answers to three problems 4, 1 and 0 are right; the greedy set comes first."""
    upstream.fault = Pupil(phase["task"], upstream, {0: 5, 1: 2, 7: 1})
    evaluation = await evaluate(**with_sets(phase, GREEDY, MANY), router_url=upstream.url)
    greedy, many = evaluation.sets
    assert evaluation.accuracy == greedy.accuracy == 3 / 40
    assert (many.problems, many.samples) == (3, 4)
    assert many.accuracy == pytest.approx(5 / 12)
    assert many.pass_at == {
        1: pytest.approx(5 / 12),
        2: pytest.approx((1 + 1 / 2 + 0) / 3),
        4: pytest.approx(2 / 3),
    }
    assert evaluation.scores["many pass@4"] == pytest.approx(2 / 3)
    assert many.accuracy_error is not None
    asked = [p["sampling_params"] for p in upstream.payloads if "evaluated.many/" in p["rid"]]
    assert asked == [{"temperature": 0.7, "top_p": 0.9, "max_new_tokens": 9}] * 12
    assert store.peek("steps/1/evaluated.many.arrow").num_rows == 12


async def test_a_second_attempt_asks_only_for_what_is_missing(
    phase: dict[str, Any], upstream: Upstream, settled: Settled
):
    """The first set is whole, the second breaks off; nothing of the first is asked again."""
    pupil = Pupil(phase["task"], upstream, {0: 1})

    def breaks(payload: dict[str, Any]) -> dict[str, Any] | web.Response:
        later = "evaluated.many/" in payload["rid"]
        return web.Response(status=503) if later else pupil(payload)

    upstream.fault = breaks
    arguments = with_sets(phase, GREEDY, MANY)
    with pytest.raises(TransientError):
        await evaluate(**arguments, router_url=upstream.url)
    upstream.fault = pupil
    before = len(upstream.asked)
    evaluation = await evaluate(**arguments, router_url=upstream.url)
    assert len(upstream.asked) - before == 12
    assert ("run-1/1/evaluated.many/", before) in settled.calls
    assert evaluation.sets[0].accuracy == 1 / 40


async def test_an_answer_of_other_weights_ends_the_evaluation(
    phase: dict[str, Any], upstream: Upstream
):
    upstream.weight_version = "4"
    with pytest.raises(PermanentError, match=r"set greedy.*weights 4, not 3"):
        await evaluate(**with_sets(phase, GREEDY), router_url=upstream.url)


async def test_an_answer_that_was_refused_is_told_and_counts_as_not_right(
    phase: dict[str, Any], upstream: Upstream
):
    pupil = Pupil(phase["task"], upstream, dict.fromkeys(range(40), 1))

    def refuses(payload: dict[str, Any]) -> dict[str, Any] | web.Response:
        refused = payload["rid"].startswith("run-1/1/evaluated.greedy/g1/s2/")
        return web.Response(status=400, text="too long") if refused else pupil(payload)

    upstream.fault = refuses
    evaluation = await evaluate(**with_sets(phase, GREEDY), router_url=upstream.url)
    assert evaluation.unanswered == 1
    assert evaluation.accuracy == 39 / 40


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        ([MANY, MANY], "two sets have the name many"),
        ([{"name": "a", "samples": 2}], "temperature 0 gives the same answer"),
        ([{"name": "a", "pass_at": [2]}], "pass_at 2 needs as many samples"),
        ([{"name": "a", "seed": 1}], "config and seed are for another source"),
        ([{"name": "a", "source": "reasoning_gym.chain_sum"}], "cannot read"),
        ([{"name": "a/b"}], "name"),
    ],
)
def test_a_set_that_cannot_be_measured_is_refused(sets: list[dict[str, Any]], words: str):
    with pytest.raises(RecipeError, match=words):
        load_recipe("quickstart", {"evaluation.sets": sets})


def test_a_set_cannot_have_more_problems_than_are_held_out():
    overrides = {"data.held_out": 8, "evaluation.sets": [{"name": "a", "problems": 9}]}
    with pytest.raises(RecipeError, match=r"problems: set a has 9, data\.held_out is 8"):
        load_recipe("quickstart", overrides)


def test_a_set_of_another_source_has_its_own_problems(tmp_path: Any):
    pytest.importorskip("reasoning_gym", reason="pip install --no-deps -r lock/reasoning-gym.lock")
    other = {"name": "sums", "source": "reasoning_gym.chain_sum", "problems": 5, "seed": 3}
    unknown = {"name": "none", "source": "reasoning_gym.no_such"}
    recipe = load_recipe(
        "quickstart",
        {
            "rollout.model": byte_policy(tmp_path / "policy"),
            "data.source": "reasoning_gym.basic_arithmetic",
            "reward.source": "reasoning_gym",
            "evaluation.sets": [other, unknown],
        },
    )
    problems = make_problems(recipe, recipe.evaluation.sets[0])
    assert len({problem.prompt for problem in problems}) == 5
    assert all('"chain_sum"' in problem.metadata for problem in problems)
    with pytest.raises(PermanentError, match=r"evaluation set none: .*no dataset no_such"):
        make_problems(recipe, recipe.evaluation.sets[1])
