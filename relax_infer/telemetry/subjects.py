"""What a line, a span or a sample of a metric is about: the same six names everywhere."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

FIELDS = ("run", "step", "phase", "role", "replica", "fence")
"""In the order in which they are written; one that is not known is null."""

Subject = Mapping[str, str | int | None]

_process: dict[str, str | int | None] = {}
_here: ContextVar[Subject] = ContextVar("subject", default={})  # noqa: B039 - never changed

_STEP = re.compile(r"(?P<run>.+)\.(?:step|weights)-(?P<step>\d+)")
_REPLICA = re.compile(r"(?P<run>.+?)\.(?P<role>\w+)\.(?P<model>.+)\.replica-(?P<replica>\d+)\..+")
_ROLE = re.compile(r"(?P<run>.+?)\.(?P<role>rollout|genrm|teacher)(?:\..+)?")
_LEASE = re.compile(r"(?P<run>.+)\.lease(?:-.+)?")


def about_process(**fields: str | int | None) -> None:
    """What everything in this process is about, whatever thread or task says it."""
    _process.update(_known(fields))


@contextmanager
def about(**fields: str | int | None) -> Iterator[None]:
    """What everything in this task is about while the block runs; fields that are None say
    nothing."""
    token = _here.set({**_here.get(), **_known(fields)})
    try:
        yield
    finally:
        _here.reset(token)


def subject() -> dict[str, str | int | None]:
    """Of the line that is written now: the task's own before the process's."""
    return {**_process, **_here.get()}


def subject_of_workflow(workflow_id: str) -> dict[str, str | int | None]:
    """What a workflow is about, as its id tells: see the table of ids in docs/architecture.md."""
    for pattern in (_STEP, _REPLICA, _ROLE, _LEASE):
        if match := pattern.fullmatch(workflow_id):
            found = match.groupdict()
            found.pop("model", None)
            numbers = {key: int(found[key]) for key in ("step", "replica") if key in found}
            return {**found, **numbers}
    return {"run": workflow_id}


def _known(fields: Subject) -> dict[str, str | int | None]:
    if unknown := fields.keys() - set(FIELDS):
        raise ValueError(f"{sorted(unknown)[0]} is none of {', '.join(FIELDS)}")
    return {key: value for key, value in fields.items() if value is not None}
