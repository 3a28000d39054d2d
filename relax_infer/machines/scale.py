"""One scale operation on one model of a role."""

from enum import StrEnum

from relax_infer.machines._machine import Machine, edges


class ScaleState(StrEnum):
    PENDING = "PENDING"
    """Accepted; nothing has begun."""
    CREATING = "CREATING"
    """Placement groups and engine actors are being made."""
    CONNECTING = "CONNECTING"
    """External engines are being contacted."""
    HEALTH_CHECKING = "HEALTH_CHECKING"
    """New engines must answer as processes and generate."""
    WEIGHT_SYNCING = "WEIGHT_SYNCING"
    """New engines receive the current weights."""
    READY = "READY"
    """New engines are right and not yet routed."""
    ACTIVE = "ACTIVE"
    """New engines answer."""
    PARTIAL = "PARTIAL"
    """Some of what was asked for was reached; the rest is told per replica."""
    FAILED = "FAILED"
    """Nothing of what was asked for was reached; what was made is gone or fenced."""
    DRAINING = "DRAINING"
    """Engines to be removed finish their requests."""
    REMOVING = "REMOVING"
    """Engines are stopped and proved gone."""
    COMPLETED = "COMPLETED"
    """The engines to be removed are gone."""
    CANCELLED = "CANCELLED"
    """Called off before an engine answered."""
    REJECTED = "REJECTED"
    """The request could not be carried out as asked."""
    NOOP = "NOOP"
    """The target was met already."""


class ScaleEvent(StrEnum):
    OUT_STARTED = "OUT_STARTED"
    CONNECT_STARTED = "CONNECT_STARTED"
    CREATED = "CREATED"
    HEALTH_CONFIRMED = "HEALTH_CONFIRMED"
    WEIGHTS_CONFIRMED = "WEIGHTS_CONFIRMED"
    ADOPTED = "ADOPTED"
    SOME_FAILED = "SOME_FAILED"
    ALL_FAILED = "ALL_FAILED"
    IN_STARTED = "IN_STARTED"
    DRAINED = "DRAINED"
    RELEASE_PROVED = "RELEASE_PROVED"
    CANCEL_ASKED = "CANCEL_ASKED"
    REFUSED = "REFUSED"
    TARGET_MET = "TARGET_MET"


_S, _E = ScaleState, ScaleEvent
_OUT = (_S.CREATING, _S.CONNECTING, _S.HEALTH_CHECKING, _S.WEIGHT_SYNCING, _S.READY)

SCALE = Machine(
    name="Scale operation",
    states=ScaleState,
    events=ScaleEvent,
    initial=_S.PENDING,
    terminal=frozenset(
        {
            _S.ACTIVE,
            _S.PARTIAL,
            _S.FAILED,
            _S.COMPLETED,
            _S.CANCELLED,
            _S.REJECTED,
            _S.NOOP,
        }
    ),
    transitions=edges(
        (_S.PENDING, _E.OUT_STARTED, _S.CREATING),
        (_S.PENDING, _E.CONNECT_STARTED, _S.CONNECTING),
        ((_S.CREATING, _S.CONNECTING), _E.CREATED, _S.HEALTH_CHECKING),
        (_S.HEALTH_CHECKING, _E.HEALTH_CONFIRMED, _S.WEIGHT_SYNCING),
        (_S.WEIGHT_SYNCING, _E.WEIGHTS_CONFIRMED, _S.READY),
        (_S.READY, _E.ADOPTED, _S.ACTIVE),
        ((*_OUT, _S.REMOVING), _E.SOME_FAILED, _S.PARTIAL),
        ((*_OUT, _S.DRAINING, _S.REMOVING), _E.ALL_FAILED, _S.FAILED),
        (_S.PENDING, _E.IN_STARTED, _S.DRAINING),
        (_S.DRAINING, _E.DRAINED, _S.REMOVING),
        (_S.REMOVING, _E.RELEASE_PROVED, _S.COMPLETED),
        ((_S.PENDING, _S.CREATING), _E.CANCEL_ASKED, _S.CANCELLED),
        (_S.PENDING, _E.REFUSED, _S.REJECTED),
        (_S.PENDING, _E.TARGET_MET, _S.NOOP),
    ),
)
