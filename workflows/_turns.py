"""Whose turn it is, where several steps of a run are open at once. Without Temporal.

A step needs three turns, in this order: to ``generate`` (from its prompts to its commit), to
``train``, and to ``sync`` (its weights to the policy engines, and their evaluation). Generating and
syncing exclude each other; steps train one after another, each on the weights of the one before.
"""

from typing import Literal

from relax_infer.contracts.refs import WeightsRef

Turn = Literal["generate", "train", "sync"]
_EXCLUDES: dict[Turn, tuple[Turn, ...]] = {
    "generate": ("generate", "sync"),
    "sync": ("generate", "sync"),
    "train": ("train",),
}


class Turns:
    """The book of turns of one run.

    Args:
        max_staleness: steps that the weights which generate a batch may be behind those that are
            trained on it.
        weights: what the policy engines hold now; its version is the newest step that was trained.
    """

    def __init__(self, max_staleness: int, weights: WeightsRef) -> None:
        self.max_staleness = max_staleness
        self.weights = weights
        self._held: list[tuple[Turn, int]] = []
        self._waiting: list[tuple[Turn, int]] = []

    def ask(self, turn: Turn, step: int) -> None:
        """The step waits from now on."""
        if (turn, step) not in self._waiting + self._held:
            self._waiting.append((turn, step))

    def may(self, turn: Turn, step: int) -> bool:
        """Whether it is the step's turn now."""
        if (turn, step) in self._held:
            return True
        if any(held in _EXCLUDES[turn] for held, _ in self._held):
            return False
        if turn == "train":
            return self.weights.version >= step - 1
        if turn == "generate":
            fresh = step - 1 - self.weights.version <= self.max_staleness
            return fresh and not any(waits == "sync" for waits, _ in self._waiting)
        return True

    def take(self, turn: Turn, step: int) -> None:
        """The step has its turn.

        Raises:
            ValueError: it is not its turn.
        """
        if not self.may(turn, step):
            raise ValueError(f"step {step} cannot {turn} now: {self}")
        self._waiting = [each for each in self._waiting if each != (turn, step)]
        if (turn, step) not in self._held:
            self._held.append((turn, step))

    def give_back(self, turn: Turn, step: int, weights: WeightsRef | None = None) -> None:
        """The turn is over; ``weights`` are what the policy engines hold from now on.

        Raises:
            ValueError: the weights would go back.
        """
        if weights is not None:
            if weights.version < self.weights.version:
                raise ValueError(
                    f"weights {weights.version} after {self.weights.version}: versions only grow"
                )
            self.weights = weights
        self._held = [each for each in self._held if each != (turn, step)]

    def forget(self, step: int) -> None:
        """The step has ended, however it did."""
        self._held = [each for each in self._held if each[1] != step]
        self._waiting = [each for each in self._waiting if each[1] != step]

    def __str__(self) -> str:
        held = ", ".join(f"step {step} has the turn to {turn}" for turn, step in self._held)
        return f"{held or 'nobody has a turn'}, the engines hold weights {self.weights.version}"
