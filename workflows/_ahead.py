"""Steps of a run that are open at once: the next generates while those before it train."""

import asyncio
from collections.abc import Callable, Coroutine

from temporalio import workflow

from relax_infer.contracts.mailbox import Ask
from relax_infer.contracts.refs import WeightsRef
from relax_infer.contracts.run import TurnAnswer, TurnRequest
from workflows._turns import Turns


class StepsAhead:
    """Which steps are open, and whose turn it is.

    Args:
        max_staleness: steps that generation may be ahead of training.
        weights: what the policy engines hold; their version is the last step that is done.
        take: carries one step out.
    """

    def __init__(
        self,
        max_staleness: int,
        weights: WeightsRef,
        take: Callable[[int], Coroutine[None, None, None]],
    ) -> None:
        self.turns = Turns(max_staleness, weights)
        self.newest = weights.version
        """The last step that was begun."""
        self._take = take
        self._open: dict[int, asyncio.Task[None]] = {}
        self._committed: set[int] = set()

    @property
    def steps(self) -> tuple[int, ...]:
        """Those that are open, oldest first."""
        return tuple(self._open)

    @property
    def several(self) -> bool:
        return len(self._open) > 1

    @property
    def ended_one(self) -> bool:
        """Whether there is something to reap."""
        return any(task.done() for task in self._open.values())

    @property
    def may_begin(self) -> bool:
        """Everything that is open has committed its batch, and there is room for one more."""
        room = len(self._open) <= self.turns.max_staleness
        return room and all(step in self._committed for step in self._open)

    def begin(self) -> None:
        """The next step."""
        self.newest += 1
        self._open[self.newest] = asyncio.create_task(self._take(self.newest))

    def ended(self, step: int) -> None:
        """An attempt of the step is over, however it ended; what it held is free."""
        self.turns.forget(step)
        self._committed.discard(step)

    async def reap(self) -> None:
        """Let go of the steps that have ended; raises what ended one otherwise than by its end."""
        for step in [step for step, task in self._open.items() if task.done()]:
            await self._open.pop(step)

    async def cancel(self) -> None:
        """The open steps let go of what they hold and end."""
        tasks = list(self._open.values())
        self._open.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def serve(self, ask: Ask) -> TurnAnswer:
        """A step's signal: it waits here for its turn, or gives it back."""
        request = TurnRequest.model_validate(ask.payload)
        turn, step = request.turn, request.step
        if ask.method == "give_back_turn":
            self.turns.give_back(turn, step, request.weights)
            if turn == "generate":
                self._committed.add(step)
            return TurnAnswer(weights=self.turns.weights)
        self.turns.ask(turn, step)
        # Several who waited may be woken at once: each looks again.
        while not self.turns.may(turn, step):
            await workflow.wait_condition(
                lambda: self.turns.may(turn, step) or step not in self._open
            )
            if step not in self._open:
                raise ValueError(f"step {step} has ended: it needs no turn to {turn}")
        self.turns.take(turn, step)
        return TurnAnswer(weights=self.turns.weights)
