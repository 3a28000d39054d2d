"""Whether pools can be spread over nodes, against every spread there is; without Ray."""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product

import pytest

from relax_infer.contracts.engines import BundleBinding
from relax_infer.placement import (
    InferencePlacementPlan,
    PlacementError,
    plan_inference_placement,
    validate_bound_plan,
)
from relax_infer.placement.binding import in_order
from relax_infer.placement.room import NodeRoom, Undecided, node_of_each, unfit_shape
from relax_infer.placement.shapes import Cuts, can_spread, cuts_of, in_need
from tests.placement.recipes import document, engine, plan, read
from tests.placement.test_room import node


def parts(size: int, rooms: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every way to have ``size`` bundles on these nodes."""
    for counts in product(*(range(min(room, size) + 1) for room in rooms)):
        if sum(counts) == size:
            yield counts


def every_spread(
    sizes: Sequence[tuple[str, int]], rooms: Sequence[int]
) -> Iterator[dict[str, tuple[int, ...]]]:
    """Of every pool, on what the pools before it leave."""
    if not sizes:
        yield {}
        return
    (pool, size), *others = sizes
    for counts in parts(size, rooms):
        left = [room - count for room, count in zip(rooms, counts, strict=True)]
        for more in every_spread(others, left):
            yield {pool: counts, **more}


def fits_somehow(made: InferencePlacementPlan, rooms: Sequence[int]) -> bool:
    """By brute force, and by the check that a binding has to pass."""
    for spread in every_spread(made.pool_sizes, rooms):
        taken = [0] * len(rooms)
        pools: dict[str, list[BundleBinding]] = {}
        for pool, counts in spread.items():
            rows: list[BundleBinding] = []
            for number, count in enumerate(counts):
                for gpu in range(taken[number], taken[number] + count):
                    where = {"node_id": f"n{number}", "node_ip": "10.0.0.1", "gpu_id": gpu}
                    rows.append(BundleBinding.model_validate({"bundle": len(rows), **where}))
                taken[number] += count
            pools[pool] = in_order(rows)
        try:
            validate_bound_plan(made, pools)
        except PlacementError:
            continue
        return True
    return False


def pinned_fits(made: InferencePlacementPlan, nodes: Sequence[NodeRoom]) -> bool:
    """Whether there is a node for each bundle; what there is has to pass the check of a binding."""
    chosen = node_of_each(made, nodes)
    if chosen is not None:
        used: Counter[str] = Counter()
        pools: dict[str, list[BundleBinding]] = {}
        for pool, mine in chosen.items():
            rows: list[BundleBinding] = []
            for bundle, there in enumerate(mine):
                where = {"node_id": there.node_id, "node_ip": there.node_ip}
                gpu = {"bundle": bundle, "gpu_id": used[there.node_id]}
                rows.append(BundleBinding.model_validate(where | gpu))
                used[there.node_id] += 1
            pools[pool] = in_order(rows)
        assert {pool: len(rows) for pool, rows in pools.items()} == dict(made.pool_sizes)
        assert all(used[each.node_id] <= each.free_bundles for each in nodes)
        validate_bound_plan(made, pools)
    return chosen is not None


def packed_as_ray_does(
    made: InferencePlacementPlan, order: Sequence[str], rooms: Sequence[int]
) -> bool:
    """Each pool begins on the node with the most free, and takes all that it can of it."""
    left, pools = list(rooms), dict[str, list[BundleBinding]]()
    for pool in order:
        rows: list[BundleBinding] = []
        while lacking := dict(made.pool_sizes)[pool] - len(rows):
            number = max(range(len(left)), key=lambda n: left[n])
            for gpu in range(rooms[number] - left[number], rooms[number])[:lacking]:
                where = {"node_id": f"n{number}", "node_ip": "10.0.0.1", "gpu_id": gpu}
                rows.append(BundleBinding.model_validate({"bundle": len(rows), **where}))
                left[number] -= 1
        pools[pool] = in_order(rows)
    try:
        validate_bound_plan(made, pools)
    except PlacementError:
        return False
    return True


APART = plan(
    document(
        "decoupled",
        16,
        ranks=2,
        rollout=engine(2, 1),
        genrm=engine(4, 4),
        teacher=engine(8, 8),
    )
)


def test_a_pool_that_needs_a_whole_node_is_asked_for_first() -> None:
    sizes = {"rollout": 2, "genrm": 4, "teacher": 8, "trainer": 2}
    assert dict(APART.pool_sizes) == sizes
    assert in_need(APART) == ["teacher", "genrm", "rollout", "trainer"]
    assert packed_as_ray_does(APART, in_need(APART), [8, 8])
    assert not packed_as_ray_does(APART, list(sizes), [8, 8])


def test_whole_engines_on_idle_nodes_of_eight_fit_in_the_order_that_they_are_asked_in() -> None:
    """Every decoupled recipe of engines that divide a node, against every spread there is."""
    told: Counter[bool] = Counter()
    for sizes in product((1, 2, 4, 8), repeat=3):
        for many in ((1, 1, 1), (2, 1, 1), (1, 2, 1)):
            gpus = [size * count for size, count in zip(sizes, many, strict=True)]
            ranks = 16 - sum(gpus)
            if ranks < 1:
                continue
            roles = [engine(total, size) for total, size in zip(gpus, sizes, strict=True)]
            made = plan(
                document(
                    *("decoupled", 16),
                    ranks=ranks,
                    rollout=roles[0],
                    genrm=roles[1],
                    teacher=roles[2],
                )
            )
            fits = pinned_fits(made, [node("1"), node("2")])
            packed = packed_as_ray_does(made, in_need(made), [8, 8])
            assert not packed or fits
            told[packed] += fits
    assert told[True] > 50
    assert told[False] == 0


def some_plan(chance: random.Random) -> InferencePlacementPlan | None:
    """None: the planner refuses it."""
    sizes = [chance.choice((1, 2, 3, 4)) for _ in range(2)]
    gpus = [size * chance.randint(1, 3 if size < 3 else 1) for size in sizes]
    mode = chance.choice(("defer", "decoupled", "decoupled"))
    ranks = chance.randint(1, 3)
    total = max(*gpus, ranks) if mode == "defer" else sum(gpus) + ranks
    judge = engine(gpus[1], sizes[1])
    recipe = document(mode, total, ranks=ranks, rollout=engine(gpus[0], sizes[0]), genrm=judge)
    recipe["cluster"]["gpus_per_node"] = chance.choice((2, 3, 4))
    try:
        return plan_inference_placement(read(recipe))
    except PlacementError:
        return None


def test_it_is_refused_just_where_no_spread_at_all_is_legal() -> None:
    chance = random.Random(11)
    told: Counter[tuple[bool, bool]] = Counter()
    while told.total() < 300:
        made = some_plan(chance)
        rooms = [chance.randint(0, 5) for _ in range(chance.randint(1, 4))]
        if made is None or not 0 <= sum(rooms) - made.total_required_gpus <= 2:
            continue
        nodes = [node(f"{n}", gpus=room) for n, room in enumerate(rooms)]
        fits = fits_somehow(made, rooms)
        found = unfit_shape(made, nodes)
        assert not isinstance(found, Undecided)
        assert (found is None) is fits, (rooms, made)
        exact = can_spread(cuts_of(made), Counter(rooms))
        assert exact is fits, (rooms, made)
        assert pinned_fits(made, nodes) is fits, (rooms, made)
        told[fits, made.mode == "decoupled"] += 1
    assert min(told[f, d] for f in (True, False) for d in (True, False)) > 2, told


def test_a_spread_that_neither_order_of_the_pools_finds_is_found() -> None:
    """Three engines of two GPUs: a node of five in full would cut the third."""
    made = plan(document("decoupled", 9, ranks=1, rollout=engine(6, 2), genrm=engine(2, 2)))
    assert [size for _, size in made.pool_sizes] == [6, 2, 1]
    assert unfit_shape(made, [node("1", gpus=5), node("2", gpus=5)]) is None
    nowhere = unfit_shape(made, [node(f"{n}", gpus=1) for n in range(9)])
    assert isinstance(nowhere, PlacementError)
    assert "must be on one node" in nowhere.violations[0].rule


def test_many_nodes_of_one_size_are_decided_at_once() -> None:
    eights = Cuts(512, never=frozenset(n for n in range(512) if n % 8), needed=frozenset())
    pairs = Cuts(64, never=frozenset(range(1, 64, 2)), needed=frozenset())
    assert can_spread([eights, pairs], {8: 72}, looks=2_000) is True
    assert can_spread([eights, pairs], {8: 64, 7: 11, 1: 1}, looks=2_000) is True
    assert can_spread([eights, pairs], {8: 63, 7: 20}, looks=2_000) is False


def test_what_is_not_decided_in_time_is_not_refused() -> None:
    made = plan(document("decoupled", 11, ranks=1, rollout=engine(6, 3), genrm=engine(4, 4)))
    nodes = [node(f"{n}", gpus=3) for n in range(4)]
    assert unfit_shape(made, nodes, looks=0) == Undecided(0)


@pytest.mark.parametrize("rooms", [{}, {0: 4}, {3: 1}])
def test_without_room_there_is_no_spread(rooms: dict[int, int]) -> None:
    assert can_spread([Cuts(4, frozenset(), frozenset())], rooms) is False
    assert can_spread([], rooms) is True
