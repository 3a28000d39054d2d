"""What the project's own code names, read from its syntax."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
CODE = ("relax_infer", "activities", "workflows", "workers")


def modules_that_name(name: str) -> set[str]:
    """Dotted names of the modules of the project that use or import ``name``."""
    found: set[str] = set()
    for path in (p for folder in CODE for p in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            named = {
                ast.Name: lambda n: {n.id},
                ast.Attribute: lambda n: {n.attr},
                ast.ImportFrom: lambda n: {alias.name for alias in n.names},
            }.get(type(node))
            if named is not None and name in named(node):
                found.add(".".join(path.relative_to(ROOT).with_suffix("").parts))
    return found
