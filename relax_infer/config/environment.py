"""The recipe's environment: what answers the policy between its turns."""

import re
from typing import Annotated

from pydantic import AfterValidator, Field

from relax_infer.config.placed import Free, Positive, Seconds, Section

BUILT_IN = ("retry",)


def _known_environment(source: str) -> str:
    if source not in BUILT_IN and not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", source):
        raise ValueError(f"must be {', '.join(BUILT_IN)} or package.module:name of a maker")
    return source


class Environment(Section):
    """Makes every sample an episode: the policy and an environment take turns."""

    source: Annotated[str, AfterValidator(_known_environment)]
    """`retry`: the task's checker says that an answer is wrong, and the policy tries again. Or
    `package.module:name` of what makes an Environment, which the workers can import."""
    config: Free = Field(default_factory=dict)
    """Given to the environment. retry: `again`, what the policy is told after a wrong answer;
    `discount`, the worth of a right answer, times itself with every turn before it."""
    max_turns: Positive = 4
    """Answers of the policy in an episode. rollout.sampling.max_new_tokens is of each of them."""
    max_response_tokens: Positive = 4096
    """Tokens of an episode after its prompt, the environment's words among them; one that has no
    room for the next turn ends as one that hit its limit."""
    step_timeout: Seconds = 60.0
    """Seconds for the environment to answer one turn; without an answer the sample has no score."""
