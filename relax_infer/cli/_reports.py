"""The HTML report of a run."""

from pathlib import Path

from relax_infer.cli._errors import CommandError
from relax_infer.contracts.run import RunStatus


def report(run: RunStatus, out: Path) -> Path:
    """Write the report of a run to ``out``.

    Raises:
        CommandError: the run keeps no files yet.
        PermanentError: none of its steps has ended.
    """
    from relax_infer.report import write_report

    if run.store is None:
        raise CommandError(
            f"Run {run.run} keeps no files: it is {run.state}.", cure="Wait for its first step."
        )
    return write_report(run.store, run.run, out)
