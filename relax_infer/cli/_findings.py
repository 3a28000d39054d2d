"""How findings are shown: a line each, or JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict

import typer

from relax_infer.placement.findings import Finding, Result

_MARKS: dict[Result, tuple[str, str]] = {
    "ok": ("ok", "green"),
    "note": ("note", "yellow"),
    "missing": ("MISSING", "red"),
}


def show_findings(findings: Sequence[Finding], *, as_json: bool) -> None:
    """A line each, or JSON."""
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
        return
    for finding in findings:
        mark, colour = _MARKS[finding.result]
        cure = f" {finding.cure}" if finding.cure else ""
        head = typer.style(f"{mark:<8}", fg=colour) + (finding.field or finding.name)
        typer.echo(f"{head}: {finding.text}{cure}")
