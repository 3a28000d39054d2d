"""Charts as inline SVG: no script, no network, colours from the page's variables."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 640, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 12, 12, 28


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


def line_chart(title: str, curves: Sequence[Curve], *, low: float | None = None) -> str:
    """Curves over steps with a legend; an empty string when there is no point at all."""
    points = [point for curve in curves for point in curve.points]
    if not points:
        return ""
    x_low, x_high = min(x for x, _ in points), max(x for x, _ in points)
    y_low = min([y for _, y in points] + ([low] if low is not None else []))
    y_high = max(y for _, y in points)
    if y_high == y_low:
        y_high = y_low + 1
    across = _scale(x_low, max(x_high, x_low + 1), _LEFT, WIDTH - _RIGHT)
    up = _scale(y_low, y_high, HEIGHT - _BOTTOM, _TOP)
    parts = [_grid(y_low, y_high, up), _steps(x_low, x_high, across)]
    for curve in curves:
        path = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in curve.points)
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="var({curve.colour})"'
            ' stroke-width="2" stroke-linejoin="round"/>'
        )
        parts.extend(
            f'<circle cx="{across(x):.1f}" cy="{up(y):.1f}" r="2.5" fill="var({curve.colour})">'
            f"<title>{escape(curve.name)}, step {x:g}: {y:.4g}</title></circle>"
            for x, y in curve.points
        )
    legend = " ".join(
        f'<span class="key"><i style="background:var({c.colour})"></i>{escape(c.name)}</span>'
        for c in curves
        if c.points
    )
    return _figure(title, legend, _svg("".join(parts), HEIGHT))


def bar_rows(
    title: str, rows: Sequence[tuple[str, Sequence[Bar]]], colours: Sequence[tuple[str, str]]
) -> str:
    """Named rows of bars on one axis of seconds, with a legend of (name, colour)."""
    longest = max((bar.start + bar.length for _, bars in rows for bar in bars), default=0.0)
    if longest <= 0:
        return ""
    across = _scale(0.0, longest, _LEFT + 20, WIDTH - _RIGHT)
    high = 16
    height = _TOP + high * len(rows) + _BOTTOM
    parts: list[str] = []
    for index, (name, bars) in enumerate(rows):
        y = _TOP + index * high
        parts.append(f'<text x="{_LEFT + 14}" y="{y + 11}" class="end">{escape(name)}</text>')
        parts.extend(
            f'<rect x="{across(bar.start):.1f}" y="{y + 2}" height="{high - 4}"'
            f' width="{max(across(bar.start + bar.length) - across(bar.start), 0.8):.1f}"'
            f' fill="var({bar.colour})"><title>{escape(bar.title)}</title></rect>'
            for bar in bars
        )
    for tick in _ticks(0.0, longest):
        x = across(tick)
        parts.append(f'<text x="{x:.1f}" y="{height - 8}" class="mid">{tick:g} s</text>')
    legend = " ".join(
        f'<span class="key"><i style="background:var({colour})"></i>{escape(name)}</span>'
        for name, colour in colours
    )
    return _figure(title, legend, _svg("".join(parts), height))


def _figure(title: str, legend: str, svg: str) -> str:
    return f"<figure><figcaption>{escape(title)} {legend}</figcaption>{svg}</figure>"


def _svg(body: str, height: int) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img">{body}</svg>'


def _scale(low: float, high: float, start: float, end: float):
    def place(value: float) -> float:
        return start + (value - low) / (high - low) * (end - start)

    return place


def _ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers between two bounds."""
    raw = (high - low) / count
    power = 10.0 ** len(str(int(1 / raw))) if raw < 1 else 1.0
    step = next(s / power for s in _NICE if s / power >= raw)
    first = int(low / step) if low >= 0 else int(low / step) - 1
    ticks = [k * step for k in range(first, int(high / step) + 1)]
    return [tick for tick in ticks if low - 1e-12 <= tick <= high + 1e-12]


_NICE = [m * 10**e for e in range(9) for m in (1, 2, 5)]


def _grid(low: float, high: float, up) -> str:
    return "".join(
        f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{up(t):.1f}" y2="{up(t):.1f}"/>'
        f'<text x="{_LEFT - 6}" y="{up(t) + 3:.1f}" class="end">{t:.4g}</text>'
        for t in _ticks(low, high)
    )


def _steps(low: float, high: float, across) -> str:
    return "".join(
        f'<text x="{across(t):.1f}" y="{HEIGHT - 8}" class="mid">{t:g}</text>'
        for t in _ticks(low, max(high, low + 1))
        if t == int(t)
    )
