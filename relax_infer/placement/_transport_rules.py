"""Which ways of new weights to the policy's engines a recipe's engines and mode allow."""

from collections.abc import Sequence

from relax_infer.config import Recipe
from relax_infer.placement._demands import Demand, mode_of
from relax_infer.placement.placed import Violation

_FIELD = "train.weights.transport"


def transport_violations(recipe: Recipe, demands: Sequence[Demand]) -> list[Violation]:
    """Transport disk goes everywhere."""
    transport = recipe.train.weights.transport
    if transport == "disk":
        return []
    found: list[Violation] = []
    apart = mode_of(recipe) == "decoupled"
    # A GPU that the trainer shares is the engine's during the update: nccl wants one of its own for
    # each rank. On a CPU gloo sends from the host's memory, whoever holds what.
    policy = [demand for demand in demands if demand.role == "rollout"]
    size = recipe.cluster.gpus_per_node or recipe.cluster.gpus
    spans = any(d.gpus_per_replica > size for d in policy)
    split = [
        n
        for n in ("pp_size", "dp_size", "attn_dp_size")
        if any((d.size(n) or 1) > 1 for d in policy)
    ]
    if transport == "process_group" and not apart and recipe.cluster.device != "cpu":
        better = "disk" if spans or split else "tensor"
        found.append(
            Violation(
                _FIELD,
                f"process_group in mode {mode_of(recipe)}: the trainer and the engines never hold"
                " their GPUs at the same time, and nccl needs one for each rank.",
                f"Set it to {better}, or mode to decoupled.",
                ((_FIELD, better),),
            )
        )
    if transport == "tensor" and spans:
        found.append(
            Violation(
                _FIELD,
                "tensor: an engine that spans nodes has ranks that do not see the shared memory of"
                " its head.",
                "Set it to disk, or in mode decoupled to process_group.",
                ((_FIELD, "disk"),),
            )
        )
    if split:
        found.append(
            Violation(
                _FIELD,
                f"{transport}: SGLang takes weights so into engines without {' and '.join(split)}"
                " only.",
                "Set it to disk.",
                ((_FIELD, "disk"),),
            )
        )
    return found
