"""Structured logs: one JSON object a line in files, words and colours in a terminal.

Every module logs with the standard library (``logging.getLogger(__name__)``); what a line is about
comes from :mod:`relax_infer.telemetry.subjects`, so no call has to say it.
"""

import logging
import os
import sys
import time
from collections.abc import Callable, MutableMapping, Sequence
from pathlib import Path
from typing import Any, Literal

from relax_infer.telemetry.redaction import hide_secrets, remember_environment
from relax_infer.telemetry.subjects import FIELDS, about_process, subject

Format = Literal["json", "text"]
EventDict = MutableMapping[str, Any]
Processor = Callable[[Any, str, EventDict], EventDict]

FIRST = ("time", "level", "event", "logger", *FIELDS)
"""Keys of a line, in this order; further ones follow. ``time`` is ISO 8601 in UTC."""


_OURS = "of_relax"


class _Stderr(logging.StreamHandler[Any]):
    """To whatever stderr is when a line is written."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:
        return sys.stderr


def configure_logs(
    *,
    to: Path | None = None,
    only: str | None = None,
    processors: Sequence[Processor] = (),
    **fields: str | int | None,
) -> None:
    """Logging of this process, from now on.

    RELAX_LOG_LEVEL (INFO) says what is written, RELAX_LOG_FORMAT (``json`` or ``text``) how; by
    default JSON, and text where stderr is a terminal.

    Args:
        to: file to append to, whole lines at once; None: stderr.
        only: name of the one logger to configure, where the process's root logger belongs to
            others (SGLang's, Ray's); its lines are not passed on to the root.
        processors: run before the line is completed; for what a framework attaches to a record.
        fields: run, step, phase, role, replica, fence, as far as everything here is about them.
    """
    about_process(**fields)
    remember_environment()
    handler: logging.Handler
    if to is None:
        handler = _Stderr()
    else:
        to.parent.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(to)
    handler.setFormatter(formatter(_format(to), processors))
    logger = logging.getLogger(only)
    for earlier in [each for each in logger.handlers if getattr(each, _OURS, False)]:
        logger.removeHandler(earlier)
        earlier.close()
    setattr(handler, _OURS, True)
    logger.addHandler(handler)
    logger.setLevel(os.environ.get("RELAX_LOG_LEVEL", "INFO").upper())
    logger.propagate = only is None


def formatter(style: Format, processors: Sequence[Processor] = ()) -> logging.Formatter:
    """Of a handler, for records of any logger."""
    import structlog  # an engine's own interpreter may be without it

    shared: list[Processor] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(),
        *processors,
        _complete,
    ]
    if style == "json":
        last: list[Any] = [structlog.processors.format_exc_info, hide_secrets, _in_order]
        last.append(structlog.processors.JSONRenderer(ensure_ascii=False, default=str))
    else:
        last = [structlog.processors.format_exc_info, hide_secrets, as_text]
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
    )


def as_text(_logger: Any, _method: str, event: EventDict) -> str:
    """A line for people: time, level, words, then what is known besides as ``name=value``."""
    told = dict(event)
    at, level = str(told.pop("time", "")), str(told.pop("level", "info"))
    words, trace = told.pop("event", ""), told.pop("exception", None)
    told.pop("logger", None)
    shown = {k: v for k, v in told.items() if v is not None and not k.startswith("_")}
    rest = " ".join(f"{key}={value}" for key, value in shown.items())
    line = f"{at} {level.upper():7} {words}{f'  {rest}' if rest else ''}"
    return f"{line}\n{trace}" if trace else line


def _complete(_logger: Any, _method: str, event: EventDict) -> EventDict:
    """When it was, and what it is about; what the call itself says comes first."""
    record = event.get("_record")
    at = record.created if isinstance(record, logging.LogRecord) else time.time()
    clock = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at))
    event["time"] = f"{clock}.{int(at % 1 * 1e6):06d}Z"
    known = subject()
    for field in FIELDS:
        event.setdefault(field, known.get(field))
    return event


def _in_order(_logger: Any, _method: str, event: EventDict) -> EventDict:
    first = {key: event[key] for key in FIRST if key in event}
    # What begins with _ others attach to every record, for themselves.
    return {**first, **{key: value for key, value in event.items() if not key.startswith("_")}}


def _format(to: Path | None) -> Format:
    asked = os.environ.get("RELAX_LOG_FORMAT", "")
    if asked not in ("", "json", "text"):
        raise ValueError(f"RELAX_LOG_FORMAT is {asked!r}: it must be json or text")
    if asked:
        return "json" if asked == "json" else "text"
    return "text" if to is None and sys.stderr.isatty() else "json"
