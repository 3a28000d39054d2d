"""What a task is to the rest of the project: prompts, right answers, and how to judge."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from relax_infer.config.recipe import Recipe

TEACHER = "teacher"
"""In a problem's metadata: the model_id of the Teacher that its samples are taught by."""


class Unscored(ValueError):
    """A score that could not be had; its text says why and stands beside the empty score.

    What comes before the first colon is the kind: groups that are dropped are counted by it.
    """


class UnparsableVerdict(Unscored):
    """The judge answered something that is no verdict."""


@dataclass(frozen=True)
class Problem:
    """One prompt and its right answer."""

    prompt: str
    prompt_ids: tuple[int, ...]
    answer: str
    metadata: str = "{}"
    """JSON: what the task needs to grade an answer to it later."""


class Task(Protocol):
    """A source of problems with a checker. Every method is deterministic."""

    @property
    def eos_id(self) -> int: ...

    @property
    def vocab_size(self) -> int:
        """Of the policy and of every model that scores its tokens."""
        ...

    def prompts(self, seed: int, step: int, n: int) -> list[Problem]:
        """The ``n`` training problems of a step. Steps count from 1."""
        ...

    def held_out(self, n: int) -> list[Problem]:
        """The first ``n`` problems that are never trained on."""
        ...

    def grade(self, answer: str, response_ids: Sequence[int], metadata: str = "{}") -> float:
        """What a response is worth by the task's own rule, 1.0 for a right one.

        Raises:
            Unscored: that cannot be said.
        """
        ...

    def check(self, answer: str, response_ids: Sequence[int], metadata: str = "{}") -> bool:
        """Whether a response is known to be right. For accuracies, not for rewards: also False
        where :meth:`grade` cannot say."""
        ...

    def judge_prompt(
        self, prompt_ids: Sequence[int], response_ids: Sequence[int]
    ) -> list[int] | None:
        """What a GenRM is shown; None for a response without an end.

        Raises:
            PermanentError: the task has no such prompt; the recipe must have one.
        """
        ...

    def verdict(self, output_ids: Sequence[int]) -> float:
        """The reward a GenRM's answer stands for; raises :class:`UnparsableVerdict`."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, without the end token."""
        ...

    def turn(self, text: str) -> list[int]:
        """What the policy reads, after its own end token, when it is told ``text`` and asked to
        go on."""
        ...


def teachers_of(recipe: Recipe) -> tuple[str, ...]:
    """Model ids of the Teachers that take part; the first one teaches what names none."""
    teacher = recipe.teacher
    if teacher is None or not recipe.distilled:
        return ()
    return (teacher.model_id, *(model.model_id for model in teacher.extra_models))


def load_task(recipe: Recipe) -> Task:
    """The recipe's task; prompts are made with the tokenizer of its policy."""
    source, _, dataset = recipe.data.source.partition(".")
    if source == "reasoning_gym":
        from relax_infer.samples.gym_task import ReasoningGymTask

        return ReasoningGymTask(dataset, recipe.data, recipe.rollout.model)
    if source == "file":
        from relax_infer.samples.file_task import FileTask

        data = recipe.data
        if data.grader is None:
            by_value = recipe.reward.source == "math_verify"
            data = data.model_copy(update={"grader": "math_verify" if by_value else "exact"})
        return FileTask(data, recipe.rollout.model, teachers_of(recipe))
    from relax_infer.tiny.task import Sort4Task

    return Sort4Task(recipe.data.held_out)
