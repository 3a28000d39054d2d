"""The staging store of a run: immutable files on an fsspec URL, each with its digest."""

import hashlib
import json
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pyarrow as pa
from fsspec.core import url_to_fs

from relax_infer.contracts.failures import PermanentError, TransientError
from relax_infer.contracts.refs import RunRef, StagedRef
from relax_infer.samples import layout

_SHARD = re.compile(r"group-(\d+)\.attempt-(\d+)(?:\.([0-9a-f]{64}))?\.arrow$")
"""A shard says its digest in its name; those of earlier versions do not."""


class StagingStore:
    """Files below ``<store>/<run>/``.

    A file appears whole or not at all (written beside its place, then moved), and is not changed
    afterwards. Reads check the digest that the reference carries.
    """

    def __init__(self, run: RunRef) -> None:
        self.run = run.run
        self._filesystem: Any
        self._filesystem, root = url_to_fs(run.store)
        self._root = f"{root.rstrip('/')}/{run.run}"

    def url(self, name: str) -> str:
        """Full URL of a file of this run."""
        return self._filesystem.unstrip_protocol(f"{self._root}/{name}")

    def exists(self, name: str) -> bool:
        return bool(self._filesystem.exists(f"{self._root}/{name}"))

    # --- bytes and JSON

    def write_bytes(self, name: str, content: bytes, *, replace: bool = False) -> str:
        """Write a file; returns its SHA-256.

        Raises:
            PermanentError: the file is there with other content and ``replace`` is not set.
        """
        digest = hashlib.sha256(content).hexdigest()
        path = f"{self._root}/{name}"
        if not replace and self._filesystem.exists(path):
            self._same_or_refuse(name, digest)
            return digest
        with self._beside(path) as (beside, file):
            file.write(content)
        self._filesystem.mv(beside, path)
        return digest

    @contextmanager
    def _beside(self, path: str) -> Iterator[tuple[str, Any]]:
        self._filesystem.makedirs(path.rpartition("/")[0], exist_ok=True)
        beside = f"{path}.{uuid.uuid4().hex}.tmp"
        with self._filesystem.open(beside, "wb") as file:
            yield beside, file

    def _same_or_refuse(self, name: str, digest: str) -> None:
        there = hashlib.sha256(self._filesystem.cat_file(f"{self._root}/{name}")).hexdigest()
        if there != digest:
            raise PermanentError(
                f"{self.url(name)} exists with other content: staged files are never changed.",
                cure="Does another run of this id write there, or did somebody edit it? Begin a new"
                " run under an id of its own; with begin_from it goes on from a checkpoint.",
            )

    def write_json(self, name: str, value: Any, *, replace: bool = False) -> StagedRef:
        content = json.dumps(value, indent=1, sort_keys=True, default=str).encode()
        digest = self.write_bytes(name, content, replace=replace)
        rows = len(value) if isinstance(value, list) else 1
        return StagedRef(uri=self.url(name), sha256=digest, rows=rows)

    def read_json(self, what: str | StagedRef) -> Any:
        """By name, or by reference (then the digest is checked)."""
        if isinstance(what, StagedRef):
            return json.loads(self._checked(what))
        return json.loads(self._filesystem.cat_file(f"{self._root}/{what}"))

    def remove(self, name: str) -> None:
        """Delete a file, or a folder with what is in it; nothing if there is none."""
        path = f"{self._root}/{name}"
        with suppress(FileNotFoundError):
            self._filesystem.rm(path, recursive=True)

    # --- tables

    def write_table(self, name: str, table: pa.Table) -> StagedRef:
        """One Arrow IPC file, hashed as it is written: the table is not in memory twice.

        Args:
            name: ``{digest}`` in it is replaced by the file's.

        Raises:
            PermanentError: the file is there with other content.
        """
        with self._beside(f"{self._root}/{name}") as (beside, file):
            hashed = _Hashed(file)
            with pa.ipc.new_file(pa.PythonFile(hashed, "w"), table.schema) as writer:
                writer.write_table(table)
        digest = hashed.digest
        name = name.replace("{digest}", digest)
        path = f"{self._root}/{name}"
        if self._filesystem.exists(path):
            self._filesystem.rm_file(beside)
            self._same_or_refuse(name, digest)
        else:
            self._filesystem.mv(beside, path)
        return StagedRef(uri=self.url(name), sha256=digest, rows=table.num_rows)

    def read_table(self, ref: StagedRef) -> pa.Table:
        """The table that ``ref`` names, if it is what ``ref`` says.

        Raises:
            PermanentError: the content or the number of rows is another.
            TransientError: the store does not answer.
        """
        table = pa.ipc.open_file(pa.BufferReader(self._checked(ref))).read_all()
        if table.num_rows != ref.rows:
            raise PermanentError(f"{ref.uri} has {table.num_rows} rows, {ref.rows} were staged")
        return table

    def peek(self, name: str) -> pa.Table:
        """The table of that name, for people: nothing says that it is the one it should be.

        Raises:
            PermanentError: it is no table.
        """
        content = self._filesystem.cat_file(f"{self._root}/{name}")
        try:
            return pa.ipc.open_file(pa.BufferReader(content)).read_all()
        except pa.ArrowException as error:
            raise PermanentError(
                f"{self.url(name)} is no Arrow file: {error}", cure="Was it cut short or changed?"
            ) from error

    def browse(self, name: str) -> pa.Table:
        """As :meth:`peek`; of a local file only what is looked at is read."""
        path = f"{self._root}/{name}"
        if "file" in _protocols(self._filesystem):
            return pa.ipc.open_file(pa.memory_map(path)).read_all()
        return self.peek(name)

    def steps(self) -> list[int]:
        """Numbers of the steps that have files."""
        folder = f"{self._root}/steps"
        if not self._filesystem.exists(folder):
            return []
        names = (
            str(path).rstrip("/").rpartition("/")[2]
            for path in self._filesystem.ls(folder, detail=False)
        )
        return sorted(int(name) for name in names if name.isdecimal())

    def forget_samples(self, step: int) -> None:
        """Delete what a step has staged; its record stays. Idempotent."""
        folder = f"{self._root}/steps/{step}"
        if not self._filesystem.exists(folder):
            return
        for path in self._filesystem.ls(folder, detail=False):
            if str(path).rstrip("/").endswith(f"/{layout.record(step)}"):
                continue
            self._filesystem.rm(path, recursive=True)

    # --- phases

    def claim_attempt(self, step: int, phase: str) -> int:
        """The number of this attempt at a phase: 1, 2, … Two claimants never get the same."""
        folder = f"{self._root}/{layout.phase_folder(step, phase)}"
        self._filesystem.makedirs(folder, exist_ok=True)
        attempt = 1
        while True:
            path = f"{self._root}/{layout.claim(step, phase, attempt)}"
            try:
                with self._filesystem.open(path, "xb") as file:
                    file.write(b"{}")
            except FileExistsError:
                attempt += 1
            else:
                return attempt

    def write_shard(
        self, step: int, phase: str, group: int, attempt: int, table: pa.Table
    ) -> StagedRef:
        """One finished group."""
        return self.write_table(layout.shard(step, phase, group, attempt, "{digest}"), table)

    def shards(self, step: int, phase: str) -> dict[int, str]:
        """Group → the name of its shard; of two attempts at one group the earlier counts."""
        folder = f"{self._root}/{layout.phase_folder(step, phase)}"
        found: dict[int, tuple[int, str]] = {}
        if not self._filesystem.exists(folder):
            return {}
        for path in self._filesystem.ls(folder, detail=False):
            match = _SHARD.search(path)
            if match is None:
                continue
            group, attempt = int(match[1]), int(match[2])
            if group not in found or attempt < found[group][0]:
                found[group] = (attempt, path[len(self._root) + 1 :])
        return {group: name for group, (_, name) in sorted(found.items())}

    def compact(self, step: int, phase: str) -> StagedRef:
        """All shards of a phase as one file, by group. A phase is compacted once: a shard of a
        late earlier attempt changes nothing any more.

        Raises:
            TransientError: a shard is not what was staged; it is set aside, so that its group is
                asked for again.
            PermanentError: there is no shard.
        """
        done = layout.compacted(step, phase)
        if self.exists(done):
            return StagedRef.model_validate(self.read_json(done))
        names = self.shards(step, phase).values()
        tables = [self._shard(name) for name in names]
        if not tables:
            raise PermanentError(f"step {step}: phase {phase} has no shard to compact")
        table = pa.concat_tables(tables).sort_by([("group", "ascending"), ("sample", "ascending")])
        file = layout.phase_file(step, phase)
        if self.exists(file):  # of an attempt that ended before it said so
            self._filesystem.rm_file(f"{self._root}/{file}")
        ref = self.write_table(file, table.combine_chunks())
        self.write_json(done, ref.model_dump(mode="json"), replace=True)
        return ref

    def _shard(self, name: str) -> pa.Table:
        """A shard's rows, if it is what was staged."""
        path = f"{self._root}/{name}"
        content: bytes = self._filesystem.cat_file(path)
        match = _SHARD.search(name)
        expected = match[3] if match else None
        if expected is not None and hashlib.sha256(content).hexdigest() != expected:
            self._filesystem.mv(path, f"{path}.damaged")
            raise TransientError(
                f"{self.url(name)} was changed after it was staged: its digest differs",
                cure="It is set aside as .damaged, and its group is asked for again.",
            )
        return pa.ipc.open_file(pa.BufferReader(content)).read_all()

    def _checked(self, ref: StagedRef) -> bytes:
        filesystem, path = url_to_fs(ref.uri)
        try:
            content: bytes = filesystem.cat_file(path)
        except FileNotFoundError:
            raise PermanentError(
                f"{ref.uri} is gone",
                cure="Is the store the one the run began with, and still mounted?",
            ) from None
        except OSError as error:
            raise TransientError(f"{ref.uri} cannot be read: {error}") from error
        if hashlib.sha256(content).hexdigest() != ref.sha256:
            raise PermanentError(f"{ref.uri} was changed after it was staged: its digest differs")
        return content


def _protocols(filesystem: Any) -> tuple[str, ...]:
    known = filesystem.protocol
    return (known,) if isinstance(known, str) else tuple(known)


class _Hashed:
    """A file to write to, and the SHA-256 of what was written."""

    closed = False

    def __init__(self, file: Any) -> None:
        self._file, self._sha256 = file, hashlib.sha256()

    def write(self, piece: bytes) -> int:
        self._sha256.update(piece)
        return int(self._file.write(piece))

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        """The store closes the file."""

    @property
    def digest(self) -> str:
        return self._sha256.hexdigest()
