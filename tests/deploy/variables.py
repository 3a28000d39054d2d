"""The environment variables that the code, Temporal's and Ray's libraries read."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]

_CODE = "\n".join(
    path.read_text()
    for room in ("relax_infer", "workers", "activities", "workflows")
    for path in sorted((ROOT / room).rglob("*.py"))
)
OURS = frozenset(re.findall(r"\bRELAX_[A-Z_]*[A-Z]\b", _CODE))
_SCRIPTS = "\n".join(path.read_text() for path in (ROOT / "deploy").glob("*.sh"))
OF_SCRIPTS = frozenset(re.findall(r"\$\{(RELAX_[A-Z_]+)", _SCRIPTS))
_COMPOSE = (ROOT / "deploy" / "compose.yaml").read_text()
OF_COMPOSE = frozenset(re.findall(r"\$\{(RELAX_[A-Z_]+)", _COMPOSE))
OTHERS = frozenset(
    {
        *("TEMPORAL_ADDRESS", "TEMPORAL_NAMESPACE", "TEMPORAL_API_KEY", "TEMPORAL_TLS"),
        *("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"),
        *("RAY_USAGE_STATS_ENABLED", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"),
        "RAY_memory_monitor_refresh_ms",
    }
)
KNOWN = OURS | OF_SCRIPTS | OTHERS
