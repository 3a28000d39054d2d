"""The Temporal server of the local stack: its command, and when it answers."""

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path

from workers._preflight import HOST, binary

_RETENTION = "720h"
_CALL = 20.0
_SEARCH_ATTRIBUTES = (
    "RelaxRun=Keyword",
    "RelaxStep=Int",
    "RelaxRole=Keyword",
    "RelaxState=Keyword",
    "RelaxWeightVersion=Int",
    "RelaxReward=Double",
)
_DYNAMIC_CONFIG = (
    # By default every dispatch waits 40 to 50 ms for its queue to be polled.
    "history.transferProcessorMaxPollRPS=200",
    "history.timerProcessorMaxPollRPS=200",
    # By default a timer, a retry and a timeout come up to a second late.
    'history.timerProcessorMaxTimeShift="20ms"',
    # One partition of each queue: a task meets its poller without being handed on or stored.
    "matching.numTaskqueueReadPartitions=1",
    "matching.numTaskqueueWritePartitions=1",
)
_PRAGMAS = ("journal_mode=WAL", "synchronous=NORMAL")
DYNAMIC = tuple(word for value in _DYNAMIC_CONFIG for word in ("--dynamic-config-value", value))
"""Options of any development server, without which it is slow."""
SPEED = (*(word for pragma in _PRAGMAS for word in ("--sqlite-pragma", pragma)), *DYNAMIC)
"""Those of one with its database in a file."""
VARIABLES = {"GOGC": "400"}
"""Its heap is small and short-lived: a fifth of its time went to collecting it. A person's own
value comes before."""


def server_command(database: Path, port: int, ui_port: int, metrics_port: int) -> list[str]:
    """A development server whose workflows outlive it in ``database``."""
    return [
        *(binary("temporal"), "server", "start-dev", "--ip", HOST, "--ui-ip", HOST),
        *("--port", str(port), "--ui-port", str(ui_port), "--metrics-port", str(metrics_port)),
        *("--db-filename", str(database), "--ui-disable-news-fetch", "--log-level", "warn"),
        *(word for name in _SEARCH_ATTRIBUTES for word in ("--search-attribute", name)),
        *SPEED,
    ]


def answers(variables: Mapping[str, str]) -> bool:
    """Whether the server serves its namespace; closed workflows are kept 30 days from then on."""
    command = ("operator", "namespace", "update", "-n", variables["TEMPORAL_NAMESPACE"])
    return _call(variables, *command, "--retention", _RETENTION) is not None


def polled_by(variables: Mapping[str, str], queue: str, pid: int) -> bool:
    """Whether the worker with this pid asks for work on a queue."""
    text = _call(variables, "task-queue", "describe", "--task-queue", queue, "-o", "json")
    pollers = json.loads(text).get("pollers") or [] if text else []
    return any(poller["identity"].startswith(f"{pid}@") for poller in pollers)


def _call(variables: Mapping[str, str], *command: str) -> str | None:
    """What the command line printed, None if it failed."""
    try:
        done = subprocess.run(
            (binary("temporal"), *command),
            env=dict(variables),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_CALL,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None
    return done.stdout.decode() if done.returncode == 0 else None
