"""SGLang's flags by one name each: with dashes, and the name that SGLang keeps the value under."""

from collections.abc import Iterable, Mapping
from typing import TypeVar

from relax_infer.contracts.failures import PermanentError

Value = TypeVar("Value")

ALIASES: Mapping[str, str] = {
    "model": "model-path",
    "tensor-parallel-size": "tp-size",
    "pipeline-parallel-size": "pp-size",
    "data-parallel-size": "dp-size",
    "attention-data-parallel-size": "attn-dp-size",
    "attention-context-parallel-size": "attn-cp-size",
    "moe-data-parallel-size": "moe-dp-size",
    "decode-context-parallel-size": "dcp-size",
    "expert-parallel-size": "ep-size",
    "nccl-init-addr": "dist-init-addr",
    "grpc-http-sidecar-port": "smg-http-sidecar-port",
    "context-bucket": "cuda-graph-prefill-max-context",
    "speculative-draft-model": "speculative-draft-model-path",
    "enable-hicache": "enable-hierarchical-cache",
    "hierarchical-sparse-attention-extra-config": "hisparse-config",
    # Known by these once, and still written so.
    **{"tp": "tp-size", "pp": "pp-size", "dp": "dp-size", "ep": "ep-size"},
}
"""Other names that SGLang 0.5.23 takes for a flag."""

OWN = frozenset(
    {
        *("model-path", "served-model-name", "weight-version", "config"),
        *("fence-socket", "fence-token", "fence-nodes", "request-log"),
    }
)
"""Flags that the run decides for each engine."""

UNFENCED: Mapping[str, tuple[object, ...]] = {
    "grpc_port": (None, 0),
    "smg_grpc_mode": (None, False),
    "grpc_mode": (None, False),
    "sidecar": (None,),
    "tokenizer_worker_num": (None, 1),
    "enable_http2": (None, False),
    "use_ray": (None, False),
    "encoder_only": (None, False),
    "disaggregation_mode": (None, "null"),
    "kv_events_config": (None,),
    "remote_instance_weight_loader_start_seed_via_transfer_engine": (None, False),
}
"""SGLang's settings, and the values of each that open no listener beside the fenced ones."""


def flag_of(name: str) -> str:
    """The flag that a name of the recipe means; dashes and underscores are the same."""
    dashed = name.replace("_", "-")
    return ALIASES.get(dashed, dashed)


def repeated(names: Iterable[str]) -> list[tuple[str, ...]]:
    """Names that mean one flag, for every flag that has several."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(flag_of(name), []).append(name)
    return [tuple(same) for same in found.values() if len(same) > 1]


def by_flag(server_args: Mapping[str, Value]) -> dict[str, Value]:
    """The values under their flags' own names.

    Raises:
        PermanentError: one flag is given under two names.
    """
    if twice := repeated(server_args):
        told = "; ".join(" and ".join(same) for same in twice)
        raise PermanentError(f"server_args give one flag twice: {told}.", cure="Keep one of them.")
    return {flag_of(name): value for name, value in server_args.items()}
