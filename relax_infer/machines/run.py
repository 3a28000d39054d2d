"""A training run."""

from enum import StrEnum

from relax_infer.machines._machine import Machine, edges


class RunState(StrEnum):
    STARTING = "STARTING"
    """The recipe is read, GPUs are bound, roles and trainer are brought up."""
    RUNNING = "RUNNING"
    """Steps follow one another."""
    PAUSING = "PAUSING"
    """The current step ends; no other begins."""
    PAUSED = "PAUSED"
    """Nothing happens until someone resumes or stops."""
    BLOCKED = "BLOCKED"
    """Something needs a person: the details say what, and the command that releases it."""
    STOPPING = "STOPPING"
    """Every role is being stopped, with proof."""
    DONE = "DONE"
    """The last step is trained and nothing is left running."""
    FAILED = "FAILED"
    """The run ended without reaching its target; its record says why."""


class RunEvent(StrEnum):
    STARTED = "STARTED"
    PAUSE_ASKED = "PAUSE_ASKED"
    STEP_ENDED = "STEP_ENDED"
    RESUME_ASKED = "RESUME_ASKED"
    NEEDS_PERSON = "NEEDS_PERSON"
    RESOLVED_BY_OPERATOR = "RESOLVED_BY_OPERATOR"
    STOP_ASKED = "STOP_ASKED"
    TARGET_REACHED = "TARGET_REACHED"
    RELEASE_PROVED = "RELEASE_PROVED"
    GAVE_UP = "GAVE_UP"


_R, _E = RunState, RunEvent

RUN = Machine(
    name="Run",
    states=RunState,
    events=RunEvent,
    initial=_R.STARTING,
    terminal=frozenset({_R.DONE, _R.FAILED}),
    transitions=edges(
        (_R.STARTING, _E.STARTED, _R.RUNNING),
        (_R.RUNNING, _E.PAUSE_ASKED, _R.PAUSING),
        (_R.PAUSING, _E.STEP_ENDED, _R.PAUSED),
        ((_R.PAUSING, _R.PAUSED), _E.RESUME_ASKED, _R.RUNNING),
        ((_R.STARTING, _R.RUNNING, _R.PAUSING, _R.STOPPING), _E.NEEDS_PERSON, _R.BLOCKED),
        (_R.BLOCKED, _E.RESOLVED_BY_OPERATOR, _R.RUNNING),
        (
            (_R.STARTING, _R.RUNNING, _R.PAUSING, _R.PAUSED, _R.BLOCKED),
            _E.STOP_ASKED,
            _R.STOPPING,
        ),
        (_R.RUNNING, _E.TARGET_REACHED, _R.STOPPING),
        (_R.STOPPING, _E.RELEASE_PROVED, _R.DONE),
        ((_R.STARTING, _R.STOPPING, _R.BLOCKED), _E.GAVE_UP, _R.FAILED),
    ),
)
