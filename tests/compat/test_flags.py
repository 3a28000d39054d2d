"""Launch scripts of the reference become recipes, and no flag is dropped without a word."""

from typing import Any

import pytest

from relax_infer.compat.flags import Converted, FlagError, convert_flags, flags_of_script
from relax_infer.config import Recipe, RecipeError, load_recipe
from relax_infer.config.runnable import require_runnable
from relax_infer.placement import plan_inference_placement

SCRIPT = r"""#!/bin/bash
# Two nodes of 8 GPUs; rollout, judge and actor take turns on all of them.
set -ex
MODEL_DIR=/models
export SAVE=/checkpoints
RESOURCE_ARGS=(
   --resource '{"actor": [1, 16], "rollout": [1, 16], "genrm": [1, 16]}'
   --colocate
   --max-staleness 0
   --num-gpus-per-node 8
   --rollout-num-gpus 16
)
ROLLOUT_ARGS=(
   --rm-type dapo-genrm   # the judge
   --inference-defer-roles genrm
   --reward-key score
   --num-rollout 1000 --rollout-batch-size 16 --n-samples-per-prompt 8
   --rollout-max-response-len 8192
   --rollout-temperature 1 --global-batch-size 128 --use-fault-tolerance --balance-data
   --prompt-data ${MODEL_DIR}/dapo.jsonl --input-key prompt --label-key label
   --apply-chat-template --rollout-shuffle
   #--rollout-batch-size 999
)
ENGINE_ARGS=( --rollout-num-gpus-per-engine 2 --sglang-mem-fraction-static 0.7
   --sglang-server-concurrency 32 )
GENRM_ARGS=(
   --genrm-model-path $MODEL_DIR/judge --genrm-num-gpus 16 --genrm-num-gpus-per-engine 8
   --genrm-engine-config '{"context_length": 10240, "mem_fraction_static": 0.85, "dp_size": 8,
     "ep_size": 8, "enable_dp_attention": true, "server_concurrency": 1024,
     "watchdog_timeout": 3600}'
   --genrm-sampling-config '{"temperature": 0.1, "top_p": 1.0, "top_k": -1,
     "max_response_len": 32, "chat_template_kwargs": {"enable_thinking": false}}'
)
TRAIN_ARGS=(
   --tensor-model-parallel-size 4 --sequence-parallel --pipeline-model-parallel-size 2
   --context-parallel-size 1 --expert-model-parallel-size 8 --expert-tensor-parallel-size 1
   --max-tokens-per-gpu 20480
   --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
   --advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.00 --kl-loss-type low_var_kl
   --entropy-coef 0.00 --eps-clip 0.2 --eps-clip-high 0.28 --use-tis
   --optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9
   --adam-beta2 0.98 --optimizer-cpu-offload
   --hf-checkpoint ${MODEL_DIR}/policy --ref-load ${MODEL_DIR}/policy
   --save $SAVE --save-interval 1000 --max-actor-ckpt-to-keep 1
)
ray start --head --num-gpus 8
ray job submit --address="http://127.0.0.1:8265" -- python3 train.py \
   ${RESOURCE_ARGS[@]} ${ROLLOUT_ARGS[@]} ${ENGINE_ARGS[@]} \
   ${GENRM_ARGS[@]} ${TRAIN_ARGS[@]} 2>&1 | tee log.txt
"""
JUDGED = {
    "genrm.prompt": "Is {response} right?",
    "genrm.verdict": {"labels": {"yes": 1, "no": 0}, "pattern": "(?P<score>yes|no)"},
}


def converted(text: str) -> Converted:
    return convert_flags(text.split())


def test_the_references_own_recipe_passes_parsing_placement_and_the_check_for_runs():
    done = convert_flags(flags_of_script(SCRIPT), name="reference")
    recipe = load_recipe(done.recipe, JUDGED)
    plan = plan_inference_placement(recipe)
    require_runnable(recipe)
    assert plan.mode == "defer"
    assert _said(recipe) == {
        "cluster": (16, 8),
        "rollout": (8, 2, 256, 16, 8, 8192, 1.0),
        "genrm": (2, 8, 2048, 32, 0.1, None, {"enable_thinking": False}),
        "train": (16, 4, 2, True, 20480, 1e-6, (0.9, 0.98), 0.1, 1, 1),
        "algorithm": ("grpo", "k3", 0.0, "trainer", "token"),
        "data": ("/models/dapo.jsonl", "prompt", "label", True, True),
        "run": (1000, "genrm", "score"),
    }
    assert recipe.genrm is not None
    assert recipe.genrm.engine.server_args["enable_dp_attention"] is True
    assert recipe.rollout.engine.server_args == {"mem_fraction_static": 0.7}


def _said(recipe: Recipe) -> dict[str, Any]:
    rollout, genrm, train, data = recipe.rollout, recipe.genrm, recipe.train, recipe.data
    assert genrm is not None
    return {
        "cluster": (recipe.cluster.gpus, recipe.cluster.gpus_per_node),
        "rollout": (
            *(rollout.engine.replicas, rollout.engine.gpus_per_replica, rollout.max_concurrency),
            *(rollout.prompts_per_step, rollout.samples_per_prompt),
            *(rollout.sampling.max_new_tokens, rollout.sampling.temperature),
        ),
        "genrm": (
            *(genrm.engine.replicas, genrm.engine.gpus_per_replica, genrm.max_concurrency),
            *(genrm.max_new_tokens, genrm.sampling.temperature, genrm.sampling.top_k),
            genrm.chat_template_kwargs,
        ),
        "train": (
            *(train.ranks, train.tensor_parallel, train.pipeline_parallel),
            *(train.sequence_parallel, train.micro_batch_tokens, train.learning_rate),
            *(train.betas, train.weight_decay, train.mini_batches, train.keep_checkpoints),
        ),
        "algorithm": (
            *(train.algorithm.estimator, train.algorithm.kl_estimator),
            *(train.algorithm.kl_coefficient, train.algorithm.old_log_probs),
            train.algorithm.importance,
        ),
        "data": (data.path, data.prompt_field, data.answer_field, data.chat, data.shuffle),
        "run": (recipe.steps, recipe.reward.source, recipe.reward.key),
    }


def test_every_flag_is_a_field_or_is_told():
    """Those told are the ones that mean nothing here, or cannot be had."""
    done = convert_flags(flags_of_script(SCRIPT))
    assert set(done.notes) == {
        *("balance-data", "use-fault-tolerance", "expert-model-parallel-size", "genrm"),
        *("recompute-granularity", "recompute-method", "recompute-num-layers"),
        *("optimizer-cpu-offload", "ref-load", "save"),
    }
    assert "dense" in done.notes["expert-model-parallel-size"]


def test_a_script_is_read_as_a_shell_reads_it():
    flags = flags_of_script(SCRIPT)
    assert flags[0] == "--resource"
    assert flags[flags.index("--prompt-data") + 1] == "/models/dapo.jsonl"
    assert flags[flags.index("--rollout-batch-size") + 1] == "16"
    assert flags.count("--rollout-batch-size") == 1
    assert not {"tee", "--head", "--address", "2>&1", ")"} & set(flags)


def test_a_script_without_arrays_is_one_command():
    text = "torchrun --nproc 8 train.py --lr 1e-6 \\\n --seed 7 > log.txt"
    assert flags_of_script(text) == ["--lr", "1e-6", "--seed", "7"]


def test_a_later_flag_wins_as_on_a_command_line():
    done = converted("--rollout-batch-size 4 --rollout-batch-size=8")
    assert done.recipe["rollout"] == {"prompts_per_step": 8}


@pytest.mark.parametrize(
    ("flags", "mode", "gpus"),
    [
        ('--resource {"actor":[1,4],"rollout":[1,8]}', "decoupled", 12),
        ('--resource {"actor":[1,4],"rollout":[1,4]} --colocate', "split", 4),
        ('--resource {"actor":[1,4],"genrm":[1,4]} --inference-defer-roles genrm', "defer", 4),
    ],
)
def test_who_shares_gpus_decides_the_mode(flags: str, mode: str, gpus: int):
    recipe = converted(flags).recipe
    assert (recipe["mode"], recipe["cluster"]["gpus"]) == (mode, gpus)


@pytest.mark.parametrize(
    ("more", "gpus", "ranks"),
    [
        ("", 12, {"reference": 4}),
        ("--colocate", 12, {"reference": 4}),
        ("--colocate --advantage-estimator ppo", 12, {"reference": 4, "critic": 8}),
        ("--advantage-estimator ppo", 20, {"reference": 4, "critic": 8}),
    ],
)
def test_ranks_beside_the_actors_have_pools_where_the_plan_gives_them_some(
    more: str, gpus: int, ranks: dict[str, int]
):
    """A critic of as many ranks is on the actor's, if those are shared at all."""
    resource = '{"actor":[1,8],"critic":[1,8],"reference":[1,4]}'
    made = converted(f"--resource {resource} {more}").recipe
    assert made["cluster"]["gpus"] == gpus
    assert {role: made[role]["ranks"] for role in ("reference", "critic") if role in made} == ranks


def test_a_flag_of_the_role_wins_in_the_cluster_that_the_resource_describes():
    flags = '--resource {"actor":[1,4],"rollout":[1,8]} --rollout-num-gpus 4'
    recipe = converted(flags).recipe
    assert (recipe["rollout"]["num_gpus"], recipe["cluster"]["gpus"]) == (4, 12)


def test_a_judge_and_a_teacher_get_their_engines():
    flags = (
        '--resource {"actor":[1,8],"genrm":[1,4],"teacher":[1,8]} --colocate'
        " --genrm-model-path j --genrm-ray-num-gpus 0.3"
        " --opd-teacher-model-path t --opd-teacher-num-gpus-per-engine 4"
    )
    recipe = converted(flags).recipe
    assert recipe["genrm"]["engine"] == {"ray_gpu_fraction": 0.3, "replicas": 4}
    assert recipe["teacher"] == {
        "model": "t",
        "num_gpus": 8,
        "engine": {"gpus_per_replica": 4, "replicas": 2},
    }


def test_the_file_of_rollout_models_is_no_flag_of_the_engines():
    assert "rollout" not in converted("--sglang-config engines.yaml").recipe


@pytest.mark.parametrize(
    ("flags", "algorithm"),
    [
        ("--use-kl-loss --kl-loss-coef 0.01", {"kl_coefficient": 0.01}),
        ("--kl-coef 0.02", {"kl_coefficient": 0.02, "kl_in": "reward"}),
        ("--kl-loss-coef 0.01", None),
        ("--use-tis --tis-clip 3", {"importance": "token", "importance_cap": 3}),
        ("--disable-grpo-std-normalization", {"normalise_std": False}),
        ("--advantage-estimator reinforce_plus_plus", {"estimator": "reinforce_plus_plus"}),
    ],
)
def test_flags_of_the_algorithm(flags: str, algorithm: dict[str, Any] | None):
    made = converted(flags).recipe.get("train", {}).get("algorithm")
    assert (made or {}).items() >= (algorithm or {}).items()
    assert bool(made) == bool(algorithm)


def test_a_colocated_rollout_has_the_actors_gpus_unless_it_says_otherwise():
    flags = '--resource {"actor":[1,8]} --colocate --rollout-num-gpus-per-engine 2'
    assert converted(flags).recipe["rollout"]["engine"]["replicas"] == 4
    assert "the actor's" in converted(flags).notes["rollout-num-gpus"]
    assert converted(f"{flags} --rollout-num-gpus 4").recipe["rollout"]["engine"]["replicas"] == 2
    apart = converted('--resource {"actor":[1,8]}')
    assert "rollout" not in apart.recipe


def test_ppo_trains_a_critic_on_the_trainers_ranks():
    flags = '--resource {"actor":[1,2],"rollout":[1,2]} --colocate --advantage-estimator ppo'
    assert converted(f"{flags} --critic-lr 1e-5").recipe["critic"] == {
        "learning_rate": 1e-5,
        "ranks": 2,
    }
    assert "critic" in converted("--critic-lr 1e-5").notes


@pytest.mark.parametrize(
    ("flags", "flag", "why"),
    [
        ("--new-thing 3", "new-thing", "not known"),
        ("--rm-type my_rm", "rm-type", "RewardAdapter"),
        ("--advantage-estimator gspo", "advantage-estimator", "no counterpart"),
        ("--optimizer muon", "optimizer", "AdamW"),
        ("--context-parallel-size 2", "context-parallel-size", "split sequences"),
        ('--resource {"critic":[1,2]}', "resource.critic", "left out"),
        ('--resource {"advantages":[1,0]}', "resource.advantages", "left out"),
        ('--resource {"teacher":[1,2]}', "resource.teacher", "left out"),
        ('--resource {"reference":[1,2]}', "resource.reference", "remove reference to run"),
        ('--resource {"rollout":[1,8]} --rollout-num-gpus 4', "rollout-num-gpus", "4 are used"),
        ('--resource {"genrm":[1,8]} --genrm-num-gpus 4', "genrm-num-gpus", "--resource says 8"),
        (
            '--resource {"actor":[1,8]} --actor-num-nodes 2 --actor-num-gpus-per-node 8',
            "actor-num-nodes",
            "2 x 8 GPUs, --resource says 8",
        ),
        ("--colocate --rollout-num-gpus 4", "colocate", "the actor has no GPUs"),
        ("--sglang-config engines.yaml", "sglang-config", "rollout.server_groups"),
        ("--hybrid", "hybrid", "mode alone says"),
        ("--fully-async", "fully-async", "max_staleness"),
        ("--offload-train --offload-rollout", "offload-rollout", "lets them go"),
        ('--opd-teacher-routes {"math":"/t"}', "opd-teacher-routes", "teacher.extra_models"),
    ],
)
def test_what_has_no_counterpart_is_told(flags: str, flag: str, why: str):
    assert why in converted(flags).notes[flag]


def test_a_judges_share_with_ray_is_its_engines():
    """A share that none is, is refused in the planner's own words (contract 8.4)."""
    base = "--genrm-model-path /judge --genrm-num-gpus 4 --genrm-ray-num-gpus"
    done = converted(f"{base} 0.6")
    assert done.recipe["genrm"]["engine"]["ray_gpu_fraction"] == 0.6
    for share in ("-1", "true", "half", "1.5"):
        done = converted(f"{base} {share}")
        with pytest.raises(RecipeError, match="a share of one GPU must be a finite number"):
            load_recipe(done.recipe | {"rollout": {"model": "/m"}, "cluster": {"gpus": 4}})


@pytest.mark.parametrize(
    ("flags", "key", "value"),
    [
        ("--debug-train-only", "debug", "train_only"),
        ("--debug-rollout-only", "debug", "rollout_only"),
        ("--rollout-external", "rollout", {"external": True}),
        ("--opd-teacher-key subject", "data", {"teacher_field": "subject"}),
    ],
)
def test_switches_of_placement_are_fields(flags: str, key: str, value: Any):
    assert converted(flags).recipe[key] == value


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("train.py --seed 1", "belongs to no flag"),
        ("", "there are no flags"),
        ("--resource [1]", "not a JSON object"),
        ("--resource {", "not JSON"),
        ('--resource {"actor":16}', r"is not \[instances, GPUs\]"),
        ('--resource {"rollout":[2,8]}', r"rollout: \[2, 8\]: Only one service replica"),
        ('--resource {"actor":[0,8]}', "Only one service replica"),
        ("--rollout-num-gpus 6 --rollout-num-gpus-per-engine 4", "no whole number of engines"),
        ("--global-batch-size 100 --rollout-batch-size 16", "no whole number"),
    ],
)
def test_flags_that_make_no_recipe(flags: str, why: str):
    with pytest.raises(FlagError, match=why):
        converted(flags)


def test_a_script_that_is_not_one():
    with pytest.raises(FlagError, match="as a shell would"):
        flags_of_script("echo 'never closed")
