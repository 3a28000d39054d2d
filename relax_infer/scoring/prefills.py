"""A Teacher's prefills: which positions and token ids to ask for in one request, and what came.

Stock SGLang takes one list of token ids per request and gives the log-prob of each of them at every
position. So a response is asked about in pieces of consecutive tokens with the unique ids that
occur in the piece, no larger than ``teacher.max_logprob_cells``, and each row picks its own.
Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from relax_infer.contracts.failures import PermanentError
from relax_infer.samples.sample import Sample
from relax_infer.samples.top_log_probs import pair_of, pairs_of, top_log_probs


@dataclass(frozen=True)
class Piece:
    """Response tokens ``start`` … ``stop - 1``, and the ids to give at each of them."""

    start: int
    stop: int
    ids: tuple[int, ...]
    """Unique, in the order of their first occurrence; empty: only the sampled tokens."""


def pieces(
    tokens: int, wanted: Sequence[Sequence[int]] | None, own: int, max_cells: int
) -> list[Piece]:
    """A response of ``tokens`` tokens in as few pieces as the limit allows, in order.

    Args:
        wanted: ids wanted at each token; None: none beside the sampled one.
        own: likeliest tokens that the Teacher names itself at each token.
        max_cells: positions times (unique ids + ``own``) of a piece. One position alone may have
            more: the recipe has room for it.
    """
    if wanted is None and own == 0:
        return [Piece(0, tokens, ())]
    made: list[Piece] = []
    start, ids = 0, dict[int, None]()
    for token in range(tokens):
        more = {} if wanted is None else dict.fromkeys(wanted[token])
        together = ids | more
        if token > start and (token - start + 1) * (len(together) + own) > max_cells:
            made.append(Piece(start, token, tuple(ids)))
            start, together = token, more
        ids = together
    return [*made, Piece(start, tokens, tuple(ids))]


def prefill(sample: Sample, model: str | None, piece: Piece, own: int) -> dict[str, Any]:
    """The request: the tokens up to the piece's end, log-probs from the token before its start.

    Args:
        model: one of several at a gateway; None: a server that has one, and takes no such field.
    """
    payload: dict[str, Any] = {
        "input_ids": [*sample.prompt_ids, *sample.response_ids[: piece.stop]],
        "sampling_params": {"temperature": 0, "max_new_tokens": 0, "skip_special_tokens": False},
        "return_logprob": True,
        "logprob_start_len": max(len(sample.prompt_ids) + piece.start - 1, 0),
    }
    if model is not None:
        payload["model"] = model
    if own:
        payload["top_logprobs_num"] = own
    if piece.ids:
        payload["token_ids_logprob"] = list(piece.ids)
    return payload


def sampled_log_probs(answer: Any, sample: Sample, piece: Piece, vocab_size: int) -> list[float]:
    """Log-probs of the piece's own tokens; the answer's first entry is of the token before.

    SGLang names the vocabulary's last token 0 in this list (it clips the padding values of image
    tokens so); the log-prob beside it is the token's own.
    """
    rows = _rows(answer, "input_token_logprobs", sample, piece)
    pairs = [pair_of(row, sample.name, "teacher_log_probs") for row in rows]
    tokens = sample.response_ids[piece.start : piece.stop]
    named = [0 if token >= vocab_size - 1 else token for token in tokens]
    if [token for _, token in pairs] != named:
        raise PermanentError(f"{sample.name}: the Teacher's log-probs are of other tokens")
    return [log_prob for log_prob, _ in pairs]


def log_probs_at(
    answer: Any, sample: Sample, piece: Piece, wanted: Sequence[Sequence[int]]
) -> list[list[float]]:
    """Of each token's row the log-probs of the ids that were wanted there, in their order."""
    field = "teacher_at_student_topk_log_probs"
    rows = _rows(answer, "input_token_ids_logprobs", sample, piece)
    found: list[list[float]] = []
    for row, ids in zip(rows, wanted[piece.start : piece.stop], strict=True):
        by_id = {token: log_prob for log_prob, token in pairs_of(row, sample.name, field)}
        if missing := [token for token in ids if token not in by_id]:
            raise PermanentError(
                f"{sample.name}: {field} lacks token {missing[0]}, which was asked for"
            )
        found.append([by_id[token] for token in ids])
    return found


def own_log_probs(
    answer: Any, sample: Sample, piece: Piece, top_k: int
) -> list[tuple[list[int], list[float]]]:
    """The Teacher's K likeliest tokens at each token of the piece."""
    rows = _rows(answer, "input_top_logprobs", sample, piece)
    return list(top_log_probs(rows, sample.name, "teacher_topk_log_probs", top_k))


def _rows(answer: Any, name: str, sample: Sample, piece: Piece) -> list[Any]:
    """The list of that name without its first entry."""
    try:
        rows = answer["meta_info"][name]
    except (KeyError, TypeError, IndexError) as error:
        raise PermanentError(f"{sample.name}: the Teacher's answer lacks {error}") from error
    expected = piece.stop - piece.start + 1
    if not isinstance(rows, list) or len(rows) != expected:
        given = len(rows) if isinstance(rows, list) else type(rows).__name__
        kind = "log-probs" if name == "input_token_logprobs" else f"rows of {name}"
        raise PermanentError(f"{sample.name}: the Teacher gave {given} {kind}, {expected} were due")
    return rows[1:]
