"""What holds for every test."""

import ast
import os
import signal
import sys
from functools import wraps
from typing import Any

import pytest

# A shell that starts pytest in the background has it ignore Ctrl-C, and whatever it starts too;
# tests that interrupt a program need it to be heard.
signal.signal(signal.SIGINT, signal.default_int_handler)

# As the local stack gives it to its Temporal server, for the servers that tests start.
os.environ.setdefault("GOGC", "400")
# Lanes of tests share few cores; on one thread such a server takes a third less of them.
os.environ.setdefault("GOMAXPROCS", "1")

if sys.version_info < (3, 11, 8):
    # Two threads that parse at once confuse this Python's parser (CPython issue 106905): a test
    # that has pytest or Hypothesis look at its source fails then, or ends the session.
    _parse = ast.parse

    @wraps(_parse)
    def _parse_again(*args: Any, **kwargs: Any) -> ast.AST:
        for _ in range(20):
            try:
                return _parse(*args, **kwargs)
            except SystemError as error:
                if "recursion depth mismatch" not in str(error):
                    raise
        return _parse(*args, **kwargs)

    ast.parse = _parse_again  # type: ignore[assignment]

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
