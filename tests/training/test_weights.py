"""Layouts of weights, for any number of tensor parallel ranks."""

import itertools
from typing import Any

import pytest
import torch

from relax_infer.training import cpu_megatron
from tests.training.conftest import MEGATRON_WARNS, InThread

pytestmark = MEGATRON_WARNS

_PARTS = {
    "whole": [(24,)],
    "rows": [(32, 64)],
    "columns": [(64, 96)],
    "qkv": [(96, 64), (48, 64), (48, 64)],
    "gate_up": [(96, 64), (96, 64)],
}


@pytest.fixture
def weights(in_thread: InThread) -> Any:
    def load() -> Any:
        cpu_megatron.enable()
        from relax_infer.training import weights

        return weights

    return in_thread(load)


@pytest.fixture
def shape(weights: Any) -> Any:
    return weights.PolicyShape(
        vocabulary=32,
        hidden=64,
        mlp=96,
        layers=1,
        heads=4,
        groups=2,
        head_width=24,
        context=64,
        norm_eps=1e-6,
        rope_base=1e4,
        tied=False,
        qk_norm=True,
        qkv_bias=False,
    )


@pytest.mark.parametrize(("layout", "ranks"), list(itertools.product(_PARTS, [1, 2])))
def test_what_is_stacked_and_shared_out_comes_back(
    layout: str, ranks: int, weights: Any, shape: Any
) -> None:
    parts = [torch.randn(*size) for size in _PARTS[layout]]
    whole = weights.stack(layout, parts, shape)
    shared = [weights.shard(layout, whole, rank, ranks) for rank in range(ranks)]
    again = weights.unstack(layout, weights.unshard(layout, shared), shape)
    assert all(torch.equal(a, b) for a, b in zip(parts, again, strict=True))


def test_a_rank_has_whole_attention_groups(weights: Any, shape: Any) -> None:
    queries, keys, values = parts = [torch.randn(*size) for size in _PARTS["qkv"]]
    second = weights.shard("qkv", weights.stack("qkv", parts, shape), 1, 2)
    assert torch.equal(second, torch.cat([queries[48:], keys[24:], values[24:]]))
