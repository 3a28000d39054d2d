"""The recovery of one failed replica."""

from enum import StrEnum

from relax_infer.machines._machine import Machine, edges


class RecoveryState(StrEnum):
    FENCED = "FENCED"
    """The replica is unrouted and its GPUs are reserved."""
    STOPPING = "STOPPING"
    """What still lives of it is being ended."""
    PROVING = "PROVING"
    """Its host is searched until nothing of it is left."""
    REBUILDING = "REBUILDING"
    """A new incarnation is being launched."""
    SYNCING = "SYNCING"
    """The new incarnation receives the current weights."""
    CHECKING = "CHECKING"
    """A canary compares it with what was known to be right."""
    READMITTED = "READMITTED"
    """It answers again."""
    BLOCKED = "BLOCKED"
    """No proof could be had; a person must say that it is gone."""
    ABANDONED = "ABANDONED"
    """It is not rebuilt: nobody needs it now, or it was given up. Its GPUs are free, by proof or
    by a person's word."""


class RecoveryEvent(StrEnum):
    STOP_STARTED = "STOP_STARTED"
    STOPPED = "STOPPED"
    RELEASE_PROVED = "RELEASE_PROVED"
    PROOF_FAILED = "PROOF_FAILED"
    REBUILT = "REBUILT"
    REBUILD_FAILED = "REBUILD_FAILED"
    WEIGHTS_CONFIRMED = "WEIGHTS_CONFIRMED"
    CHECK_PASSED = "CHECK_PASSED"
    CHECK_FAILED = "CHECK_FAILED"
    LEFT_RELEASE_PROVED = "LEFT_RELEASE_PROVED"
    RESOLVED_BY_OPERATOR = "RESOLVED_BY_OPERATOR"


_S, _E = RecoveryState, RecoveryEvent

RECOVERY = Machine(
    name="Recovery",
    states=RecoveryState,
    events=RecoveryEvent,
    initial=_S.FENCED,
    terminal=frozenset({_S.READMITTED, _S.ABANDONED}),
    holds_gpu=frozenset(_S) - {_S.ABANDONED},
    transitions=edges(
        (_S.FENCED, _E.STOP_STARTED, _S.STOPPING),
        (_S.STOPPING, _E.STOPPED, _S.PROVING),
        (_S.PROVING, _E.RELEASE_PROVED, _S.REBUILDING),
        ((_S.STOPPING, _S.PROVING), _E.PROOF_FAILED, _S.BLOCKED),
        ((_S.PROVING, _S.BLOCKED), _E.LEFT_RELEASE_PROVED, _S.ABANDONED),
        (_S.BLOCKED, _E.RESOLVED_BY_OPERATOR, _S.ABANDONED),
        (_S.REBUILDING, _E.REBUILT, _S.SYNCING),
        ((_S.REBUILDING, _S.SYNCING), _E.REBUILD_FAILED, _S.FENCED),
        (_S.SYNCING, _E.WEIGHTS_CONFIRMED, _S.CHECKING),
        (_S.CHECKING, _E.CHECK_PASSED, _S.READMITTED),
        (_S.CHECKING, _E.CHECK_FAILED, _S.FENCED),
    ),
    forbidden={
        (_S.FENCED, _E.REBUILT): "Nothing is rebuilt before the last incarnation is proved gone.",
        (_S.FENCED, _E.LEFT_RELEASE_PROVED): "A replica is given up only after its GPUs are proved"
        " free.",
        (_S.BLOCKED, _E.REBUILT): "Nothing is rebuilt beside what may still live.",
    },
)
