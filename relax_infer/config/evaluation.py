"""What a run is measured by: named sets of problems that are answered with pinned weights."""

from typing import Annotated

from pydantic import AfterValidator, Field, ValidationInfo, model_validator

from relax_infer.config.data import Sha256, known_source
from relax_infer.config.placed import Free, Positive, Section, Seed, own_rules

HELD_OUT = "held_out"
"""Name of the only set, where the recipe names none."""


class EvaluationSet(Section):
    """Problems, how often each is answered, and how."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,39}$")]
    """Shown in progress, web UI and report."""
    source: Annotated[str, AfterValidator(known_source)] | None = None
    """Another task than data.source, graded by its own rule. Empty: the problems that data.held_out
    keeps from training. Those of another source are not kept from training: choose one that no run
    trains on."""
    path: str | None = None
    """A file of problems, read as data.path is, by the fields that the data section names."""
    sha256: Sha256 | None = None
    """Of that file, as data.sha256."""
    problems: Positive = 128
    """So many of them."""
    config: Free = Field(default_factory=dict)
    """Of the other source, as in data.config."""
    seed: Seed = 0
    """Of the other source, as in data.seed."""
    samples: Positive = 1
    """Answers to each problem."""
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """0: greedy, which is for one answer."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus."""
    max_new_tokens: Positive | None = None
    """Tokens of an answer. Empty: rollout.sampling.max_new_tokens."""
    pass_at: tuple[Positive, ...] = ()
    """k of each pass@k: the chance that at least one of k answers is right, estimated without bias
    from all samples."""

    @model_validator(mode="after")
    def _can_be_told(self, info: ValidationInfo) -> "EvaluationSet":
        if not own_rules(info):
            return self
        if self.samples > 1 and self.temperature == 0:
            raise ValueError(
                f"set {self.name}: samples is {self.samples} but temperature 0 gives the same"
                " answer each time: set a temperature, or samples to 1"
            )
        if too_many := [k for k in self.pass_at if k > self.samples]:
            raise ValueError(
                f"set {self.name}: pass_at {too_many[0]} needs as many samples, there are"
                f" {self.samples}: raise samples"
            )
        if (self.source == "file") != (self.path is not None):
            raise ValueError(f"set {self.name}: source file and path belong together: give both")
        if self.source is None and (self.config or self.seed):
            raise ValueError(
                f"set {self.name}: config and seed are for another source: name one, or change"
                " data.config and data.seed"
            )
        return self


class EvaluationPlan(Section):
    """Answers to problems that are not trained on, with the weights of a step pinned."""

    every: Annotated[int, Field(ge=0)] = 5
    """Steps between evaluations, also before the first and after the last; 0: never."""
    sets: tuple[EvaluationSet, ...] = ()
    """One after another; the first one's accuracy is the run's. Empty: every problem of
    data.held_out once, greedy."""

    @model_validator(mode="after")
    def _names_differ(self, info: ValidationInfo) -> "EvaluationPlan":
        if not own_rules(info):
            return self
        names = [each.name for each in self.sets]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two sets have the name {twice[0]}: give each its own")
        return self

    def resolved(self, held_out: int) -> tuple[EvaluationSet, ...]:
        """The sets, or the only one."""
        return self.sets or (EvaluationSet(name=HELD_OUT, problems=held_out),)
