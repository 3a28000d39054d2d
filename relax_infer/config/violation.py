"""One rule that a recipe breaks, with its cure."""

from dataclasses import dataclass

from relax_infer.config.placed import Scalar


@dataclass(frozen=True)
class Violation:
    """One rule that the recipe breaks."""

    field: str
    """Dotted key of the recipe."""
    rule: str
    cure: str
    settings: tuple[tuple[str, Scalar], ...] = ()
    """Overrides of the recipe, as for ``load_recipe``, that cure it; None removes the key. Empty
    where only a person knows what was meant."""

    def __str__(self) -> str:
        return f"{self.field}: {self.rule} {self.cure}"
