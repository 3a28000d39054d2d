"""Start, state and results of runs and steps."""

from typing import Any, Literal

from pydantic import Field

from relax_infer.contracts.alarms import LogProbBound
from relax_infer.contracts.autoscale import AutoscalePolicy
from relax_infer.contracts.base import Message, StartInput
from relax_infer.contracts.engines import EngineGroupSpec, LeaseRole
from relax_infer.contracts.recovery import RecoveryTrace
from relax_infer.contracts.refs import RunRef, StagedRef, WeightsRef
from relax_infer.contracts.training import TrainerSpec, TrainResult
from relax_infer.machines import RunState, StepPhase


class BeginFrom(StartInput):
    """An earlier run whose weights, optimizer and steps a new one goes on from."""

    run: str
    """Its id."""
    step: int | None = Field(default=None, ge=1)
    """Go on after this one; its checkpoint must be kept. None: after the last one trained."""
    store: str | None = None
    """Where its files are; None: where this run's will be."""


class RunInput(StartInput):
    """The JSON that a person types to start a TrainingRun."""

    recipe: str | dict[str, Any]
    """Name of a shipped recipe, path of a YAML file that the worker can read, or the recipe."""
    steps: int | None = Field(default=None, ge=1, le=1_000_000_000)
    """Target step; None: the recipe's."""
    overrides: dict[str, Any] = Field(default_factory=dict)
    """Dotted recipe keys and their values, e.g. ``{"train.learning_rate": 0.0001}``."""
    begin_from: BeginFrom | None = None
    """Go on from an earlier run; None: from the recipe's policy."""
    steps_per_history: int | None = Field(default=None, ge=1)
    """Continue as new after this many steps; None: when Temporal suggests it."""
    carried: "RunCarry | None" = None
    """Filled by continue-as-new only."""


class RunPlan(Message):
    """The resolved recipe as far as workflows need it."""

    run: RunRef
    recipe_name: str
    recipe_sha256: str
    steps: int
    roles: tuple[LeaseRole, ...]
    """Roles that take part, trainer included, in the order in which a step leases them."""
    groups: tuple[EngineGroupSpec, ...]
    trainer: TrainerSpec
    initial_weights: WeightsRef
    judged_by_genrm: bool
    distilled: bool
    evaluation_every: int
    """Steps between evaluations; 0: never."""
    operation_timeout: float
    reconcile_timeout: float
    phase_attempts: int
    """How often a step may run a phase whose failure is transient."""
    apart: tuple[tuple[LeaseRole, LeaseRole], ...] = ()
    """Pairs of roles that share no GPU; all others take turns."""
    max_staleness: int = 0
    """Steps that the weights which generate a batch may be behind those trained on it."""
    begins_after: int = 0
    """Last step of the run that this one goes on from; 0: none."""
    logprob_bound: LogProbBound = LogProbBound()
    autoscale: dict[str, dict[str, AutoscalePolicy]] = Field(
        default_factory=dict[str, dict[str, AutoscalePolicy]]
    )
    """Role, model and when it has more or fewer replicas."""
    updates_in_place: bool = False
    """The policy engines keep their memory while they take new weights; only where they share their
    GPUs with nobody."""

    def sharing(self, role: str) -> tuple[str, ...]:
        """Roles that use a GPU of ``role``'s."""
        apart = {frozenset(pair) for pair in self.apart}
        return tuple(r for r in self.roles if r != role and frozenset((r, role)) not in apart)


class Binding(Message):
    """The placement group that the cluster gave, and specs that name it."""

    placement_group: str
    plan: RunPlan
    """The plan with every group's and the trainer's bundles filled in."""
    placement: dict[str, Any] | None = None
    """Who has which bundles in which phase: an InferencePlacementPlan's ``to_dict``."""


class FrontAddress(Message):
    """Where a run's router and gateway answer."""

    router_url: str
    gateway_url: str


class StepInput(StartInput):
    """Start of TrainingStep. Step 0 syncs the first weights and evaluates; it does not train."""

    step: int
    plan: RunPlan
    weights: WeightsRef
    """Weights that the policy samples with."""
    evaluate: bool
    last: bool = False
    attempt: int = 1
    """A step that gave up is tried again as another attempt, with a batch of its own: what is
    staged, trained or synced already is found again."""


def batch_of(step: int, attempt: int) -> str:
    """The batch that an attempt of a step makes."""
    return f"step-{step}.attempt-{attempt}" if attempt > 1 else f"step-{step}"


class TurnRequest(Message):
    """A step's signal ``ask`` to its run, methods ``take_turn`` and ``give_back_turn``."""

    turn: Literal["generate", "train", "sync"]
    step: int
    weights: WeightsRef | None = None
    """give_back_turn of ``sync``: what the policy engines hold now."""


class TurnAnswer(Message):
    weights: WeightsRef
    """What the policy engines hold."""


class PhaseTime(Message):
    phase: StepPhase
    started: float
    """Unix seconds, workflow time."""
    seconds: float


class SetEvaluation(Message):
    """One named set of an evaluation."""

    name: str
    problems: int
    samples: int
    """Answers to each problem."""
    accuracy: float
    """Share of all answers that are right: pass@1."""
    accuracy_error: float | None = None
    """Standard error of it over problems."""
    pass_at: dict[int, float] = Field(default_factory=dict[int, float])
    """k → pass@k."""
    unanswered: int = 0
    """Answers that the engine refused to give; they count as not right."""
    truncated: int = 0
    """Answers that hit their token limit."""
    response_tokens: int = 0
    """Of all answers together."""


class Evaluation(Message):
    """What was answered right with pinned weights."""

    step: int
    weight_version: int
    problems: int
    """Of the first set."""
    accuracy: float
    """Of the first set."""
    unanswered: int = 0
    """Of all sets: answers that the engine refused to give."""
    sets: tuple[SetEvaluation, ...] = ()
    """Empty in records of before there were sets."""

    @property
    def scores(self) -> dict[str, float]:
        """Name of a set, or of a set and its pass@k above pass@1, which is the accuracy, and the
        value."""
        return {
            name: value
            for each in self.sets
            for name, value in (
                (each.name, each.accuracy),
                *((f"{each.name} pass@{k}", v) for k, v in each.pass_at.items() if k > 1),
            )
        }


def more_than_accuracy(evaluation: Evaluation | None) -> dict[str, float]:
    """Its scores, unless the accuracy says it all."""
    scores = evaluation.scores if evaluation is not None else {}
    return scores if len(scores) > 1 else {}


class BatchMetrics(Message):
    """Of the scored batch, before training."""

    samples: int
    groups: int
    dropped_groups: int
    drop_reasons: dict[str, int] = Field(default_factory=dict)
    reward_mean: float | None
    reward_std: float | None
    exact_share: float | None
    """Share of samples that the task's own checker accepts, where it has one."""
    teacher_kl: float | None
    """Mean over response tokens of rollout minus teacher log-prob."""
    response_tokens: int
    truncated: int
    staleness: int = 0
    """Most versions that the weights of a sample were behind those that are trained on it."""


class ResolveRequest(Message):
    """Ask of ``resolve_recipe``."""

    run: str
    start: RunInput
    execution: str = ""
    """Temporal's id of the run's first execution: who may use the files of this run's id."""


class WeightSyncInput(StartInput):
    """Start of WeightSync: bring one published version to every policy engine."""

    run: RunRef
    weights: WeightsRef
    resident: bool = False
    """The policy engines share their GPUs with nobody: they keep them."""
    operation_timeout: float = 180.0


class WeightSyncResult(Message):
    """Read back from every engine."""

    version: int
    digest: str
    """Of the resident weights, as the engines computed it; equal on all of them."""
    engines: int


class StepResult(Message):
    """What a step leaves behind."""

    step: int
    weights: WeightsRef
    batch: BatchMetrics | None = None
    training: TrainResult | None = None
    evaluation: Evaluation | None = None
    phases: tuple[PhaseTime, ...] = ()
    record: StagedRef | None = None
    alarms: tuple[str, ...] = ()
    """Bounds of the recipe that were passed, in words."""

    @property
    def seconds(self) -> float:
        """From the first phase to the end of the last."""
        return sum(phase.seconds for phase in self.phases)


class PhaseRetry(Message):
    """An attempt at a phase that failed; a later one may have succeeded."""

    phase: StepPhase
    what: str
    """Generate, train, …"""
    attempt: int
    """The one that failed, from 1."""
    began: float
    """Unix seconds, workflow time, of all three."""
    failed: float
    recovered: float | None = None
    """When a later attempt had succeeded; None: none did."""
    error: str


class GaveUp(Message):
    """An earlier attempt at a step, that gave up and was tried again."""

    error: str
    began: float
    """Unix seconds, workflow time, as ``ended``."""
    ended: float


class StepStatus(Message):
    """Answer of TrainingStep's query ``status``."""

    step: int
    phase: StepPhase
    doing: str
    """In words."""
    attempts: dict[str, int] = Field(default_factory=dict)
    """Runs of each phase so far."""
    error: str | None = None


class RunProgress(Message):
    """One line of the run's history, kept over continue-as-new (the last 1,000)."""

    step: int
    reward: float | None = None
    accuracy: float | None = None
    evaluated: dict[str, float] = Field(default_factory=dict[str, float])
    """Accuracy and pass@k of every set, where there is more to tell than the accuracy."""
    teacher_kl: float | None = None
    loss: float | None = None
    logprob_gap: float | None = None
    """Mean absolute difference between rollout and trainer log-probs of the trained tokens."""
    seconds: float = 0.0
    record: StagedRef | None = None
    alarms: tuple[str, ...] = ()


class RunStatus(Message):
    """Answer of TrainingRun's query ``status``."""

    run: str
    state: RunState
    doing: str
    """In words; when it waits, what for and the command that releases it."""
    step: int
    """Last finished step."""
    target: int
    weight_version: int | None = None
    accuracy: float | None = None
    reward: float | None = None
    progress: tuple[RunProgress, ...] = ()
    """The newest 50."""
    error: str | None = None
    gateway_url: str | None = None
    store: str | None = None
    lease: str | None = None
    """Workflow id of the lease."""
    roles: dict[str, str] = Field(default_factory=dict)
    """Role and its workflow id."""


class RunCarry(Message):
    """Everything that continue-as-new of TrainingRun takes along."""

    plan: RunPlan
    state: RunState
    front: FrontAddress
    step: int
    target: int
    weights: WeightsRef
    progress: tuple[RunProgress, ...] = ()
    histories: int = 0
    restarts: int = 0
    leases_lost: int = 0


class ResolveRun(Message):
    """A person's answer to a BLOCKED run."""

    who: str
    why: str
    action: Literal["retry", "restart", "stop"] = "retry"
    """``restart``: every role is stopped, with proof, and started anew before the step is tried
    again; for a run that waits because a step gave up."""
    confirm_released: bool = False
    """The person looked and says that the named holder has let go of its GPUs."""


class StepRecord(Message):
    """The small durable record of one step; reports rest on it."""

    run: str
    step: int
    outcome: StepPhase
    result: StepResult
    transitions: tuple[dict[str, Any], ...] = ()
    """Lease transitions during the step (see LeaseTransition)."""
    error: str | None = None
    retries: tuple[PhaseRetry, ...] = ()
    recoveries: tuple[RecoveryTrace, ...] = ()
    """Of replicas, that were at work during the step or shortly before it. One that spans steps is
    in the record of each, last as it went on."""
    earlier: tuple[GaveUp, ...] = ()
    """Attempts before this one; their retries and transitions are among this record's."""


class RecordRequest(Message):
    """Ask of ``write_step_record``."""

    run: RunRef
    record: StepRecord
    since: float
    """Unix seconds: the lease's transitions from here on belong to the step."""


RunInput.model_rebuild()
