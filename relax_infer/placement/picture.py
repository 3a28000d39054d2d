"""A plan as a picture: a row for each node, a cell for each GPU and phase, coloured by role."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape

from relax_infer.contracts.counted import counted
from relax_infer.placement.placed import InferencePlacementPlan, Phase, Placement, Slot

COLOURS: Mapping[str, str] = {
    "rollout": "#2f6fde",
    "genrm": "#d9822b",
    "teacher": "#7b4fc9",
    "trainer": "#1d9a6c",
    "critic": "#c2417c",
    "reference": "#14a3b8",
    "actor_fwd": "#8a94a6",
}
LETTERS: Mapping[str, str] = {
    "rollout": "R",
    "genrm": "G",
    "teacher": "T",
    "trainer": "A",
    "critic": "C",
    "reference": "F",
    "actor_fwd": "W",
}
"""Where there is no colour. A is the actor that is trained, as in layout scripts."""
_TITLES = {
    "inference": "generate, evaluate",
    "genrm_score": "judge",
    "teacher_score": "teach",
    "critic_train": "train the critic",
}

_INK, _QUIET, _PAPER, _IDLE = "#1c2430", "#667085", "#ffffff", "#e4e7ec"
_CELL, _GAP, _BETWEEN, _ROW = 16, 2, 14, 22
_TOP, _LABEL, _EDGE = 44, 96, 12
_LETTER_WIDTH = 5.6
"""Of text of 10 pixels, on average."""


@dataclass(frozen=True)
class Cell:
    """A GPU that is held."""

    role: str
    who: str
    """Engine or rank, for a person."""
    begins: bool
    """Whether it is the first on its node of its engine, or of all the ranks of its role."""


@dataclass(frozen=True)
class NodeRow:
    """A node of a pool."""

    pool: str
    node: int
    """From 0 within the pool."""
    phases: tuple[tuple[Cell | None, ...], ...]
    """For each phase a cell for each GPU; None: nobody holds it."""


def node_rows(plan: InferencePlacementPlan) -> list[NodeRow]:
    """Every node of every pool, in the plan's order."""
    pools = dict(plan.pool_sizes)
    held: list[dict[str, list[Cell | None]]] = []
    for phase in plan.phases:
        cells: dict[str, list[Cell | None]] = {p: [None] * size for p, size in pools.items()}
        for slot in phase.slots:
            for bundle, cell in _cells(plan, slot):
                cells[slot.pool][bundle] = cell
        held.append(cells)
    return [
        NodeRow(pool, node, tuple(tuple(c[pool][start : start + plan.gpus_per_node]) for c in held))
        for pool, size in pools.items()
        for node, start in enumerate(range(0, size, plan.gpus_per_node))
    ]


def phase_title(phase: Phase) -> str:
    return _TITLES.get(phase.name, phase.name)


def node_label(plan: InferencePlacementPlan, row: NodeRow) -> str:
    """Its number; with the pool where there are several."""
    return f"{row.pool} {row.node}" if len(plan.pool_sizes) > 1 else f"node {row.node}"


def legend(plan: InferencePlacementPlan) -> list[tuple[str, str]]:
    """(role, what it is) for each group of engines and each training role, once."""
    lines: dict[tuple[str, str], None] = {}
    for phase in plan.phases:
        for slot in phase.slots:
            name = slot.role if slot.model_id is None else f"{slot.role} {slot.model_id}"
            lines[slot.role, f"{name}: {slot_size(plan, slot)}"] = None
    return list(lines)


def slot_size(plan: InferencePlacementPlan, slot: Slot) -> str:
    """Engines and their GPUs, or ranks, in words."""
    placement = _placement(plan, slot)
    if placement is None:
        return counted(slot.bundle_stop - slot.bundle_start, "rank")
    kind = "" if placement.worker_type == "regular" else f"{placement.worker_type} "
    nodes = placement.nodes_per_engine
    over = f" over {nodes} nodes" if nodes > 1 else ""
    return f"{placement.replicas} {kind}x {counted(placement.gpus_per_engine, 'GPU')}{over}"


def placement_svg(plan: InferencePlacementPlan, *, inline: bool = False) -> str:
    """The picture as SVG.

    Args:
        plan: of any size; a cell is drawn for every GPU and phase.
        inline: to stand in a page that has colours of its own: without a background and without
            the namespace that a file of its own needs.
    """
    rows, labels = node_rows(plan), legend(plan)
    titles = [phase_title(phase) for phase in plan.phases]
    cells = plan.gpus_per_node * (_CELL + _GAP)
    widths = [max(cells, int(len(title) * _LETTER_WIDTH) + 4) for title in titles]
    lefts = [_LABEL + sum(widths[:k]) + k * _BETWEEN for k in range(len(widths))]
    where = f"{len(rows)} nodes" if len(rows) != 1 else "one node"
    head = f"mode {plan.mode}, {counted(plan.total_required_gpus, 'GPU')} on {where}"
    longest = max((len(text) for _, text in labels), default=0)
    texts = max(len(head) * _LETTER_WIDTH, longest * _LETTER_WIDTH + 24)
    width = int(max(sum(widths) + _LABEL + len(widths) * _BETWEEN, texts + _EDGE)) + _EDGE
    bottom = _TOP + len(rows) * _ROW + 8
    height = bottom + len(labels) * 18 + _EDGE
    parts = [] if inline else [f'<rect width="{width}" height="{height}" fill="{_PAPER}"/>']
    parts.append(_text(_EDGE, 16, head, _INK))
    parts += [_text(x, 36, title, _QUIET) for x, title in zip(lefts, titles, strict=True)]
    for number, row in enumerate(rows):
        y = _TOP + number * _ROW
        parts.append(_text(_EDGE, y + 12, node_label(plan, row), _QUIET))
        for x, gpus in zip(lefts, row.phases, strict=True):
            parts += (_gpu(x + k * (_CELL + _GAP), y, k, cell) for k, cell in enumerate(gpus))
    for number, (role, text) in enumerate(labels):
        y = bottom + number * 18
        parts.append(_gpu(_EDGE, y, None, Cell(role, text, begins=True)))
        parts.append(_text(_EDGE + 24, y + 12, text, _INK))
    namespace = "" if inline else 'xmlns="http://www.w3.org/2000/svg" '
    return (
        f'<svg {namespace}viewBox="0 0 {width} {height}" role="img"'
        f' style="max-width:{width}px" font-family="system-ui,sans-serif" font-size="10">\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _cells(plan: InferencePlacementPlan, slot: Slot) -> Iterator[tuple[int, Cell]]:
    placement = _placement(plan, slot)
    for offset, bundle in enumerate(range(slot.bundle_start, slot.bundle_stop)):
        if placement is None:
            begins = offset == 0 or bundle % plan.gpus_per_node == 0
            yield bundle, Cell(slot.role, f"{slot.role} rank {offset}", begins)
            continue
        who = f"{slot.role} {slot.model_id} #{offset // placement.gpus_per_engine}"
        yield bundle, Cell(slot.role, who, begins=offset % placement.gpus_per_worker == 0)


def _placement(plan: InferencePlacementPlan, slot: Slot) -> Placement | None:
    key = (slot.role, slot.model_id, slot.group_id)
    return next((p for p in plan.placements if (p.role, p.model_id, p.group_id) == key), None)


def _gpu(x: int, y: int, number: int | None, cell: Cell | None) -> str:
    colour = _IDLE if cell is None else COLOURS[cell.role]
    who = "free" if cell is None else cell.who
    title = who if number is None else f"GPU {number}: {who}"
    box = (
        f'<rect x="{x}" y="{y}" width="{_CELL}" height="{_CELL}" rx="2" fill="{colour}">'
        f"<title>{escape(title)}</title></rect>"
    )
    if cell is None or not cell.begins:
        return box
    return box + (
        f'<text x="{x + _CELL // 2}" y="{y + 12}" text-anchor="middle" style="fill:{_PAPER}">'
        f"{LETTERS[cell.role]}</text>"
    )


def _text(x: int, y: int, text: str, colour: str) -> str:
    return f'<text x="{x}" y="{y}" fill="{colour}">{escape(text)}</text>'
