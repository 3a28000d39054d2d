"""Tasks of reasoning-gym: over a hundred kinds of problems, each with a scorer of its own.

Index ``i`` of a dataset is made from ``dataset seed + i``. Two datasets with neighbouring seeds
thus hold mostly the same problems, so there is one dataset, and training and evaluation differ by
index and are kept apart by the text of the question.
"""

import json
import random
from collections.abc import Sequence
from typing import Any

from relax_infer.config.data import Data
from relax_infer.contracts.failures import PermanentError
from relax_infer.samples.grading import grader
from relax_infer.samples.policy_text import PolicyText, asked
from relax_infer.samples.tasks import Problem, Unscored

SYSTEM_PROMPT = (
    "Solve the problem. You may think first. End with nothing but the final answer between"
    " <answer> and </answer>."
)
INDICES = 1 << 24
"""Problems of a dataset whose recipe does not say its size."""
_TRIES = 1000
"""Draws that may hit held-out questions, one after another, before the dataset is too small."""


class ReasoningGymTask:
    """One dataset of reasoning-gym, as :class:`relax_infer.samples.Task`.

    Args:
        dataset: its name, for instance ``chain_sum``.
        data: the recipe's section; ``config`` goes to the dataset.
        policy: Hugging Face folder of the policy, for its tokenizer, chat template and vocabulary.

    Raises:
        PermanentError: naming the field: no such dataset, a configuration that it refuses, no
            tokenizer, or too few different problems.
    """

    def __init__(self, dataset: str, data: Data, policy: str) -> None:
        self._name = dataset
        self._config: dict[str, Any] = {"size": INDICES, **data.config, "seed": data.seed}
        self._system = SYSTEM_PROMPT if data.system_prompt is None else data.system_prompt
        self._text = PolicyText(policy, data.chat_template_kwargs)
        self._dataset = _dataset(dataset, self._config)
        self._held, self._first = self._set_apart(data.held_out)
        self._secret = {problem.prompt for problem in self._held}

    @property
    def eos_id(self) -> int:
        return self._text.eos_id

    @property
    def vocab_size(self) -> int:
        return self._text.vocab_size

    def prompts(self, seed: int, step: int, n: int) -> list[Problem]:
        draw = random.Random(f"{self._name}/{seed}/{step}")
        return [self._not_held_out(draw) for _ in range(n)]

    def held_out(self, n: int) -> list[Problem]:
        if n > len(self._held):
            raise PermanentError(f"{n} held-out problems were asked for, {len(self._held)} kept")
        return self._held[:n]

    def grade(self, answer: str, response_ids: Sequence[int], metadata: str = "{}") -> float:
        where = json.loads(metadata)
        if where.get("dataset") != self._name or "index" not in where:
            raise Unscored(f"metadata: {metadata} is no problem of {self._name}")
        return grader("reasoning_gym").grade(
            {
                "dataset": self._name,
                "config": self._config,
                "index": where["index"],
                "answer": answer,
                "text": self.decode(response_ids),
            }
        )

    def check(self, answer: str, response_ids: Sequence[int], metadata: str = "{}") -> bool:
        try:
            return self.grade(answer, response_ids, metadata) >= 1.0
        except Unscored:
            return False

    def judge_prompt(
        self, prompt_ids: Sequence[int], response_ids: Sequence[int]
    ) -> list[int] | None:
        raise PermanentError(
            f"data.source reasoning_gym.{self._name} has no prompt for a judge.",
            cure="Write genrm.prompt and genrm.verdict in the recipe.",
        )

    def verdict(self, output_ids: Sequence[int]) -> float:
        raise PermanentError(
            f"data.source reasoning_gym.{self._name} has no rule for verdicts.",
            cure="Write genrm.prompt and genrm.verdict in the recipe.",
        )

    def decode(self, ids: Sequence[int]) -> str:
        return self._text.decode(ids)

    def turn(self, text: str) -> list[int]:
        return self._text.encode_turn(text)

    def _set_apart(self, n: int) -> tuple[list[Problem], int]:
        """The first ``n`` different questions, and the first index after them."""
        held: dict[str, Problem] = {}
        for index in range(min(int(self._config["size"]), n + _TRIES)):
            problem = self._problem(index)
            held.setdefault(problem.prompt, problem)
            if len(held) == n and index + 1 < int(self._config["size"]):
                return list(held.values()), index + 1
        raise self._too_small(n)

    def _not_held_out(self, draw: random.Random) -> Problem:
        for _ in range(_TRIES):
            problem = self._problem(draw.randrange(self._first, int(self._config["size"])))
            if problem.prompt not in self._secret:
                return problem
        raise self._too_small(len(self._held))

    def _too_small(self, n: int) -> PermanentError:
        return PermanentError(
            f"data.held_out is {n}: reasoning_gym.{self._name} with this data.config has too few"
            " different problems to keep so many from training.",
            cure="Lower data.held_out, or raise data.config.size or its difficulty.",
        )

    def _problem(self, index: int) -> Problem:
        entry = self._dataset[index]
        question = str(entry["question"])
        return Problem(
            prompt=question,
            prompt_ids=tuple(self._text.encode(asked(question, self._system))),
            answer=str(entry["answer"]),
            metadata=json.dumps({"dataset": self._name, "index": index}),
        )


def _dataset(name: str, config: dict[str, Any]) -> Any:
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        raise PermanentError(
            f"data.source is reasoning_gym.{name}, but reasoning-gym does not load: {error}.",
            cure="pip install --no-deps -r lock/reasoning-gym.lock (it needs a C compiler).",
        ) from error
    if name not in DATASETS:
        raise PermanentError(
            f"data.source: reasoning-gym has no dataset {name}.",
            cure=f"It has: {', '.join(sorted(DATASETS))}.",
        )
    try:
        return create_dataset(name, **config)
    except (TypeError, ValueError, AssertionError) as error:
        raise PermanentError(f"data.config: {name} refuses {config}: {error}") from error
