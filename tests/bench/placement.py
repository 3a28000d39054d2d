"""How long a plan takes, and how that grows: ``python -m tests.bench.placement``.

Prints seconds for each size (best of three) and exits 1 when 16,384 GPUs with 2,048 engines take
more than a second.
"""

import sys
import time
from typing import Any

from relax_infer.config import Recipe, load_recipe
from relax_infer.placement import plan_inference_placement

GPUS = (1024, 2048, 4096, 8192, 16384)
LIMIT = 1.0


def main() -> int:
    """The exit code."""
    slowest = 0.0
    for name, shape in SHAPES.items():
        for gpus in GPUS:
            taken, engines = measured(load_recipe(shape(gpus)))
            print(f"{name:<20} {gpus:>6} GPUs {engines:>5} engines {taken:>8.4f} s")
        slowest = max(slowest, taken)
    print(f"slowest of the largest: {slowest:.3f} s, at most {LIMIT:g} s")
    return int(slowest > LIMIT)


def measured(recipe: Recipe) -> tuple[float, int]:
    """Seconds, best of three, and the engines of the plan."""
    taken: list[float] = []
    plan = None
    for _ in range(3):
        begin = time.perf_counter()
        plan = plan_inference_placement(recipe)
        taken.append(time.perf_counter() - begin)
    assert plan is not None
    return min(taken), sum(p.replicas for p in plan.placements)


def _recipe(mode: str, gpus: int, ranks: int, rollout: int, **more: Any) -> dict[str, Any]:
    return {
        "name": "bench",
        "mode": mode,
        "cluster": {"gpus": gpus, "gpus_per_node": 8},
        "rollout": {"model": "m", "engine": {"replicas": rollout // 8, "gpus_per_replica": 8}},
        "genrm": {"model": "m", "engine": {"replicas": gpus // 32, "gpus_per_replica": 8}},
        "train": {"ranks": ranks},
        **more,
    }


def in_turns(gpus: int) -> dict[str, Any]:
    """Every engine and every rank on one pool."""
    return _recipe("defer", gpus, gpus, gpus)


def decoupled(gpus: int) -> dict[str, Any]:
    """Half trains, a quarter generates, a quarter judges, rollout engines of 2 GPUs."""
    recipe = _recipe("decoupled", gpus, gpus // 2, gpus // 4)
    recipe["rollout"]["engine"] = {"replicas": gpus // 8, "gpus_per_replica": 2}
    return recipe


def many_models(gpus: int) -> dict[str, Any]:
    """A model of its own for every engine."""
    recipe = _recipe("split", gpus, gpus, 8, reward={"source": "exact"})
    recipe["rollout"]["extra_models"] = [
        {"model": "m", "model_id": f"m{n}", "engine": {"gpus_per_replica": 8}}
        for n in range(gpus // 8 - 1)
    ]
    return recipe


def laid_out(gpus: int) -> dict[str, Any]:
    """By a script."""
    script = "rollout[/] -> genrm[1/4] -> actor[/]"
    return in_turns(gpus) | {"layout": script}


SHAPES = {
    "defer": in_turns,
    "decoupled": decoupled,
    "a model per engine": many_models,
    "layout": laid_out,
}


if __name__ == "__main__":
    sys.exit(main())
