"""What holds for every test."""

import os
import signal
import sys

import pytest

# A shell that starts pytest in the background has it ignore Ctrl-C, and whatever it starts too;
# tests that interrupt a program need it to be heard.
signal.signal(signal.SIGINT, signal.default_int_handler)

_STATUS = pytest.StashKey[int]()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    session.config.stash[_STATUS] = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Threads of native libraries (the Temporal SDK's, Ray's, Arrow's) can crash an interpreter
    that is being taken down, after every test has passed and every fixture has ended; so it is
    not taken down."""
    status = config.stash.get(_STATUS, None)
    if status is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
