"""What an engine answers to ``/generate``."""

from typing import Any, NamedTuple

from relax_infer.contracts.failures import PermanentError, TransientError
from relax_infer.samples.top_log_probs import pairs_of


class Answer(NamedTuple):
    """Sampled tokens, with natural log-probs of each."""

    ids: list[int]
    log_probs: list[float]
    version: int
    """Of the weights that sampled them."""
    finish: str
    """``stop`` or ``length``."""

    def require(self, version: int, where: str) -> "Answer":
        """This, if it was made with these weights; else a PermanentError."""
        if self.version != version:
            raise PermanentError(
                f"{where} was made with weights {self.version}, not {version}",
                cure="An engine answered before its weights were current; nothing was kept.",
            )
        return self


def read_answer(answer: Any, where: str) -> Answer:
    """
    Raises:
        TransientError: the request was aborted.
        PermanentError: the answer is malformed; ``where`` names the sample.
    """
    try:
        meta, ids = answer["meta_info"], answer["output_ids"]
        rows, version = meta["output_token_logprobs"], int(meta["weight_version"])
        finish = str(meta["finish_reason"]["type"])
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise PermanentError(f"{where}: the engine's answer lacks {error}") from error
    if finish not in ("stop", "length"):
        raise TransientError(f"{where}: the request ended with {finish}")
    pairs = pairs_of(rows, where, "rollout_log_probs")
    if [token for _, token in pairs] != ids:
        raise PermanentError(f"{where}: log-probs are of other tokens than those sampled")
    sampled, log_probs = [token for _, token in pairs], [log_prob for log_prob, _ in pairs]
    return Answer(sampled, log_probs, version, finish)
