"""What the three models are taught from: right, sloppy and judged answers to training problems.

Each function draws one example: (prompt ids, target ids with the end token).
"""

import random
from collections.abc import Callable, Sequence

from relax_infer.samples.tasks import Problem
from relax_infer.tiny.vocabulary import EOS, encode

Example = tuple[list[int], list[int]]
Draw = Callable[[random.Random], Example]

CAREFUL_SHARE = 0.2
"""How often the sloppy annotator is right on purpose."""


def right_answers(problems: Sequence[Problem]) -> Draw:
    """For the Teacher."""

    def draw(rng: random.Random) -> Example:
        problem = rng.choice(problems)
        return list(problem.prompt_ids), [*encode(problem.answer), EOS]

    return draw


def sloppy_answers(problems: Sequence[Problem]) -> Draw:
    """For the weak policy: an annotator who mostly sorts three digits and leaves the last.

    What the policy has to learn by reinforcement is thus in its samples, but is not what it
    does when it decodes greedily.
    """

    def draw(rng: random.Random) -> Example:
        problem = rng.choice(problems)
        answer = problem.answer
        if rng.random() >= CAREFUL_SHARE:
            digits = problem.prompt[:4]
            answer = "".join(sorted(digits[:3])) + digits[3]
        return list(problem.prompt_ids), [*encode(answer), EOS]

    return draw


def judged_answers(problems: Sequence[Problem]) -> Draw:
    """For the GenRM: half the answers right and judged ``y``, half spoilt and judged ``n``."""

    def draw(rng: random.Random) -> Example:
        problem = rng.choice(problems)
        right = rng.random() < 0.5
        shown = problem.answer if right else spoilt(problem.answer, rng, problems)
        return judged(problem, shown), [*encode("y" if right else "n"), EOS]

    return draw


def judged(problem: Problem, answer: str) -> list[int]:
    """What the GenRM reads: prompt, answer, question mark."""
    return encode(f"{problem.prompt}{answer}?")


def spoilt(answer: str, rng: random.Random, problems: Sequence[Problem]) -> str:
    """A wrong answer of a kind that policies give: swapped, mistaken, doubled, lost digits."""
    kinds = list(_KINDS)
    weights = list(_KINDS.values())
    while True:
        (kind,) = rng.choices(kinds, weights)
        wrong = kind(list(answer), rng, problems)
        if wrong != answer:
            return wrong


def _swap_two(digits: list[str], rng: random.Random, _: Sequence[Problem]) -> str:
    one, other = rng.sample(range(4), 2)
    digits[one], digits[other] = digits[other], digits[one]
    return "".join(digits)


def _swap_neighbours(digits: list[str], rng: random.Random, _: Sequence[Problem]) -> str:
    place = rng.randrange(3)
    digits[place], digits[place + 1] = digits[place + 1], digits[place]
    return "".join(digits)


def _mistake_one(digits: list[str], rng: random.Random, _: Sequence[Problem]) -> str:
    digits[rng.randrange(4)] = _digit(rng)
    return "".join(digits)


def _write_one_twice(digits: list[str], rng: random.Random, _: Sequence[Problem]) -> str:
    one, other = rng.sample(range(4), 2)
    digits[one] = digits[other]
    return "".join(digits)


def _mistake_one_in_order(digits: list[str], rng: random.Random, _: Sequence[Problem]) -> str:
    digits[rng.randrange(4)] = _digit(rng)
    return "".join(sorted(digits))


def _answer_another(_: list[str], rng: random.Random, problems: Sequence[Problem]) -> str:
    return rng.choice(problems).answer


def _shuffle(digits: list[str], rng: random.Random, _: Sequence[Problem]) -> str:
    rng.shuffle(digits)
    return "".join(digits)


def _lose_one(digits: list[str], rng: random.Random, _: Sequence[Problem]) -> str:
    digits.pop(rng.randrange(4))
    return "".join(digits)


def _add_one(digits: list[str], rng: random.Random, _: Sequence[Problem]) -> str:
    digits.insert(rng.randrange(5), _digit(rng))
    return "".join(digits)


def _digit(rng: random.Random) -> str:
    return rng.choice("0123456789")


_KINDS = {
    _swap_two: 25,
    _swap_neighbours: 15,
    _mistake_one: 20,
    _write_one_twice: 10,
    _mistake_one_in_order: 10,
    _answer_another: 5,
    _shuffle: 5,
    _lose_one: 5,
    _add_one: 5,
}
"""Ways to be wrong, and how often of a hundred."""
