"""Schema 1: what callers from before the common discovery document read."""

from typing import Any

from relax_infer.discovery import RoleSnapshot, State

_GONE = frozenset({State.FAILED, State.DEAD})


def engines_document(snapshot: RoleSnapshot) -> dict[str, Any]:
    """Regular engines with an address, by model: rank, status and url, and how many there are."""
    models: dict[str, Any] = {}
    for model_id, model in snapshot.models.items():
        engines = [
            {
                "rank": rank,
                "status": "dead" if engine.state in _GONE else "active",
                "url": engine.base_url,
            }
            for rank, engine in enumerate(model.engines)
            if engine.base_url is not None
        ]
        group = {"worker_type": "regular", "engines": engines, "total_engines": len(engines)}
        models[model_id] = {"engine_groups": [group], "total_engines": len(engines)}
    total = sum(model["total_engines"] for model in models.values())
    return {"models": models, "total_engines": total}


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
