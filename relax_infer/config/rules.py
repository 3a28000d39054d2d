"""Rules between the parts of a recipe, each of which is well formed by itself."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

from relax_infer.config.placed import MOST
from relax_infer.config.scoring import JUDGE_PLACES, GenRM
from relax_infer.config.violation import Violation

if TYPE_CHECKING:
    from relax_infer.config.recipe import Recipe

_FEWEST = (("rollout.prompts_per_step", 1), ("rollout.samples_per_prompt", 2))
"""Of a step's samples, where no limit of them is high enough."""
TINY_TASK = "tiny.sort4"
"""The task that the tiny models can read, and no other model."""


def broken_rules(recipe: Recipe) -> list[Violation]:
    """Every rule that the recipe breaks; those of its placement are the planner's."""
    parts = (_staleness, _reward, _judges, _served_elsewhere, _teacher, _data, _environment)
    more = (_size_of_a_step, _sets, _schedule, _ranks, _algorithm, _critic)
    return list(chain.from_iterable(rules(recipe) for rules in (*parts, *more)))


def _staleness(recipe: Recipe) -> Iterator[Violation]:
    if recipe.max_staleness > 0 and recipe.mode != "decoupled":
        yield Violation(
            "max_staleness",
            f"{recipe.max_staleness} in mode {recipe.mode}: generation can be ahead of training"
            " only where each has GPUs of its own.",
            "Set it to 0, or mode to decoupled.",
            (("max_staleness", 0),),
        )


def _reward(recipe: Recipe) -> Iterator[Violation]:
    source = recipe.reward.source
    if source == "genrm" and recipe.genrm is None:
        yield Violation(
            "reward.source",
            "genrm, but the recipe has no genrm section.",
            "Add one, or set it to exact.",
            (("reward.source", "exact"),),
        )
    if source == "none" and not recipe.distilled:
        yield Violation(
            "reward.source",
            "none, and nothing is distilled: there is nothing to learn from.",
            "Set it to a source, or distillation with a coefficient above 0.",
            (("reward.source", "exact"),),
        )
    if source == "reasoning_gym" and not recipe.data.source.startswith("reasoning_gym."):
        yield Violation(
            "reward.source",
            f"reasoning_gym, but data.source is {recipe.data.source}: its scorers know only their"
            " own problems.",
            "Set data.source to reasoning_gym.<dataset>, or another source of reward.",
            (("reward.source", "exact"),),
        )
    if source in ("exact", "math_verify") and not recipe.data.answer_field:
        yield Violation(
            "reward.source",
            f"{source}, but data.answer_field is empty.",
            "Name the field with the right answers.",
        )
    if source == "environment" and recipe.rollout.environment is None:
        yield Violation(
            "reward.source",
            "environment, but rollout has no environment section.",
            "Add one, or set another source.",
            (("reward.source", "exact"),),
        )


def _judges(recipe: Recipe) -> Iterator[Violation]:
    genrm = recipe.genrm
    if genrm is None:
        return
    if (genrm.prompt is None) != (genrm.verdict is None):
        yield Violation(
            "genrm.prompt",
            "it and genrm.verdict belong together.",
            "Give both, or neither to use the task's own.",
            (("genrm.prompt", None), ("genrm.verdict", None)),
        )
    elif genrm.prompt is not None:
        yield from _prompt(genrm.prompt)
    elif recipe.judged and recipe.data.source != TINY_TASK:
        yield Violation(
            "genrm.prompt",
            f"is missing: data.source {recipe.data.source} has no prompt for a judge.",
            "Write genrm.prompt and genrm.verdict.",
        )
    yield from _verdicts(recipe, genrm)


def _prompt(prompt: str) -> Iterator[Violation]:
    places = set(re.findall(r"\{(\w+)\}", prompt))
    for unknown in sorted(places - set(JUDGE_PLACES)):
        known = ", ".join(f"{{{place}}}" for place in JUDGE_PLACES)
        yield Violation("genrm.prompt", f"has {{{unknown}}}.", f"It may show {known}.")
    if "response" not in places:
        yield Violation("genrm.prompt", "does not show what is judged.", "It must show {response}.")


def _verdicts(recipe: Recipe, genrm: GenRM) -> Iterator[Violation]:
    key = recipe.reward.key
    pattern = genrm.verdict.pattern if genrm.verdict else None
    if pattern is not None and key not in re.compile(pattern).groupindex:
        yield Violation(
            "genrm.verdict.pattern",
            f"has no group (?P<{key}>...), which reward.key names.",
            "Give the group that name, or set reward.key to its own.",
        )
    judges = {genrm.model_id, *(model.model_id for model in genrm.extra_models)}
    weights = recipe.reward.combine.weights
    if recipe.reward.combine.rule == "weighted" and set(weights) != judges:
        yield Violation(
            "reward.combine.weights",
            f"has {', '.join(sorted(weights)) or 'nobody'}, the judges are"
            f" {', '.join(sorted(judges))}.",
            "Give each judge a weight.",
        )


def _served_elsewhere(recipe: Recipe) -> Iterator[Violation]:
    for role, section in (("genrm", recipe.genrm), ("teacher", recipe.teacher)):
        if section is not None and section.url is not None and section.extra_models:
            yield Violation(
                f"{role}.url",
                f"is set, so {role}.extra_models would have no engines.",
                "Remove one of them.",
                ((f"{role}.extra_models", None),),
            )


def _teacher(recipe: Recipe) -> Iterator[Violation]:
    distillation, teacher = recipe.distillation, recipe.teacher
    if distillation is None:
        return
    if teacher is None:
        yield Violation(
            "distillation",
            "the recipe has no teacher section.",
            "Add one, or remove distillation.",
        )
    if recipe.distilled and recipe.rollout.sampling.temperature != 1.0:
        field = "rollout.sampling.temperature"
        yield Violation(
            field,
            f"{recipe.rollout.sampling.temperature:g} with distillation: the Teacher's log-probs"
            " are untempered, so the two could not be compared.",
            "Set it to 1.0.",
            ((field, 1.0),),
        )
    cells = 2 * distillation.top_k
    if distillation.mode == "student_sampled" or teacher is None:
        return
    if teacher.max_logprob_cells < cells:
        field = "teacher.max_logprob_cells"
        yield Violation(
            field,
            f"{teacher.max_logprob_cells}, one position with distillation.top_k"
            f" {distillation.top_k} may need {cells}.",
            "Raise it, or lower distillation.top_k.",
            ((field, cells),) if cells <= MOST else (("distillation.top_k", 1),),
        )


def _data(recipe: Recipe) -> Iterator[Violation]:
    data = recipe.data
    tiny = data.source == TINY_TASK
    if not tiny and recipe.rollout.model.startswith("tiny:"):
        yield Violation(
            "rollout.model",
            f"{recipe.rollout.model} with data.source {data.source}: the tiny models know 22"
            " characters and no words.",
            "Name a folder with a policy and its tokenizer.",
        )
    if data.config and not data.source.startswith("reasoning_gym."):
        yield Violation(
            "data.config",
            f"is for reasoning_gym.<dataset>, data.source is {data.source}.",
            "Remove it.",
            (("data.config", None),),
        )
    if data.system_prompt is not None and tiny:
        yield Violation(
            "data.system_prompt",
            f"is not for data.source {TINY_TASK}.",
            "Remove it.",
            (("data.system_prompt", None),),
        )


def _environment(recipe: Recipe) -> Iterator[Violation]:
    plan = recipe.distillation
    if recipe.rollout.environment is not None and recipe.student_top_k and plan is not None:
        yield Violation(
            "distillation.mode",
            f"{plan.mode} with rollout.environment: the policy's likeliest tokens are not known"
            " where the environment speaks.",
            "Set it to student_sampled or teacher_topk.",
            (("distillation.mode", "student_sampled"),),
        )


def _size_of_a_step(recipe: Recipe) -> Iterator[Violation]:
    rollout, staging = recipe.rollout, recipe.staging
    total = rollout.prompts_per_step * rollout.samples_per_prompt
    if total > staging.max_samples:
        yield Violation(
            "rollout.prompts_per_step",
            f"{total} samples a step with rollout.samples_per_prompt"
            f" {rollout.samples_per_prompt}, staging.max_samples is {staging.max_samples}.",
            "Lower the former, or raise the limit if memory and store allow.",
            (("staging.max_samples", total),) if total <= MOST else _FEWEST,
        )
    limit, most = "rollout.sampling.max_new_tokens", rollout.sampling.max_new_tokens
    if rollout.environment is not None:
        limit = "rollout.environment.max_response_tokens"
        most = rollout.environment.max_response_tokens
    tokens = total * most
    if tokens > staging.max_tokens:
        yield Violation(
            limit,
            f"{most} x {total} samples is {tokens} tokens a step, staging.max_tokens is"
            f" {staging.max_tokens}.",
            "Lower the former, or raise the limit if memory and store allow.",
            (("staging.max_tokens", tokens),) if tokens <= MOST else ((limit, 1),),
        )
    mini_batches = recipe.train.mini_batches
    if mini_batches > total:
        yield Violation(
            "train.mini_batches",
            f"{mini_batches}, but a step has {total} samples.",
            "Use fewer mini-batches.",
            (("train.mini_batches", total),),
        )


def _sets(recipe: Recipe) -> Iterator[Violation]:
    tiny = recipe.rollout.model.startswith("tiny:")
    for n, each in enumerate(recipe.evaluation.sets):
        field = f"evaluation.sets.{n}"
        if each.source is None and each.problems > recipe.data.held_out:
            yield Violation(
                f"{field}.problems",
                f"set {each.name} has {each.problems}, data.held_out is {recipe.data.held_out}.",
                "Lower the former, or raise the latter.",
                ((f"{field}.problems", recipe.data.held_out),),
            )
        if each.source is not None and tiny != (each.source == TINY_TASK):
            yield Violation(
                f"{field}.source",
                f"set {each.name} is of {each.source}, whose problems {recipe.rollout.model} cannot"
                " read.",
                "Choose another source.",
            )


def _schedule(recipe: Recipe) -> Iterator[Violation]:
    schedule, rate = recipe.train.schedule, recipe.train.learning_rate
    end = schedule.decay_steps or recipe.steps
    if schedule.style != "constant" and schedule.warmup_steps >= end:
        field = "train.schedule.warmup_steps"
        yield Violation(
            field,
            f"{schedule.warmup_steps}, but the learning rate is to have fallen at step {end}.",
            "Raise decay_steps, or warm up for fewer steps.",
            ((field, end - 1),),
        )
    if schedule.min_learning_rate > rate:
        field = "train.schedule.min_learning_rate"
        yield Violation(
            field,
            f"{schedule.min_learning_rate:g} is above train.learning_rate {rate:g}.",
            "Lower it.",
            ((field, rate),),
        )


def _ranks(recipe: Recipe) -> Iterator[Violation]:
    train = recipe.train
    model = train.tensor_parallel * train.pipeline_parallel
    if train.ranks % model:
        yield Violation(
            "train.ranks",
            f"is {train.ranks}, tensor_parallel x pipeline_parallel is {model}.",
            "Make it a multiple of that, or lower these.",
            (("train.tensor_parallel", 1), ("train.pipeline_parallel", 1)),
        )
    if train.sequence_parallel and train.tensor_parallel == 1:
        field = "train.sequence_parallel"
        yield Violation(
            field,
            "needs train.tensor_parallel above 1.",
            "Raise that, or leave it out.",
            ((field, False),),
        )


def _algorithm(recipe: Recipe) -> Iterator[Violation]:
    algorithm, of = recipe.train.algorithm, "train.algorithm"
    if algorithm.importance != "none" and algorithm.old_log_probs != "trainer":
        yield Violation(
            f"{of}.importance",
            f"is {algorithm.importance} but old_log_probs is {algorithm.old_log_probs}: the ratio"
            " against the rollout's log-probs corrects already.",
            "Set old_log_probs to trainer, or importance to none.",
            ((f"{of}.importance", "none"),),
        )
    k1 = algorithm.kl_estimator == "k1"
    if algorithm.kl_coefficient > 0 and algorithm.kl_in == "loss" and k1:
        yield Violation(
            f"{of}.kl_estimator",
            "k1 has no gradient as a loss, in expectation.",
            "Use k2 or k3, or set kl_in to reward.",
            ((f"{of}.kl_estimator", "k3"),),
        )


def _critic(recipe: Recipe) -> Iterator[Violation]:
    field = "train.algorithm.estimator"
    if recipe.train.algorithm.estimator != "ppo":
        return
    if recipe.critic is None:
        yield Violation(
            field,
            "ppo, but the recipe has no critic section.",
            "Add one, with as many ranks as train.ranks.",
            (("critic.ranks", recipe.train.ranks),),
        )
    if recipe.reward.source == "none":
        yield Violation(
            field, "ppo, but reward.source is none.", "Set one.", (("reward.source", "exact"),)
        )
