"""Rules of the recipe's autoscale section: who may have more replicas, and whether the cluster has
room for them."""

from collections.abc import Iterator, Sequence

from relax_infer.config import Recipe
from relax_infer.config.autoscale import AutoscaleRule
from relax_infer.config.placed import MOST_GPUS, Scalar
from relax_infer.contracts.counted import counted
from relax_infer.placement._demands import Demand, mode_of
from relax_infer.placement.placed import Violation


def autoscale_violations(recipe: Recipe, demands: Sequence[Demand], placed: int) -> list[Violation]:
    """
    Args:
        placed: GPUs of all pools together.
    """
    if recipe.autoscale is None:
        return []
    if (mode := mode_of(recipe)) != "decoupled":
        return [
            Violation(
                "autoscale",
                f"in mode {mode} the roles take turns on shared GPUs: a replica more would have"
                " none, or would stay while another role has its turn.",
                "Remove the section, or set mode to decoupled.",
                (("autoscale", None),),
            )
        ]
    found: list[Violation] = []
    needed = placed
    for role, rule in recipe.autoscale.rules():
        mine = [d for d in demands if d.role == role]
        found += _rule(f"autoscale.{role}", rule, mine)
        needed += sum(
            max(0, rule.max_replicas - d.replicas) * d.gpus_per_replica for d in _meant(rule, mine)
        )
    if not found and needed > recipe.cluster.gpus:
        settings: tuple[tuple[str, Scalar], ...] = (("cluster.gpus", needed),)
        cure = f"Raise cluster.gpus to {needed}, or lower max_replicas."
        if needed > MOST_GPUS:
            cure, settings = "Lower max_replicas, or remove the section.", (("autoscale", None),)
        rule = (
            f"with every model at its max_replicas the run needs {counted(needed, 'GPU')}, the"
            f" cluster has {recipe.cluster.gpus}."
        )
        found.append(Violation("autoscale", rule, cure, settings))
    return found


def _rule(field: str, rule: AutoscaleRule, demands: Sequence[Demand]) -> Iterator[Violation]:
    if not demands:
        rule_text = "the role takes no part with engines of ours."
        yield Violation(field, rule_text, "Remove it, or let it take part.", ((field, None),))
        return
    known = {d.model_id for d in demands}
    if unknown := [model for model in rule.models if model not in known]:
        yield Violation(
            f"{field}.models",
            f"the role has no model {unknown[0]}.",
            f"Name {', '.join(sorted(known))}, or leave it out.",
            ((f"{field}.models", None),),
        )
    meant = _meant(rule, demands)
    most = max((demand.replicas for demand in meant), default=0)
    for demand in [d for d in meant if d.replicas == most and d.replicas > rule.min_replicas][:1]:
        yield Violation(
            f"{field}.min_replicas",
            f"it is {rule.min_replicas}, {demand.model_id} begins with {demand.replicas} replicas,"
            " and those always stay.",
            f"Raise it to {demand.replicas}, or lower {demand.field}.replicas.",
            tuple(
                (f"{field}.{name}", demand.replicas)
                for name in ("min_replicas", "max_replicas")
                if getattr(rule, name) < demand.replicas
            ),
        )


def _meant(rule: AutoscaleRule, demands: Sequence[Demand]) -> list[Demand]:
    return [d for d in demands if not rule.models or d.model_id in rule.models]
