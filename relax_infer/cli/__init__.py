"""The ``relax-infer`` command: a client of Temporal, and the way to start a local stack.

Knows workflows by type name and id, and worker processes by module name.
"""

from relax_infer.cli import _gateway, _inside, _looks, _persons, _scale
from relax_infer.cli._options import app
from relax_infer.cli._stack_and_runs import main

__all__ = ["app", "main"]

del _gateway, _inside, _looks, _persons, _scale  # imported for the commands that they add
