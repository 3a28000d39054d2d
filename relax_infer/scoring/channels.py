"""Score channels as Arrow tables: each row carries the identity of the sample it belongs to."""

import pyarrow as pa

from relax_infer.scoring.validation import Mode

_IDENTITY = [
    ("run", pa.string()),
    ("step", pa.int64()),
    ("group", pa.int64()),
    ("sample", pa.int64()),
]
IDS, LOG_PROBS = pa.list_(pa.list_(pa.int32())), pa.list_(pa.list_(pa.float32()))
"""Per sample R lists, one for each response token."""

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

_AT_STUDENT = [("teacher_at_student_topk_log_probs", LOG_PROBS)]
_OWN = [("teacher_topk_token_ids", IDS), ("teacher_topk_log_probs", LOG_PROBS)]


def taught_schema(mode: Mode) -> pa.Schema:
    """Columns of the taught file. All modes have the log-probs of the sampled tokens."""
    extra = {"student_sampled": [], "student_topk": _AT_STUDENT, "teacher_topk": _OWN}
    return pa.schema([*TAUGHT, *(pa.field(*c) for c in extra.get(mode, [*_AT_STUDENT, *_OWN]))])
