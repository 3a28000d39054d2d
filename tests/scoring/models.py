"""Two small language models by formula, served as SGLang serves: for channels that can be computed
independently. tests/scoring/test_real_teacher.py holds the same rules against the real engine."""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

VOCABULARY = 32
EOS = 1


def log_probs(model: str, prefix: Sequence[int]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Natural log-probs of the next token, [32]; of the same prefix always the same."""
    seed = hashlib.sha256(f"{model}/{list(prefix)}".encode()).digest()
    logits = np.random.default_rng(list(seed)).normal(size=VOCABULARY) * 2
    return logits - np.log(np.exp(logits).sum())


def likeliest(model: str, prefix: Sequence[int], k: int) -> list[list[Any]]:
    row = log_probs(model, prefix)
    return [[float(row[t]), int(t), None] for t in np.argsort(-row, kind="stable")[:k]]


def policy_answer(payload: dict[str, Any]) -> dict[str, Any]:
    """A response of 1 to 5 tokens that depends on prompt and request id."""
    prompt, k = payload["input_ids"], payload.get("top_logprobs_num", 0)
    draw = np.random.default_rng(list(payload["rid"].encode()))
    ids = [*draw.integers(2, VOCABULARY, size=int(draw.integers(0, 5))).tolist(), EOS]
    at = [[*prompt, *ids[:n]] for n in range(len(ids))]
    meta: dict[str, Any] = {
        "finish_reason": {"type": "stop"},
        "weight_version": "3",
        "output_token_logprobs": [
            [float(log_probs("policy", p)[t]), t, None] for p, t in zip(at, ids, strict=True)
        ],
    }
    if k:
        meta["output_top_logprobs"] = [likeliest("policy", p, k) for p in at]
    return {"output_ids": ids, "meta_info": meta}


def teacher_answer(payload: dict[str, Any]) -> dict[str, Any]:
    """A prefill's: entry n is of token ``logprob_start_len + n``, the first has nothing."""
    ids, start = payload["input_ids"], payload["logprob_start_len"]
    k, asked = payload.get("top_logprobs_num", 0), payload.get("token_ids_logprob")
    places = range(start + 1, len(ids))
    named = [0 if t >= VOCABULARY - 1 else t for t in ids]
    meta: dict[str, Any] = {
        "finish_reason": {"type": "length"},
        "input_token_logprobs": [
            [None, named[start], None],
            *([float(log_probs("teacher", ids[:n])[ids[n]]), named[n], None] for n in places),
        ],
    }
    if k:
        rows = [likeliest("teacher", ids[:n], k) for n in places]
        meta["input_top_logprobs"] = [None, *rows]
    if asked is not None:
        meta["input_token_ids_logprobs"] = [
            None,
            *([[float(log_probs("teacher", ids[:n])[t]), t, None] for t in asked] for n in places),
        ]
    return {"output_ids": [], "meta_info": meta}
