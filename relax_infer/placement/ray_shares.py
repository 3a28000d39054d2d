"""What actors reserve with Ray on each bundle: computed where asked, and never above one GPU.

Ray waits for ever for a reservation that does not fit instead of failing, and a reservation lasts
over all phases. So every sum is checked beforehand.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from relax_infer.config.placed import Scalar
from relax_infer.contracts.fractions import STEPS, ray_steps
from relax_infer.placement.placed import POOL, Violation

PREFERRED = 0.2
"""Share of an engine that asks for ``auto`` where there is room."""
TRAINING = 0.4
"""Share of a training rank that leaves room for engines."""


@dataclass(frozen=True)
class Claim:
    """One reservation of the same share in several bundles of a pool."""

    who: str
    pool: str
    bundles: range
    share: float | None
    """None: computed."""
    field: str
    """Dotted key of the share in the recipe."""


def computed_shares(claims: Iterable[Claim], pools: Mapping[str, int]) -> dict[str, float]:
    """For each pool the share of its claims without one: 0.2, or an equal part of what is left.

    On the bundle with the least room, n such claims get (1 - other claims) / n each, rounded down
    to what Ray can count. With nothing left it is 0.
    """
    fixed = {pool: [0] * size for pool, size in pools.items()}
    asked = {pool: [0] * size for pool, size in pools.items()}
    for claim in claims:
        for bundle in _within(claim, pools):
            if claim.share is None:
                asked[claim.pool][bundle] += 1
            else:
                fixed[claim.pool][bundle] += ray_steps(claim.share)
    return {
        pool: min(
            (_part(ray_steps(1) - fixed[pool][b], n) for b, n in enumerate(counts) if n),
            default=PREFERRED,
        )
        for pool, counts in asked.items()
    }


def share_violations(claims: Sequence[Claim], pools: Mapping[str, int]) -> list[Violation]:
    """One for each different set of claims that adds up to more than one GPU."""
    shares = computed_shares(claims, pools)
    on_bundle: dict[str, list[tuple[int, ...]]] = {p: [()] * size for p, size in pools.items()}
    for number, claim in enumerate(claims):
        for bundle in _within(claim, pools):
            on_bundle[claim.pool][bundle] += (number,)
    found: list[Violation] = []
    for pool, bundles in on_bundle.items():
        alike: dict[tuple[int, ...], list[int]] = {}
        for bundle, numbers in enumerate(bundles):
            alike.setdefault(numbers, []).append(bundle)
        for numbers, where in alike.items():
            listed = [(claims[n], _share(claims[n], shares)) for n in numbers]
            if sum(ray_steps(share) for _, share in listed) > ray_steps(1):
                found.append(_violation(pool, where, listed))
    return found


def _share(claim: Claim, shares: Mapping[str, float]) -> float:
    return shares[claim.pool] if claim.share is None else claim.share


def _within(claim: Claim, pools: Mapping[str, int]) -> range:
    bundles = claim.bundles
    return range(bundles.start, min(bundles.stop, pools[claim.pool]), bundles.step)


def _part(left: int, among: int) -> float:
    """Of so many steps."""
    return min(ray_steps(PREFERRED), max(0, left) // among) / STEPS


def _violation(pool: str, where: list[int], listed: list[tuple[Claim, float]]) -> Violation:
    total = sum(ray_steps(share) for _, share in listed) / STEPS
    parts = " ".join(f"{claim.who}={share:g}" for claim, share in listed)
    more = f" and {len(where) - 1} more" if len(where) > 1 else ""
    of_pool = "" if pool == POOL else f" of pool {pool}"
    return Violation(
        "ray_gpu_fraction",
        f"bundle {where[0]}{more}{of_pool} would reserve {total:g} of its one GPU with Ray"
        f" ({parts}).",
        "Lower train.ray_gpu_fraction or the roles' engine.ray_gpu_fraction, or set the latter to"
        " auto; they reserve, they do not limit.",
        _settings([claim for claim, _ in listed]),
    )


def _settings(claims: list[Claim]) -> tuple[tuple[str, Scalar], ...]:
    """Engines compute theirs; training gives way only where it alone is more than the GPU."""
    training = [c for c in claims if not c.field.endswith("engine.ray_gpu_fraction")]
    engines = [c for c in claims if c.field.endswith("engine.ray_gpu_fraction")]
    settings: list[tuple[str, Scalar]] = [(c.field, "auto") for c in engines]
    if sum(ray_steps(c.share or 0.0) for c in training) > ray_steps(1):
        settings += [(c.field, TRAINING) for c in training]
    return tuple(dict(settings).items())
