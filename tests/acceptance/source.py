"""What the project's own code names."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
CODE = ("relax_infer", "activities", "workflows", "workers")


def modules_that_name(name: str) -> set[str]:
    """Dotted names of the modules of the project in which the word ``name`` is."""
    word = re.compile(rf"\b{re.escape(name)}\b")
    paths = (path for folder in CODE for path in (ROOT / folder).rglob("*.py"))
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in paths
        if word.search(path.read_text())
    }
