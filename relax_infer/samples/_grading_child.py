"""The process that graders run in: ``python -m relax_infer.samples._grading_child KIND``.

Reads one question as JSON per line, answers one line: ``{"score": number}``, or ``{"unscored":
why}``. A grader parses, and sometimes evaluates, what a policy wrote: here it has no more memory
than a limit, and may be killed.
"""

import contextlib
import json
import os
import resource
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

MEMORY = 4 << 30
"""Bytes of address space."""
_SECONDS = 5
"""For one parse or one comparison of math-verify, by an alarm of its own."""

Question = dict[str, Any]


class CannotSay(Exception):
    """Why there is no score."""


def math_verify() -> Callable[[Question], float]:
    """1.0 where the response's last expression equals the right answer, else 0.0."""
    from math_verify import parse, verify
    from math_verify.errors import TimeoutException

    def grade(question: Question) -> float:
        right = question["answer"]
        try:
            gold = parse(f"${right}$", parsing_timeout=_SECONDS, raise_on_error=True)
            gold = gold or parse(right, parsing_timeout=_SECONDS, raise_on_error=True)
        except (Exception, TimeoutException) as error:
            raise CannotSay(f"the right answer cannot be parsed: {error or right!r}") from error
        if not gold:
            raise CannotSay(f"the right answer cannot be parsed: {right!r}")
        try:
            try:
                given = parse(question["text"], parsing_timeout=_SECONDS, raise_on_error=True)
            except Exception:
                return 0.0  # not an expression: a wrong answer, not a failed score
            same = verify(gold, given, timeout_seconds=_SECONDS, raise_on_error=True)
        except (Exception, TimeoutException) as error:
            kind = type(error).__name__
            raise CannotSay(f"the response cannot be compared: {kind}: {error}") from error
        return float(same)

    return grade


def reasoning_gym() -> Callable[[Question], float]:
    """The dataset's own score of the text between the response's last answer tags."""
    from reasoning_gym import create_dataset
    from reasoning_gym.utils import extract_answer

    made: dict[str, Any] = {}

    def grade(question: Question) -> float:
        key = json.dumps([question["dataset"], question["config"]], sort_keys=True)
        if key not in made:
            made[key] = create_dataset(question["dataset"], **question["config"])
        entry = made[key][question["index"]]
        if str(entry["answer"]) != question["answer"]:
            raise CannotSay(
                f"problem {question['index']} of {question['dataset']} is another one here:"
                " another version of reasoning-gym made the prompt"
            )
        return float(made[key].score_answer(extract_answer(question["text"]), entry))

    return grade


KINDS = {"math_verify": math_verify, "reasoning_gym": reasoning_gym}


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a grader prints is no answer
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    grade = KINDS[sys.argv[1]]()
    answers.write(json.dumps({"ready": sys.argv[1]}) + "\n")
    for line in sys.stdin:
        try:
            answer: dict[str, Any] = {"score": grade(json.loads(line))}
        except CannotSay as error:
            answer = {"unscored": str(error)}
        except Exception as error:
            answer = {"unscored": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")


def _end_with(parent: int) -> None:
    """A question that never ends must not outlive the worker that asked it."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main()
