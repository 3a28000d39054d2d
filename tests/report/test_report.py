"""The report: one file that needs nothing else and shows what the records say."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_infer.config import load_recipe
from relax_infer.contracts.failures import PermanentError
from relax_infer.contracts.lease import LeaseTransition
from relax_infer.contracts.refs import RunRef, WeightsRef
from relax_infer.contracts.run import BatchMetrics, Evaluation, PhaseTime, StepRecord, StepResult
from relax_infer.machines import StepPhase
from relax_infer.report import write_report
from relax_infer.report.charts import Bar, Curve, bar_rows, line_chart
from relax_infer.samples import StagingStore

RUN = "run-<7>"
BEGAN = 1_700_000_000.0
FINITE = st.floats(-1e6, 1e6, allow_nan=False)


class Page(HTMLParser):
    """What a browser would find: tags that close, and everything they refer to."""

    VOID = frozenset({"meta", "link", "br", "img", "line", "rect", "circle", "polyline"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.references: list[str] = []
        self.titles: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.references += [v or "" for k, v in attrs if k in ("src", "href", "xlink:href")]
        if tag not in self.VOID or tag == "rect" or tag == "circle":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "title":
            self.titles.append(data)


def a_record(step: int, *, error: str | None = None) -> StepRecord:
    began = BEGAN + 10 * step
    return StepRecord(
        run=RUN,
        step=step,
        outcome=StepPhase.FAILED if error else StepPhase.DONE,
        error=error,
        result=StepResult(
            step=step,
            weights=WeightsRef(version=step, uri="memory://w", digest=f"{step:064d}"),
            batch=BatchMetrics(
                samples=256,
                groups=32,
                dropped_groups=1,
                reward_mean=0.25 * step,
                reward_std=0.1,
                exact_share=0.5,
                teacher_kl=-0.01,
                response_tokens=1280,
                truncated=0,
            ),
            evaluation=Evaluation(step=step, weight_version=step, problems=512, accuracy=0.4),
            phases=(
                PhaseTime(phase=StepPhase.GENERATING, started=began, seconds=4.0),
                PhaseTime(phase=StepPhase.TRAINING, started=began + 4, seconds=2.5),
            ),
        ),
        transitions=tuple(
            LeaseTransition(at=at, role=role, event=event, state=state, fence=step + 1).model_dump()
            for at, role, event, state in (
                (began, "rollout", "GRANTED", "ONLOADING"),
                (began + 1, "rollout", "ONLOAD_CONFIRMED", "ACTIVE"),
                (began + 3, "rollout", "OPERATION_FAILED", "BLOCKED"),
                (began + 5, "rollout", "RELEASE_PROVED", "SLEEPING"),
            )
        ),
    )


@pytest.fixture
def store(tmp_path: Path) -> str:
    return (tmp_path / "store").as_uri()


def written(store: str, tmp_path: Path, *records: StepRecord) -> str:
    files = StagingStore(RunRef(run=RUN, store=store))
    for record in records:
        document = record.model_dump(mode="json")
        files.write_json(f"steps/{record.step}/record.json", document)
    return write_report(store, RUN, tmp_path / "deep" / "report.html").read_text()


def test_the_file_needs_nothing_but_itself(store: str, tmp_path: Path):
    text = written(store, tmp_path, a_record(0), a_record(1))
    page = Page(text)
    assert page.open == []
    assert page.references == []
    assert "svg" in page.seen
    assert not {"script", "iframe", "img", "link"} & set(page.seen)
    assert not re.search(r"url\(|@import|https?://", text)


def test_names_and_errors_are_text_and_never_markup(store: str, tmp_path: Path):
    text = written(store, tmp_path, a_record(1, error="<script>alert(1)</script>"))
    assert "script" not in Page(text).seen
    assert "run-&lt;7&gt;" in text
    assert "Step 1: &lt;script&gt;" in text


def test_steps_are_in_the_order_of_their_numbers(store: str, tmp_path: Path):
    text = written(store, tmp_path, *(a_record(step) for step in (10, 2, 1)))
    rows = re.findall(r"<tr><td>(\d+)</td>", text)
    assert rows == ["1", "2", "10"]


def test_holds_and_blocks_of_a_role_are_drawn_with_their_seconds(store: str, tmp_path: Path):
    titles = Page(written(store, tmp_path, a_record(1))).titles
    assert "rollout held for 5.00 s under fence 2" in titles
    assert "rollout was blocked" in titles
    assert "step 1 GENERATING: 4.00 s" in titles


def test_the_plan_is_drawn_where_the_recipe_is_on_record(store: str, tmp_path: Path):
    assert "Who has which GPUs" not in written(store, tmp_path, a_record(1))
    files = StagingStore(RunRef(run=RUN, store=store))
    files.write_json("recipe.json", load_recipe("quickstart").model_dump(mode="json"))
    text = written(store, tmp_path, a_record(1))
    page = Page(text)
    assert page.open == []
    assert {"GPU 0: rollout policy #0", "GPU 1: free", "GPU 0: trainer rank 0"} <= set(page.titles)
    assert not re.search(r"url\(|@import|https?://", text)


def test_a_run_without_records_is_an_error_that_says_where(store: str, tmp_path: Path):
    with pytest.raises(PermanentError, match="run-2") as refused:
        write_report(store, "run-2", tmp_path / "report.html")
    assert store in str(refused.value)
    assert not (tmp_path / "report.html").exists()


@given(st.lists(st.tuples(st.integers(0, 10_000), FINITE), min_size=1, max_size=30))
def test_every_point_of_a_curve_is_inside_its_chart(points: list[tuple[int, float]]):
    chart = line_chart("t", [Curve("c", points, "--x")])
    places = re.findall(r'<circle cx="([-\d.]+)" cy="([-\d.]+)"', chart)
    assert len(places) == len(points)
    assert all(0 <= float(x) <= 640 and 0 <= float(y) <= 220 for x, y in places)
    assert Page(chart).open == []


@given(st.lists(st.tuples(st.floats(0, 1e5), st.floats(0.001, 1e5)), min_size=1, max_size=20))
def test_bars_never_leave_the_chart(spans: list[tuple[float, float]]):
    chart = bar_rows("t", [("r", [Bar(s, n, "--x", "b") for s, n in spans])], [])
    bars = re.findall(r'<rect x="([-\d.]+)" y="\d+" height="\d+" width="([-\d.]+)"', chart)
    assert len(bars) == len(spans)
    assert all(float(x) >= 0 and float(x) + float(w) <= 640 for x, w in bars)


def test_a_chart_without_points_is_left_out():
    assert line_chart("t", [Curve("c", [], "--x")]) == ""
    assert bar_rows("t", [("r", [])], []) == ""
