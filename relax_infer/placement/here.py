"""Whether this host has the folders and files that a recipe names, before anything is begun."""

from collections.abc import Iterator
from pathlib import Path

from relax_infer.config import Recipe
from relax_infer.config.violation import Violation
from relax_infer.placement.named_files import named_data, named_models
from relax_infer.samples.prompt_file import file_fault

_POLICY = "rollout.model"


def lacking_here(recipe: Recipe) -> list[Violation]:
    """Every model's folder and every file of problems that this host cannot read."""
    return [*_models(recipe), *_data(recipe)]


def _models(recipe: Recipe) -> Iterator[Violation]:
    for field, named in named_models(recipe):
        folder = Path(named)
        if not folder.is_dir():
            cure = f"Put the model there, or set {field} to the folder where it is."
            yield Violation(field, f"{named} is no folder of this machine.", cure)
        elif not (folder / "config.json").is_file():
            cure = "Name a folder as transformers writes it."
            yield Violation(field, f"the folder {named} has no config.json.", cure)
        elif field == _POLICY and not any(folder.glob("*.safetensors")):
            cure = "Put the policy's weights there."
            yield Violation(field, f"the folder {named} has no *.safetensors.", cure)


def _data(recipe: Recipe) -> Iterator[Violation]:
    for field, path in named_data(recipe):
        if fault := file_fault(path):
            cure = "Name a file that every worker can read, by its full path or an fsspec URL."
            yield Violation(field, f"{path} cannot be read: {fault}.", cure)
