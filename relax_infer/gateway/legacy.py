"""Schema 1: what callers from before the common discovery document read."""

from typing import Any


def genrm_health(health: dict[str, Any]) -> dict[str, Any]:
    """The old health of the judge from the common one; contacts no engine and retires nothing."""
    document: dict[str, Any] = {"status": _word(health["ready"]), "service": "genrm"}
    if len(health["models"]) > 1:
        document["instances"] = {
            model: {"status": _word(entry["ready"])} for model, entry in health["models"].items()
        }
    return document


def _word(ready: bool) -> str:
    return "healthy" if ready else "unhealthy"
