"""Step records, as they were kept."""

import json
import re
from dataclasses import dataclass
from typing import cast

from fsspec.core import url_to_fs

from relax_infer.contracts.failures import PermanentError
from relax_infer.contracts.refs import RunRef
from relax_infer.contracts.run import StepRecord

_RECORD = re.compile(r"/steps/(\d+)/record\.json$")


@dataclass(frozen=True)
class StepRange:
    """Steps ``first`` to ``last``, both included; None: as far as there are any."""

    first: int | None = None
    last: int | None = None

    @classmethod
    def parse(cls, text: str) -> "StepRange":
        """``3-9``, ``7``, ``3-`` or ``-9``; raises PermanentError for any other text."""
        found = re.fullmatch(r"\s*(\d*)\s*(-?)\s*(\d*)\s*", text)
        if found is None or not (found[1] or found[3]):
            raise PermanentError(
                f"--steps {text!r} is no range of steps.",
                cure="Write for instance --steps 3-9, --steps 7, --steps 3- or --steps=-9.",
            )
        first = int(found[1]) if found[1] else None
        last = int(found[3]) if found[3] else None
        if not found[2]:
            last = first
        if first is not None and last is not None and first > last:
            raise PermanentError(
                f"--steps {text}: step {first} comes after step {last}.", cure=f"{last}-{first}?"
            )
        return cls(first, last)

    def __contains__(self, step: int) -> bool:
        return (self.first is None or step >= self.first) and (
            self.last is None or step <= self.last
        )

    def __str__(self) -> str:
        if self.first is not None and self.first == self.last:
            return f"step {self.first}"
        first = "the first step" if self.first is None else f"step {self.first}"
        last = "the last" if self.last is None else str(self.last)
        return f"{first} to {last}"


ALL = StepRange()


@dataclass(frozen=True)
class RunRecords:
    """Everything a report rests on."""

    run: str
    recipe: dict[str, object]
    steps: tuple[StepRecord, ...]
    """In order; a step that was tried again counts as it ended last."""
    store: RunRef | None = None
    """Where its samples are."""
    wanted: StepRange = ALL


def read_records(store_url: str, run: str, wanted: StepRange = ALL) -> RunRecords:
    """The records of a run's steps.

    Raises:
        PermanentError: there is none, none of these steps, or one cannot be read.
    """
    filesystem, root = url_to_fs(store_url)
    folder = f"{root.rstrip('/')}/{run}"
    paths = filesystem.glob(f"{folder}/steps/*/record.json") if filesystem.exists(folder) else []
    numbered = sorted((int(match[1]), p) for p in paths if (match := _RECORD.search(p)))
    if not numbered:
        raise PermanentError(
            f"{store_url} holds no finished step of a run {run}",
            cure="Is the run id right, and has its first step ended?",
        )
    chosen = [(number, path) for number, path in numbered if number in wanted]
    if not chosen:
        raise PermanentError(
            f"{store_url} holds no record of {wanted} of run {run}.",
            cure=f"It has steps {numbered[0][0]} to {numbered[-1][0]}.",
        )
    recipe_path = f"{folder}/recipe.json"
    recipe = (
        _recipe(recipe_path, filesystem.cat_file(recipe_path))
        if filesystem.exists(recipe_path)
        else {}
    )
    # All at once: a remote store would take a round trip for each.
    contents = filesystem.cat([path for _, path in chosen])
    steps = tuple(_record(path, contents[path]) for _, path in chosen)
    return RunRecords(
        run=run,
        recipe=recipe,
        steps=steps,
        store=RunRef(run=run, store=store_url),
        wanted=wanted,
    )


def _recipe(path: str, content: bytes) -> dict[str, object]:
    try:
        recipe = json.loads(content)
    except ValueError as error:
        raise PermanentError(f"{path} is no JSON: {error}", cure="Was it cut short?") from error
    if not isinstance(recipe, dict):
        raise PermanentError(f"{path} is {type(recipe).__name__}, and no recipe.")
    return cast("dict[str, object]", recipe)


def _record(path: str, content: bytes) -> StepRecord:
    try:
        return StepRecord.model_validate_json(content)
    except ValueError as error:
        raise PermanentError(
            f"{path} is no step record: {error}", cure="Was it cut short, or written by hand?"
        ) from error
