"""What an engine was asked: one JSON line per event, readable while the engine runs.

.. code-block:: json

    {"t": 1790000000.1, "event": "admitted", "rid": "r1", "path": "/generate"}
    {"t": 1790000000.2, "event": "ended", "rid": "r1", "path": "/generate", "status": 200,
     "reason": "answered"}

``admitted`` is on file before the engine sees the request. ``ended`` has reason ``answered``,
``disconnected`` (the caller left), ``cancelled`` (the gate closed or somebody aborted it) or
``failed``. ``refused`` never reached the engine: the gate was ``closed``, or the ``body`` is too
large or cannot be read; its ``rid`` is null when the body was not read.
"""

import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

Event = Literal["admitted", "refused", "ended"]
Reason = Literal["closed", "body", "answered", "disconnected", "cancelled", "failed"]


class RequestLog:
    """Appends whole lines with one write each, so a reader never sees half a line of one."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(
        self,
        event: Event,
        path: str,
        rids: Sequence[str],
        status: int | None = None,
        reason: Reason | None = None,
    ) -> None:
        """One line for each request id; one with ``null`` when the caller named none."""
        row: dict[str, Any] = {"t": time.time(), "event": event, "rid": None, "path": path}
        if status is not None:
            row["status"] = status
        if reason is not None:
            row["reason"] = reason
        lines = "".join(json.dumps({**row, "rid": rid}) + "\n" for rid in rids or (None,))
        os.write(self._descriptor, lines.encode())


def read_request_log(path: Path) -> Iterator[dict[str, Any]]:
    """Events in order; a last line that is still being written is left out."""
    with path.open() as lines:
        for line in lines:
            if line.endswith("\n"):
                yield json.loads(line)
