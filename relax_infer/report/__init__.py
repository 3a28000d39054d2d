"""One self-contained HTML file about a run, from its step records alone."""

from pathlib import Path


def write_report(store_url: str, run: str, out: Path) -> Path:
    """Write the report of ``run`` to ``out``; returns the file.

    Raises:
        PermanentError: the store has no step record of that run.
    """
    from relax_infer.report.page import page
    from relax_infer.report.records import read_records

    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page(read_records(store_url, run)), encoding="utf-8")
    return out


__all__ = ["write_report"]
