"""Charts as inline SVG: they need no script and no network; colours are the page's variables."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 360, 200
"""Of a line chart: a phone's width, so that its text is as large there as anywhere."""
WIDE = 960
"""Of rows of bars; narrow screens scroll them."""
POINTS = 240
"""Points of a curve; a longer one is drawn as means of equally many neighbours."""
DOTS = 60
"""Up to so many points are also drawn one by one."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 10, 10, 24
_ROW = 16
_SMALLEST = 1e-300
"""Below it a logarithmic axis takes a value for 0: the decade under it may be none."""

Place = Callable[[float], float]


@dataclass(frozen=True)
class Curve:
    """One line of a chart: points (step, value) and the CSS colour variable of its role."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: str


@dataclass(frozen=True)
class Bar:
    """A piece of a row: from ``start`` for ``length``, in seconds."""

    start: float
    length: float
    colour: str
    title: str
    faint: bool = False


@dataclass(frozen=True)
class Point:
    """A point of a curve, or what stands for several."""

    x: float
    y: float
    low: float
    high: float


def thin(points: Sequence[tuple[float, float]], limit: int = POINTS) -> list[Point]:
    """At most ``limit`` points: means over runs of neighbours, with their lowest and highest."""
    finite = [(x, y) for x, y in points if math.isfinite(y)]
    each = -(-len(finite) // limit) if finite else 1
    runs = [finite[start : start + each] for start in range(0, len(finite), each)]
    return [
        Point(
            sum(x for x, _ in run) / len(run),
            sum(y for _, y in run) / len(run),
            min(y for _, y in run),
            max(y for _, y in run),
        )
        for run in runs
    ]


def line_chart(
    title: str,
    curves: Sequence[Curve],
    *,
    low: float | None = None,
    bound: float | None = None,
    log: bool = False,
    about: str = "",
) -> str:
    """Curves over steps with a legend; an empty string when there is no point at all.

    Args:
        low: the axis reaches down to it at least.
        bound: drawn as a line of its own.
        log: logarithmic where every value is above 0 or none is.
        about: what the values are, for people who do not know.
    """
    thinned = [(curve, thin(curve.points)) for curve in curves]
    thinned = [(curve, points) for curve, points in thinned if points]
    if not thinned:
        return ""
    every = [point for _, points in thinned for point in points]
    x_low, x_high = min(p.x for p in every), max(p.x for p in every)
    bounds = [] if bound is None else [bound]
    values = [v for p in every for v in (p.low, p.high)] + bounds
    positive = [v for v in values if v > _SMALLEST]
    log = log and bool(positive) and min(values) >= 0
    if log:
        # What is 0 is drawn at the bottom.
        floor = 10.0 ** math.floor(math.log10(min(positive)))
        up, marks = _log_axis(floor, max(positive))
    else:
        y_low = min(values + ([] if low is None else [low]))
        y_high = max(values)
        y_high = y_high if y_high > y_low else y_low + (abs(y_low) or 1.0)
        up = _scale(y_low, y_high, HEIGHT - _BOTTOM, _TOP)
        marks = _ticks(y_low, y_high, 5)
    across = _scale(x_low, max(x_high, x_low + 1), _LEFT, WIDTH - _RIGHT)
    parts = [_grid(marks, up), _steps(x_low, x_high, across)]
    if bound is not None:
        y = f"{up(bound):.1f}"
        parts.append(f'<line class="bound" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>')
    parts += [_drawn(curve, points, across, up) for curve, points in thinned]
    parts.append(f'<line class="here" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}" x1="0" x2="0"/>')
    keys = [(curve.name, curve.colour) for curve, _ in thinned]
    if bound is not None:
        keys.append((f"bound {bound:g}", "--bad"))
    told = {
        "x": [_LEFT, WIDTH - _RIGHT, x_low, max(x_high, x_low + 1)],
        "c": [
            [curve.name, [_short(p.x) for p in points], [_short(p.y) for p in points]]
            for curve, points in thinned
        ],
    }
    data = escape(json.dumps(told, separators=(",", ":")), quote=True)
    body = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" data-c="{data}">{"".join(parts)}</svg>'
    return _figure(title, keys, body, about, "chart")


def bar_rows(
    title: str,
    rows: Sequence[tuple[str, Sequence[Bar]]],
    colours: Sequence[tuple[str, str]],
    about: str = "",
) -> str:
    """Named rows of bars on one axis of seconds, with a legend of (name, colour)."""
    longest = max((bar.start + bar.length for _, bars in rows for bar in bars), default=0.0)
    if longest <= 0:
        return ""
    left = min(28 + 6 * max(len(name) for name, _ in rows), 240)
    across = _scale(0.0, longest, left, WIDE - 2 * _RIGHT)
    height = _TOP + _ROW * len(rows) + _BOTTOM
    parts = [
        f'<line x1="{across(t):.1f}" x2="{across(t):.1f}" y1="{_TOP}" y2="{height - _BOTTOM}"/>'
        f'<text x="{across(t):.1f}" y="{height - 8}" class="mid">{_seconds(t)}</text>'
        for t in _ticks(0.0, longest, 8)
    ]
    for index, (name, bars) in enumerate(rows):
        y = _TOP + index * _ROW
        parts.append(f'<text x="{left - 6}" y="{y + 11}" class="end">{escape(name)}</text>')
        parts.extend(
            f'<rect x="{across(bar.start):.1f}" y="{y + 2}" height="{_ROW - 4}"'
            f' width="{max(across(bar.start + bar.length) - across(bar.start), 0.8):.1f}"'
            f' fill="var({bar.colour})"{" class=faint" if bar.faint else ""}>'
            f"<title>{escape(bar.title)}</title></rect>"
            for bar in bars
        )
    body = f'<svg viewBox="0 0 {WIDE} {height}" role="img">{"".join(parts)}</svg>'
    return _figure(title, colours, f'<div class="wide">{body}</div>', about, "rows")


def _drawn(curve: Curve, points: Sequence[Point], across: Place, up: Place) -> str:
    line = " ".join(f"{across(p.x):.1f},{up(p.y):.1f}" for p in points)
    parts = [
        f'<polyline points="{line}" fill="none" stroke="var({curve.colour})"'
        ' stroke-width="1.8" stroke-linejoin="round"/>'
    ]
    if any(p.low < p.high for p in points):
        edge = [f"{across(p.x):.1f},{up(p.high):.1f}" for p in points]
        edge += [f"{across(p.x):.1f},{up(p.low):.1f}" for p in reversed(points)]
        parts.insert(
            0, f'<polygon class="band" points="{" ".join(edge)}" fill="var({curve.colour})"/>'
        )
    if len(points) <= DOTS:
        parts.extend(
            f'<circle cx="{across(p.x):.1f}" cy="{up(p.y):.1f}" r="2.2"'
            f' fill="var({curve.colour})">'
            f"<title>{escape(curve.name)}, step {p.x:g}: {p.y:.4g}</title></circle>"
            for p in points
        )
    return "".join(parts)


def _figure(title: str, keys: Sequence[tuple[str, str]], body: str, about: str, kind: str) -> str:
    legend = "".join(
        f'<span class="key"><i style="background:var({colour})"></i>{escape(name)}</span>'
        for name, colour in keys
    )
    note = f'<p class="about">{escape(about)}</p>' if about else ""
    return (
        f'<figure class="{kind}"><figcaption><b>{escape(title)}</b> {legend}'
        f'<span class="told"></span></figcaption>{body}{note}</figure>'
    )


def _scale(low: float, high: float, start: float, end: float) -> Place:
    def place(value: float) -> float:
        return start + (value - low) / (high - low) * (end - start)

    return place


def _log_axis(floor: float, high: float) -> tuple[Place, list[float]]:
    """From a power of ten to one above ``high``; a mark at each, or at some."""
    first, last = round(math.log10(floor)), math.ceil(math.log10(high))
    last = max(last, first + 1)
    place = _scale(first, last, HEIGHT - _BOTTOM, _TOP)
    every = -(-(last - first) // 5)
    marks = [10.0**power for power in range(first, last + 1, every)]
    return lambda value: place(math.log10(max(value, floor))), marks


def _ticks(low: float, high: float, count: int) -> list[float]:
    """About ``count`` round numbers between two bounds."""
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [k * step for k in range(first, last + 1)]


def _grid(marks: Sequence[float], up: Place) -> str:
    return "".join(
        f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{up(t):.1f}" y2="{up(t):.1f}"/>'
        f'<text x="{_LEFT - 5}" y="{up(t) + 3.5:.1f}" class="end">{t:.4g}</text>'
        for t in marks
    )


def _steps(low: float, high: float, across: Place) -> str:
    marks = [t for t in _ticks(low, max(high, low + 1), 6) if abs(t - round(t)) < 1e-9]
    return "".join(
        f'<text x="{across(t):.1f}" y="{HEIGHT - 7}" class="mid">{t:.6g}</text>' for t in marks
    )


def _seconds(value: float) -> str:
    return f"{value / 3600:g} h" if value >= 7200 else f"{value:g} s"


def _short(value: float) -> float:
    return float(f"{value:.5g}")
