"""The log files of a run on this machine, and the lines in them with their times."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from relax_infer.cli._errors import CommandError
from relax_infer.cli._home import stored_runs
from relax_infer.telemetry import as_text

ENGINE_ROLES = ("rollout", "genrm", "teacher")
ROLES = (*ENGINE_ROLES, "trainer", "gateway", "router", "worker")
"""Whose logs a person may ask for."""

_ENGINE = re.compile(
    r"engine\.(?P<role>\w+)\.(?P<model>.+)\.replica-(?P<replica>\d+)"
    r"(?:\.node-(?P<node>\d+))?\.(?P<mark>[0-9a-f]+|actor)\.log"
)
_TRAINER, _HEAD = ":actor_name:TrainerActor", 4096
_MARKS = (":job_id:", ":actor_name:", ":task_name:")
"""What Ray itself writes into its workers' logs."""
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_TIME = re.compile(r"[\[\s]*(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:[.,](\d{1,6}))?")
_NAMED = 5
"""Runs that are named where one is not there."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


@dataclass(frozen=True)
class LogFile:
    """One file and who wrote it."""

    path: Path
    role: str
    name: str
    """As lines are labelled."""
    replica: int | None = None
    mentions: str | None = None
    """Only lines with this text are of the run; None: all are."""


@dataclass(frozen=True)
class LogLine:
    """One line."""

    at: float
    """Unix seconds; of a line without a time, those of the line before."""
    source: str
    text: str
    fields: dict[str, Any] | None = None
    """Of a structured line: level, logger, run, step, phase, role, replica, fence and more."""

    def of_run(self, run: str) -> bool:
        """Whether a structured line is about the run."""
        known = (self.fields or {}).get("run")
        return known == run if known is not None else _is_about(self.text, run)

    def in_step(self, step: int, span: tuple[float, float]) -> bool:
        """Whether it belongs to a step that was at work in ``span``; one that says so knows."""
        known = (self.fields or {}).get("step")
        return known == step if known is not None else span[0] <= self.at <= span[1]


def find_logs(
    home: Path, run: str, role: str | None, replica: int | None, ray: Sequence[Path] = ()
) -> list[LogFile]:
    """The run's files below ``home`` of one role or all, and of one replica or all.

    Args:
        ray: folders with the logs of Ray's workers; read for the trainer alone.

    Raises:
        CommandError: there are none.
    """
    if replica is not None and role is not None and role not in ENGINE_ROLES:
        raise CommandError(
            f"--replica is for engines, {role} has none",
            cure=f"Leave it out, or name one of {', '.join(ENGINE_ROLES)} with --role.",
        )
    every = list(_all(home / "logs", run))
    if role == "trainer":
        every += _trainer(ray)
    found = [
        each
        for each in every
        if role in (None, each.role) and (replica is None or each.replica == replica)
    ]
    if found:
        return found
    if every:
        there = sorted({_named(each) for each in every})
        wanted = " ".join(filter(None, (role, None if replica is None else f"replica {replica}")))
        raise CommandError(f"Run {run} has no log of {wanted} here", cure=f"It has {_list(there)}.")
    runs = stored_runs(home)
    known = (
        f" The runs in {home} are {', '.join(runs[:_NAMED])}." if run not in runs and runs else ""
    )
    raise CommandError(
        f"There is no log of a run {run} in {home / 'logs'}.{known}",
        cure="Engines, router and gateway write on the node on which they run, to logs/ of their"
        " RELAX_HOME: look there, or name that folder with --home.",
    )


def _all(logs: Path, run: str) -> Iterator[LogFile]:
    for path in sorted((logs / run).glob("engine.*.log")):
        if match := _ENGINE.fullmatch(path.name):
            node = f".{match['node']}" if match["node"] else ""
            name = f"{match['role']} {match['model']}/{match['replica']}{node}"
            yield LogFile(path, match["role"], name, int(match["replica"]))
    for path in sorted((logs / run).glob("trainer.rank-*.log")):
        yield LogFile(path, "trainer", f"trainer/{path.stem.rpartition('-')[2]}")
    for role in ("gateway", "router"):
        path = logs / f"{run}.{role}.log"
        if path.is_file():
            yield LogFile(path, role, role)
    worker = logs / "worker.log"
    if worker.is_file() and (logs / run).is_dir():
        yield LogFile(worker, "worker", "worker", mentions=run)


def _trainer(folders: Sequence[Path]) -> Iterator[LogFile]:
    """What a trainer printed goes to Ray, which tells the kind of actor and not the run."""
    for folder in folders:
        for path in sorted((*folder.glob("worker-*.out"), *folder.glob("worker-*.err"))):
            with path.open(errors="replace") as file:
                if _TRAINER in file.read(_HEAD):
                    yield LogFile(path, "trainer", "trainer")


def lines_of(file: LogFile, start: int = 0) -> tuple[list[LogLine], int]:
    """Whole lines from a byte on, and the byte after them."""
    with file.path.open("rb") as stream:
        stream.seek(start)
        data = stream.read()
    whole = data[: data.rfind(b"\n") + 1]
    at = file.path.stat().st_mtime if start else 0.0
    found: list[LogLine] = []
    for raw in whole.decode(errors="replace").split("\n")[:-1]:
        if (line := structured(raw, file.name)) is not None:
            at = line.at
            if file.mentions is None or line.of_run(file.mentions):
                found.append(line)
            continue
        text = clean(raw)
        at = time_of(text) or at
        about = file.mentions is None or _is_about(text, file.mentions)
        if text and about and not text.startswith(_MARKS):
            found.append(LogLine(at, file.name, text))
    return found, start + len(whole)


def structured(raw: str, source: str) -> LogLine | None:
    """A line of ours, in words for people; None for any other."""
    if not raw.startswith("{"):
        return None
    try:
        fields = json.loads(raw)
        at = datetime.fromisoformat(fields["time"]).timestamp()
        local = datetime.fromtimestamp(at, UTC).astimezone()
    except (ValueError, KeyError, TypeError):
        return None
    shown = {**fields, "time": f"{local:%Y-%m-%d %H:%M:%S.%f}"[:-3]}
    text = "\n".join(clean(line) for line in as_text(None, "", shown).split("\n"))
    return LogLine(at, source, text, fields)


def clean(raw: str) -> str:
    """Without colours and what else would steer a terminal."""
    last = raw.rstrip("\r").rpartition("\r")[2]  # of a progress bar what stands at the end
    return _CONTROL.sub("", _COLOURS.sub("", last)).rstrip()


def time_of(text: str) -> float | None:
    """Unix seconds of the time that a line begins with, which is this machine's own."""
    match = _TIME.match(text)
    if match is None:
        return None
    day, clock, fraction = match.groups()
    try:
        at = datetime.fromisoformat(f"{day}T{clock}").timestamp()
    except ValueError:
        return None
    return at + float(f"0.{fraction or 0}")


def _is_about(text: str, run: str) -> bool:
    return re.search(rf"(?<![\w-]){re.escape(run)}(?![\w-])", text) is not None


def _named(file: LogFile) -> str:
    return file.role if file.replica is None else f"{file.role} replica {file.replica}"


def _list(names: list[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]
