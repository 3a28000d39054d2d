"""The report as a browser shows it: without a network, on a phone, light and dark."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from relax_infer.config import load_recipe
from relax_infer.report import write_report
from tests.report.browser import Tab, browsing, chromium
from tests.report.records import RUN, a_record, a_recovery, keep, some_samples

BROWSER = chromium()
pytestmark = pytest.mark.skipif(BROWSER is None, reason="apt-get install chromium")


@pytest.fixture
def url(tmp_path: Path) -> str:
    store = (tmp_path / "store").as_uri()
    files = keep(store, *(a_record(step, recoveries=(a_recovery(1),)) for step in range(6)))
    files.write_json("recipe.json", load_recipe("quickstart").model_dump(mode="json"))
    for step in (1, 2):
        table = some_samples(step, 4, 6, text="<b>bold</b>", unscored=2)
        files.write_table(f"steps/{step}/scored.arrow", table)
    return write_report(store, RUN, tmp_path / "report.html").as_uri()


@pytest_asyncio.fixture
async def tab() -> AsyncIterator[Tab]:
    assert BROWSER is not None
    async with browsing(BROWSER) as made:
        yield made


async def chosen(tab: Tab, **filters: str) -> str:
    """What the browser counts after filters were set."""
    for name, value in filters.items():
        await tab.evaluate(
            f"""(() => {{ const e = document.getElementById("f-{name}"); e.value = "{value}";
            e.dispatchEvent(new Event("input")); }})()"""
        )
    return await tab.evaluate("document.getElementById('count').textContent")


async def test_it_asks_for_nothing_and_nothing_fails(tab: Tab, url: str):
    await tab.open(url, width=1200)
    assert await tab.evaluate("document.querySelectorAll('svg').length") > 10
    assert tab.told == []


@pytest.mark.parametrize("width", [320, 390, 1200])
async def test_a_narrow_screen_has_no_sideways_scrolling_of_the_page(
    tab: Tab, url: str, width: int
):
    await tab.open(url, width=width)
    assert await tab.evaluate("document.documentElement.scrollWidth") <= width
    small = """[...document.querySelectorAll("p,td,dd,label,figcaption,svg text")]
        .map((e) => e.getBoundingClientRect().height).filter((h) => h > 0 && h < 8).length"""
    assert await tab.evaluate(small) == 0


async def test_dark_follows_the_screen(tab: Tab, url: str):
    background = "getComputedStyle(document.body).backgroundColor"
    await tab.open(url, width=1200, dark=True)
    dark = await tab.evaluate(background)
    await tab.open(url, width=1200)
    assert (dark, await tab.evaluate(background)) == ("rgb(15, 19, 25)", "rgb(255, 255, 255)")


async def test_samples_are_found_by_step_reward_verdict_and_text(tab: Tab, url: str):
    await tab.open(url, width=1200)
    assert await chosen(tab) == "48 of 48 samples match; 12 shown"
    assert (await chosen(tab, step="2")).startswith("24 of 48")
    assert (await chosen(tab, step="", least="2.5")).startswith("10 of 48")
    assert (await chosen(tab, least="", most="-1")).startswith("2 of 48")
    assert (await chosen(tab, most="", scored="no")).startswith("2 of 48")
    assert (await chosen(tab, scored="", words="n")).startswith("14 of 48")
    assert (await chosen(tab, words="", text="BOLD</B>3")).startswith("12 of 48")
    assert (await chosen(tab, text="", order="best")).startswith("48 of 48")
    assert "reward 3" in await tab.evaluate("document.querySelector('.sample').innerText")


async def test_what_a_policy_wrote_is_shown_and_not_carried_out(tab: Tab, url: str):
    await tab.open(url, width=1200)
    assert "<b>bold</b>0" in await tab.evaluate("document.querySelector('.sample').innerText")
    assert await tab.evaluate("document.querySelectorAll('.sample dd b').length") == 0


async def test_more_samples_come_on_demand(tab: Tab, url: str):
    await tab.open(url, width=390)
    await tab.evaluate("document.getElementById('more').click()")
    assert await tab.evaluate("document.querySelectorAll('.sample').length") == 24
    assert await chosen(tab) == "48 of 48 samples match; 24 shown"


async def test_a_chart_tells_the_values_under_the_pointer(tab: Tab, url: str):
    await tab.open(url, width=1200)
    told = await tab.evaluate(
        """(() => { const svg = document.querySelector(".chart svg"),
        box = svg.getBoundingClientRect();
        svg.dispatchEvent(new PointerEvent("pointermove",
            {clientX: box.right - 12, clientY: box.top + 20}));
        return svg.parentElement.querySelector(".told").textContent; })()"""
    )
    assert told.startswith("step 5: mean reward 1.25")
