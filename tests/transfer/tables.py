"""Scored tables as write-back makes them, small and deterministic."""

import numpy as np
import pyarrow as pa

from relax_infer.samples.sample import SCHEMA


def scored_table(
    groups: int = 4, samples: int = 4, *, seed: int = 0, teacher: bool = True, reward: bool = True
) -> pa.Table:
    """Responses of 0 to 5 tokens over a vocabulary of 32."""
    random = np.random.default_rng(seed)
    rows: list[dict[str, object]] = []
    for group in range(groups):
        prompt = [*random.integers(2, 12, 4).tolist(), 23]
        for sample in range(samples):
            length = int(random.integers(0, 6))
            rows.append(
                {
                    "run": "r",
                    "step": 1,
                    "group": group,
                    "sample": sample,
                    "attempt": 1,
                    "prompt_ids": prompt,
                    "response_ids": random.integers(1, 12, length).tolist(),
                    "rollout_log_probs": (-random.random(length)).tolist(),
                    "loss_mask": [1] * length,
                    "weight_version": 0,
                    "reward": float(random.integers(0, 2)) if reward else None,
                    "teacher_log_probs": (-random.random(length)).tolist() if teacher else None,
                }
            )
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def with_column(table: pa.Table, name: str, values: list[object]) -> pa.Table:
    where = table.schema.get_field_index(name)
    column = pa.array(values, type=table.schema.field(name).type)
    return table.set_column(where, table.schema.field(name), column)


def write_table(table: pa.Table, path: str) -> None:
    with pa.OSFile(path, "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)


def read_table(path: str) -> pa.Table:
    with pa.OSFile(path) as source:
        return pa.ipc.open_file(source).read_all()
