"""A step too large for staging is refused before any GPU moves (finding F15)."""

from typing import Any

import pytest

from relax_infer.config import RecipeError, load_recipe
from relax_infer.contracts.failures import PermanentError
from relax_infer.samples import generate
from relax_infer.scoring import score_with_genrm, score_with_teacher, write_back
from tests.samples.upstream import Upstream


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            {"rollout.prompts_per_step": 8193},
            r"prompts_per_step: 65544 samples a step with rollout\.samples_per_prompt 8,"
            r" staging\.max_samples is 65536",
        ),
        (
            {"staging.max_samples": 255},
            r"256 samples a step with .* 8, staging\.max_samples is 255",
        ),
        (
            {"rollout.sampling.max_new_tokens": 2_000_000},
            r"rollout\.sampling\.max_new_tokens: 2000000 x 256 samples is 512000000 tokens a step,"
            r" staging\.max_tokens is 268435456",
        ),
        ({"staging.max_tokens": 1279}, r"is 1280 tokens a step, staging\.max_tokens is 1279"),
    ],
)
def test_a_step_over_the_limit_is_refused_with_figure_and_field(
    overrides: dict[str, Any], says: str
):
    with pytest.raises(RecipeError, match=says):
        load_recipe("quickstart", overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        {"rollout.prompts_per_step": 8192},
        {"staging.max_samples": 256, "staging.max_tokens": 1280},
        {"rollout.prompts_per_step": 10_000, "staging.max_samples": 80_000},
    ],
)
def test_a_step_at_the_limit_or_with_a_higher_one_is_allowed(overrides: dict[str, Any]):
    load_recipe("quickstart", overrides)


async def test_the_limit_holds_of_what_was_really_generated_too(
    phase: dict[str, Any], upstream: Upstream
):
    source = (await generate(**phase, router_url=upstream.url)).staged
    upstream.asked.clear()
    small = load_recipe(
        "quickstart",
        {
            "rollout.prompts_per_step": 2,
            "rollout.samples_per_prompt": 2,
            "staging.max_samples": 4,
        },
    )
    args = phase | {"recipe": small, "source": source, "gateway_url": upstream.url}
    for score in (score_with_genrm, score_with_teacher):
        with pytest.raises(PermanentError, match=r"has 8 samples, staging\.max_samples is 4"):
            await score(**args)
    assert upstream.asked == []
    with pytest.raises(PermanentError, match=r"has 8 samples, staging\.max_samples is 4"):
        write_back(
            phase["store"],
            1,
            generated=source,
            judged=None,
            taught=None,
            task=phase["task"],
            recipe=small,
        )
