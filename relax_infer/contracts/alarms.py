"""Bounds whose breach a person is told of."""

from typing import Annotated, Literal

from pydantic import Field

from relax_infer.contracts.base import Message

Nats = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class LogProbBound(Message):
    """How far the engines' log-probs of the sampled tokens may be from the trainer's own, before
    the update. Past it the step's details, the progress line and the report warn."""

    mean: Nats = 0.0
    """Mean absolute difference over trained tokens. 0: no bound."""
    largest: Nats = 0.0
    """Largest absolute difference of a trained token. 0: no bound."""
    action: Literal["warn", "pause"] = "warn"
    """pause: the run also pauses after the step; `relax-infer resume` goes on."""

    def breach(self, mean: float, largest: float | None) -> str | None:
        """What is past its bound, in words; None if nothing is."""
        faults = [
            f"{name} {value:.4g} is above {bound:g}"
            for name, value, bound in (
                ("mean", mean, self.mean),
                ("largest", largest, self.largest),
            )
            if bound > 0 and value is not None and not value <= bound
        ]
        if not faults:
            return None
        return f"rollout and trainer log-probs differ: {', '.join(faults)} (train.logprob_bound)"
