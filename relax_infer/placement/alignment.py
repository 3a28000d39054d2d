"""Where engines may begin in their nodes: one rule for every mode and for the layout script.

An engine that a node can hold does not cross its end; where its size divides the node, it begins at
a multiple of its size, so that its GPUs are neighbours. A larger one has whole nodes.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """Engines of one size, one after another without a gap."""

    engines: int
    size: int
    """GPUs of one engine."""

    @property
    def gpus(self) -> int:
        return self.engines * self.size


def may_begin(size: int, bundle: int, node: int) -> bool:
    """Whether an engine may begin there; this is the rule.

    Args:
        size: GPUs of the engine.
        bundle: its first, counted from a node's first.
        node: GPUs of a node.
    """
    within = bundle % node
    if size >= node:
        return within == 0
    return within % size == 0 if node % size == 0 else within + size <= node


def can_line_up(row: Row, node: int) -> bool:
    """Whether there is any bundle at which the row may begin."""
    if row.size >= node:
        return row.size % node == 0
    # Of a size that does not divide the node, engines end with one node and begin with the next.
    return node % row.size == 0 or row.engines <= 2 * (node // row.size)


def first_start(row: Row, cursor: int, node: int) -> int:
    """The lowest bundle from ``cursor`` on at which the row may begin; a node's first where it
    may begin nowhere."""
    size = row.size
    if size >= node or not can_line_up(row, node):
        return -(-cursor // node) * node
    if node % size == 0:
        return -(-cursor // size) * size
    left = node - cursor % node
    if row.gpus <= left:
        return cursor
    # The first engines end with this node: `kept` of its bundles, and the others fit the next.
    kept = left // size * size
    if kept and row.gpus - kept <= node:
        return cursor + left - kept
    border = cursor + left
    most = node // size * size
    return border if row.gpus <= node else border + node - most


def line_up(rows: Iterable[Row], cursor: int, node: int) -> tuple[tuple[int, ...], int]:
    """First bundle of each row, one after another from ``cursor`` on, and the bundle after the
    last. Each row is as low as the one before it allows."""
    starts: list[int] = []
    for row in rows:
        starts.append(first_start(row, cursor, node))
        cursor = starts[-1] + row.gpus
    return tuple(starts), cursor
