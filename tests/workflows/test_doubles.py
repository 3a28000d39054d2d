"""The double of the activity layer has the names and types of the real one."""

import inspect
from typing import Any, get_type_hints

import workflows._calls as calls
from activities.registry import ACTIVITIES
from relax_infer.contracts.policies import POLICIES
from tests.workflows.scripted_world import ScriptedWorld

CALLS: dict[str, calls.Call[Any, Any]] = {
    call.name: call
    for call in (*vars(calls).values(), *calls.CONFIRM_OFFLOAD.values())
    if isinstance(call, calls.Call)
}


def types(function: Any) -> tuple[Any, Any]:
    hints = get_type_hints(function)
    (argument,) = [p for p in inspect.signature(function).parameters if p != "self"]
    return hints[argument], hints["return"]


def test_activities_and_doubles_agree():
    real = {activity.__name__: types(activity) for activity in ACTIVITIES}
    double = {activity.__name__: types(activity) for activity in ScriptedWorld().activities()}
    stubs = {name: (call.takes, call.gives) for name, call in CALLS.items()}
    assert real == double
    assert real == stubs
    assert set(real) == set(POLICIES)


def test_every_policy_notices_a_dead_worker():
    """Pain 25: no activity without a heartbeat timeout and a bound on one attempt."""
    for name, policy in POLICIES.items():
        assert 0 < policy.heartbeat <= 30, name
        assert policy.start_to_close > 0, name
