"""What answers the policy between its turns: the protocol, and one that lets it try again."""

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from relax_infer.config.environment import Environment as Plan
from relax_infer.contracts.failures import PermanentError
from relax_infer.samples.tasks import Problem, Task, Unscored

EPISODE = "episode"
"""In a sample's metadata: how its episode went, as :class:`Episode`'s fields."""


@dataclass(frozen=True)
class Turn:
    """What an environment answers.

    Attributes:
        observation: what the policy reads next; unused when the episode is over.
        done: the episode is over.
        reward: of the whole episode so far; the last one given is the sample's. None: as before.
    """

    observation: str = ""
    done: bool = False
    reward: float | None = None


class Environment(Protocol):
    """One episode of one sample. What it raises leaves the sample without a score."""

    async def step(self, text: str, ids: Sequence[int]) -> Turn:
        """The policy said ``text`` (token ``ids``, its end among them)."""
        ...

    async def close(self) -> None:
        """The episode is over, however it ended. Called once."""
        ...


Maker = Callable[[Problem, Task, Mapping[str, Any]], Environment]
"""Of a sample's problem, its task and the recipe's ``rollout.environment.config``."""


def environment_maker(plan: Plan) -> Maker:
    """What the recipe names.

    Raises:
        PermanentError: it cannot be imported or called.
    """
    if plan.source == "retry":
        return Retry
    module, _, name = plan.source.partition(":")
    try:
        found: Any = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise PermanentError(
            f"rollout.environment.source {plan.source} cannot be imported: {error}",
            cure="The module must be installed where the workers run.",
        ) from error
    if not callable(found):
        raise PermanentError(
            f"rollout.environment.source {plan.source} is {type(found).__name__} and makes no"
            " environment.",
            cure="Name a class or function of (problem, task, config).",
        )
    return cast(Maker, found)


class Retry:
    """The task's checker says that an answer is wrong, and the policy tries again.

    A right answer at turn ``k`` (from 0) is worth ``discount ** k``, a wrong one nothing.
    """

    def __init__(self, problem: Problem, task: Task, config: Mapping[str, Any]) -> None:
        unknown = sorted(set(config) - {"again", "discount"})
        if unknown:
            raise PermanentError(
                f"rollout.environment.config has {unknown[0]}: retry takes again and discount."
            )
        self._problem, self._task = problem, task
        self._again = str(config.get("again", "That is not right. Try again."))
        self._discount = float(config.get("discount", 0.5))
        self._wrong = 0

    async def step(self, text: str, ids: Sequence[int]) -> Turn:
        problem = self._problem
        if self._task.check(problem.answer, ids, problem.metadata):
            return Turn(done=True, reward=self._discount**self._wrong)
        self._wrong += 1
        return Turn(self._again, reward=0.0)

    async def close(self) -> None:
        pass


def episode_reward(metadata: str) -> float:
    """The reward that a sample's environment gave.

    Raises:
        Unscored: it gave none, or the sample is of no episode.
    """
    episode = json.loads(metadata).get(EPISODE)
    if episode is None:
        raise Unscored("no episode: the sample was made without an environment")
    if episode["error"] is not None:
        raise Unscored(f"environment: {episode['error']}")
    if episode["reward"] is None:
        raise Unscored("environment: it gave no reward")
    return float(episode["reward"])
