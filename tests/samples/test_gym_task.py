"""Tasks of reasoning-gym."""

from pathlib import Path
from typing import Any

import pytest

from relax_infer.config import Recipe, RecipeError, load_recipe
from relax_infer.contracts.failures import PermanentError
from relax_infer.samples import Unscored, load_task
from relax_infer.samples.gym_task import ReasoningGymTask
from tests.samples.byte_policy import byte_policy

pytest.importorskip("reasoning_gym", reason="pip install --no-deps -r lock/reasoning-gym.lock")


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    return byte_policy(tmp_path_factory.mktemp("models") / "policy")


def gym_recipe(policy: str, source: str = "reasoning_gym.chain_sum", **overrides: Any) -> Recipe:
    return load_recipe(
        "quickstart",
        {
            "rollout.model": policy,
            "data.source": source,
            "data.held_out": 16,
            "reward.source": "reasoning_gym",
        }
        | overrides,
    )


def gym_task(policy: str, *args: Any, **overrides: Any) -> ReasoningGymTask:
    task = load_task(gym_recipe(policy, *args, **overrides))
    assert isinstance(task, ReasoningGymTask)
    return task


def test_a_step_draws_the_same_problems_whichever_process_asks(policy: str):
    first, again = gym_task(policy), gym_task(policy)
    assert first.prompts(3, 7, 20) == again.prompts(3, 7, 20)
    assert first.prompts(3, 7, 20) != first.prompts(3, 8, 20)
    assert first.prompts(3, 7, 20) != first.prompts(4, 7, 20)
    assert first.held_out(16) == again.held_out(16)


def test_no_question_that_is_held_out_is_trained_on(policy: str):
    """By its text: a small dataset has the same question under many indices."""
    task = gym_task(
        policy,
        **{
            "data.config": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
            "data.held_out": 40,
        },
    )
    secret = {problem.prompt for problem in task.held_out(40)}
    assert len(secret) == 40
    drawn = {problem.prompt for step in range(20) for problem in task.prompts(0, step, 50)}
    assert len(drawn) > 40
    assert not drawn & secret


def test_a_dataset_with_too_few_different_problems_is_refused(policy: str):
    with pytest.raises(PermanentError, match=r"data\.held_out is 40.*too few"):
        gym_task(policy, **{"data.config": {"size": 40}, "data.held_out": 40})


def test_the_prompt_is_the_question_in_the_policys_own_tokens(policy: str):
    task = gym_task(policy)
    problem = task.prompts(0, 1, 1)[0]
    told = task.decode(problem.prompt_ids)
    assert told.endswith(f"{problem.prompt}\n\n")
    assert "<answer>" in told
    silent = gym_task(policy, **{"data.system_prompt": ""}).prompts(0, 1, 1)[0]
    assert task.decode(silent.prompt_ids) == f"{problem.prompt}\n\n"
    assert task.vocab_size == 320
    assert task.eos_id == 1


def test_a_policy_with_a_chat_template_is_asked_in_it(tmp_path: Path):
    task = gym_task(byte_policy(tmp_path, chat=True))
    problem = task.prompts(0, 1, 1)[0]
    told = task.decode(problem.prompt_ids)
    assert told.startswith("<system>Solve the problem")
    assert told.endswith(f"<user>{problem.prompt}\n<assistant>")


def said(task: ReasoningGymTask, text: str) -> list[int]:
    return [*task._text.encode_plain(text), task.eos_id]


def test_the_datasets_own_scorer_grades(policy: str):
    task = gym_task(policy)
    problem = task.prompts(0, 1, 1)[0]

    def grade(text: str) -> float:
        return task.grade(problem.answer, said(task, text), problem.metadata)

    assert grade(f"so <answer> {problem.answer} </answer>") == 1.0
    assert 0 < grade(f"<answer>it is {problem.answer}</answer>") < 1
    assert grade("I do not know") == 0.0
    assert task.check(problem.answer, said(task, f"<answer>{problem.answer}</answer>"), "{}") is (
        False
    ), "nothing is right that cannot be graded"


def test_a_problem_that_another_version_makes_otherwise_is_not_graded(policy: str):
    """Pain 9: it is no wrong answer, it has no score."""
    task = gym_task(policy)
    problem = task.prompts(0, 1, 1)[0]
    with pytest.raises(Unscored, match="another one here"):
        task.grade("12345678", said(task, "<answer>12345678</answer>"), problem.metadata)
    with pytest.raises(Unscored, match="no problem of chain_sum"):
        task.grade(problem.answer, said(task, "x"), "{}")


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"data.source": "reasoning_gym.no_such"}, r"no dataset no_such.*chain_sum"),
        ({"data.config": {"no_such": 1}}, r"data\.config: chain_sum refuses"),
        ({"data.config": {"min_terms": 9, "max_terms": 2}}, r"data\.config: chain_sum refuses"),
        ({"rollout.model": "/no/such/folder"}, r"rollout\.model: /no/such/folder has no tokenizer"),
    ],
)
def test_what_cannot_be_made_is_refused_with_its_field(
    policy: str, overrides: dict[str, Any], says: str
):
    with pytest.raises(PermanentError, match=says):
        load_task(gym_recipe(policy, **overrides))


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"data.source": "tiny.sort4"}, "reward.source: reasoning_gym, but data.source"),
        ({"rollout.model": "tiny:policy"}, "rollout.model: tiny:policy"),
        ({"data.source": "gsm8k"}, r"data\.source: must be tiny\.sort4, file or reasoning_gym"),
        (
            {"data.source": "tiny.sort4", "reward.source": "exact", "data.config": {"size": 3}},
            "data.config: is for reasoning_gym",
        ),
        ({"reward.source": "dapo"}, r"reward\.source: must be genrm, exact"),
    ],
)
def test_a_recipe_whose_data_and_reward_do_not_fit_is_refused(
    policy: str, overrides: dict[str, Any], says: str
):
    with pytest.raises(RecipeError, match=says):
        gym_recipe(policy, **overrides)
