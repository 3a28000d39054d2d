"""Samples, where they are staged, and the phases that make them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from relax_infer.samples.evaluation import evaluate, make_problems
    from relax_infer.samples.generation import generate
    from relax_infer.samples.phase import Limits, run_phase
    from relax_infer.samples.sample import Sample, SampleGroup, from_table, to_table
    from relax_infer.samples.store import StagingStore
    from relax_infer.samples.tasks import Problem, Task, UnparsableVerdict, Unscored, load_task

_HOME = {
    "Limits": "phase",
    "Problem": "tasks",
    "Sample": "sample",
    "SampleGroup": "sample",
    "StagingStore": "store",
    "Task": "tasks",
    "UnparsableVerdict": "tasks",
    "Unscored": "tasks",
    "evaluate": "evaluation",
    "from_table": "sample",
    "generate": "generation",
    "load_task": "tasks",
    "make_problems": "evaluation",
    "run_phase": "phase",
    "to_table": "sample",
}

__all__ = [
    "Limits",
    "Problem",
    "Sample",
    "SampleGroup",
    "StagingStore",
    "Task",
    "UnparsableVerdict",
    "Unscored",
    "evaluate",
    "from_table",
    "generate",
    "load_task",
    "make_problems",
    "run_phase",
    "to_table",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
