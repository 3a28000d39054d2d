"""The reference's ``--resource``: GPUs by role, and the cluster that they add up to."""

from collections.abc import Mapping
from typing import Any

from relax_infer.compat._flag_error import FlagError

INFERENCE = {
    "rollout": "rollout-num-gpus",
    "genrm": "genrm-num-gpus",
    "teacher": "opd-teacher-num-gpus",
}
"""Roles with engines, and the flag that says their GPUs as well."""
TRAINING = ("critic", "reference", "actor_fwd")
"""Roles that the recipe has a section with ranks for, beside the actor."""


def gpus_by_role(resource: Mapping[str, Any]) -> dict[str, int]:
    """
    Args:
        resource: role → ``[service replicas, GPUs]``.

    Raises:
        FlagError: an entry is none, or of several service replicas.
    """
    return {role: _gpus(role, asked) for role, asked in resource.items()}


def cluster_gpus(gpus: Mapping[str, int], *, shared: bool) -> int:
    """GPUs of all pools together.

    A critic is on the actor's where roles share GPUs and it has as many; reference and forward-only
    ranks are never.
    """
    together = {role: n for role, n in gpus.items() if role == "actor" or role in INFERENCE}
    alone = [
        n
        for role, n in gpus.items()
        if role in TRAINING and not (shared and role == "critic" and n == gpus.get("actor"))
    ]
    sizes = together.values()
    return (max(sizes, default=0) if shared else sum(sizes)) + sum(alone)


def _gpus(role: str, asked: Any) -> int:
    if (
        not isinstance(asked, list)
        or len(asked) != 2
        or not all(type(n) is int and n >= 0 for n in asked)
    ):
        raise FlagError(f"--resource {role}: {asked!r} is not [instances, GPUs].")
    if asked[0] != 1:
        raise FlagError(
            f"--resource {role}: {asked!r}: Only one service replica is known here.",
            cure="Write [1, GPUs]; the engines of a role are its replicas.",
        )
    return asked[1]
