"""What a person sees of a workflow in the web UI: search attributes and current details."""

from collections.abc import Sequence
from typing import Any

from temporalio import workflow
from temporalio.common import (
    SearchAttributeKey,
    SearchAttributePair,
    SearchAttributeUpdate,
    TypedSearchAttributes,
)

from relax_infer.contracts.counted import counted
from relax_infer.contracts.engines import BundleBinding
from relax_infer.contracts.run import RunPlan

RUN = SearchAttributeKey.for_keyword("RelaxRun")
STEP = SearchAttributeKey.for_int("RelaxStep")
ROLE = SearchAttributeKey.for_keyword("RelaxRole")
STATE = SearchAttributeKey.for_keyword("RelaxState")
WEIGHT_VERSION = SearchAttributeKey.for_int("RelaxWeightVersion")
REWARD = SearchAttributeKey.for_float("RelaxReward")

_NODES_SHOWN = 4


def attributes(
    *, run: str, role: str | None = None, step: int | None = None, state: str | None = None
) -> TypedSearchAttributes:
    """The search attributes a child begins with."""
    pairs: list[SearchAttributePair[Any]] = [SearchAttributePair(RUN, run)]
    if role is not None:
        pairs.append(SearchAttributePair(ROLE, role))
    if step is not None:
        pairs.append(SearchAttributePair(STEP, step))
    if state is not None:
        pairs.append(SearchAttributePair(STATE, state))
    return TypedSearchAttributes(pairs)


def show_state(state: str) -> None:
    """Make ``state`` searchable; an unchanged one writes no event."""
    if workflow.info().typed_search_attributes.get(STATE) != state:
        _upsert(STATE.value_set(str(state)))


def show_run(run: str) -> None:
    """For the run itself, which a person starts without search attributes."""
    _upsert(RUN.value_set(run))


def show_weights(version: int) -> None:
    _upsert(WEIGHT_VERSION.value_set(version))


def show_reward(mean: float | None) -> None:
    if mean is not None:
        _upsert(REWARD.value_set(mean))


def _upsert(update: SearchAttributeUpdate[Any]) -> None:
    workflow.upsert_search_attributes([update])  # pyright: ignore[reportUnknownMemberType]


def show_details(doing: str, rows: Sequence[tuple[str, str]] | None = None) -> None:
    """Current details as Markdown: a sentence, then a table of what matters."""
    text = doing
    if rows:
        table = "\n".join(f"| {name} | {value} |" for name, value in rows)
        text = f"{doing}\n\n| | |\n| --- | --- |\n{table}"
    workflow.set_current_details(text)


def placement_rows(plan: RunPlan) -> list[tuple[str, str]]:
    """Who has which GPUs of which node, for current details; empty before they are bound."""
    rows = [(f"GPUs of {g.role} {g.model}", _devices(g.bundles)) for g in plan.groups]
    rows.append(("GPUs of trainer", _devices(plan.trainer.bundles)))
    return [(who, devices) for who, devices in rows if devices]


def _devices(bundles: Sequence[BundleBinding]) -> str:
    nodes: dict[tuple[str, str], list[str]] = {}
    for bundle in bundles:
        nodes.setdefault((bundle.node_id, bundle.node_ip), []).append(str(bundle.gpu_id))
    told = [f"{ip}: {', '.join(gpus)}" for (_, ip), gpus in nodes.items()]
    left = len(told) - _NODES_SHOWN
    more = f"; and on {counted(left, 'more node')}" if left > 0 else ""
    return "; ".join(told[:_NODES_SHOWN]) + more
