"""What a person sees of a workflow in the web UI: search attributes and current details."""

from typing import Any

from temporalio import workflow
from temporalio.common import SearchAttributeKey, SearchAttributePair, TypedSearchAttributes

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
        workflow.upsert_search_attributes([STATE.value_set(state)])


def show_details(doing: str, rows: list[tuple[str, str]] | None = None) -> None:
    """Current details as Markdown: a sentence, then a table of what matters."""
    text = doing
    if rows:
        table = "\n".join(f"| {name} | {value} |" for name, value in rows)
        text = f"{doing}\n\n| | |\n| --- | --- |\n{table}"
    workflow.set_current_details(text)
