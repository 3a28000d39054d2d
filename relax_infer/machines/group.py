"""An engine group as an operator sees it: every replica of one model of one role."""

from enum import StrEnum

from relax_infer.machines._machine import Machine, edges


class GroupState(StrEnum):
    STARTING = "STARTING"
    """No replica has been launched, or the first launch is under way."""
    READY = "READY"
    """At least one replica may answer."""
    DRAINING = "DRAINING"
    """Its replicas are letting go of their GPUs."""
    SLEEPING = "SLEEPING"
    """Every replica confirmed its release."""
    ONLOADING = "ONLOADING"
    """Its replicas are waking up or changing weights."""
    BLOCKED = "BLOCKED"
    """The release of at least one replica is unconfirmed; its GPUs stay fenced."""
    STOPPING = "STOPPING"
    """Its processes are being ended."""
    STOPPED = "STOPPED"
    """No process is left, by proof."""


class GroupEvent(StrEnum):
    LAUNCH_STARTED = "LAUNCH_STARTED"
    LAUNCHED = "LAUNCHED"
    OPENED = "OPENED"
    ONLOAD_STARTED = "ONLOAD_STARTED"
    WEIGHTS_UPDATE_STARTED = "WEIGHTS_UPDATE_STARTED"
    DRAIN_STARTED = "DRAIN_STARTED"
    RELEASE_CONFIRMED = "RELEASE_CONFIRMED"
    OPERATION_UNCONFIRMED = "OPERATION_UNCONFIRMED"
    REPLICA_LOST = "REPLICA_LOST"
    LOST_REPLICA_PROVED_GONE = "LOST_REPLICA_PROVED_GONE"
    SLEEP_PROVED = "SLEEP_PROVED"
    READY_PROVED = "READY_PROVED"
    STOP_STARTED = "STOP_STARTED"
    RELEASE_PROVED = "RELEASE_PROVED"


_G, _E = GroupState, GroupEvent
_HELD = (_G.STARTING, _G.READY, _G.DRAINING, _G.ONLOADING, _G.STOPPING)

GROUP = Machine(
    name="Group",
    states=GroupState,
    events=GroupEvent,
    initial=_G.STOPPED,
    holds_gpu=frozenset(_G) - {_G.SLEEPING, _G.STOPPED},
    transitions=edges(
        (_G.STOPPED, _E.LAUNCH_STARTED, _G.STARTING),
        (_G.STARTING, _E.LAUNCHED, _G.ONLOADING),
        (_G.ONLOADING, _E.OPENED, _G.READY),
        (_G.SLEEPING, _E.ONLOAD_STARTED, _G.ONLOADING),
        (_G.READY, _E.WEIGHTS_UPDATE_STARTED, _G.ONLOADING),
        ((_G.READY, _G.ONLOADING), _E.DRAIN_STARTED, _G.DRAINING),
        (_G.DRAINING, _E.RELEASE_CONFIRMED, _G.SLEEPING),
        (_HELD, _E.OPERATION_UNCONFIRMED, _G.BLOCKED),
        (_G.READY, _E.REPLICA_LOST, _G.BLOCKED),
        (_G.BLOCKED, _E.LOST_REPLICA_PROVED_GONE, _G.ONLOADING),
        (_G.BLOCKED, _E.SLEEP_PROVED, _G.SLEEPING),
        (_G.BLOCKED, _E.READY_PROVED, _G.READY),
        (tuple(s for s in _G if s not in (_G.STOPPING, _G.STOPPED)), _E.STOP_STARTED, _G.STOPPING),
        ((_G.STOPPING, _G.BLOCKED), _E.RELEASE_PROVED, _G.STOPPED),
    ),
    forbidden={
        (_G.BLOCKED, _E.RELEASE_CONFIRMED): "A late answer proves nothing: reconcile probes, or a"
        " person resolves.",
        (_G.BLOCKED, _E.ONLOAD_STARTED): "Nothing may load while a release is unconfirmed.",
        (_G.READY, _E.LOST_REPLICA_PROVED_GONE): "A loss is shown before it is mended.",
        (_G.STOPPED, _E.OPENED): "There is no process that could answer.",
    },
)
