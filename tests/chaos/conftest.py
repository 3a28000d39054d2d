"""The stack of the end-to-end tests, and what is needed to hurt it."""

import pytest

from tests.chaos.harm import TABLE
from tests.e2e.conftest import _nothing_runs_on, client, ray, stack

__all__ = ["_nothing_runs_on", "client", "ray", "stack"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The table of docs/reliability.md, as this run measured it."""
    if TABLE:
        terminalreporter.section("harm and healing")
        terminalreporter.line(
            "| harm | noticed, s | whole again, s | leases meanwhile | the step |"
        )
        terminalreporter.line("| --- | --- | --- | --- | --- |")
        for healing in TABLE:
            terminalreporter.line(healing.row())
