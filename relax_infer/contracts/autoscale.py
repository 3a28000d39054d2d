"""Replicas by load: what a person wants, one look, what it led to, and what is remembered of it."""

from typing import Annotated

from pydantic import Field, model_validator

from relax_infer.contracts.base import Message, StartInput
from relax_infer.contracts.engines import EngineGroupSpec
from relax_infer.contracts.refs import RunRef

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class AutoscalePolicy(StartInput):
    """How many replicas of a model there are, by its load. More come fast; fewer come slowly, one
    at a time, since an engine that is needed again has to be started anew."""

    min_replicas: Annotated[int, Field(ge=1)]
    """Not fewer. At least those that the model began with, which always stay."""
    max_replicas: Annotated[int, Field(ge=1)]
    """Not more."""
    in_flight_high: Positive
    """Requests in flight for each replica, above which there should be more replicas."""
    in_flight_low: Seconds
    """The same, below which there should be one less."""
    slow_seconds: Positive | None = None
    """Seconds of a batch's phase above which there should be one more, whatever is in flight;
    empty: they do not matter."""
    most_at_once: Annotated[int, Field(ge=1)] = 4
    """Replicas that one decision adds."""
    interval: Positive = 30.0
    """Seconds of one look: what is in flight is their mean."""
    looks: Annotated[int, Field(ge=1)] = 3
    """Looks in a row that must agree before anything is done. A batch that was slow counts once."""
    idle_counts: bool = False
    """Whether a look at which nobody asked anything asks for one less. False: it says nothing,
    since a role of a run is idle while others work."""
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
        if self.in_flight_low >= self.in_flight_high:
            raise ValueError(
                f"in_flight_low {self.in_flight_low:g} must be below in_flight_high"
                f" {self.in_flight_high:g}: between them nothing changes"
            )
        return self


class Load(Message):
    """One look at a model."""

    at: float
    """Seconds of any clock that only goes forward."""
    replicas: int
    """Those there are, whether they answer or are still coming."""
    in_flight: Annotated[float, Field(ge=0)]
    """Requests that its engines have admitted and not answered: at work or waiting in them."""
    batch_seconds: float | None = None
    """Of the role's phase of the last batch that has a record."""
    step: int | None = None
    """That batch's step."""


class AutoscaleMemory(Message):
    """What the decisions before this one leave behind."""

    changed_at: float | None = None
    """When the number of replicas last changed, or somebody last tried."""
    high: int = 0
    """Looks in a row that asked for more."""
    low: int = 0
    """Looks in a row that asked for less."""
    step: int | None = None
    """Of the last slow batch that counted."""
    failures: int = 0
    """Operations in a row that did not reach their target."""
    retry_at: float | None = None
    """Nothing is done before, after such a failure."""


class AutoscaleDecision(Message):
    """How many replicas there should be, and why; for the role's history."""

    target: int
    reason: str
    memory: AutoscaleMemory


class LoadAsk(Message):
    """Ask of ``look_at_load``."""

    run: RunRef
    group: EngineGroupSpec
    seconds: float
    """Of the look."""


class LoadReport(Message):
    """What a look saw."""

    in_flight: float
    """Mean over the look, of all replicas together."""
    replicas: int
    """Replicas that said it, the last time that they were asked."""
    batch_seconds: float | None = None
    step: int | None = None


class AutoscaleNote(Message):
    """One decision."""

    at: float
    """Unix seconds, workflow time."""
    load: Load | None = None
    target: int
    reason: str
    operation_id: str | None = None
    """Of the scale operation that it led to; None: nothing was to be done."""
    outcome: str | None = None
    """The state in which the operation ended, and why."""


class AutoscaleStatus(Message):
    """Answer of a role's query ``autoscaling``, one for each model that has a policy."""

    model: str
    policy: AutoscalePolicy
    memory: AutoscaleMemory = AutoscaleMemory()
    last: AutoscaleNote | None = None
    """The newest decision, whatever it was."""
    decisions: tuple[AutoscaleNote, ...] = ()
    """Those that led to an operation, oldest first; the last fifty."""
    off: str | None = None
    """Who switched it off, and why; None: it is at work."""


class AutoscaleSwitch(StartInput):
    """Body of a role's update ``autoscale``."""

    on: bool
    who: Annotated[str, Field(min_length=1)]
    why: Annotated[str, Field(min_length=1)]
    model: str | None = None
    """None: every model of the role that has a policy."""
