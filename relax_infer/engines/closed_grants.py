"""Grants that ended for a holder which could not be told: kept in the run's store.

A holder (an engine, a trainer rank) whose host does not answer is taken for gone on a person's word
alone. If its host was only cut off, what was on its way there arrives when it is back, after the
GPUs were given to somebody else. So the end of the grant is written where the holder itself looks
before it loads anything. What ended with it is every earlier grant, too: a lease that was begun
anew doubts a role under a token of its own, and what is on its way has the one that was lost.
"""

import contextlib
import hashlib
import re
from collections.abc import Collection
from typing import Any

import fsspec

from relax_infer.contracts.engines import EngineGroupSpec
from relax_infer.contracts.failures import TransientError
from relax_infer.contracts.fence import FenceToken, StaleFence

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]")


def name_of(token: FenceToken) -> str:
    """Of the file that closes a grant."""
    grant = hashlib.sha256(token.grant_id.encode()).hexdigest()[:16]
    return f"{token.counter}-{grant}"


def ends(names: Collection[str], token: FenceToken) -> bool:
    """Whether a grant is over where the files ``names`` are: closed itself, or a later one is."""
    counters = (name.partition("-")[0] for name in names)
    later = any(counter.isdigit() and int(counter) > token.counter for counter in counters)
    return later or name_of(token) in names


class ClosedGrants:
    """Of one holder: one small file per grant, so that two writers never undo each other.

    Raises :class:`TransientError` where the store does not answer.
    """

    def __init__(self, store: str, run: str, holder: str) -> None:
        name = _NOT_IN_NAMES.sub("-", holder)
        self._folder = f"{store.rstrip('/')}/{run}/closed-grants/{name}"

    def close(self, token: FenceToken) -> None:
        """From now on the holder loads nothing under ``token``, or under any before it."""
        try:
            files, path = self._file(token)
            files.makedirs(path.rpartition("/")[0], exist_ok=True)
            files.pipe_file(path, str(token).encode())
        except OSError as error:
            raise TransientError(f"Cannot write {self._folder}: {error}.") from error

    def reopen(self, token: FenceToken) -> None:
        """The holder was reached after all: its own memory says from here on what has ended."""
        try:
            files, path = self._file(token)
            with contextlib.suppress(FileNotFoundError):
                files.rm_file(path)
        except OSError as error:
            raise TransientError(f"Cannot write {self._folder}: {error}.") from error

    def check(self, token: FenceToken) -> None:
        """To be asked before anything is loaded; raises :class:`StaleFence` for a closed grant."""
        try:
            files, path = self._file(token)
            files.invalidate_cache()
            closed = ends(_names_in(files, path.rpartition("/")[0]), token)
        except OSError as error:
            raise TransientError(
                f"Cannot read {self._folder}, which says whether the grant has ended: {error}."
            ) from error
        if closed:
            raise StaleFence(token, token)

    def _file(self, token: FenceToken) -> tuple[Any, str]:
        uri = f"{self._folder}/{name_of(token)}"
        files, path = fsspec.url_to_fs(uri)  # pyright: ignore[reportUnknownMemberType]
        return files, str(path)


def _names_in(files: Any, folder: str) -> list[str]:
    try:
        return [str(path).rpartition("/")[2] for path in files.ls(folder, detail=False)]
    except FileNotFoundError:
        return []


def closed_grants(spec: EngineGroupSpec, replica: int, node: int = 0) -> ClosedGrants:
    """Of one replica; with ``node``, of that follower alone."""
    return ClosedGrants(spec.store, spec.run, spec.actor_name(replica, node))
