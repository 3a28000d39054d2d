"""Rules that one model's engines must keep, wherever they are placed."""

import math

from relax_infer.engines.static import static_faults
from relax_infer.placement._demands import Demand
from relax_infer.placement.placed import Violation

RESERVED_ARGS = frozenset(
    {
        *("nnodes", "node_rank", "base_gpu_id", "gpu_id_step"),
        *("dist_init_addr", "host", "port", "nccl_port"),
    }
)
"""SGLang flags that placement itself decides."""

_SIZES = ("tp_size", "pp_size", "dp_size")


def engine_violations(demand: Demand, gpus_per_node: int | None) -> list[Violation]:
    """Of flags and sizes. ``gpus_per_node``: None when all GPUs are on one node."""
    found = _reserved(demand)
    found += _static(demand)
    found += _sizes(demand)
    found += _attention(demand)
    if gpus_per_node is not None:
        found += _nodes(demand, gpus_per_node)
    return found


def tensor_parallel(demand: Demand) -> tuple[int, int]:
    """Tensor and pipeline parallel size of one engine."""
    pp = demand.size("pp_size") or 1
    return demand.gpus_per_replica // pp, pp


def _reserved(demand: Demand) -> list[Violation]:
    return [
        Violation(
            demand.flags[name].field.rpartition(".")[0] + f".{name}",
            "placement decides this flag itself.",
            "Remove it; replicas and gpus_per_replica say the same.",
            ((demand.flags[name].field, None),),
        )
        for name in sorted(RESERVED_ARGS & demand.flags.keys())
    ]


def _static(demand: Demand) -> list[Violation]:
    """GenRM and Teacher keep their own checkpoint."""
    if demand.role == "rollout":
        return []
    faults = static_faults({name: flag.value for name, flag in demand.flags.items()})
    return [
        Violation(
            demand.flags[name].field, f"{why}.", "Remove it.", ((demand.flags[name].field, None),)
        )
        for name, why in faults.items()
    ]


def _sizes(demand: Demand) -> list[Violation]:
    """TP x PP must be the engine's GPUs; DP is within them and multiplies nothing."""
    wrong = [name for name in _SIZES if name in demand.flags and demand.size(name) is None]
    if wrong:
        return [
            Violation(
                demand.flags[name].field,
                f"{name} is {demand.flags[name].value!r}, not a positive whole number.",
                "Remove it.",
                ((demand.flags[name].field, None),),
            )
            for name in wrong
        ]
    tp, pp = demand.size("tp_size"), demand.size("pp_size") or 1
    gpus = demand.gpus_per_replica
    if gpus % pp == 0 and tp in (None, gpus // pp):
        return []
    named = ["tp_size"] if gpus % pp == 0 else ["tp_size", "pp_size"]
    return [
        Violation(
            f"{demand.field}.server_args",
            f"tp_size {tp or 'unset'} x pp_size {pp} is not gpus_per_replica {gpus}.",
            "Leave tp_size out, and let pp_size divide gpus_per_replica.",
            tuple((demand.flags[n].field, None) for n in named if n in demand.flags),
        )
    ]


def _attention(demand: Demand) -> list[Violation]:
    enabled, dp = demand.flags.get("enable_dp_attention"), demand.size("dp_size") or 1
    tensor, _ = tensor_parallel(demand)
    if enabled is None or not enabled.value or tensor % dp == 0:
        return []
    cure = math.gcd(tensor, dp)
    return [
        Violation(
            f"{demand.field}.server_args.dp_size",
            f"DP attention splits the {tensor} tensor-parallel GPUs in {dp} parts.",
            f"Use a dp_size that divides {tensor}, for instance {cure}.",
            ((demand.flags["dp_size"].field, cure),),
        )
    ]


def _nodes(demand: Demand, node: int) -> list[Violation]:
    """An engine is within a node or over whole ones; ``node``: GPUs of one."""
    gpus = demand.gpus_per_replica
    field = f"{demand.field}.gpus_per_replica"
    if gpus > node and gpus % node:
        whole = -(-gpus // node) * node
        return [
            Violation(
                field,
                f"{gpus} GPUs are not whole configured nodes of {node}.",
                f"Use {whole}, or at most {node}.",
                ((field, whole),),
            )
        ]
    if gpus < node and node % gpus and demand.num_gpus > node:
        divisor = next(g for g in range(gpus, 0, -1) if node % g == 0)
        return [
            Violation(
                field,
                f"engines of {gpus} GPUs, one after another, would cross the boundary of a node"
                f" of {node}.",
                f"Use a size that divides {node}, for instance {divisor}.",
                ((field, divisor),),
            )
        ]
    return []
