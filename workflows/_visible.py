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

RUN = SearchAttributeKey.for_keyword("RelaxRun")
STEP = SearchAttributeKey.for_int("RelaxStep")
ROLE = SearchAttributeKey.for_keyword("RelaxRole")
STATE = SearchAttributeKey.for_keyword("RelaxState")
WEIGHT_VERSION = SearchAttributeKey.for_int("RelaxWeightVersion")
REWARD = SearchAttributeKey.for_float("RelaxReward")


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
