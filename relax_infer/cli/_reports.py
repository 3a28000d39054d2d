"""The HTML report of a run."""

from pathlib import Path

from relax_infer.cli._errors import CommandError
from relax_infer.cli._recipes import check_run_id
from relax_infer.cli._runs import runs_of
from relax_infer.cli._server import connected
from relax_infer.contracts.run import RunStatus


async def report_of(home: Path, run: str, out: Path, steps: str | None = None) -> Path:
    """Write the report of a run, or of its ``steps`` as ``3-9``. Of the local stack also when
    nothing of it runs any more.

    Raises:
        RelaxError: there is no such run, it has no step yet, or the file cannot be written.
    """
    check_run_id(run)
    try:
        async with connected(home) as server:
            status = (await runs_of(server).glance(run)).run
    except CommandError:
        store = store_with(home, run)
        if store is None:
            raise
        return _write(store, run, out, steps)
    return report(status, out, steps)


def report(run: RunStatus, out: Path, steps: str | None = None) -> Path:
    """Write the report of a run to ``out``.

    Raises:
        CommandError: the run keeps no files yet, or the report cannot be written.
        PermanentError: none of its steps has ended.
    """
    if run.store is None:
        raise CommandError(
            f"Run {run.run} keeps no files: it is {run.state}.",
            cure="Files come with its first step; `relax-infer status` says where it stands.",
        )
    return _write(run.store, run.run, out, steps)


def store_with(home: Path, run: str) -> str | None:
    """URL of the local stack's store, if it keeps steps of that run."""
    store = home.resolve() / "store"
    return store.as_uri() if (store / run / "steps").is_dir() else None


def _write(store_url: str, run: str, out: Path, steps: str | None) -> Path:
    from relax_infer.report import write_report

    try:
        return write_report(store_url, run, out, steps)
    except OSError as error:
        raise CommandError(
            f"The report {out} cannot be written: {error}.", cure="Name another file."
        ) from error
