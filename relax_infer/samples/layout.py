"""Names of a run's files below ``<store>/<run>/``; nothing else spells them."""

RECIPE = "recipe.json"

GENERATED, JUDGED, TAUGHT, EVALUATED = "generated", "judged", "taught", "evaluated"


def evaluated(name: str | None) -> str:
    """The phase of one set of an evaluation; None: the only one, where the recipe names none."""
    return EVALUATED if name is None else f"{EVALUATED}.{name}"


def phase_folder(step: int, phase: str) -> str:
    return f"steps/{step}/{phase}"


def claim(step: int, phase: str, attempt: int) -> str:
    return f"{phase_folder(step, phase)}/attempt-{attempt}.json"


def shard(step: int, phase: str, group: int, attempt: int, digest: str) -> str:
    return f"{phase_folder(step, phase)}/group-{group:06d}.attempt-{attempt}.{digest}.arrow"


def phase_file(step: int, phase: str) -> str:
    return f"{phase_folder(step, phase)}.arrow"


def compacted(step: int, phase: str) -> str:
    """Says which file a phase has become, and its digest."""
    return f"{phase_folder(step, phase)}/compacted.json"


def scored(step: int) -> str:
    return f"steps/{step}/scored.arrow"


def export(step: int) -> str:
    return f"steps/{step}/samples.jsonl"


def record(step: int) -> str:
    return f"steps/{step}/record.json"
