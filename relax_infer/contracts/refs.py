"""References to staged data: samples never enter a workflow, these do."""

import re

from relax_infer.contracts.base import Message

RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
"""Folders, actors and workflows are named after a run; the last with dots behind its id."""


class RunRef(Message):
    """Where a run keeps its files."""

    run: str
    """Run id, the workflow id of its TrainingRun."""
    store: str
    """fsspec URL of the folder that holds all runs; the run's own is ``<store>/<run>``."""


class StagedRef(Message):
    """One immutable staged file."""

    uri: str
    sha256: str
    rows: int


class WeightsRef(Message):
    """One published version of the policy's weights, as a Hugging Face folder."""

    version: int
    """Training step that made it; 0 is the model the run began with."""
    uri: str
    """Folder with config, tokenizer and safetensors."""
    digest: str
    """SHA-256 over the tensors' names, dtypes, shapes and bytes in name order."""
