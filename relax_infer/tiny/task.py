"""sort4: put four digits in order. ``4071>`` is answered ``0147`` and the end token."""

import random
from collections.abc import Sequence
from functools import cache

from relax_infer.contracts.failures import PermanentError
from relax_infer.samples.tasks import Problem, UnparsableVerdict
from relax_infer.tiny.vocabulary import EOS, TOKENS, decode, encode

HELD_OUT = 512
"""Problems that no model and no run is ever trained on."""

_SPLIT_SEED = 0
_QUESTION, _YES, _NO = encode("?yn")


@cache
def split() -> tuple[tuple[Problem, ...], tuple[Problem, ...]]:
    """All 10,000 problems, shuffled: (to train on, held out). Always the same split."""
    numbers = list(range(10_000))
    random.Random(_SPLIT_SEED).shuffle(numbers)
    problems = tuple(_problem(f"{number:04d}") for number in numbers)
    return problems[HELD_OUT:], problems[:HELD_OUT]


def _problem(digits: str) -> Problem:
    prompt = f"{digits}>"
    return Problem(prompt, tuple(encode(prompt)), "".join(sorted(digits)))


class Sort4Task:
    """The task of the quickstart, as :class:`relax_infer.samples.Task`.

    Args:
        held_out: how many held-out problems an evaluation may ask for. The split does not depend
            on it, so a short evaluation trains on the same problems as a long one.

    Raises:
        PermanentError: more are wanted than there are.
    """

    eos_id = EOS
    vocab_size = len(TOKENS)

    def __init__(self, held_out: int = HELD_OUT) -> None:
        if not 0 < held_out <= HELD_OUT:
            raise PermanentError(
                f"data.held_out is {held_out}: tiny.sort4 holds out {HELD_OUT} problems",
                cure=f"Set it to 1 … {HELD_OUT}.",
            )
        self._train, held = split()
        self._held = held[:held_out]

    def prompts(self, seed: int, step: int, n: int) -> list[Problem]:
        draw = random.Random(f"sort4/{seed}/{step}")
        return draw.choices(self._train, k=n)

    def held_out(self, n: int) -> list[Problem]:
        if n > len(self._held):
            raise PermanentError(f"{n} held-out problems were asked for, {len(self._held)} kept")
        return list(self._held[:n])

    def grade(self, answer: str, response_ids: Sequence[int], metadata: str = "{}") -> float:
        return float(self.check(answer, response_ids))

    def check(self, answer: str, response_ids: Sequence[int], metadata: str = "{}") -> bool:
        return list(response_ids) == [*encode(answer), EOS]

    def judge_prompt(
        self, prompt_ids: Sequence[int], response_ids: Sequence[int]
    ) -> list[int] | None:
        if not response_ids or response_ids[-1] != EOS:
            return None
        return [*prompt_ids, *response_ids[:-1], _QUESTION]

    def verdict(self, output_ids: Sequence[int]) -> float:
        said = list(output_ids)
        if said and said[-1] == EOS:
            said.pop()
        if said == [_YES]:
            return 1.0
        if said == [_NO]:
            return 0.0
        raise UnparsableVerdict(f"{decode(output_ids)!r} is neither y nor n")

    def decode(self, ids: Sequence[int]) -> str:
        return decode(ids)

    def turn(self, text: str) -> list[int]:
        try:
            return encode(text)
        except (KeyError, ValueError) as error:
            raise PermanentError(
                f"rollout.environment says {text!r}: tiny.sort4 knows 22 characters and no words.",
                cure='With retry set rollout.environment.config.again, for instance to "?".',
            ) from error
