"""Where engines may begin: one rule, against every start there is, in each mode and by script."""

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import pytest

from relax_infer.placement import PlacementError
from relax_infer.placement.alignment import Row, can_line_up, first_start, line_up, may_begin
from relax_infer.placement.layout import Block, Layout, parse_layout, plan_layout
from tests.placement.recipes import document, engine, plan, refused, slices

SIDE_BY_SIDE = "rollout + genrm + teacher -> actor"


def legal(row: Row, start: int, node: int) -> bool:
    """By the words of docs/placement.md, bundle by bundle."""
    for first in range(start, start + row.gpus, row.size):
        nodes = [bundle // node for bundle in range(first, first + row.size)]
        if row.size >= node:
            if first % node or row.size % node:
                return False
        elif len(set(nodes)) > 1 or (node % row.size == 0 and first % node % row.size):
            return False
    return True


def test_a_row_begins_at_the_lowest_bundle_that_is_legal() -> None:
    for node, size, engines in product(range(1, 9), range(1, 17), range(1, 9)):
        row = Row(engines, size)
        starts = [start for start in range(3 * node) if legal(row, start, node)]
        assert can_line_up(row, node) is bool(starts), (row, node)
        for cursor in range(2 * node) if starts else ():
            lowest = next(start for start in starts if start >= cursor)
            assert first_start(row, cursor, node) == lowest, (row, node, cursor)
            assert all(may_begin(size, lowest + k * size, node) for k in range(engines))


def test_rows_are_lined_up_one_after_another() -> None:
    assert line_up([Row(1, 2), Row(1, 3), Row(1, 3)], 0, 8) == ((0, 2, 5), 8)
    assert line_up([Row(1, 1), Row(1, 4), Row(1, 16)], 0, 8) == ((0, 4, 8), 24)
    assert line_up([], 3, 8) == ((), 3)


@pytest.mark.parametrize("mode", ["split", "defer"])
def test_the_script_places_engines_that_do_not_divide_a_node_as_the_mode_does(mode: str) -> None:
    roles = document(mode, rollout=engine(2, 2), genrm=engine(3, 3), teacher=engine(3, 3))
    wanted = [
        ("rollout", "policy", 0, 2),
        ("genrm", "judge", 2, 5),
        ("teacher", "teacher", 5, 8),
    ]
    assert slices(plan(roles, layout=SIDE_BY_SIDE, mode="split")) == wanted
    shares = "rollout[1/4] + genrm[3/8] + teacher[3/8] -> actor[/]"
    assert slices(plan(roles, layout=shares, mode="split")) == wanted
    assert slices(plan(roles, mode="split")) == wanted


def test_engines_end_with_one_node_and_begin_with_the_next() -> None:
    """Four engines of three on nodes of eight, two on each."""
    made = plan(document("decoupled", 24, ranks=8, rollout=engine(12, 3)))
    assert slices(made) == [("rollout", "policy", 2, 14)]
    (found,) = refused(document(gpus=24, rollout=engine(15, 3)))
    assert "5 engines of 3 GPUs, one after another, would cross" in found.rule


def test_a_row_that_cannot_begin_at_the_first_bundle_needs_more_of_the_pool() -> None:
    """Six engines of two on nodes of seven: three on each, and the first bundle is free."""
    recipe = document(gpus=12, rollout=engine(12, 2), ranks=12)
    recipe["cluster"]["gpus_per_node"] = 7
    (found,) = refused(recipe)
    assert "needs 13 GPUs (rollout=12, 1 unused so that engines begin" in found.rule
    assert slices(plan(recipe, cluster__gpus=13)) == [("rollout", "policy", 1, 13)]


def spans(
    rows: Sequence[Row], node: int, pool: int, cursor: int = 0
) -> Iterator[tuple[tuple[int, int], ...]]:
    """Every way to have the rows, in their order, in legal places of the pool."""
    if not rows:
        yield ()
        return
    row, *others = rows
    for start in range(cursor, pool - row.gpus + 1):
        if legal(row, start, node):
            for more in spans(others, node, pool, start + row.gpus):
                yield ((start, start + row.gpus), *more)


def there_is_a_layout(script: str, pool: int, blocks: Mapping[str, Block]) -> bool:
    """By brute force: a role keeps its slots and is beside nobody's in any of its phases."""
    phases = [{holder.role for holder in phase} for phase in parse_layout(script)]
    shared = {holder.role for phase in parse_layout(script) for holder in phase if holder.share}
    roles = list(dict.fromkeys(role for phase in phases for role in sorted(phase)))
    beside = {(a, b) for phase in phases for a in phase for b in phase if a != b}

    def search(left: list[str], held: dict[str, tuple[int, int]]) -> bool:
        if not left:
            return True
        role, *others = left
        block = blocks[role]
        tried: set[tuple[int, int]] = set()
        for found in spans(block.rows, block.node, pool):
            first, last = found[0][0], found[-1][1]
            if (first, last) in tried or (role in shared and last - first > block.gpus):
                continue
            tried.add((first, last))
            near = [held[other] for other in held if (role, other) in beside]
            if all(last <= low or first >= high for low, high in near) and search(
                others, held | {role: (first, last)}
            ):
                return True
        return False

    return search(roles, {})


SCRIPTS = [
    SIDE_BY_SIDE,
    "rollout + genrm -> genrm + teacher -> actor",
    "rollout + genrm -> teacher + actor",
    "genrm[{genrm}/{pool}] + rollout -> teacher[{teacher}/{pool}] + genrm -> actor",
]


def test_a_script_is_laid_out_just_where_some_layout_is_legal() -> None:
    chance = random.Random(5)
    told: Counter[bool] = Counter()
    while min(told[True], told[False]) < 150:
        node = chance.choice((3, 4, 5, 6))
        pool = node * chance.choice((1, 2)) + chance.choice((0, 0, 1))

        def rows(most: int, node: int = node) -> tuple[Row, ...]:
            sizes = [*range(1, node + 1), 2 * node]
            count = chance.randint(1, most)
            return tuple(Row(chance.randint(1, 2), chance.choice(sizes)) for _ in range(count))

        blocks = {role: Block(rows(2), node, role) for role in ("rollout", "genrm", "teacher")}
        blocks["trainer"] = Block((Row(chance.randint(1, pool), 1),), node, "ranks")
        shares = {role: block.gpus for role, block in blocks.items()}
        if max(shares.values()) > pool or not all(
            can_line_up(row, node) for block in blocks.values() for row in block.rows
        ):
            continue
        script = chance.choice(SCRIPTS).format(pool=pool, **shares)
        made = plan_layout(script, pool, blocks)
        fits = there_is_a_layout(script, pool, blocks)
        assert isinstance(made, Layout) is fits, (script, pool, blocks)
        if isinstance(made, Layout):
            for role, starts in made.starts.items():
                mine = zip(blocks[role].rows, starts, strict=True)
                assert all(legal(row, start, node) for row, start in mine)
        told[fits] += 1


def test_split_places_just_what_its_order_of_roles_allows_and_so_does_the_script() -> None:
    chance = random.Random(7)
    told: Counter[bool] = Counter()
    while min(told[True], told[False]) < 60:
        node = chance.choice((3, 4, 6, 8))
        pool = node * chance.choice((1, 2))
        rows = [Row(chance.randint(1, 2), chance.randint(1, node)) for _ in range(3)]
        engines: list[dict[str, Any]] = [engine(row.gpus, row.size) for row in rows]
        recipe = document("split", pool, rollout=engines[0], genrm=engines[1], teacher=engines[2])
        recipe["cluster"]["gpus_per_node"] = node
        fits = any(True for _ in spans(rows, node, pool))
        try:
            made = plan(recipe)
        except PlacementError:
            assert not fits, (node, pool, rows)
        else:
            assert fits, (node, pool, rows)
            assert made.mode == plan(recipe, layout=SIDE_BY_SIDE).mode == "split"
        told[fits] += 1
