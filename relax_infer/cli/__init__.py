"""The ``relax-infer`` command: a client of Temporal, and the way to start a local stack.

Knows workflows by type name and id, and worker processes by module name.
"""

from relax_infer.cli._app import app, main

__all__ = ["app", "main"]
