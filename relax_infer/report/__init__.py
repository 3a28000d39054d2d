"""One self-contained HTML file about a run, from its step records and staged samples alone."""

from pathlib import Path


def write_report(store_url: str, run: str, out: Path, steps: str | None = None) -> Path:
    """Write the report of ``run`` to ``out``; returns the file.

    Args:
        steps: which of them, as ``3-9``; None: all.

    Raises:
        PermanentError: the store has no record of those steps, or ``steps`` is no range.
    """
    from relax_infer.report.page import page
    from relax_infer.report.records import ALL, StepRange, read_records

    wanted = ALL if steps is None else StepRange.parse(steps)
    text = page(read_records(store_url, run, wanted))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8")
    return out


__all__ = ["write_report"]
