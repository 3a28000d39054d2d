"""The state diagrams of the documentation, made from the tables.

``python -m relax_infer.machines.diagrams docs/state-machines.md`` writes the page; a test fails
when the page and the tables differ.
"""

import inspect
import sys
from enum import StrEnum
from pathlib import Path
from typing import cast

from relax_infer.machines import ALL, Machine

_HEAD = """# State machines

Made from the tables in `relax_infer/machines` by `make diagrams`; do not edit.
One function, `Machine.advance`, changes a state; an event that a table does not list is refused
with what would be legal. States with a bold border hold GPUs: whoever is in one must be taken to
hold them until an event that names its proof.
"""


def page() -> str:
    """The whole page."""
    return "\n".join([_HEAD, *(_section(machine) for machine in ALL)])


def _section(table: object) -> str:
    machine = cast("Machine[StrEnum, StrEnum]", table)
    parts = [f"## {machine.name}\n", "```mermaid", "stateDiagram-v2"]
    parts.append(f"    [*] --> {machine.initial}")
    joined: dict[tuple[str, str], list[str]] = {}
    for (source, event), target in machine.transitions.items():
        joined.setdefault((source, target), []).append(event)
    for (source, target), events in joined.items():
        parts.append(f"    {source} --> {target}: {', '.join(events)}")
    parts += [f"    {state} --> [*]" for state in machine.states if state in machine.terminal]
    holding = [state for state in machine.states if machine.holds(state)]
    if holding:
        parts.append("    classDef holds stroke-width:3px")
        parts.append(f"    class {','.join(holding)} holds")
    parts.append("```\n")
    described = _documentation(machine.states)
    parts += [f"- **{state}**: {described[state]}" for state in machine.states if described[state]]
    if machine.forbidden:
        parts.append("\nEdges that must not exist:\n")
        parts += [f"- {s} on {e}: {why}" for (s, e), why in machine.forbidden.items()]
    return "\n".join(parts) + "\n"


def _documentation(states: type[StrEnum]) -> dict[str, str]:
    """The line that stands under each member in the source."""
    found = dict.fromkeys((str(s) for s in states), "")
    current = ""
    for line in inspect.getsource(states).splitlines():
        text = line.strip()
        name = text.partition(" = ")[0]
        if name in found:
            current = name
        elif text.startswith('"""') and current:
            found[current] = text.strip('"')
            current = ""
    return found


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
