"""Published rows as TransferQueue takes and gives them. Needs torch and tensordict."""

from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from relax_infer.contracts.failures import PermanentError
from relax_infer.transfer.rows import RAGGED, SCALARS, Array, PublishedRows, Ragged


def to_tensordict(rows: PublishedRows) -> TensorDict:
    """Scalars as dense tensors [n], ragged columns as jagged nested tensors."""
    fields: dict[str, Any] = {}
    for name, column in rows.columns.items():
        if isinstance(column, Ragged):
            parts = [torch.from_numpy(np.array(row)) for row in column.rows()]
            fields[name] = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
        else:
            fields[name] = torch.from_numpy(np.array(column))
    return TensorDict(fields, batch_size=len(rows))


def from_tensordict(fields: TensorDict, keys: list[str]) -> PublishedRows:
    """Rows in the order of ``keys``, as they were asked for.

    Raises:
        PermanentError: a column that we do not publish, or one of another kind.
    """
    columns: dict[str, Array | Ragged] = {}
    for name, value in fields.items():
        wanted = SCALARS.get(name) or RAGGED.get(name)
        if wanted is None or not isinstance(value, torch.Tensor):
            raise PermanentError(f"The partition holds a column {name!r} that is not ours.")
        parts = [part.numpy().reshape(-1) for part in value.unbind()]
        lengths = np.array([len(part) for part in parts], dtype=np.int64)
        values = np.concatenate(parts) if parts else np.empty(0, wanted)
        if values.dtype.name != wanted or (name in SCALARS and (lengths != 1).any()):
            raise PermanentError(f"Column {name!r} of the partition is not {wanted}.")
        columns[name] = values if name in SCALARS else Ragged(values, lengths)
    rows = PublishedRows(columns)
    if not {"group", "sample"} <= columns.keys() or rows.keys != keys:
        raise PermanentError("Keys and identity columns of the partition do not agree.")
    return rows


def sorted_keys(keys: list[str]) -> list[str]:
    """By (group, sample) as numbers.

    Raises:
        PermanentError: a key that is not ``<group>/<sample>``.
    """
    try:
        return sorted(keys, key=lambda key: tuple(int(part) for part in key.split("/")))
    except ValueError:
        raise PermanentError("The partition holds keys that are not <group>/<sample>.") from None
