"""What becomes of each flag: a table, read by :mod:`relax_infer.compat.flags`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class To:
    """A flag that is one field of the recipe."""

    field: str
    """Dotted."""
    words: Mapping[str, Any] | None = None
    """What the flag's words are in the recipe; None: the same. A word that is not there is told."""


@dataclass(frozen=True)
class Told:
    """A flag that is no field of the recipe; why, for the person who converts."""

    why: str
    unless: Any = None
    """A value under which there is nothing to tell."""


_ALWAYS = "always so here"
_DENSE = "the trainer knows dense models only"
_RECOMPUTE = "activations are not recomputed: lower train.micro_batch_tokens if memory is short"

TABLE: dict[str, To | Told] = {
    # prompts and the step
    "num-rollout": To("steps"),
    "rollout-batch-size": To("rollout.prompts_per_step"),
    "n-samples-per-prompt": To("rollout.samples_per_prompt"),
    "rollout-max-response-len": To("rollout.sampling.max_new_tokens"),
    "rollout-max-prompt-len": To("data.max_prompt_tokens"),
    "rollout-temperature": To("rollout.sampling.temperature"),
    "rollout-top-p": To("rollout.sampling.top_p"),
    "rollout-seed": To("seed"),
    "seed": To("seed"),
    "prompt-data": To("data.path"),
    "input-key": To("data.prompt_field"),
    "label-key": To("data.answer_field"),
    "apply-chat-template": To("data.chat"),
    "apply-chat-template-kwargs": To("data.chat_template_kwargs"),
    "rollout-shuffle": To("data.shuffle"),
    "metadata-key": Told("rows have a prompt and an answer only"),
    "tool-key": Told("tools are not passed to the chat template"),
    "reward-key": To("reward.key"),
    "max-staleness": To("max_staleness"),
    "balance-data": Told(f"{_ALWAYS}: ranks get parts of equal tokens"),
    "use-fault-tolerance": Told(f"{_ALWAYS}: replicas that fail are rebuilt after proof"),
    "partial-rollout": Told("unfinished samples are not carried to the next step"),
    "over-sampling-batch-size": Told("every prompt that is issued is trained on or accounted for"),
    "dynamic-sampling-filter-path": Told("groups are dropped by reward.on_unscored only"),
    # evaluation
    "eval-interval": To("evaluation.every"),
    "eval-prompt-data": Told("evaluation is on data.held_out rows of data.path"),
    # engines
    "rollout-num-gpus": To("rollout.num_gpus"),
    "rollout-num-gpus-per-engine": To("rollout.engine.gpus_per_replica"),
    "num-gpus-per-node": To("cluster.gpus_per_node"),
    "actor-num-gpus-per-node": To("cluster.gpus_per_node"),
    "hf-checkpoint": To("rollout.model"),
    "genrm-model-path": To("genrm.model"),
    "genrm-num-gpus": To("genrm.num_gpus"),
    "genrm-num-gpus-per-engine": To("genrm.engine.gpus_per_replica"),
    "genrm-ray-num-gpus": To("genrm.engine.ray_gpu_fraction"),
    "rollout-external": To("rollout.external"),
    "debug-train-only": To("debug", {"True": "train_only"}),
    "debug-rollout-only": To("debug", {"True": "rollout_only"}),
    "hybrid": Told("mode alone says who shares GPUs: defer, split or decoupled"),
    "fully-async": Told("mode decoupled, with max_staleness how far generation may be ahead"),
    "offload-train": Told(f"{_ALWAYS}: who shares GPUs lets them go"),
    "offload-rollout": Told(f"{_ALWAYS}: who shares GPUs lets them go"),
    "sglang-config": Told(
        "models and groups of engines are not read from a file: write rollout.server_groups and"
        " rollout.extra_models"
    ),
    # training
    "tensor-model-parallel-size": To("train.tensor_parallel"),
    "pipeline-model-parallel-size": To("train.pipeline_parallel"),
    "sequence-parallel": To("train.sequence_parallel"),
    "context-parallel-size": Told("the trainer does not split sequences over ranks", 1),
    "expert-model-parallel-size": Told(_DENSE, 1),
    "expert-tensor-parallel-size": Told(_DENSE, 1),
    "max-tokens-per-gpu": To("train.micro_batch_tokens"),
    "use-dynamic-batch-size": To("train.packed"),
    "recompute-granularity": Told(_RECOMPUTE),
    "recompute-method": Told(_RECOMPUTE),
    "recompute-num-layers": Told(_RECOMPUTE),
    "bf16": To("train.precision", {"True": "bf16"}),
    "advantage-estimator": To(
        "train.algorithm.estimator",
        {
            "grpo": "grpo",
            "ppo": "ppo",
            "rloo": "rloo",
            "reinforce_plus_plus": "reinforce_plus_plus",
            "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
        },
    ),
    "disable-grpo-std-normalization": To("train.algorithm.normalise_std", {"True": False}),
    "kl-loss-type": To(
        "train.algorithm.kl_estimator", {"low_var_kl": "k3", "k1": "k1", "k2": "k2", "k3": "k3"}
    ),
    "entropy-coef": To("train.algorithm.entropy_coefficient"),
    "eps-clip": To("train.clip_low"),
    "eps-clip-high": To("train.clip_high"),
    "eps-clip-c": To("train.algorithm.dual_clip"),
    "tis-clip": To("train.algorithm.importance_cap"),
    "gamma": To("train.algorithm.gamma"),
    "lambd": To("train.algorithm.gae_lambda"),
    "value-clip": To("critic.value_clip"),
    "critic-lr": To("critic.learning_rate"),
    "optimizer": Told("the optimizer is AdamW", "adam"),
    "optimizer-cpu-offload": Told("the optimizer's state is on the GPUs, sharded over the ranks"),
    "overlap-cpu-optimizer-d2h-h2d": Told("the optimizer's state is on the GPUs"),
    "use-precision-aware-optimizer": Told("the optimizer's state is float32"),
    "lr": To("train.learning_rate"),
    "min-lr": To("train.schedule.min_learning_rate"),
    "lr-warmup-iters": To("train.schedule.warmup_steps"),
    "lr-decay-iters": To("train.schedule.decay_steps"),
    "lr-decay-style": To(
        "train.schedule.style", {"constant": "constant", "linear": "linear", "cosine": "cosine"}
    ),
    "weight-decay": To("train.weight_decay"),
    "clip-grad": To("train.grad_clip"),
    "attention-dropout": Told("there is no dropout", 0.0),
    "hidden-dropout": Told("there is no dropout", 0.0),
    # files
    "ref-load": Told("the reference is the policy that the run begins with"),
    "load": Told("a run begins with rollout.model and goes on by itself after a crash"),
    "save": Told("checkpoints, weights and samples are below staging.url"),
    "save-interval": To("train.keep_every"),
    "max-actor-ckpt-to-keep": To("train.keep_checkpoints"),
    # distillation
    "opd-kl-coef": To("distillation.coefficient"),
    "opd-teacher-model-path": To("teacher.model"),
    "opd-teacher-num-gpus": To("teacher.num_gpus"),
    "opd-teacher-num-gpus-per-engine": To("teacher.engine.gpus_per_replica"),
    "opd-teacher-routes": Told(
        "write teacher and teacher.extra_models, each with its route's key as model_id; a row's"
        " Teacher is named by data.teacher_field"
    ),
    "opd-teacher-key": To("data.teacher_field"),
    "opd-teacher-defer": Told("with mode defer the Teacher has a turn of its own"),
    "defer-reward-to-post-process": Told(f"{_ALWAYS}: rewards are scored after generation"),
    # looking on
    "use-wandb": Told("metrics are in the report and in the Temporal UI"),
    "wandb-project": Told("metrics are in the report and in the Temporal UI"),
    "wandb-group": Told("metrics are in the report and in the Temporal UI"),
}
"""Flags that stand for themselves. Those that depend on each other are in
:mod:`relax_infer.compat.flags`."""

SGLANG_OF_ROLLOUT = "sglang-"
"""Flags with this prefix go to the policy's engines as they are."""
