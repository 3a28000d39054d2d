"""What a look at something there says of it."""

from dataclasses import dataclass
from typing import Literal

from relax_infer.config.violation import Violation

Result = Literal["ok", "note", "missing"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    name: str
    result: Result
    text: str
    cure: str = ""
    field: str | None = None
    """Dotted key of the recipe that names what is missing; None: where it was looked at."""

    @property
    def violation(self) -> Violation | None:
        """As the planner tells its own; None where nothing is missing."""
        if self.result != "missing":
            return None
        return Violation(self.field or self.name, self.text, self.cure)
