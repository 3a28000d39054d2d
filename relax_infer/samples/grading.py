"""Graders that parse what a policy wrote, in a process of their own that may be killed.

A response can be an expression that takes a computer algebra system for ever, or all memory. Then
there is no score, and a reason; it is not 0.
"""

import atexit
import json
import math
import os
import select
import subprocess
import sys
import threading
import time
from functools import cache
from typing import Any, Literal

from relax_infer.contracts.failures import PermanentError
from relax_infer.samples.tasks import Unscored

Kind = Literal["math_verify", "reasoning_gym"]
START_TIMEOUT = 180.0
"""Seconds for the grader's imports, on a busy machine."""
TIMEOUT = 20.0
"""Seconds for one response; math-verify gives up by itself before."""
_PACKAGE = {"math_verify": "math-verify", "reasoning_gym": "reasoning-gym"}


class Grader:
    """One grading process, started at the first question and again after it was killed.

    Safe to use from several threads; questions are answered one after another.
    """

    def __init__(self, kind: Kind, *, timeout: float = TIMEOUT) -> None:
        self._kind, self._timeout = kind, timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._read = b""
        self._one_at_a_time = threading.Lock()

    def grade(self, question: dict[str, Any]) -> float:
        """A finite score.

        Raises:
            Unscored: the grader cannot say, took too long, or died of the question.
            PermanentError: the grader does not start.
        """
        with self._one_at_a_time:
            process = self._started()
            try:
                assert process.stdin is not None
                process.stdin.write(json.dumps(question).encode() + b"\n")
                process.stdin.flush()
                answer = self._line(self._timeout)
            except (TimeoutError, OSError, EOFError) as error:
                self._kill()
                why = str(error) or type(error).__name__
                raise Unscored(f"{self._kind} could not grade: {why}") from None
        if "unscored" in answer:
            raise Unscored(f"{self._kind} could not grade: {answer['unscored']}")
        score = answer["score"]
        if isinstance(score, bool) or not isinstance(score, (int, float)):
            raise Unscored(f"{self._kind} could not grade: its score is {score!r}")
        if not math.isfinite(score):
            raise Unscored(f"{self._kind} could not grade: its score is {score}")
        return float(score)

    def close(self) -> None:
        """End the process."""
        with self._one_at_a_time:
            self._kill()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._kill()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "relax_infer.samples._grading_child", self._kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        try:
            self._line(START_TIMEOUT)
        except (TimeoutError, OSError, EOFError) as error:
            self._kill()
            package = _PACKAGE[self._kind]
            raise PermanentError(
                f"The grader {self._kind} does not start: {str(error) or type(error).__name__}.",
                cure=f"Is {package} installed? Try: python -c 'import {self._kind}'",
            ) from None
        return self._process

    def _line(self, seconds: float) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        until = time.monotonic() + seconds
        while b"\n" not in self._read:
            left = until - time.monotonic()
            if left <= 0 or not select.select([descriptor], [], [], left)[0]:
                raise TimeoutError(f"it took more than {seconds:g} s")
            piece = os.read(descriptor, 1 << 16)
            if not piece:
                raise EOFError("its process ended")
            self._read += piece
        line, _, self._read = self._read.partition(b"\n")
        return json.loads(line)

    def _kill(self) -> None:
        process, self._process, self._read = self._process, None, b""
        if process is not None:
            process.kill()
            process.communicate()


@cache
def grader(kind: Kind) -> Grader:
    """This process's grader of that kind."""
    made = Grader(kind)
    atexit.register(made.close)
    return made
