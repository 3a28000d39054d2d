"""Values of a parameter that CI has no time for."""

from typing import Any

import pytest


def wide(*values: Any) -> list[Any]:
    """Each is tried by ``make wide`` only. A tuple is one of several parameters."""
    each = (value if isinstance(value, tuple) else (value,) for value in values)
    return [pytest.param(*value, marks=pytest.mark.wide) for value in each]
