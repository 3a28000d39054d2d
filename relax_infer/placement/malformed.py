"""Every violation of a recipe that is not well formed."""

from dataclasses import replace

from relax_infer.config import RecipeError
from relax_infer.placement.placed import PlacementError, Violation
from relax_infer.placement.plan import plan_inference_placement


def every_violation(error: RecipeError) -> tuple[Violation, ...]:
    """The malformed fields, and behind them what is wrong with the rest of the recipe, where that
    can be told: each such rule says without which fields."""
    if error.mended is None:
        return error.violations
    try:
        plan_inference_placement(error.mended.recipe)
    except PlacementError as refused:
        named = tuple(violation.field for violation in error.violations)
        rest = (v for v in refused.violations if not _within(v.field, named))
        mended = error.mended
        said = ((v, mended.said_of(v.field)) for v in rest)
        return (
            *error.violations,
            *(replace(v, rule=f"{before}: {v.rule}") if before else v for v, before in said),
        )
    return error.violations


def with_the_rest(error: RecipeError) -> RecipeError:
    """The error that tells all of :func:`every_violation`."""
    told = error.violations
    more = [violation for violation in every_violation(error) if violation not in told]
    if not more:
        return error
    text = "; ".join((error.message.removesuffix("."), *(str(violation) for violation in more)))
    return RecipeError(text, cure=error.cure, violations=(*told, *more), mended=error.mended)


def _within(field: str, named: tuple[str, ...]) -> bool:
    """Whether it is one of the fields, or of one of the sections, that are named already."""
    return any(field == each or field.startswith(f"{each}.") for each in named)
