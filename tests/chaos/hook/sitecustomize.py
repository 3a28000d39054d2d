"""Read by every Python process of a stack whose PYTHONPATH begins with this folder: what the actors
of its engines hear from their servers can be harmed, fault by fault, by files in a folder.

The servers, the actors and their code are the real ones; see :mod:`tests.chaos.faults`.
"""

import importlib.abc
import importlib.util
import os
import sys

MODULE = "relax_infer.engines.control"


class _Loader(importlib.abc.Loader):
    """The module's own, and then the hook."""

    def __init__(self, real):
        self._real = real

    def create_module(self, spec):
        return self._real.create_module(spec)

    def exec_module(self, module):
        self._real.exec_module(module)
        from tests.chaos.faults import harm

        harm(module)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != MODULE:
            return None
        sys.meta_path.remove(self)  # looked for once, by the real finders
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


if os.environ.get("RELAX_TEST_FAULTS"):
    sys.meta_path.insert(0, _Finder())
