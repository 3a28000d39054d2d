"""The ``relax-infer`` command: a client of Temporal, and the way to start a local stack.

Knows workflows by type name and id, and worker processes by module name.
"""

# Imported for the commands that they add.
from relax_infer.cli import (
    _codec,
    _convert,
    _gateway,
    _guard,
    _inside,
    _looks,
    _persons,
    _scale,
    _trace,
)
from relax_infer.cli._options import app
from relax_infer.cli._stack_and_runs import main

__all__ = ["app", "main"]

del _codec, _convert, _gateway, _guard, _inside, _looks, _persons, _scale, _trace
