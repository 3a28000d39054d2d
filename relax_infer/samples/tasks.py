"""What a task is to the rest of the project: prompts, right answers, and how to judge."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from relax_infer.config.recipe import Data


class UnparsableVerdict(ValueError):
    """The judge answered something that is no verdict: a score that could not be had."""


@dataclass(frozen=True)
class Problem:
    """One prompt and its right answer."""

    prompt: str
    prompt_ids: tuple[int, ...]
    answer: str


class Task(Protocol):
    """A source of problems with a checker. Every method is deterministic."""

    @property
    def eos_id(self) -> int: ...

    @property
    def vocab_size(self) -> int:
        """Of the policy and of every model that scores its tokens."""
        ...

    def prompts(self, seed: int, step: int, n: int) -> list[Problem]:
        """The ``n`` training problems of a step, drawn with replacement."""
        ...

    def held_out(self, n: int) -> list[Problem]:
        """The first ``n`` problems that are never trained on."""
        ...

    def check(self, answer: str, response_ids: Sequence[int]) -> bool:
        """Whether a response is exactly right, its end included."""
        ...

    def judge_prompt(
        self, prompt_ids: Sequence[int], response_ids: Sequence[int]
    ) -> list[int] | None:
        """What a GenRM is shown; None for a response without an end."""
        ...

    def verdict(self, output_ids: Sequence[int]) -> float:
        """The reward a GenRM's answer stands for; raises :class:`UnparsableVerdict`."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, without the end token."""
        ...


def load_task(data: Data) -> Task:
    """The recipe's task."""
    from relax_infer.tiny.task import Sort4Task

    return Sort4Task(data.held_out)
