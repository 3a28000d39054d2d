"""The report's page: what was learned, how the time went, who held the GPUs, what went wrong."""

import json
from html import escape
from importlib.resources import files

from relax_infer.report import tables
from relax_infer.report.curves import learned
from relax_infer.report.incidents import incidents_of, recoveries_of
from relax_infer.report.occupancy import holders, occupancy, picture, plan_of
from relax_infer.report.recipe import recipe_table
from relax_infer.report.records import ALL, RunRecords
from relax_infer.report.sampling import Chosen, choose
from relax_infer.report.spans import SpanIndex, spans_of, time_of, transitions_of
from relax_infer.report.timeline import phase_table, timeline

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
"""Whatever the page is made to hold, a browser fetches nothing for it."""
_SECTIONS = (
    ("learned", "Learned"),
    ("time", "Time"),
    ("gpus", "GPUs"),
    ("incidents", "Incidents"),
    ("samples-section", "Samples"),
    ("steps", "Steps"),
    ("recipe", "Recipe"),
)
_FILTERS = """<div class="filters">
<label>step<select id="f-step"><option value="">all</option></select></label>
<label>verdict<select id="f-words"><option value="">all</option></select></label>
<label>score<select id="f-scored"><option value="">all</option><option value="yes">scored</option>
<option value="no">not scored</option><option value="length">hit its limit</option></select></label>
<label>reward from<input id="f-least" type="number" step="any"></label>
<label>reward to<input id="f-most" type="number" step="any"></label>
<label>text<input id="f-text" type="search" placeholder="in any field"></label>
<label>order<select id="f-order"><option value="step">by step</option>
<option value="worst">lowest reward</option><option value="best">highest reward</option>
<option value="kl">farthest above the Teacher</option><option value="long">longest</option></select>
</label></div>"""


def page(records: RunRecords) -> str:
    """The whole file."""
    steps = records.steps
    transitions = transitions_of(steps)
    ends = [p.started + p.seconds for s in steps for p in s.result.phases]
    until = max(ends, default=0.0)
    spans = spans_of(transitions, until)
    index = SpanIndex(spans)
    times = [time_of(step, index) for step in steps]
    incidents = incidents_of(steps, transitions)
    plan = plan_of(records.recipe)
    # The first launch of the engines, in step 0, would dwarf every step.
    begun = [s.result.phases[0].started for s in steps if s.step > 0 and s.result.phases]
    start = min(begun, default=until)
    trained = [span for span in spans if span.stop > start]
    chosen = None if records.store is None else choose(records.store, [s.step for s in steps])
    name = escape(records.run)
    links = "".join(f'<a href="#{anchor}">{title}</a>' for anchor, title in _SECTIONS)
    return f"""<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width,initial-scale=1"><title>{name}</title>
<style>{_asset("report.css")}</style></head><body>
<h1>{name}</h1><p class="quiet">{_about(records)}</p><nav>{links}</nav>
{tables.facts(steps, times, incidents)}
<h2 id="learned">What was learned</h2>
<div class="charts">{learned(steps, _bound(records.recipe))}</div>
{tables.evaluation_table(steps)}
<h2 id="time">How the time went</h2>{timeline(steps, times)}
<h3>Phases</h3>{phase_table(times)}
<h2 id="gpus">Who held the GPUs</h2>{occupancy(plan, trained, start, until)}
{holders(trained)}{picture(plan)}
<h3>Replicas</h3>{tables.recovery_table(recoveries_of(steps))}
<h3>Leases</h3>{tables.transition_table(transitions)}
<h2 id="incidents">What went wrong</h2>{tables.incident_list(incidents)}
<h2 id="samples-section">Samples</h2>{_samples(chosen)}
<h2 id="steps">Steps</h2>{tables.step_table(steps, times)}
<h2 id="recipe">Recipe</h2>{recipe_table(records.recipe)}
<script>{_asset("report.js")}</script>
</body></html>
"""


def _about(records: RunRecords) -> str:
    steps = records.steps
    words = [f"Recipe {records.recipe.get('name', '?')}"]
    if records.wanted != ALL:
        words.append(str(records.wanted))
    if steps[0].result.phases:
        words.append(f"from {tables.clock(steps[0].result.phases[0].started)}")
    between = tables.gaps_between(steps)
    if between >= 1:
        words.append(f"{tables.duration(between)} between steps")
    return escape(", ".join(words)) + "."


def _bound(recipe: dict[str, object]) -> float | None:
    """Of the mean log-prob difference; None in recipes of before there was one."""
    train = recipe.get("train")
    bound = train.get("logprob_bound") if isinstance(train, dict) else None
    mean = bound.get("mean") if isinstance(bound, dict) else None
    return float(mean) if isinstance(mean, int | float) and mean > 0 else None


def _samples(chosen: Chosen | None) -> str:
    if chosen is None or not chosen.rows:
        return '<p class="quiet">The store keeps no scored samples of these steps.</p>'
    # "<" would end the script, or begin a comment in it.
    data = json.dumps(chosen.rows, separators=(",", ":"), ensure_ascii=False)
    data = data.replace("<", "\\u003c")
    return (
        f'<p class="about">{escape(chosen.rule)} All of them:'
        " <code>relax-infer samples RUN STEP</code>.</p>"
        f'{_FILTERS}<p class="quiet" id="count"></p><div id="samples"></div>'
        '<button id="more" hidden>Show more</button>'
        f'<script type="application/json" id="samples-data">{data}</script>'
        "<noscript>The sample browser needs JavaScript; nothing else does.</noscript>"
    )


def _asset(name: str) -> str:
    return files("relax_infer.report").joinpath(name).read_text(encoding="utf-8")
