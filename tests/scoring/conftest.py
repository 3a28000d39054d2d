"""The fixtures of the samples room serve here too."""

from tests.samples.conftest import phase, recipe, settled, store, upstream

__all__ = ["phase", "recipe", "settled", "store", "upstream"]
