"""How bad a line of a log is, whoever wrote it."""

import re
from collections.abc import Iterable

from relax_infer.cli._log_files import LogLine

LEVELS = ("warning", "error")
"""That may be asked for; the second includes what is worse."""

_RANKS = {"warn": 1, "warning": 1, "error": 2, "exception": 2, "critical": 2, "fatal": 2}
_SAID = re.compile(r"\b(WARN|WARNING|ERROR|CRITICAL|FATAL)\b")
_TRACEBACK = "Traceback (most recent call last)"
_GOES_ON = re.compile(r"\s|[\w.]+(Error|Exception|Exit|Interrupt)\b")
"""How a line begins that belongs to the one before it: a traceback's frames, and its end."""


class Loud:
    """The lines of a level and worse, each with what belongs to it, as they come."""

    def __init__(self, level: str) -> None:
        self._least = _RANKS[level]
        self._before: dict[str, int] = {}
        """Rank of the last line of each source."""

    def of(self, lines: Iterable[LogLine]) -> list[LogLine]:
        return [line for line in lines if self._rank(line) >= self._least]

    def _rank(self, line: LogLine) -> int:
        rank = _own_rank(line)
        if rank == 0 and line.fields is None and _GOES_ON.match(line.text):
            rank = self._before.get(line.source, 0)
        self._before[line.source] = rank
        return rank


def _own_rank(line: LogLine) -> int:
    if line.fields is not None:
        return _RANKS.get(str(line.fields.get("level", "")).lower(), 0)
    if said := _SAID.search(line.text):
        return _RANKS[said[1].lower()]
    return _RANKS["error"] if _TRACEBACK in line.text else 0
