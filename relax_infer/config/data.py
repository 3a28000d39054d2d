"""The recipe's data section: where prompts and right answers come from."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, ValidationInfo, model_validator

from relax_infer.config.placed import Free, Pattern, Positive, Section, Seed, own_rules


def known_source(source: str) -> str:
    """A task's name; raises ValueError for any other text."""
    own = source in ("tiny.sort4", "file")
    if not own and not re.fullmatch(r"reasoning_gym\.[a-z0-9_]+", source):
        raise ValueError("must be tiny.sort4, file or reasoning_gym.<dataset>")
    return source


def _digest(text: str) -> str:
    if not re.fullmatch(r"[0-9a-f]{64}", text):
        raise ValueError("must be 64 hexadecimal digits")
    return text


Sha256 = Annotated[str, AfterValidator(_digest)]


class Data(Section):
    """Where prompts come from."""

    source: Annotated[str, AfterValidator(known_source)] = "tiny.sort4"
    """Task: prompts, right answers and a checker. `tiny.sort4`, `reasoning_gym.<dataset>`, or
    `file`: one of your own."""
    held_out: Annotated[int, Field(ge=1)] = 512
    """Problems that are never trained on and serve evaluation; tiny.sort4 has 512 at most."""
    config: Free = Field(default_factory=dict)
    """reasoning-gym: the dataset's own settings, its size among them."""
    seed: Seed = 0
    """reasoning-gym: of the dataset's problems. file: of the choice of those held out. Which of
    the others a step draws is the run's seed."""
    system_prompt: str | None = None
    """What the policy is told before each question; '' tells it nothing. Empty: with a file
    nothing, with reasoning-gym to end with the answer between answer tags, which the datasets'
    scorers look for."""
    path: str | None = None
    """file: JSON lines (.jsonl) or Parquet (.parquet), one prompt a row, by its path or fsspec URL
    as the workers see it."""
    sha256: Sha256 | None = None
    """file: of its content. Empty: of the file as it is when the run begins. A worker that finds
    another file stops the run."""
    prompt_field: str = "prompt"
    """file: the row's prompt: text, or a list of messages with role and content. A dot goes into
    an object: `extra.question`."""
    answer_field: str = "answer"
    """file: the row's right answer, text or a number. '': rows have none."""
    teacher_field: str | None = None
    """file: the row's Teacher, by its model_id, where there are several. Empty: the teacher
    section's own teaches all."""
    grader: Literal["exact", "math_verify"] | None = None
    """file: how a response is found right, for accuracies and reward exact: it is the answer, text
    for text; or its last expression equals it. Empty: math_verify if that is the reward."""
    answer_pattern: Pattern | None = None
    """file, grader exact: where a response says its answer, a regular expression with a group
    `(?P<answer>...)`; its last match counts. Empty: the whole response is the answer."""
    chat: bool = True
    """file: a prompt that is text becomes a user's message in the policy's chat template; false:
    it goes to the policy as it is."""
    chat_template_kwargs: Free = Field(default_factory=dict)
    """file and reasoning-gym: switches of the policy's chat template, for instance
    `enable_thinking: false`."""
    shuffle: bool = True
    """file: each pass over the rows in another order; false: in the file's."""
    max_prompt_tokens: Positive | None = None
    """file: rows with longer prompts are left out. Empty: none is."""

    @model_validator(mode="after")
    def _source_can_be_had(self, info: ValidationInfo) -> "Data":
        if not own_rules(info):
            return self
        if self.source == "tiny.sort4" and self.held_out > 512:
            raise ValueError(f"held_out is {self.held_out}: tiny.sort4 has 512")
        if (self.source == "file") != (self.path is not None):
            raise ValueError(
                "data.path and source file belong together: give both, or neither"
                f" (source is {self.source}, path is {self.path})"
            )
        pattern = self.answer_pattern
        if pattern is not None and "answer" not in re.compile(pattern).groupindex:
            raise ValueError("answer_pattern has no group (?P<answer>...)")
        return self
