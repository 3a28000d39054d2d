"""How a recovery is read from its history."""

import re
from collections.abc import AsyncIterator
from datetime import UTC
from pathlib import Path
from typing import Any

import pytest
from temporalio.contrib.pydantic import pydantic_data_converter

from activities._recoveries import read_trace
from relax_infer.machines import RecoveryState
from tests.workflows.histories import load

KEPT = Path(__file__).parents[1] / "histories" / "genrm.judge.replica-0.recovery-1.json.gz"


async def events(upto: int | None = None) -> AsyncIterator[Any]:
    for event in load(KEPT).events[:upto]:
        yield event


@pytest.mark.asyncio
async def test_a_kept_recovery_tells_its_states_with_their_times():
    trace = await read_trace("w", events(), pydantic_data_converter)
    assert trace is not None
    assert [state for state, _ in trace.states] == [
        RecoveryState.FENCED,
        RecoveryState.STOPPING,
        RecoveryState.PROVING,
        RecoveryState.REBUILDING,
        RecoveryState.SYNCING,
        RecoveryState.CHECKING,
        RecoveryState.READMITTED,
    ]
    shown = [
        event.event_time.ToDatetime(UTC).timestamp()
        for event in load(KEPT).events
        if event.HasField("upsert_workflow_search_attributes_event_attributes")
    ]
    assert [at for _, at in trace.states] == pytest.approx(shown, abs=1e-3)
    assert trace.ended is not None
    assert trace.ended >= shown[-1]
    assert trace.role == "genrm"
    assert re.fullmatch(r"its process \d+ is gone", trace.cause)
    assert trace.why is None


@pytest.mark.asyncio
async def test_one_that_goes_on_has_no_end_and_one_without_a_state_is_none():
    trace = await read_trace("w", events(20), pydantic_data_converter)
    assert trace is not None
    assert trace.ended is None
    assert trace.states[-1][0] is RecoveryState.PROVING
    assert await read_trace("w", events(3), pydantic_data_converter) is None
