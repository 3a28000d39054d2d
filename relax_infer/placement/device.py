"""What the cluster computes on."""

from typing import Literal


def cluster_device(asked: Literal["auto", "cpu", "cuda"]) -> Literal["cpu", "cuda"]:
    """``asked``, or for ``auto`` cuda when a Ray node names an accelerator type.

    Pretended GPUs (``ray start --num-gpus`` on a machine without any) have no type. The caller has
    done ``ray.init``.
    """
    if asked != "auto":
        return asked
    import ray

    typed = any(name.startswith("accelerator_type:") for name in ray.cluster_resources())
    return "cuda" if typed else "cpu"
