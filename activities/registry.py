"""Every activity, for the worker."""

from collections.abc import Callable
from typing import Any

from activities import (
    batch,
    engines,
    external,
    front,
    load,
    phases,
    placement,
    recipes,
    records,
    scaling,
    training,
)

ACTIVITIES: tuple[Callable[..., Any], ...] = (
    *recipes.ACTIVITIES,
    *placement.ACTIVITIES,
    *front.ACTIVITIES,
    *engines.ACTIVITIES,
    *phases.ACTIVITIES,
    *batch.ACTIVITIES,
    *training.ACTIVITIES,
    *records.ACTIVITIES,
    *scaling.ACTIVITIES,
    *load.ACTIVITIES,
    *external.ACTIVITIES,
)
