"""Who held the GPUs at every moment, from the lines that the actors themselves wrote."""

import itertools
import json
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

LOADS = ("launch begins", "onload begins", "is on the device")
LETS_GO = ("offload is done", "stop is done", "forget is done", "is off the device")


@dataclass(frozen=True)
class Span:
    """From the moment at which a holder may have had its GPUs to that at which it had let go."""

    began: float
    ended: float
    """Unix seconds; infinity where it never said so."""
    role: str
    holder: str


def spans_of(home: Path, run: str) -> list[Span]:
    """Of every engine and rank of a run, by when they began."""
    found: list[Span] = []
    for path in sorted((home / "logs" / run).glob("*.log")):
        if path.name.endswith(".actor.log") or path.name.startswith("trainer.rank-"):
            role = "trainer" if path.name.startswith("trainer") else path.name.split(".")[1]
            found += _spans(role, path.name, _lines(path))
    return sorted(found, key=lambda span: span.began)


def nobody_held_beside_another(home: Path, run: str) -> None:
    """The first promise, as the holders saw it, for roles that share their GPUs."""
    spans = spans_of(home, run)
    assert len({span.role for span in spans}) >= 2
    for one, other in itertools.combinations(spans, 2):
        if one.role != other.role and other.began < one.ended:
            raise AssertionError(
                f"{other.holder} began {one.ended - other.began:.3f} s before {one.holder} let go"
            )


def _spans(role: str, holder: str, lines: list[dict[str, Any]]) -> list[Span]:
    spans: list[Span] = []
    began: float | None = None
    for line in lines:
        at = datetime.fromisoformat(line["time"]).timestamp()
        if line["event"].startswith(LOADS):
            began = at if began is None else began
        elif line["event"].startswith(LETS_GO) and began is not None:
            spans.append(Span(began, at, role, holder))
            began = None
    if began is not None:
        spans.append(Span(began, float("inf"), role, holder))
    return spans


def _lines(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for text in path.read_text().splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue  # of another library, or cut by the end of its process
        if isinstance(line, dict) and {"time", "event"} <= line.keys():
            found.append(line)
    return found
