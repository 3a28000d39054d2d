"""Prompts and right answers from a file of one's own."""

import json
import random
import re
from collections.abc import Collection, Sequence
from functools import lru_cache

from relax_infer.config.data import Data
from relax_infer.contracts.failures import PermanentError
from relax_infer.samples.grading import grader
from relax_infer.samples.policy_text import Messages, PolicyText, asked
from relax_infer.samples.prompt_file import read_prompt_file
from relax_infer.samples.tasks import TEACHER, Problem, Unscored


class FileTask:
    """A file's rows, as :class:`relax_infer.samples.Task`.

    Training goes through the rows that are not held out in passes: each row once per pass, in an
    order that run seed and pass decide. Where a step is in it follows from its number alone, so
    nothing has to be remembered for a restart.

    Args:
        data: the recipe's section.
        policy: Hugging Face folder of the policy, for its tokenizer, chat template and vocabulary.
        teachers: model ids of the recipe's Teachers, which rows may name.

    Raises:
        PermanentError: naming file, line and field: the file cannot be used, or it has too few
            different prompts.
    """

    def __init__(self, data: Data, policy: str, teachers: Collection[str] = ()) -> None:
        self._data = data
        self._text = PolicyText(policy, data.chat_template_kwargs)
        self._file = read_prompt_file(data, teachers)
        self._answer = re.compile(data.answer_pattern) if data.answer_pattern else None
        self.left_out = 0
        """Rows whose prompt has more tokens than ``data.max_prompt_tokens``."""
        self._held, self._train = self._set_apart()
        self._order = lru_cache(maxsize=2)(self._pass_order)

    @property
    def eos_id(self) -> int:
        return self._text.eos_id

    @property
    def vocab_size(self) -> int:
        return self._text.vocab_size

    def prompts(self, seed: int, step: int, n: int) -> list[Problem]:
        if not self._train:
            raise self._too_few()
        first = (step - 1) * n
        drawn: list[Problem] = []
        for place in range(first, first + n):
            through, at = divmod(place, len(self._train))
            drawn.append(self._problem(self._order(seed, through)[at]))
        return drawn

    def held_out(self, n: int) -> list[Problem]:
        if n > len(self._held):
            raise PermanentError(f"{n} held-out problems were asked for, {len(self._held)} kept")
        return [self._problem(row) for row in self._held[:n]]

    def grade(self, answer: str, response_ids: Sequence[int], metadata: str = "{}") -> float:
        text = self.decode(response_ids)
        if self._data.grader == "math_verify":
            return grader("math_verify").grade({"answer": answer, "text": text})
        return float(self._says(text, answer))

    def check(self, answer: str, response_ids: Sequence[int], metadata: str = "{}") -> bool:
        try:
            return self.grade(answer, response_ids) >= 1.0
        except Unscored:
            return False

    def _says(self, text: str, answer: str) -> bool:
        if self._answer is not None:
            found = [match.group("answer") for match in self._answer.finditer(text)]
            text = found[-1] if found and found[-1] is not None else ""
        return answer != "" and text.strip() == answer

    def judge_prompt(
        self, prompt_ids: Sequence[int], response_ids: Sequence[int]
    ) -> list[int] | None:
        raise PermanentError(
            "data.source file has no prompt for a judge.",
            cure="Write genrm.prompt and genrm.verdict in the recipe.",
        )

    def verdict(self, output_ids: Sequence[int]) -> float:
        raise PermanentError(
            "data.source file has no rule for verdicts.",
            cure="Write genrm.prompt and genrm.verdict in the recipe.",
        )

    def decode(self, ids: Sequence[int]) -> str:
        return self._text.decode(ids)

    def turn(self, text: str) -> list[int]:
        return self._text.encode_turn(text)

    def _set_apart(self) -> tuple[list[int], list[int]]:
        """Rows that are held out, drawn by ``data.seed``, and those to train on. A prompt that is
        held out is not trained on from any other row either."""
        rows = [row for row in range(len(self._file)) if self._short_enough(row)]
        self.left_out = len(self._file) - len(rows)
        mixed = random.Random(f"file/{self._data.seed}").sample(rows, len(rows))
        held: dict[str, int] = {}
        for row in mixed:
            if len(held) == self._data.held_out:
                break
            held.setdefault(self._file.prompts[row].as_py(), row)
        train = [row for row in rows if self._file.prompts[row].as_py() not in held]
        if len(held) < self._data.held_out:
            raise self._too_few()
        return list(held.values()), train

    def _too_few(self) -> PermanentError:
        left = f" ({self.left_out} of them longer than data.max_prompt_tokens)"
        return PermanentError(
            f"data.held_out is {self._data.held_out}, but {self._data.path} has {len(self._file)}"
            f" rows{left if self.left_out else ''}: too few different prompts to keep so many from"
            " training.",
            cure="Lower data.held_out, or name a larger file.",
        )

    def _short_enough(self, row: int) -> bool:
        limit = self._data.max_prompt_tokens
        return limit is None or len(self._encode(row)) <= limit

    def _pass_order(self, seed: int, through: int) -> list[int]:
        if not self._data.shuffle:
            return self._train
        return random.Random(f"file/{seed}/{through}").sample(self._train, len(self._train))

    def _problem(self, row: int) -> Problem:
        prompt, teacher = self._file.prompt(row), self._file.teacher(row)
        return Problem(
            prompt=prompt if isinstance(prompt, str) else _shown(prompt),
            prompt_ids=tuple(self._encode(row)),
            answer=self._file.answer(row),
            metadata=json.dumps({"row": row} | ({TEACHER: teacher} if teacher else {})),
        )

    def _encode(self, row: int) -> list[int]:
        prompt, system = self._file.prompt(row), self._data.system_prompt or ""
        if isinstance(prompt, list):
            own = prompt[0]["role"] == "system" or not system
            return self._text.encode(
                prompt if own else [{"role": "system", "content": system}, *prompt]
            )
        if self._data.chat:
            return self._text.encode(asked(prompt, system))
        return self._text.encode_plain(f"{system}\n\n{prompt}" if system else prompt)


def _shown(messages: Messages) -> str:
    """A conversation as people and judges read it."""
    if len(messages) == 1:
        return messages[0]["content"]
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)
