"""Folders and files that a recipe names, and whether the nodes have them: pure."""

from collections.abc import Iterable, Iterator, Sequence

from relax_infer.config import Recipe
from relax_infer.config.placed import RolloutModel, ServedModel
from relax_infer.placement.facts import ClusterFacts, NodeFacts
from relax_infer.placement.findings import Finding

BUILT_IN = "tiny:"
"""How models begin that a run makes itself."""


def named_models(recipe: Recipe) -> list[tuple[str, str]]:
    """Field and folder of every model that engines or trainer read."""
    named = [("rollout.model", recipe.rollout.model)]
    named += _extra("rollout", recipe.rollout.extra_models)
    for role, section in (("genrm", recipe.genrm), ("teacher", recipe.teacher)):
        if section is not None and recipe.serves(role):
            named.append((f"{role}.model", section.model))
            named += _extra(role, section.extra_models)
    return [(field, model) for field, model in named if not model.startswith(BUILT_IN)]


def named_data(recipe: Recipe) -> list[tuple[str, str]]:
    """Field and path of every file of problems."""
    sets = enumerate(recipe.evaluation.sets)
    named = [("data.path", recipe.data.path)]
    named += [(f"evaluation.sets.{number}.path", each.path) for number, each in sets]
    return [(field, path) for field, path in named if path is not None]


def lacking_models(recipe: Recipe, facts: Sequence[NodeFacts]) -> Iterator[Finding]:
    """One for each field whose folder is not on every node."""
    for field, folder in named_models(recipe):
        asked = {node.node_ip: node.models[folder] for node in facts if folder in node.models}
        if without := [node for node, size in asked.items() if size is None]:
            text = f"the folder {folder} is not on node {', '.join(without)}."
            cure = f"Put the model where every node sees it, or set {field} to where it is."
            yield Finding("model", "missing", text, cure, field)
        elif field == "rollout.model" and (empty := [n for n, size in asked.items() if not size]):
            text = f"the folder {folder} has no *.safetensors on node {', '.join(empty)}."
            yield Finding("model", "missing", text, "Put the policy's weights there.", field)


def lacking_data(recipe: Recipe, cluster: ClusterFacts) -> Iterator[Finding]:
    """One for each field whose file cannot be read. Workers read it, on whichever nodes they are:
    where some nodes alone have it, that is no more than worth a note."""
    for field, path in named_data(recipe):
        told = {node.node_ip: node.files[path] for node in cluster.facts if path in node.files}
        everywhere = [*told.values(), *(f for p, f in cluster.files.items() if p == path)]
        without = [node for node, fault in told.items() if fault is not None]
        cure = "Name a file that every worker can read, by its full path or an fsspec URL."
        if everywhere and all(fault is not None for fault in everywhere):
            text = f"{path} can be read on no node: {everywhere[0]}."
            yield Finding("data", "missing", text, cure, field)
        elif without:
            text = f"{path} cannot be read on node {', '.join(without)}: {told[without[0]]}."
            yield Finding("data", "note", text, f"Where workers run there: {cure}", field)
        elif everywhere:
            yield Finding("data", "ok", f"{path} can be read")


def _extra(role: str, models: Iterable[RolloutModel | ServedModel]) -> list[tuple[str, str]]:
    return [(f"{role}.extra_models.{n}.model", each.model) for n, each in enumerate(models)]
