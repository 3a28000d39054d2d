"""Rules that one model's engines must keep, wherever they are placed."""

import math

from relax_infer.config.placed import MOST_GPUS
from relax_infer.contracts.counted import counted
from relax_infer.engines.flags import ALIASES, OWN, UNFENCED
from relax_infer.engines.static import backup_faults, static_faults
from relax_infer.placement._demands import Demand
from relax_infer.placement.alignment import Row, can_line_up
from relax_infer.placement.placed import Violation

RESERVED_ARGS = frozenset(
    {
        *("nnodes", "node_rank", "base_gpu_id", "gpu_id_step"),
        *("dist_init_addr", "host", "port", "nccl_port"),
    }
)
"""SGLang flags that placement itself decides."""

_SIZES = ("tp_size", "pp_size", "dp_size", "attn_dp_size")
_OWN = frozenset(name.replace("-", "_") for name in OWN)
_KEPT = frozenset({"load_format", "enable_weights_cpu_backup", "enable_memory_saver"})
_READ = frozenset({*RESERVED_ARGS, *_OWN, *_SIZES, *UNFENCED, *_KEPT, "enable_dp_attention"})
_LONG = frozenset(
    {*_READ, *(n.replace("-", "_") for n, f in ALIASES.items() if f.replace("-", "_") in _READ)}
)
"""Every name of a flag that placement reads, or that is decided elsewhere or not at all."""


def engine_violations(demand: Demand, gpus_per_node: int | None) -> list[Violation]:
    """Of flags and sizes. ``gpus_per_node``: None when all GPUs are on one node."""
    found = _repeated(demand)
    found += _shortened(demand)
    found += _reserved(demand)
    found += _own(demand)
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


def _repeated(demand: Demand) -> list[Violation]:
    return [
        Violation(
            same[0],
            f"{' and '.join(field.rpartition('.')[2] for field in same)} are one flag of SGLang.",
            "Keep one of them.",
            tuple((field, None) for field in same[1:]),
        )
        for same in demand.repeated
    ]


def _shortened(demand: Demand) -> list[Violation]:
    """SGLang takes a flag by its first letters; placement would not know it."""
    found: list[Violation] = []
    for name, flag in demand.flags.items():
        meant = sorted(long for long in _LONG if long.startswith(name)) if name not in _LONG else []
        if meant:
            rule = f"SGLang may take it for {' or '.join(meant)}."
            cure = "Write the whole name, or remove it."
            found.append(Violation(flag.field, rule, cure, ((flag.field, None),)))
    return found


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


def _own(demand: Demand) -> list[Violation]:
    """What the run itself tells each engine, and what would let callers in beside its fence."""
    told = dict.fromkeys(sorted(_OWN & demand.flags.keys()), "the run decides this flag itself.")
    for name, harmless in UNFENCED.items():
        if name in demand.flags and demand.flags[name].value not in harmless:
            told[name] = "it opens a way in that the engine's fence does not guard."
    return [
        Violation(demand.flags[n].field, rule, "Remove it.", ((demand.flags[n].field, None),))
        for n, rule in told.items()
    ]


def _static(demand: Demand) -> list[Violation]:
    """GenRM and Teacher keep their own checkpoint; who sleeps keeps its weights."""
    flags = demand.server_args
    faults: dict[str, str] = {}
    if demand.role != "rollout":
        faults |= static_faults(flags)
    if demand.engine.offload == "memory_saver":
        faults |= backup_faults(flags)
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
    """Data parallel attention is within the engine's GPUs; SGLang's other kind multiplies them."""
    enabled = demand.flags.get("enable_dp_attention")
    if enabled is not None and not isinstance(enabled.value, bool | None):
        rule = f"enable_dp_attention is {enabled.value!r}, not true or false."
        cure = "Write true without quotes, or remove it."
        return [Violation(enabled.field, rule, cure, ((enabled.field, True),))]
    dp = "dp_size" if (demand.size("dp_size") or 1) > 1 else "attn_dp_size"
    parts = demand.size(dp) or 1
    if parts == 1:
        return []
    given = demand.flags[dp]
    tensor, _ = tensor_parallel(demand)
    if dp == "dp_size" and (demand.size("attn_dp_size") or 1) > 1:
        rule = f"dp_size {parts} beside attn_dp_size: one of them divides the engine's GPUs."
        cure = "Keep attn_dp_size, which needs no enable_dp_attention."
        return [Violation(given.field, rule, cure, ((given.field, None),))]
    if dp == "dp_size" and (enabled is None or not enabled.value):
        switch = f"{given.field.rpartition('.')[0]}.enable_dp_attention"
        rule = (
            f"dp_size {parts} without enable_dp_attention would start {parts} engines of"
            f" {counted(demand.gpus_per_replica, 'GPU')}."
        )
        cure = "Set enable_dp_attention to true, or remove dp_size and raise replicas."
        settings = ((enabled.field if enabled else switch, True),)
        return [Violation(given.field, rule, cure, settings)]
    if tensor % parts == 0:
        return []
    cure = math.gcd(tensor, parts)
    return [
        Violation(
            f"{demand.field}.server_args.{dp}",
            f"DP attention splits {counted(tensor, 'tensor-parallel GPU')} in {parts} parts.",
            f"Use a {dp} that divides {tensor}, for instance {cure}.",
            ((given.field, cure),),
        )
    ]


def _nodes(demand: Demand, node: int) -> list[Violation]:
    """An engine is within a node or over whole ones; ``node``: GPUs of one."""
    gpus = demand.gpus_per_replica
    field = f"{demand.field}.gpus_per_replica"
    if gpus > node and gpus % node:
        whole = -(-gpus // node) * node
        if whole > MOST_GPUS:
            whole -= node
        return [
            Violation(
                field,
                f"{gpus} GPUs are not whole configured nodes of {node}.",
                f"Use {whole}, or at most {node}.",
                ((field, whole),),
            )
        ]
    if gpus < node and not can_line_up(Row(demand.replicas, gpus), node):
        divisor = next(g for g in range(gpus, 0, -1) if node % g == 0)
        return [
            Violation(
                field,
                f"{demand.replicas} engines of {gpus} GPUs, one after another, would cross the"
                f" boundary of a node of {node}.",
                f"Use a size that divides {node}, for instance {divisor}.",
                ((field, divisor),),
            )
        ]
    return []
