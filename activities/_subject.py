"""What an activity is about, as its request and its caller's id tell."""

from collections.abc import Sequence
from typing import Any

from temporalio import activity

from relax_infer.machines import StepPhase
from relax_infer.telemetry import subject_of_workflow

_PHASES = {
    "generate_groups": (StepPhase.GENERATING, "rollout"),
    "confirm_rollout_offload": (StepPhase.ROLLOUT_OFFLOADING, "rollout"),
    "judge_samples": (StepPhase.GENRM_SCORING, "genrm"),
    "teach_samples": (StepPhase.TEACHER_SCORING, "teacher"),
    "write_back_scores": (StepPhase.WRITING_BACK, None),
    "publish_batch": (StepPhase.PUBLISHING, None),
    "finalise_batch": (StepPhase.FINALIZING, None),
    "train_step": (StepPhase.TRAINING, "trainer"),
    "evaluate_policy": (StepPhase.EVALUATING, "rollout"),
}
"""Activities that are one phase's work, and whose."""


def subject_of(info: activity.Info, arguments: Sequence[Any]) -> dict[str, str | int | None]:
    """Run, step, phase, role, replica and fence, as far as anybody knows them."""
    phase, role = _PHASES.get(info.activity_type, (None, None))
    known = subject_of_workflow(info.workflow_id or "")
    return {
        "role": role,
        **known,
        **{"phase": phase and phase.value},
        **(_asked(arguments[0]) if arguments else {}),
    }


def _asked(request: Any) -> dict[str, str | int]:
    group, trainer = getattr(request, "group", None), getattr(request, "trainer", None)
    replicas = getattr(request, "replicas", ())
    found = {
        "step": getattr(request, "step", None),
        "fence": getattr(request, "fence", None),
        "role": getattr(request, "role", None) or getattr(group, "role", None),
        "replica": replicas[0] if isinstance(replicas, tuple) and len(replicas) == 1 else None,
    }
    if trainer is not None:
        found["role"] = "trainer"
    shown = {key: value for key, value in found.items() if value is not None}
    return {key: value if isinstance(value, int) else str(value) for key, value in shown.items()}
