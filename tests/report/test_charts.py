"""Charts: everything is inside, nothing is lost without a word."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_infer.report.charts import HEIGHT, WIDE, WIDTH, Bar, Curve, bar_rows, line_chart, thin
from tests.report.markup import Page

FINITE = st.floats(-1e6, 1e6, allow_nan=False)
POINTS = st.lists(st.tuples(st.integers(0, 10_000), FINITE), min_size=1, max_size=30)


@pytest.mark.parametrize("log", [False, True])
@given(points=POINTS)
def test_every_point_of_a_curve_is_inside_its_chart(points: list[tuple[int, float]], log: bool):
    chart = line_chart("t", [Curve("c", points, "--x")], log=log, bound=3.0)
    places = re.findall(r'<circle cx="([-\d.]+)" cy="([-\d.]+)"', chart)
    assert len(places) == len(points)
    assert all(0 <= float(x) <= WIDTH and 0 <= float(y) <= HEIGHT for x, y in places)
    assert Page(chart).open == []


@given(st.lists(st.tuples(st.floats(0, 1e5), st.floats(0.001, 1e5)), min_size=1, max_size=20))
def test_bars_never_leave_the_chart(spans: list[tuple[float, float]]):
    chart = bar_rows("t", [("r", [Bar(s, n, "--x", "b") for s, n in spans])], [])
    bars = re.findall(r'<rect x="([-\d.]+)" y="\d+" height="\d+" width="([-\d.]+)"', chart)
    assert len(bars) == len(spans)
    assert all(float(x) >= 0 and float(x) + float(w) <= WIDE for x, w in bars)
    assert Page(chart).open == []


def test_a_chart_without_points_is_left_out():
    assert line_chart("t", [Curve("c", [], "--x")], bound=1.0) == ""
    assert line_chart("t", [Curve("c", [(1, math.nan)], "--x")]) == ""
    assert bar_rows("t", [("r", [])], []) == ""


def test_a_long_curve_keeps_its_mean_and_its_extremes():
    points = [(float(k), 100.0 if k == 777 else 1.0) for k in range(1000)]
    thinned = thin(points)
    assert len(thinned) == 200
    assert max(p.high for p in thinned) == 100.0
    assert sum(p.y for p in thinned) / 200 == pytest.approx(sum(y for _, y in points) / 1000)
    assert 'class="band"' in line_chart("t", [Curve("c", points, "--x")])


def test_on_a_logarithmic_axis_decades_are_equally_far_apart_and_zero_is_at_the_bottom():
    curve = Curve("c", [(1, 5e-324), (2, 1e-4), (3, 1e-2), (4, 1.0)], "--x")
    chart = line_chart("t", [curve], log=True)
    heights = [float(y) for y in re.findall(r'<circle cx="[\d.]+" cy="([\d.]+)"', chart)]
    assert heights[0] == heights[1]
    assert heights[1] - heights[2] == pytest.approx(heights[2] - heights[3], abs=0.2)
