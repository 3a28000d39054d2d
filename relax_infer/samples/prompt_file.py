"""A file of prompts: JSON lines or Parquet, on disk or at any fsspec URL, checked row by row."""

import hashlib
import io
import json
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet
from fsspec.core import url_to_fs

from relax_infer.config.data import Data
from relax_infer.contracts.failures import PermanentError
from relax_infer.samples.policy_text import Messages

_LINES = (".jsonl", ".json", ".ndjson")
_ENDINGS = (*_LINES, ".parquet")
_ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class PromptFile:
    """The rows of a file, in its order.

    Attributes:
        sha256: of the file's bytes.
        prompts: one JSON text per row: a string, or a list of messages.
        answers: one right answer per row, as text; empty where the recipe names no answer field.
        teachers: one Teacher's model_id per row; null where the recipe names no such field.
    """

    sha256: str
    prompts: pa.Array
    answers: pa.Array
    teachers: pa.Array

    def __len__(self) -> int:
        return len(self.prompts)

    def prompt(self, row: int) -> str | Messages:
        return json.loads(self.prompts[row].as_py())

    def answer(self, row: int) -> str:
        return self.answers[row].as_py()

    def teacher(self, row: int) -> str | None:
        return self.teachers[row].as_py()


def file_sha256(path: str) -> str:
    """Of the file as it is now.

    Raises:
        PermanentError: it cannot be read.
    """
    return hashlib.sha256(_bytes(path)).hexdigest()


def file_fault(path: str) -> str | None:
    """Why nothing can be read from the file, None if it can; of its content one byte is read."""
    if not path.endswith(_ENDINGS):
        return f"{path} is neither .jsonl nor .parquet"
    try:
        filesystem, place = url_to_fs(path)
        filesystem.cat_file(place, start=0, end=1)
    except Exception as error:  # file systems have kinds of their own, such as missing credentials
        return " ".join(str(error).split()) or type(error).__name__
    return None


def read_prompt_file(data: Data, teachers: Collection[str] = ()) -> PromptFile:
    """
    Args:
        teachers: model ids that rows may name.

    Raises:
        PermanentError: names the file, the line and the field: it cannot be read, it is another
            file than the run began with, or a row is not a prompt with its answer.
    """
    assert data.path is not None
    content = _bytes(data.path)
    sha256 = hashlib.sha256(content).hexdigest()
    if data.sha256 not in (None, sha256):
        raise PermanentError(
            f"data.path: {data.path} is not the file that data.sha256 names: it has {sha256[:12]}…,"
            f" the recipe {str(data.sha256)[:12]}….",
            cure="Put the earlier file back, or start a new run with this one.",
        )
    prompts: list[str] = []
    answers: list[str] = []
    taught: list[str | None] = []
    for where, row in _rows(data.path, content):
        prompts.append(json.dumps(_prompt(row, data.prompt_field, where), ensure_ascii=False))
        answers.append(_answer(row, data.answer_field, where) if data.answer_field else "")
        taught.append(_teacher(row, data.teacher_field, where, teachers))
    if not prompts:
        raise PermanentError(f"data.path: {data.path} has no rows.")
    return PromptFile(
        sha256,
        pa.array(prompts, pa.large_string()),
        pa.array(answers, pa.string()),
        pa.array(taught, pa.string()),
    )


def _bytes(path: str) -> bytes:
    try:
        filesystem, place = url_to_fs(path)
        return filesystem.cat_file(place)
    except (OSError, ValueError, ImportError) as error:
        raise PermanentError(
            f"data.path: {path} cannot be read: {error}",
            cure="Name a file that every worker can read, by its full path or an fsspec URL.",
        ) from error


def _rows(path: str, content: bytes) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each row, and how to call it in an error."""
    if path.endswith(".parquet"):
        try:
            table = pyarrow.parquet.read_table(io.BytesIO(content))
        except pa.ArrowException as error:
            raise PermanentError(f"data.path: {path} is no Parquet file: {error}") from error
        batches = table.to_batches(max_chunksize=4096)
        rows = (row for batch in batches for row in batch.to_pylist())
        yield from ((f"{path} row {number}", row) for number, row in enumerate(rows))
        return
    if not path.endswith(_LINES):
        raise PermanentError(
            f"data.path: {path} is neither .jsonl nor .parquet.",
            cure="Write one JSON object per line into a .jsonl file, or a .parquet file.",
        )
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{path} line {number}"
        try:
            row = json.loads(line)
        except ValueError as error:  # also bytes that are no UTF-8
            raise PermanentError(f"data.path: {where} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise PermanentError(
                f"data.path: {where} is {type(row).__name__}, not an object with fields."
            )
        yield where, row


def _prompt(row: dict[str, Any], field: str, where: str) -> str | Messages:
    given = _field(row, field, where, "data.prompt_field")
    if isinstance(given, str) and given.strip():
        return given
    if isinstance(given, list) and given:
        messages = [_message(one, f"{where}, {field}[{i}]") for i, one in enumerate(given)]
        if messages[-1]["role"] == "assistant":
            raise PermanentError(f"data.path: {where}, {field} ends with the assistant's turn.")
        return messages
    raise PermanentError(
        f"data.path: {where}, {field} is {_short(given)}: neither text nor a list of messages."
    )


def _message(given: Any, where: str) -> dict[str, str]:
    role = given.get("role") if isinstance(given, dict) else None
    content = given.get("content") if isinstance(given, dict) else None
    if role not in _ROLES or not isinstance(content, str):
        raise PermanentError(
            f"data.path: {where} is {_short(given)}: a message has a role"
            f" ({', '.join(_ROLES)}) and a text as its content."
        )
    return {"role": role, "content": content}


def _answer(row: dict[str, Any], field: str, where: str) -> str:
    given = _field(row, field, where, "data.answer_field")
    number = isinstance(given, int | float) and not isinstance(given, bool)
    if number and math.isfinite(given):
        return str(given)
    if isinstance(given, str) and given.strip():
        return given.strip()
    raise PermanentError(f"data.path: {where}, {field} is {_short(given)}: no right answer.")


def _teacher(
    row: dict[str, Any], field: str | None, where: str, teachers: Collection[str]
) -> str | None:
    if field is None:
        return None
    named = _field(row, field, where, "data.teacher_field")
    if named not in teachers:
        raise PermanentError(
            f"data.path: {where}, {field} is {_short(named)}: the recipe's Teachers are"
            f" {', '.join(sorted(teachers)) or 'none'}."
        )
    return named


def _field(row: dict[str, Any], field: str, where: str, setting: str) -> Any:
    """A field of a row; ``reward_model.ground_truth`` is the one inside of the other."""
    found: Any = row
    for part in field.split("."):
        if not isinstance(found, dict) or part not in found:
            raise PermanentError(
                f"data.path: {where} has no field {field}; it has {', '.join(sorted(row))}.",
                cure=f"Set {setting} to the field that is meant.",
            )
        found = found[part]
    return found


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}…"
