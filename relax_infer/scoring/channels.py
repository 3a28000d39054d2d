"""Score channels as Arrow tables: each row carries the identity of the sample it belongs to."""

import pyarrow as pa

_IDENTITY = [
    ("run", pa.string()),
    ("step", pa.int64()),
    ("group", pa.int64()),
    ("sample", pa.int64()),
]

JUDGED = pa.schema(
    [
        *_IDENTITY,
        ("reward", pa.float64()),
        ("reward_source", pa.string()),
        ("reward_detail", pa.string()),
    ]
)
"""``reward`` is null where no score could be had; ``reward_detail`` then says why."""

TAUGHT = pa.schema([*_IDENTITY, ("teacher_log_probs", pa.list_(pa.float32()))])
