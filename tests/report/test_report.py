"""The report: one file that needs nothing else and shows what the records say."""

import json
import re
from pathlib import Path

import pytest

from relax_infer.config import load_recipe
from relax_infer.contracts.failures import PermanentError
from relax_infer.contracts.run import StepRecord
from relax_infer.report import write_report
from tests.report.markup import Page
from tests.report.records import RUN, a_record, a_recovery, a_retry, keep, some_samples


@pytest.fixture
def store(tmp_path: Path) -> str:
    return (tmp_path / "store").as_uri()


def written(store: str, tmp_path: Path, *records: StepRecord, steps: str | None = None) -> str:
    keep(store, *records)
    return write_report(store, RUN, tmp_path / "deep" / "report.html", steps).read_text()


def test_the_file_needs_nothing_but_itself(store: str, tmp_path: Path):
    keep(store).write_table("steps/1/scored.arrow", some_samples(1, 4, 2))
    text = written(store, tmp_path, a_record(0), a_record(1))
    page = Page(text)
    assert page.open == []
    assert all(reference.startswith("#") for reference in page.references)
    assert {reference[1:] for reference in page.references} <= set(re.findall(r' id="(.+?)"', text))
    assert "svg" in page.seen
    assert not {"iframe", "img", "link"} & set(page.seen)
    assert not re.search(r"url\(|@import|https?://|fetch\(|XMLHttp|WebSocket", text)
    assert "default-src 'none'" in text


def test_names_errors_and_samples_are_text_and_never_markup(store: str, tmp_path: Path):
    evil = "</script><script>alert(1)</script><!--"
    files = keep(store)
    files.write_table("steps/1/scored.arrow", some_samples(1, 2, 2, text=evil))
    text = written(store, tmp_path, a_record(1, error=evil))
    page = Page(text)
    assert page.open == []
    assert page.seen.count("script") == 2  # the samples' data, and what shows them
    assert evil in page.text
    assert "run-&lt;7&gt;" in text
    [data] = [script for script in page.scripts if script.startswith("[")]
    assert json.loads(data)[0]["response"] == f"{evil}0"


def test_steps_are_in_the_order_of_their_numbers(store: str, tmp_path: Path):
    text = written(store, tmp_path, *(a_record(step) for step in (10, 2, 1)))
    assert re.findall(r"<tr><td>(\d+)</td><td><span", text) == ["1", "2", "10"]


@pytest.mark.parametrize(
    ("wanted", "rows"),
    [("3-5", [3, 4, 5]), ("4", [4]), ("5-", [5, 6]), ("-2", [1, 2]), (None, [1, 2, 3, 4, 5, 6])],
)
def test_a_range_of_steps_is_reported_alone(
    store: str, tmp_path: Path, wanted: str | None, rows: list[int]
):
    text = written(store, tmp_path, *(a_record(step) for step in range(1, 7)), steps=wanted)
    assert [int(n) for n in re.findall(r"<tr><td>(\d+)</td><td><span", text)] == rows


@pytest.mark.parametrize(
    ("wanted", "words"),
    [("x", "no range of steps"), ("9-3", "step 9 comes after step 3"), ("7-9", "has steps 1 to 2")],
)
def test_a_range_that_is_none_or_empty_is_refused(
    store: str, tmp_path: Path, wanted: str, words: str
):
    keep(store, a_record(1), a_record(2))
    with pytest.raises(PermanentError) as refused:
        write_report(store, RUN, tmp_path / "report.html", wanted)
    assert words in f"{refused.value} {refused.value.cure}"
    assert not (tmp_path / "report.html").exists()


def test_every_measure_has_its_curve(store: str, tmp_path: Path):
    text = Page(written(store, tmp_path, *(a_record(step) for step in range(4)))).text
    for title in (
        *("Reward of the batch", "Evaluation", "KL, nats a token", "Entropy", "Staleness"),
        *("Rollout against trainer log-probs", "Control share, %", "many pass@8"),
    ):
        assert title in text


def test_the_bound_of_the_recipe_is_drawn_beside_the_log_prob_difference(
    store: str, tmp_path: Path
):
    files = keep(store)
    files.write_json("recipe.json", load_recipe("quickstart").model_dump(mode="json"))
    text = written(store, tmp_path, a_record(1))
    assert text.count('class="bound"') == 1
    assert "bound 0.1" in Page(text).text


def test_holds_and_blocks_of_a_role_are_drawn_with_their_seconds(store: str, tmp_path: Path):
    titles = Page(written(store, tmp_path, a_record(1))).titles
    assert "rollout moving for 1.00 s under token 2" in titles
    assert "rollout active for 2.00 s under token 2" in titles
    assert "rollout blocked for 2.00 s under token 2" in titles
    assert "step 1 GENERATING: 4.00 s, at work for 2.00 s" in titles


def test_the_plan_and_each_bundles_share_are_shown_where_the_recipe_is_on_record(
    store: str, tmp_path: Path
):
    assert "Occupancy" not in written(store, tmp_path, a_record(1))
    files = keep(store)
    files.write_json("recipe.json", load_recipe("quickstart").model_dump(mode="json"))
    text = written(store, tmp_path, a_record(1))
    page = Page(text)
    assert page.open == []
    assert {"GPU 0: rollout policy #0", "GPU 1: free", "GPU 0: trainer rank 0"} <= set(page.titles)
    # 5 of the 6.5 seconds of the step, of which 2 were blocked.
    assert "GPU 1 rollout 77 %" in page.text
    assert 'title="rollout blocked: 30.8 %"' in text


def test_incidents_tell_how_long_they_took_to_notice_and_to_mend(store: str, tmp_path: Path):
    record = a_record(1, recoveries=(a_recovery(1),), retries=(a_retry(1),))
    text = Page(written(store, tmp_path, record)).text
    assert "replica lost rollout policy/0" in text
    assert "noticed within 1.0 s, mended in 12.0 s" in text
    assert "its process 7 is gone" in text
    assert "noticed within 1.5 s, mended in 6.5 s Transient: no answer" in text
    assert "lease blocked rollout" in text
    assert "noticed within 2.0 s, mended in 2.0 s" in text


def test_a_run_without_records_is_an_error_that_says_where(store: str, tmp_path: Path):
    with pytest.raises(PermanentError, match="run-2") as refused:
        write_report(store, "run-2", tmp_path / "report.html")
    assert store in str(refused.value)
    assert not (tmp_path / "report.html").exists()


def test_a_record_that_was_cut_short_is_named(store: str, tmp_path: Path):
    keep(store, a_record(1)).write_bytes("steps/2/record.json", b'{"run": ')
    with pytest.raises(PermanentError, match=r"steps/2/record\.json is no step record"):
        write_report(store, RUN, tmp_path / "report.html")


def test_a_run_of_a_thousand_steps_gives_a_file_that_a_phone_can_open(store: str, tmp_path: Path):
    files = keep(store, *(a_record(step) for step in range(1, 1001)))
    kept = files.write_table("steps/1/scored.arrow", some_samples(1, 8192, 8, text="x" * 4000))
    first = Path(kept.uri.removeprefix("file://"))
    for step in range(2, 1001):
        (first.parents[1] / str(step) / "scored.arrow").hardlink_to(first)
    out = write_report(store, RUN, tmp_path / "report.html")
    assert out.stat().st_size < 4_000_000
    text = Page(out.read_text()).text
    assert "960 of 2621440 samples of 40 of 1000 steps, spread evenly" in text
    assert "Of 1000 steps the 20 slowest and the 40 newest" in text


def test_the_recipe_s_values_stand_under_the_keys_that_set_takes(store: str, tmp_path: Path):
    evil = "<b>x"
    recipe = {"name": evil, "train": {"learning_rate": 0.001, "lora": None}, "stops": []}
    keep(store).write_json("recipe.json", recipe)
    text = written(store, tmp_path, a_record(1))
    for key, value in (("train.learning_rate", "0.001"), ("train.lora", "null"), ("stops", "[]")):
        assert f'<td>{key}</td><td class="left wrap"><code>{value}</code>' in text
    assert evil not in text


@pytest.mark.parametrize("content", ["", "[1]", '{"name":'])
def test_a_recipe_that_cannot_be_read_is_named(store: str, tmp_path: Path, content: str):
    keep(store, a_record(1)).write_bytes("recipe.json", content.encode())
    with pytest.raises(PermanentError, match=r"recipe\.json is"):
        write_report(store, RUN, tmp_path / "report.html")
