"""How far a training step has come."""

from enum import StrEnum

from relax_infer.machines._machine import Machine, edges


class StepPhase(StrEnum):
    PREPARING = "PREPARING"
    """Prompts are drawn and the servers in front of the engines are up."""
    GENERATING = "GENERATING"
    """The policy answers the prompts; each finished group is staged."""
    ROLLOUT_OFFLOADING = "ROLLOUT_OFFLOADING"
    """The policy engines drain and prove that they released their GPUs."""
    GENRM_SCORING = "GENRM_SCORING"
    """The reward model judges the samples on the same GPUs."""
    TEACHER_SCORING = "TEACHER_SCORING"
    """The Teacher gives its log-probs of the sampled tokens."""
    STUDENT_SCORING = "STUDENT_SCORING"
    """The policy, with the weights it sampled with, gives its log-probs of the Teacher's tokens."""
    WRITING_BACK = "WRITING_BACK"
    """Scores are validated and joined to the samples in a new file."""
    PUBLISHING = "PUBLISHING"
    """The batch goes to TransferQueue, one key per sample."""
    FINALIZING = "FINALIZING"
    """Metrics and the sample export are written from the scored rows."""
    COMMITTED = "COMMITTED"
    """The batch may be trained on."""
    TRAINING = "TRAINING"
    """Megatron reads the partition and updates the policy, once."""
    SYNCING_WEIGHTS = "SYNCING_WEIGHTS"
    """The new weights go to every policy engine and are read back."""
    EVALUATING = "EVALUATING"
    """The policy answers the held-out problems."""
    DONE = "DONE"
    """Everything the step promised is durable."""
    FAILED = "FAILED"
    """The step gave up; its cause is in its record and its files are kept."""


class StepEvent(StrEnum):
    GENERATION_STARTED = "GENERATION_STARTED"
    GENERATED = "GENERATED"
    JUDGING_STARTED = "JUDGING_STARTED"
    TEACHING_STARTED = "TEACHING_STARTED"
    STUDENT_SCORING_STARTED = "STUDENT_SCORING_STARTED"
    SCORES_IN = "SCORES_IN"
    WRITTEN_BACK = "WRITTEN_BACK"
    PUBLISHED = "PUBLISHED"
    FINALIZED = "FINALIZED"
    TRAINING_STARTED = "TRAINING_STARTED"
    WEIGHT_SYNC_STARTED = "WEIGHT_SYNC_STARTED"
    EVALUATION_STARTED = "EVALUATION_STARTED"
    COMPLETED = "COMPLETED"
    GAVE_UP = "GAVE_UP"


_P, _E = StepPhase, StepEvent
_ENDED = (_P.DONE, _P.FAILED)

STEP = Machine(
    name="Step phase",
    states=StepPhase,
    events=StepEvent,
    initial=_P.PREPARING,
    terminal=frozenset(_ENDED),
    transitions=edges(
        (_P.PREPARING, _E.GENERATION_STARTED, _P.GENERATING),
        (_P.PREPARING, _E.WEIGHT_SYNC_STARTED, _P.SYNCING_WEIGHTS),
        (_P.GENERATING, _E.GENERATED, _P.ROLLOUT_OFFLOADING),
        (_P.ROLLOUT_OFFLOADING, _E.JUDGING_STARTED, _P.GENRM_SCORING),
        ((_P.ROLLOUT_OFFLOADING, _P.GENRM_SCORING), _E.TEACHING_STARTED, _P.TEACHER_SCORING),
        (
            (_P.ROLLOUT_OFFLOADING, _P.GENRM_SCORING, _P.TEACHER_SCORING),
            _E.STUDENT_SCORING_STARTED,
            _P.STUDENT_SCORING,
        ),
        (
            (_P.ROLLOUT_OFFLOADING, _P.GENRM_SCORING, _P.TEACHER_SCORING, _P.STUDENT_SCORING),
            _E.SCORES_IN,
            _P.WRITING_BACK,
        ),
        (_P.WRITING_BACK, _E.WRITTEN_BACK, _P.PUBLISHING),
        (_P.PUBLISHING, _E.PUBLISHED, _P.FINALIZING),
        (_P.FINALIZING, _E.FINALIZED, _P.COMMITTED),
        (_P.COMMITTED, _E.TRAINING_STARTED, _P.TRAINING),
        (_P.TRAINING, _E.WEIGHT_SYNC_STARTED, _P.SYNCING_WEIGHTS),
        (_P.SYNCING_WEIGHTS, _E.EVALUATION_STARTED, _P.EVALUATING),
        ((_P.SYNCING_WEIGHTS, _P.EVALUATING), _E.COMPLETED, _P.DONE),
        (tuple(p for p in _P if p not in _ENDED), _E.GAVE_UP, _P.FAILED),
    ),
    forbidden={
        (_P.PUBLISHING, _E.TRAINING_STARTED): "Training waits for the commit.",
        (_P.FINALIZING, _E.TRAINING_STARTED): "Training waits for the commit.",
        (_P.GENERATING, _E.JUDGING_STARTED): "Scoring waits for the confirmed rollout offload.",
    },
)
