"""How many replicas a load asks for: by queue length and generation time, with hysteresis and
cool-down."""

import math
from typing import Annotated

from pydantic import Field, model_validator

from relax_infer.contracts.base import Message, StartInput

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class AutoscalePolicy(StartInput):
    """What a person wants. More replicas come one look after another and fast; fewer come slowly,
    since an engine that is needed again has to be started anew."""

    min_replicas: Annotated[int, Field(ge=1)]
    max_replicas: Annotated[int, Field(ge=1)]
    queue_high: Positive
    """Requests that wait, for each replica, above which there should be more replicas."""
    queue_low: Seconds
    """The same, below which there should be one less."""
    slow_seconds: Positive | None = None
    """Generation time of a batch above which there should be one more, whatever the queue says;
    None: it does not matter."""
    most_at_once: Annotated[int, Field(ge=1)] = 4
    """Replicas that one decision adds."""
    looks: Annotated[int, Field(ge=1)] = 3
    """Looks in a row that must agree before anything is done."""
    cool_down_out: Seconds = 60.0
    """Seconds after any change in which no replica is added."""
    cool_down_in: Seconds = 300.0
    """Seconds after any change in which none is removed."""

    @model_validator(mode="after")
    def _apart(self) -> "AutoscalePolicy":
        if self.max_replicas < self.min_replicas:
            raise ValueError(
                f"max_replicas {self.max_replicas} is below min_replicas {self.min_replicas}"
            )
        if self.queue_low >= self.queue_high:
            raise ValueError(
                f"queue_low {self.queue_low:g} must be below queue_high {self.queue_high:g}:"
                " between them nothing changes"
            )
        return self


class Load(Message):
    """One look at a role."""

    at: float
    """Seconds of any clock that only goes forward."""
    replicas: int
    """Those there are, whether they answer or are still coming."""
    queued: Annotated[int, Field(ge=0)]
    """Requests that wait for an engine."""
    generation_seconds: float | None = None
    """Of the last batch."""


class AutoscaleMemory(Message):
    """What the decisions before this one leave behind."""

    changed_at: float | None = None
    """When a decision last changed the target."""
    high: int = 0
    """Looks in a row that asked for more."""
    low: int = 0
    """Looks in a row that asked for less."""


class AutoscaleDecision(Message):
    """How many replicas there should be, and why; for the role's history."""

    target: int
    reason: str
    memory: AutoscaleMemory


def decide(policy: AutoscalePolicy, memory: AutoscaleMemory, load: Load) -> AutoscaleDecision:
    """The next target. Bounds are kept at once; everything else waits for looks that agree, and
    for the cool-down."""
    now = load.replicas
    bounded = min(max(now, policy.min_replicas), policy.max_replicas)
    if bounded != now:
        why = f"{now} replicas are outside of {policy.min_replicas} to {policy.max_replicas}"
        return _change(bounded, why, load)
    more, why_more = _wanted(policy, load)
    high = memory.high + 1 if more > now else 0
    low = memory.low + 1 if more == now and _spare(policy, load) else 0
    kept = memory.model_copy(update={"high": high, "low": low})
    since = math.inf if memory.changed_at is None else load.at - memory.changed_at
    if more > now:
        if now == policy.max_replicas:
            return _stay(now, f"{why_more}; {now} is the most", kept)
        if high < policy.looks:
            return _stay(now, f"{why_more}; look {high} of {policy.looks}", kept)
        if since < policy.cool_down_out:
            return _stay(now, f"{why_more}; cools down, {since:.0f} s", kept)
        return _change(min(more, policy.max_replicas), why_more, load)
    if low:
        why = f"{load.queued} requests wait for {now} replicas"
        if now == policy.min_replicas:
            return _stay(now, f"{why}; {now} is the least", kept)
        if low < policy.looks:
            return _stay(now, f"{why}; look {low} of {policy.looks}", kept)
        if since < policy.cool_down_in:
            return _stay(now, f"{why}; cools down, {since:.0f} s", kept)
        return _change(now - 1, why, load)
    return _stay(now, f"{load.queued} requests wait for {now} replicas", kept)


def _wanted(policy: AutoscalePolicy, load: Load) -> tuple[int, str]:
    """At least as many as there are: the fewest that the queue is not too long for."""
    now = load.replicas
    if load.queued > policy.queue_high * now:
        needed = math.ceil(load.queued / policy.queue_high)
        why = f"{load.queued} requests wait for {now} replicas"
        return min(needed, now + policy.most_at_once), why
    slow = policy.slow_seconds
    if slow is not None and (load.generation_seconds or 0.0) > slow:
        return now + 1, f"a batch took {load.generation_seconds:.0f} s, more than {slow:g}"
    return now, ""


def _spare(policy: AutoscalePolicy, load: Load) -> bool:
    """Whether one less would do: the queue is short, and stays short enough for those left."""
    if load.replicas < 2:
        return True
    short = load.queued <= policy.queue_low * load.replicas
    return short and load.queued <= policy.queue_high * (load.replicas - 1)


def _stay(now: int, reason: str, memory: AutoscaleMemory) -> AutoscaleDecision:
    return AutoscaleDecision(target=now, reason=reason, memory=memory)


def _change(target: int, reason: str, load: Load) -> AutoscaleDecision:
    memory = AutoscaleMemory(changed_at=load.at)
    return AutoscaleDecision(target=target, reason=reason, memory=memory)
