"""Small random batches for property tests, and their float64 copies."""

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

Array = np.ndarray[Any, np.dtype[np.float64]]


@st.composite
def batches(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    """``mask`` of zeros and ones with holes, ``first`` and ``second`` log-probs, ``rewards`` and
    ``groups``, for a few samples of a few tokens."""
    samples, tokens = draw(st.integers(1, 6)), draw(st.integers(1, 7))
    random = np.random.default_rng(draw(st.integers(0, 2**31)))
    return {
        "mask": torch.tensor(random.random((samples, tokens)) < draw(st.floats(0, 1))).float(),
        "first": torch.tensor(-3 * random.random((samples, tokens)), dtype=torch.float32),
        "second": torch.tensor(-3 * random.random((samples, tokens)), dtype=torch.float32),
        "rewards": torch.tensor(random.normal(size=samples), dtype=torch.float32),
        "groups": torch.tensor(random.integers(0, 3, samples)),
    }


def np_of(tensor: torch.Tensor) -> Array:
    return tensor.detach().numpy().astype(np.float64)
