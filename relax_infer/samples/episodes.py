"""Episodes: the policy and an environment take turns, on one replica, until one of them ends it."""

import asyncio
import hashlib
import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from relax_infer.config.recipe import Recipe
from relax_infer.contracts.failures import RelaxError, TransientError
from relax_infer.samples.answers import Answer, read_answer
from relax_infer.samples.environment import EPISODE, Environment, Turn, environment_maker
from relax_infer.samples.phase import Asker
from relax_infer.samples.tasks import Problem, Task

Addresses = Callable[[], Awaitable[Sequence[str]]]
"""URLs of the policy's replicas that answer now."""
_ERROR_SHOWN = 300
log = logging.getLogger(__name__)


async def nobody() -> Sequence[str]:
    """Where no episode is played."""
    return ()


@dataclass
class Response:
    """What came after a prompt, [R] each."""

    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    """Zero where the policy did not sample the token."""
    mask: list[int] = field(default_factory=list)
    finish: str = "stop"

    def said(self, answer: Answer) -> None:
        """By the policy."""
        self.ids += answer.ids
        self.log_probs += answer.log_probs
        self.mask += [1] * len(answer.ids)
        self.finish = answer.finish

    def read(self, ids: Sequence[int]) -> None:
        """From the environment."""
        self.ids += ids
        self.log_probs += [0.0] * len(ids)
        self.mask += [0] * len(ids)


@dataclass
class Episode:
    """How it went; kept in the sample's metadata."""

    turns: int = 0
    reward: float | None = None
    error: str | None = None
    """Why the environment gave no answer."""


class Episodes:
    """Plays episodes of one attempt at a phase.

    The turns of an episode go to the replica that a rendezvous hash of its sample names, whose
    prefix cache holds what was said before; another only when the phase is tried again.
    """

    def __init__(self, recipe: Recipe, task: Task, addresses: Addresses) -> None:
        plan = recipe.rollout.environment
        assert plan is not None
        self._plan, self._task, self._addresses = plan, task, addresses
        self._make = environment_maker(plan)
        self._sampling = recipe.rollout.sampling
        self._replicas: asyncio.Task[Sequence[str]] | None = None

    async def play(
        self, asker: Asker, problem: Problem, group: int, sample: int, version: int
    ) -> tuple[Response, str]:
        """The whole response, and the sample's metadata.

        Raises:
            TransientError: an engine did not answer, or there is none.
            PermanentError: it answered with other weights than ``version``.
        """
        where = f"group {group} sample {sample}"
        url = f"{await self._replica(asker, group, sample)}/generate"
        episode, response = Episode(), Response()
        environment = self._make(problem, self._task, self._plan.config)
        try:
            while True:
                answer = await self._ask(asker, url, problem, response, group, sample, episode)
                response.said(answer.require(version, f"{where} turn {episode.turns}"))
                episode.turns += 1
                turn = await self._step(environment, answer, episode)
                if turn is None or turn.done or episode.turns == self._plan.max_turns:
                    break
                if answer.finish != "stop" or not self._goes_on(response, turn):
                    response.finish = "length"
                    break
        finally:
            try:
                await environment.close()
            except Exception:  # the episode is over whatever its environment says to that
                log.warning("%s: its environment cannot be closed", where, exc_info=True)
        known: dict[str, Any] = json.loads(problem.metadata)
        return response, json.dumps({**known, EPISODE: asdict(episode)})

    async def _ask(
        self,
        asker: Asker,
        url: str,
        problem: Problem,
        response: Response,
        group: int,
        sample: int,
        episode: Episode,
    ) -> Answer:
        room = self._plan.max_response_tokens - len(response.ids)
        sampling = {
            "temperature": self._sampling.temperature,
            "top_p": self._sampling.top_p,
            "max_new_tokens": min(self._sampling.max_new_tokens, room),
        }
        body = {
            "input_ids": [*problem.prompt_ids, *response.ids],
            "sampling_params": sampling,
            "return_logprob": True,
        }
        part = f"t{episode.turns}"
        answer = await asker.post(url, body, group, sample, part=part)
        return read_answer(answer, f"group {group} sample {sample} turn {episode.turns}")

    async def _step(
        self, environment: Environment, answer: Answer, episode: Episode
    ) -> Turn | None:
        """None, and why in the episode, where the environment has no answer."""
        text = self._task.decode(answer.ids)
        try:
            turn = await asyncio.wait_for(
                environment.step(text, answer.ids), self._plan.step_timeout
            )
            _check(turn)
            if turn.reward is not None:
                episode.reward = float(turn.reward)
        except RelaxError:
            raise  # it is the recipe that is wrong
        except TimeoutError:
            episode.error = f"no answer within {self._plan.step_timeout:g} s"
            return None
        except Exception as error:
            episode.error = f"{type(error).__name__}: {error}"[:_ERROR_SHOWN]
            return None
        if not turn.done and not turn.observation:
            episode.error = "it neither ended the episode nor said anything"
            return None
        return turn

    def _goes_on(self, response: Response, turn: Turn) -> bool:
        """Whether there is room for what the environment said and one token in answer to it."""
        ids = self._task.turn(turn.observation)
        if len(response.ids) + len(ids) >= self._plan.max_response_tokens:
            return False
        response.read(ids)
        return True

    async def _replica(self, asker: Asker, group: int, sample: int) -> str:
        if self._replicas is None:
            self._replicas = asyncio.ensure_future(self._addresses())
        urls = await asyncio.shield(self._replicas)
        if not urls:
            raise TransientError("no engine of the policy answers")
        key = f"g{group}/s{sample}"
        return max(urls, key=lambda url: hashlib.sha256(f"{url}|{key}".encode()).digest())


def _check(turn: Any) -> None:
    """Environments are written by others."""
    if not isinstance(turn, Turn) or not isinstance(turn.observation, str):
        raise TypeError(f"step gave {turn!r}, and no Turn with a text")
