"""Where a run's files are on a host, and how a replica's processes say whose they are."""

import hashlib
import os
import tempfile
from pathlib import Path

from relax_infer.contracts.engines import EngineGroupSpec

REPLICA = "RELAX_ENGINE_REPLICA"
"""Environment variable of every process of an engine: :func:`replica_mark`."""


def folder_of(store: str, run: str) -> Path:
    """Of a run on this host. Two stacks may run a run of the same name; their stores differ."""
    return Path(tempfile.gettempdir()) / f"relax-{os.getuid()}" / _key(store, run)


def replica_mark(spec: EngineGroupSpec, replica: int) -> str:
    """The same for every incarnation and node of a replica, and for nothing else: not for a run of
    the same name in another store, nor for another model of the role."""
    return f"{_key(spec.store, spec.run)}/{spec.actor_name(replica)}"


def _key(store: str, run: str) -> str:
    return hashlib.sha256(f"{store}\0{run}".encode()).hexdigest()[:10]
