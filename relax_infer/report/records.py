"""Step records, as they were kept."""

import json
import re
from dataclasses import dataclass

from fsspec.core import url_to_fs

from relax_infer.contracts.failures import PermanentError
from relax_infer.contracts.run import StepRecord

_RECORD = re.compile(r"/steps/(\d+)/record\.json$")


@dataclass(frozen=True)
class RunRecords:
    """Everything a report rests on."""

    run: str
    recipe: dict[str, object]
    steps: tuple[StepRecord, ...]
    """In order; a step that was tried again counts as it ended last."""


def read_records(store_url: str, run: str) -> RunRecords:
    """All records of a run; raises PermanentError when there is none."""
    filesystem, root = url_to_fs(store_url)
    folder = f"{root.rstrip('/')}/{run}"
    paths = filesystem.glob(f"{folder}/steps/*/record.json") if filesystem.exists(folder) else []
    numbered = sorted((int(match[1]), p) for p in paths if (match := _RECORD.search(p)))
    if not numbered:
        raise PermanentError(
            f"{store_url} holds no finished step of a run {run}",
            cure="Is the run id right, and has its first step ended?",
        )
    recipe_path = f"{folder}/recipe.json"
    recipe = json.loads(filesystem.cat_file(recipe_path)) if filesystem.exists(recipe_path) else {}
    steps = tuple(StepRecord.model_validate_json(filesystem.cat_file(p)) for _, p in numbered)
    return RunRecords(run=run, recipe=recipe, steps=steps)
