"""Rules about roles as a whole: names, server groups, budgets, and what a mode allows."""

from collections import Counter
from collections.abc import Sequence

from relax_infer.config import Recipe
from relax_infer.config.placed import ServerGroup
from relax_infer.contracts.counted import counted
from relax_infer.placement._demands import SCORERS, Demand, mode_of
from relax_infer.placement.placed import Violation


def role_violations(recipe: Recipe, demands: Sequence[Demand]) -> list[Violation]:
    """Everything that can be said before anything is placed."""
    found = _names(demands)
    found += _groups(recipe)
    found += _budgets(recipe, demands)
    found += _deferred(recipe)
    found += _external(recipe)
    if mode_of(recipe) != "decoupled" and recipe.debug != "train_only":
        found += _offload(recipe, demands)
    return found


def _names(demands: Sequence[Demand]) -> list[Violation]:
    """Model ids of a role must differ."""
    found: list[Violation] = []
    used: dict[tuple[str, str], str] = {}
    taken = {(d.role, d.model_id) for d in demands}
    for demand in demands:
        key = (demand.role, demand.model_id)
        if used.setdefault(key, demand.model_field) == demand.model_field:
            continue
        if any(v.field == f"{demand.model_field}.model_id" for v in found):
            continue  # a further server group of the same model
        free = next(
            name
            for n in range(2, len(demands) + 2)
            if (demand.role, name := f"{demand.model_id}-{n}") not in taken
        )
        taken.add((demand.role, free))
        field = f"{demand.model_field}.model_id"
        found.append(
            Violation(
                field,
                f"{demand.model_id!r} names two models of role {demand.role}; model ids must be"
                " unique.",
                f"Choose another, for instance {free}.",
                ((field, free),),
            )
        )
    return found


def _groups(recipe: Recipe) -> list[Violation]:
    rollout = recipe.rollout
    listed = [("rollout", rollout.server_groups)]
    listed += [
        (f"rollout.extra_models.{n}", model.server_groups)
        for n, model in enumerate(rollout.extra_models)
    ]
    found: list[Violation] = []
    for where, groups in listed:
        if groups is not None and (rule := _kinds(groups)) is not None:
            field = f"{where}.server_groups"
            settings = [(f"{field}.{n}.worker_type", "regular") for n in range(len(groups))]
            cure = "List regular groups only, or prefill and decode ones only, or leave it out."
            found.append(Violation(field, rule, cure, (*settings,) or ((field, None),)))
    return found


def _kinds(groups: Sequence[ServerGroup]) -> str | None:
    """What is wrong with the worker types of one model's groups."""
    if not groups:
        return "the list of groups is empty."
    kinds = Counter(group.worker_type for group in groups)
    if kinds["regular"] and len(kinds) > 1:
        return "regular groups and prefill/decode groups are mixed."
    if bool(kinds["prefill"]) != bool(kinds["decode"]):
        there, lacking = ("prefill", "decode") if kinds["prefill"] else ("decode", "prefill")
        return f"{there} groups without {lacking} groups."
    return None


def _budgets(recipe: Recipe, demands: Sequence[Demand]) -> list[Violation]:
    sections = {"rollout": recipe.rollout, "genrm": recipe.genrm, "teacher": recipe.teacher}
    names = {"rollout": "Rollout", "genrm": "GenRM", "teacher": "Teacher"}
    found: list[Violation] = []
    for role, section in sections.items():
        mine = [d for d in demands if d.role == role]
        if section is None or section.num_gpus is None or not mine:
            continue
        rule = _budget_rule(names[role], section.num_gpus, mine, mode_of(recipe) == "decoupled")
        if rule is not None:
            field, needed = f"{role}.num_gpus", sum(d.num_gpus for d in mine)
            cure = f"Leave it out, or size the engines to it (they need {needed})."
            found.append(Violation(field, rule, cure, ((field, None),)))
    return found


def _budget_rule(name: str, budget: int, demands: list[Demand], own_pool: bool) -> str | None:
    needed = sum(d.num_gpus for d in demands)
    if len(demands) == 1 and budget % demands[0].gpus_per_replica:
        size = demands[0].gpus_per_replica
        return (
            f"{name} resource of {counted(budget, 'GPU')} is not a multiple of engines of {size}."
        )
    models = {d.model_id: 0 for d in demands}
    for demand in demands:
        models[demand.model_id] += demand.num_gpus
    if name == "Teacher" and (budget % len(models) or len(set(models.values())) > 1):
        parts = ", ".join(f"{model}={gpus}" for model, gpus in models.items())
        return f"{name} resource of {counted(budget, 'GPU')} does not divide evenly: {parts}."
    if needed == budget or (name == "Rollout" and own_pool and needed < budget):
        return None
    return f"{name} resource is {counted(budget, 'GPU')}, its engines need {needed}."


def _deferred(recipe: Recipe) -> list[Violation]:
    if recipe.defer_roles is None:
        return []
    field = "defer_roles"
    if mode_of(recipe) != "defer":
        this, cure = recipe.mode, "Set mode to defer, or leave defer_roles out."
        if recipe.debug == "rollout_only":
            this += " with debug rollout_only, which gives each role GPUs of its own"
            first = "Leave" if recipe.mode == "defer" else "Set mode to defer and leave"
            cure = f"{first} debug out, or leave defer_roles out."
        rule = f"roles take turns on shared GPUs in mode defer only, this is {this}."
        return [Violation(field, rule, cure, ((field, None),))]
    found: list[Violation] = []
    lacking = {
        "genrm": "deferred GenRM without a GenRM of ours that judges.",
        "teacher": "deferred Teacher without distillation from a Teacher of ours.",
    }
    for role in recipe.defer_roles:
        if role not in SCORERS:
            rule = f"Only GenRM and Teacher can be deferred, not {role!r}."
            cure = "Name genrm or teacher, or leave defer_roles out."
        elif not recipe.serves(role):
            rule, cure = lacking[role], f"Take {role} out, or let it take part."
        else:
            continue
        found.append(Violation(field, rule, cure, ((field, None),)))
    return found


def _external(recipe: Recipe) -> list[Violation]:
    if not recipe.rollout.external:
        return []
    found: list[Violation] = []
    if mode_of(recipe) != "decoupled":
        rule = f"External Rollout has no GPUs to share in mode {mode_of(recipe)}."
        cure = "Set mode to decoupled, or rollout.external to false."
        settings = (("rollout.external", False),)
        found.append(Violation("rollout.external", rule, cure, settings))
    if recipe.serves("genrm"):
        rule = "External Rollout cannot be judged by a GenRM of ours."
        cure = "Set reward.source to exact, or rollout.external to false."
        settings = (("rollout.external", False),)
        found.append(Violation("rollout.external", rule, cure, settings))
    return found


def _offload(recipe: Recipe, demands: Sequence[Demand]) -> list[Violation]:
    """Who shares GPUs must let them go."""
    fields = dict.fromkeys(
        f"{d.engine_field}.offload" for d in demands if d.engine.offload == "none"
    )
    rule = f"in mode {mode_of(recipe)} roles share GPUs, so each must offload."
    found = [
        Violation(
            field,
            rule,
            "Set it to memory_saver or restart, or mode to decoupled.",
            ((field, "memory_saver"),),
        )
        for field in fields
    ]
    if not recipe.train.offload and recipe.debug is None:
        cure = "Set it to true, or mode to decoupled."
        settings = (("train.offload", True),)
        found.append(Violation("train.offload", rule, cure, settings))
    return found
