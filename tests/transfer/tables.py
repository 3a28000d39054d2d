"""Scored tables as write-back makes them, small and deterministic."""

import numpy as np
import pyarrow as pa

from relax_infer.samples.sample import SCHEMA, TOP_K_SCHEMA


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


def with_support(table: pa.Table, *, k: int = 3, ragged: bool = False, seed: int = 0) -> pa.Table:
    """With columns of distillation over ``k`` tokens a position, or ``k`` to ``2 k``."""
    random = np.random.default_rng(seed)
    ids: list[list[list[int]]] = []
    teacher: list[list[list[float]]] = []
    widths: list[list[int]] = []
    for response in table.column("response_ids").to_pylist():
        width = [int(random.integers(k, 2 * k + 1)) if ragged else k for _ in response]
        ids.append([random.permutation(32)[:w].tolist() for w in width])
        # Three quarters of the Teacher's probability are on the named tokens.
        teacher.append([np.log(0.75 * random.dirichlet(np.ones(w))).tolist() for w in width])
        widths.append(width)
    columns: list[tuple[str, list[object]]] = [
        ("opd_topk_token_ids", [*ids]),
        ("opd_topk_teacher_log_probs", [*teacher]),
    ]
    if ragged:
        columns.append(("opd_topk_ksz", [*widths]))
    for name, values in columns:
        kind = TOP_K_SCHEMA.field(name)
        table = table.append_column(kind, pa.array(values, type=kind.type))
    return table
