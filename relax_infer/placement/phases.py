"""Who holds which bundles in each phase of the cycle."""

from collections.abc import Iterable, Sequence

from relax_infer.placement.placed import POOL, Mode, Phase, Placement, Slot, TrainingPlacement


def turns(
    mode: Mode, placements: Sequence[Placement], training: Sequence[TrainingPlacement]
) -> list[tuple[str, ...]]:
    """Roles of each phase, as the mode says.

    Decoupled: all at once. Else inference, each deferred scorer, a critic that shares the pool,
    the trainer.
    """
    if mode == "decoupled":
        everyone = dict.fromkeys([*(p.role for p in placements), *(t.role for t in training)])
        return [tuple(everyone)] if everyone else []
    names = dict.fromkeys(p.phase for p in placements)
    found = [tuple(dict.fromkeys(p.role for p in placements if p.phase == n)) for n in names]
    sharing = {t.role for t in training if t.pool == POOL}
    return found + [(role,) for role in ("critic", "trainer") if role in sharing]


def phases_of(
    roles: Iterable[tuple[str, ...]],
    placements: Sequence[Placement],
    training: Sequence[TrainingPlacement],
) -> tuple[Phase, ...]:
    """With the slots of each role; a training role with a pool of its own is in every phase."""
    alone = {t.role for t in training if t.pool != POOL}
    return tuple(
        Phase(
            _name(there),
            tuple(
                [_slot(p) for p in placements if p.role in there]
                + [_training_slot(t) for t in training if t.role in alone or t.role in there]
            ),
        )
        for there in roles
    )


def _name(roles: tuple[str, ...]) -> str:
    """``inference`` beside the rollout, else ``<role>_score``; ``train``; joined with +."""
    scorers = [role for role in roles if role in ("genrm", "teacher")]
    parts = ["inference"] if "rollout" in roles else [f"{role}_score" for role in scorers]
    if "trainer" in roles:
        parts.append("train")
    elif "critic" in roles:
        parts.append("critic_train")
    return "+".join(parts)


def _slot(p: Placement) -> Slot:
    return Slot(p.role, p.model_id, p.group_id, p.pool, p.bundle_start, p.bundle_stop)


def _training_slot(t: TrainingPlacement) -> Slot:
    return Slot(t.role, None, None, t.pool, t.bundle_start, t.bundle_stop)
