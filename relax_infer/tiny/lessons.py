"""How each of the three models is made, and how good it must turn out; one table."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from relax_infer.contracts.failures import PermanentError
from relax_infer.samples.tasks import Problem
from relax_infer.tiny.examples import Draw, judged_answers, right_answers, sloppy_answers


@dataclass(frozen=True)
class Lesson:
    """Supervised training of one model.

    Attributes:
        draw: examples made from the training problems.
        seed: of weights and examples; None: the run's.
        updates: AdamW steps.
        batch: examples of one update.
        warm_up: updates until the full learning rate.
        accuracy: lowest and highest share of held-out problems that it may get right.
    """

    draw: Callable[[Sequence[Problem]], Draw]
    seed: int | None
    updates: int
    batch: int
    warm_up: int
    accuracy: tuple[float, float]


LESSONS: dict[str, Lesson] = {
    "policy": Lesson(sloppy_answers, None, 200, 256, 20, (0.20, 0.45)),
    "teacher": Lesson(right_answers, 100, 300, 256, 50, (0.98, 1.0)),
    "genrm": Lesson(judged_answers, 11, 2400, 128, 50, (0.98, 1.0)),
}
"""The weak policy must be weak, or there is nothing to see; the other two must be right."""


def lesson(name: str) -> Lesson:
    """Raises PermanentError for a name that is not in the table."""
    if name not in LESSONS:
        raise PermanentError(
            f"there is no tiny model {name}", cure=f"Known: {', '.join(sorted(LESSONS))}."
        )
    return LESSONS[name]


def seed_of(name: str, run_seed: int) -> int:
    """The seed that a model is made with."""
    own = lesson(name).seed
    return run_seed if own is None else own


def folder_name(name: str, run_seed: int) -> str:
    """Only what depends on the run's seed carries it."""
    return f"{name}-{run_seed}" if lesson(name).seed is None else name


def check_quality(name: str, seed: int, accuracy: float) -> None:
    """Raises PermanentError when the model is not what the quickstart needs."""
    low, high = lesson(name).accuracy
    if not low <= accuracy <= high:
        raise PermanentError(
            f"the tiny {name} made with seed {seed} gets {accuracy:.3f} of the held-out problems"
            f" right, {low:.2f} … {high:.2f} are needed: it was not kept",
            cure="Choose another recipe seed."
            if lesson(name).seed is None
            else "Its making is fixed: look for a different torch or transformers version.",
        )
