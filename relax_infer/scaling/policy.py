"""How many replicas a load asks for: by requests in flight and the time of a batch, with
hysteresis, cool-down and a pause after failures."""

import math

from relax_infer.contracts.autoscale import (
    AutoscaleDecision,
    AutoscaleMemory,
    AutoscalePolicy,
    Load,
)

FIRST_PAUSE = 60.0
"""Seconds after a failed operation; twice as long after each that follows."""
LONGEST_PAUSE = 3600.0


def decide(policy: AutoscalePolicy, memory: AutoscaleMemory, load: Load) -> AutoscaleDecision:
    """The next target. Bounds are kept at once; everything else waits for looks that agree, and
    for the cool-down. After a failure nothing is done before its pause is over."""
    now = load.replicas
    if memory.retry_at is not None and load.at < memory.retry_at:
        times = "" if memory.failures == 1 else f" {memory.failures} times"
        left = memory.retry_at - load.at
        return _stay(now, f"the last operation failed{times}; waits {left:.0f} s more", memory)
    bounded = min(max(now, policy.min_replicas), policy.max_replicas)
    if bounded != now:
        why = f"{now} replicas are outside of {policy.min_replicas} to {policy.max_replicas}"
        return _change(bounded, why, load, memory)
    more, why_more, counts = _wanted(policy, memory, load)
    if load.in_flight == 0 and more == now and not policy.idle_counts:
        return _stay(now, "nothing is in flight, which says nothing", memory)
    high = memory.high + counts if more > now else 0
    low = memory.low + 1 if more == now and _spare(policy, load) else 0
    slow_step = load.step if more > now else memory.step
    kept = memory.model_copy(update={"high": high, "low": low, "step": slow_step})
    since = math.inf if memory.changed_at is None else load.at - memory.changed_at
    if more > now:
        if now == policy.max_replicas:
            return _stay(now, f"{why_more}; {now} is the most", kept)
        if high < policy.looks:
            return _stay(now, f"{why_more}; look {high} of {policy.looks}", kept)
        if since < policy.cool_down_out:
            return _stay(now, f"{why_more}; cools down, {since:.0f} s", kept)
        return _change(min(more, policy.max_replicas), why_more, load, kept)
    if low:
        why = _in_flight(load)
        if now == policy.min_replicas:
            return _stay(now, f"{why}; {now} is the least", kept)
        if low < policy.looks:
            return _stay(now, f"{why}; look {low} of {policy.looks}", kept)
        if since < policy.cool_down_in:
            return _stay(now, f"{why}; cools down, {since:.0f} s", kept)
        return _change(now - 1, why, load, kept)
    return _stay(now, _in_flight(load), kept)


def settled(memory: AutoscaleMemory, at: float, *, well: bool) -> AutoscaleMemory:
    """What is remembered once an operation has ended, whoever asked for it: the cool-down begins,
    looks are counted anew, and after a failure there is a pause that doubles each time."""
    failures = 0 if well else memory.failures + 1
    pause = min(FIRST_PAUSE * 2.0 ** min(failures - 1, 16), LONGEST_PAUSE)
    return AutoscaleMemory(
        changed_at=at,
        step=memory.step,
        failures=failures,
        retry_at=None if well else at + pause,
    )


def _wanted(policy: AutoscalePolicy, memory: AutoscaleMemory, load: Load) -> tuple[int, str, int]:
    """At least as many as there are: the fewest that are not too busy; why; and how many looks it
    counts for."""
    now = load.replicas
    if load.in_flight > policy.in_flight_high * now:
        needed = math.ceil(load.in_flight / policy.in_flight_high)
        return min(needed, now + policy.most_at_once), _in_flight(load), 1
    slow, took = policy.slow_seconds, load.batch_seconds
    if slow is not None and took is not None and took > slow:
        known = load.step is not None and load.step == memory.step
        return now + 1, f"a batch took {took:.0f} s, more than {slow:g}", 0 if known else 1
    return now, "", 0


def _spare(policy: AutoscalePolicy, load: Load) -> bool:
    """Whether one less would do: little is in flight, little enough for those left, and a batch
    that takes the longer by as much would not be slow."""
    now = load.replicas
    if now < 2:
        return True
    short = load.in_flight <= policy.in_flight_low * now
    enough = load.in_flight <= policy.in_flight_high * (now - 1)
    slower = (load.batch_seconds or 0.0) * now / (now - 1)
    return short and enough and (policy.slow_seconds is None or slower <= policy.slow_seconds)


def _in_flight(load: Load) -> str:
    return f"{load.in_flight:.4g} requests in flight on {load.replicas} replicas"


def _stay(now: int, reason: str, memory: AutoscaleMemory) -> AutoscaleDecision:
    return AutoscaleDecision(target=now, reason=reason, memory=memory)


def _change(target: int, reason: str, load: Load, memory: AutoscaleMemory) -> AutoscaleDecision:
    fresh = AutoscaleMemory(changed_at=load.at, step=memory.step, failures=memory.failures)
    return AutoscaleDecision(target=target, reason=reason, memory=fresh)
