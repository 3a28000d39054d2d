"""One logical replica of a model: one engine, on one or many nodes."""

from enum import StrEnum

from relax_infer.machines._machine import Machine, edges


class ReplicaState(StrEnum):
    """What a replica is doing. UNKNOWN appears in discovery only, never in a lifecycle."""

    STARTING = "STARTING"
    """Its processes are being launched under a grant; it may already hold memory."""
    READY = "READY"
    """Every tag is resident, its weights are current and its admission is open."""
    DRAINING = "DRAINING"
    """Admission is closed; requests are ending and memory is being released."""
    SLEEPING = "SLEEPING"
    """Release was confirmed: it holds nothing and answers nobody."""
    ONLOADING = "ONLOADING"
    """It is awake but incomplete: tags, weights or admission are missing."""
    FAILED = "FAILED"
    """Something went wrong and nobody proved that it let go: it still counts as a holder."""
    STOPPING = "STOPPING"
    """Its processes are being ended."""
    DEAD = "DEAD"
    """No process of it is left, by proof."""
    UNKNOWN = "UNKNOWN"
    """Discovery lost sight of it."""


class ReplicaEvent(StrEnum):
    LAUNCHED = "LAUNCHED"
    LAUNCH_FAILED = "LAUNCH_FAILED"
    OPENED = "OPENED"
    ONLOAD_STARTED = "ONLOAD_STARTED"
    ONLOAD_FAILED = "ONLOAD_FAILED"
    WEIGHTS_UPDATE_STARTED = "WEIGHTS_UPDATE_STARTED"
    DRAIN_STARTED = "DRAIN_STARTED"
    DRAIN_FAILED = "DRAIN_FAILED"
    RELEASE_CONFIRMED = "RELEASE_CONFIRMED"
    STOP_STARTED = "STOP_STARTED"
    STOP_UNCONFIRMED = "STOP_UNCONFIRMED"
    DEATH_NOTICED = "DEATH_NOTICED"
    RELEASE_PROVED = "RELEASE_PROVED"
    RESOLVED_BY_OPERATOR = "RESOLVED_BY_OPERATOR"


_R, _E = ReplicaState, ReplicaEvent
_ALIVE = (_R.STARTING, _R.READY, _R.DRAINING, _R.SLEEPING, _R.ONLOADING)

REPLICA = Machine(
    name="Replica",
    states=ReplicaState,
    events=ReplicaEvent,
    initial=_R.STARTING,
    terminal=frozenset({_R.DEAD}),
    holds_gpu=frozenset(_R) - {_R.SLEEPING, _R.DEAD},
    transitions=edges(
        (_R.STARTING, _E.LAUNCHED, _R.ONLOADING),
        (_R.STARTING, _E.LAUNCH_FAILED, _R.FAILED),
        (_R.ONLOADING, _E.OPENED, _R.READY),
        (_R.ONLOADING, _E.ONLOAD_FAILED, _R.FAILED),
        (_R.SLEEPING, _E.ONLOAD_STARTED, _R.ONLOADING),
        (_R.READY, _E.WEIGHTS_UPDATE_STARTED, _R.ONLOADING),
        ((_R.READY, _R.ONLOADING, _R.FAILED), _E.DRAIN_STARTED, _R.DRAINING),
        (_R.DRAINING, _E.RELEASE_CONFIRMED, _R.SLEEPING),
        (_R.DRAINING, _E.DRAIN_FAILED, _R.FAILED),
        (_ALIVE, _E.DEATH_NOTICED, _R.FAILED),
        ((*_ALIVE, _R.FAILED), _E.STOP_STARTED, _R.STOPPING),
        (_R.STOPPING, _E.STOP_UNCONFIRMED, _R.FAILED),
        ((_R.STOPPING, _R.FAILED), _E.RELEASE_PROVED, _R.DEAD),
        (_R.FAILED, _E.RESOLVED_BY_OPERATOR, _R.DEAD),
    ),
    forbidden={
        (_R.FAILED, _E.RELEASE_CONFIRMED): "A failed replica lets go by release proof, not by an"
        " answer that came late.",
        (_R.FAILED, _E.OPENED): "A failed replica is rebuilt; it never answers again as it is.",
        (_R.SLEEPING, _E.OPENED): "A sleeping replica must be onloaded under a grant first.",
        (_R.STARTING, _E.OPENED): "Weights must be current before a replica may answer.",
    },
)
