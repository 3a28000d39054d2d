"""Where the parts of a run write their logs on this host."""

import os
import sys
import tempfile
from pathlib import Path

from relax_infer.telemetry.logs import configure_logs
from relax_infer.telemetry.traces import configure_traces


def log_folder(run: str) -> Path:
    """``<RELAX_HOME>/logs/<run>``; without a home, a folder of this user."""
    home = os.environ.get("RELAX_HOME")
    root = Path(home) if home else Path(tempfile.gettempdir()) / f"relax-{os.getuid()}"
    return root / "logs" / run


def configure_actor(name: str, run: str, role: str, replica: int | None = None) -> None:
    """Logs and traces of a Ray actor; does nothing outside of one. The logs have a file of their
    own: what an actor prints goes to Ray, which does not tell one run from another."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized() or not ray.get_runtime_context().get_actor_id():
        return
    to = log_folder(run) / f"{name}.log"
    configure_logs(to=to, only="relax_infer", run=run, role=role, replica=replica)
    configure_traces(f"relax-{role if role in ('trainer', 'gateway') else 'engine-actor'}")
