"""Who may use the shared GPUs, and how far the pending batch has come."""

from enum import StrEnum

from relax_infer.machines._machine import Machine, edges


class LeaseState(StrEnum):
    """The lease of one role on one pool."""

    SLEEPING = "SLEEPING"
    """The role holds nothing, by confirmation."""
    ONLOADING = "ONLOADING"
    """Granted; the role is loading."""
    ACTIVE = "ACTIVE"
    """The role has the pool to itself."""
    DRAINING = "DRAINING"
    """The role was asked to let go and has not yet proved it."""
    BLOCKED = "BLOCKED"
    """A timeout, an error or a lost reply: the role may still hold; the pool stays reserved."""


class LeaseEvent(StrEnum):
    GRANTED = "GRANTED"
    ONLOAD_CONFIRMED = "ONLOAD_CONFIRMED"
    ONLOAD_REFUSED = "ONLOAD_REFUSED"
    DRAIN_STARTED = "DRAIN_STARTED"
    RELEASE_CONFIRMED = "RELEASE_CONFIRMED"
    TIMED_OUT = "TIMED_OUT"
    OPERATION_FAILED = "OPERATION_FAILED"
    ACTIVE_PROVED = "ACTIVE_PROVED"
    RELEASE_PROVED = "RELEASE_PROVED"
    RESOLVED_BY_OPERATOR = "RESOLVED_BY_OPERATOR"
    MEMORY_LOST = "MEMORY_LOST"


_L, _E = LeaseState, LeaseEvent

LEASE = Machine(
    name="Lease",
    states=LeaseState,
    events=LeaseEvent,
    initial=_L.SLEEPING,
    holds_gpu=frozenset(_L) - {_L.SLEEPING},
    transitions=edges(
        (_L.SLEEPING, _E.GRANTED, _L.ONLOADING),
        (_L.SLEEPING, _E.MEMORY_LOST, _L.BLOCKED),
        (_L.ONLOADING, _E.ONLOAD_CONFIRMED, _L.ACTIVE),
        ((_L.ONLOADING, _L.DRAINING), _E.TIMED_OUT, _L.BLOCKED),
        ((_L.ONLOADING, _L.ACTIVE, _L.DRAINING), _E.OPERATION_FAILED, _L.BLOCKED),
        (_L.ACTIVE, _E.DRAIN_STARTED, _L.DRAINING),
        (_L.DRAINING, _E.RELEASE_CONFIRMED, _L.SLEEPING),
        (_L.BLOCKED, _E.ACTIVE_PROVED, _L.ACTIVE),
        (_L.BLOCKED, _E.RELEASE_PROVED, _L.SLEEPING),
        (_L.BLOCKED, _E.RESOLVED_BY_OPERATOR, _L.SLEEPING),
    ),
    forbidden={
        (_L.BLOCKED, _E.RELEASE_CONFIRMED): "A late success changes nothing by itself: probe, or"
        " let a person resolve.",
        (_L.BLOCKED, _E.GRANTED): "Nothing is granted while a holder is unknown.",
        (_L.ACTIVE, _E.RELEASE_CONFIRMED): "A release that nobody asked for is not a release.",
    },
)


class BatchState(StrEnum):
    """The gate between scores and training."""

    PENDING = "PENDING"
    """Begun; not all of it is generated, scored and published."""
    COMMITTED = "COMMITTED"
    """Every score is in and valid and the partition is published: it may be trained on."""
    FAILED = "FAILED"
    """It will never be trained on."""


class BatchEvent(StrEnum):
    COMMITTED_AFTER_PUBLISH = "COMMITTED_AFTER_PUBLISH"
    FAILED_FOR_GOOD = "FAILED_FOR_GOOD"


BATCH = Machine(
    name="Batch gate",
    states=BatchState,
    events=BatchEvent,
    initial=BatchState.PENDING,
    terminal=frozenset({BatchState.COMMITTED, BatchState.FAILED}),
    transitions=edges(
        (BatchState.PENDING, BatchEvent.COMMITTED_AFTER_PUBLISH, BatchState.COMMITTED),
        (BatchState.PENDING, BatchEvent.FAILED_FOR_GOOD, BatchState.FAILED),
    ),
)
