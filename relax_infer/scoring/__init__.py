"""Scores: from a reward model, a Teacher or a rule; validated, and joined to their samples."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from relax_infer.scoring.assembly import write_back
    from relax_infer.scoring.genrm import score_with_genrm
    from relax_infer.scoring.metrics import batch_metrics, export_samples
    from relax_infer.scoring.rewards import (
        RewardAdapter,
        get_reward,
        register_reward,
        require_usable,
    )
    from relax_infer.scoring.teacher import score_with_teacher
    from relax_infer.scoring.validation import validate_scores

_HOME = {
    "RewardAdapter": "rewards",
    "batch_metrics": "metrics",
    "export_samples": "metrics",
    "get_reward": "rewards",
    "register_reward": "rewards",
    "require_usable": "rewards",
    "score_with_genrm": "genrm",
    "score_with_teacher": "teacher",
    "validate_scores": "validation",
    "write_back": "assembly",
}

__all__ = [
    "RewardAdapter",
    "batch_metrics",
    "export_samples",
    "get_reward",
    "register_reward",
    "require_usable",
    "score_with_genrm",
    "score_with_teacher",
    "validate_scores",
    "write_back",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
