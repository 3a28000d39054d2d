"""Who had which GPUs, and for how long: the plan's bundles joined to the leases."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby

from relax_infer.config import Recipe
from relax_infer.placement import InferencePlacementPlan, placement_svg, plan_inference_placement
from relax_infer.report.charts import Bar, bar_rows
from relax_infer.report.spans import Kind, Span

ROLES = {
    "rollout": "--rollout",
    "genrm": "--genrm",
    "teacher": "--teacher",
    "trainer": "--trainer",
    "critic": "--evaluate",
    "reference": "--sync",
    "actor_fwd": "--data",
}
SHOWN = 600
"""Stretches of leases that are drawn: the newest."""


@dataclass(frozen=True)
class Bundles:
    """Neighbours of one pool that the same roles use."""

    pool: str
    first: int
    last: int
    roles: tuple[str, ...]

    @property
    def name(self) -> str:
        gpus = f"GPU {self.first}" if self.first == self.last else f"GPUs {self.first}-{self.last}"
        return gpus if self.pool == "pool" else f"{self.pool} {gpus}"


def plan_of(recipe: Mapping[str, object]) -> InferencePlacementPlan | None:
    """None where the recipe on record is none that can be placed today."""
    try:
        return plan_inference_placement(Recipe.model_validate(recipe))
    except ValueError:
        return None


def bundles_of(plan: InferencePlacementPlan) -> list[Bundles]:
    """Every bundle of the plan, neighbours alike as one."""
    found: list[Bundles] = []
    for pool, size in plan.pool_sizes:
        slots = [slot for phase in plan.phases for slot in phase.slots if slot.pool == pool]
        users = [
            (
                bundle,
                tuple(
                    dict.fromkeys(s.role for s in slots if s.bundle_start <= bundle < s.bundle_stop)
                ),
            )
            for bundle in range(size)
        ]
        for roles, alike in groupby(users, key=lambda user: user[1]):
            numbers = [bundle for bundle, _ in alike]
            found.append(Bundles(pool, numbers[0], numbers[-1], roles))
    return found


def picture(plan: InferencePlacementPlan | None) -> str:
    """Who may have which GPUs in which phase."""
    if plan is None:
        return ""
    drawn = placement_svg(plan, inline=True)
    return f'<figure class="rows"><div class="wide plan">{drawn}</div></figure>'


def occupancy(
    plan: InferencePlacementPlan | None, spans: Sequence[Span], start: float, stop: float
) -> str:
    """Shares of the stretch from ``start`` to ``stop`` (Unix seconds), for each bundle."""
    length = stop - start
    if plan is None or length <= 0:
        return ""
    held: dict[tuple[str, Kind], float] = {}
    for span in spans:
        seconds = min(span.stop, stop) - max(span.start, start)
        if seconds > 0:
            key = span.role, span.kind
            held[key] = held.get(key, 0.0) + seconds
    rows = "".join(_row(bundles, held, length) for bundles in bundles_of(plan))
    legend = "".join(
        f'<span class="key"><i style="background:var({colour})"></i>{role}</span>'
        for role, colour in ROLES.items()
        if any(known == role for known, _ in held)
    )
    return (
        '<figure class="rows"><figcaption><b>Occupancy of each bundle</b> '
        f'{legend}<span class="key"><i class="moving"></i>comes up or lets go</span>'
        '<span class="key"><i style="background:var(--bad)"></i>blocked</span>'
        '<span class="key"><i style="background:var(--line)"></i>free</span></figcaption>'
        f"{rows}"
        f'<p class="about">Of {length:.0f} s, by the leases: a role that holds its lease has all'
        " of its bundles. Pauses between steps count as free.</p></figure>"
    )


def _row(bundles: Bundles, held: Mapping[tuple[str, Kind], float], length: float) -> str:
    pieces: list[str] = []
    words: list[str] = []
    for role in bundles.roles:
        for kind in Kind:
            share = 100 * held.get((role, kind), 0.0) / length
            if share <= 0:
                continue
            colour = "--bad" if kind is Kind.BLOCKED else ROLES.get(role, "--quiet")
            pieces.append(
                f'<i class="{kind}" style="width:{share:.2f}%;background-color:var({colour})"'
                f' title="{role} {kind}: {share:.1f} %"></i>'
            )
        total = sum(held.get((role, kind), 0.0) for kind in Kind)
        words.append(f"{role} {100 * total / length:.0f} %")
    return (
        f'<div class="bundle"><b>{escape(bundles.name)}</b><div class="stack">{"".join(pieces)}'
        f'</div><span class="quiet">{escape(", ".join(words) or "nobody")}</span></div>'
    )


def holders(spans: Sequence[Span]) -> str:
    """Which role held its lease when; the newest stretches of a long run."""
    shown = sorted(spans, key=lambda span: span.start)[-SHOWN:]
    if not shown:
        return '<p class="quiet">No lease of a training step is on record.</p>'
    began = shown[0].start
    roles = sorted({span.role for span in shown}, key=[*ROLES, ""].index)
    rows = [
        (
            role,
            [
                Bar(
                    span.start - began,
                    span.seconds,
                    "--bad" if span.kind is Kind.BLOCKED else ROLES[role],
                    f"{role} {span.kind} for {span.seconds:.2f} s under token {span.fence}",
                    span.kind is Kind.MOVING,
                )
                for span in shown
                if span.role == role
            ],
        )
        for role in roles
    ]
    legend = [("held; pale while it comes up or lets go", "--quiet"), ("blocked", "--bad")]
    about = f"The newest {SHOWN} of {len(spans)} stretches." if len(shown) < len(spans) else ""
    return bar_rows("Leases, in seconds since the first shown", rows, legend, about)
