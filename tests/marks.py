"""Values of a parameter that CI has no time for."""

from typing import Any

import pytest


def wide(*values: Any) -> list[Any]:
    """Each is tried by ``make wide`` only."""
    return [pytest.param(value, marks=pytest.mark.wide) for value in values]
