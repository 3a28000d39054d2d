"""What the cures of a refusal uncover: with that, all of them together give a placed recipe."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from json import dumps
from shlex import quote

from relax_infer.config import Recipe, RecipeError, read_recipe
from relax_infer.config.placed import Scalar
from relax_infer.placement.placed import Violation

_ROUNDS = 12
"""Times that the cures so far are looked behind. Four were the most in 5,000 random recipes."""
_LARGEST = ("cluster.gpus", ".min_replicas", ".max_replicas")
"""Ends of keys of which the largest value cures all who ask for one."""
LATER = "once the others are cured: "
"""Before a rule that the recipe breaks only then."""


def with_uncovered(
    recipe: Recipe, found: Iterable[Violation], look: Callable[[Recipe], Sequence[Violation]]
) -> list[Violation]:
    """The violations of a recipe, and behind them those of the recipe that their settings make, and
    so on.

    Args:
        found: what ``look`` says of ``recipe``.
        look: every violation of a recipe that can be told at once.

    Returns:
        Each once. No two give one key different values, so they may be set in any order.
    """
    seen = list(dict.fromkeys(found))
    told = list(seen)
    document = recipe.model_dump(mode="json")
    for _ in range(_ROUNDS):
        try:
            cured = read_recipe(document, agreed(told))
        except RecipeError:
            break  # a setting that only a person can choose
        fresh = [violation for violation in look(cured) if violation not in seen]
        if not fresh:
            break
        seen += dict.fromkeys(fresh)
        told += [replace(v, rule=f"{LATER}{v.rule}") for v in dict.fromkeys(fresh)]
    settings = agreed(told)
    return [_as_agreed(violation, settings) for violation in told]


def agreed(violations: Iterable[Violation]) -> dict[str, Scalar]:
    """One value for each key of their settings: the largest where that cures all, else the last."""
    values: dict[str, Scalar] = {}
    for key, value in (setting for v in violations for setting in v.settings):
        before = values.get(key)
        if key.endswith(_LARGEST) and isinstance(before, int) and isinstance(value, int):
            value = max(before, value)
        values[key] = value
    return {key: value for key, value in values.items() if _removed(key, values) is None}


def as_options(settings: dict[str, Scalar]) -> str:
    """Settings as a person types them after a command."""
    return " ".join(f"--set {quote(f'{key}={dumps(value)}')}" for key, value in settings.items())


def _removed(key: str, values: dict[str, Scalar]) -> str | None:
    """The section around ``key`` that is removed as a whole."""
    parts = key.split(".")
    around = (".".join(parts[:n]) for n in range(1, len(parts)))
    return next((each for each in around if each in values and values[each] is None), None)


def _as_agreed(violation: Violation, values: dict[str, Scalar]) -> Violation:
    """With the settings of all, and a cure that says nothing else than these."""
    settings: dict[str, Scalar] = {}
    more, other = "", False
    for key, value in violation.settings:
        kept = key if key in values else _removed(key, values) or key
        settings[kept] = values.get(kept)
        if values.get(key) == value:
            continue
        if kept == key and key.endswith(_LARGEST):
            more += f" Together with the others: {kept} {settings[kept]}."
        else:
            other = True
    cure = f"{_said(settings)}, as the others need." if other else violation.cure + more
    return replace(violation, cure=cure, settings=tuple(settings.items()))


def _said(settings: dict[str, Scalar]) -> str:
    parts = [
        f"leave {key} out" if value is None else f"set {key} to {value}"
        for key, value in settings.items()
    ]
    words = " and ".join(parts)
    return f"{words[:1].upper()}{words[1:]}"
