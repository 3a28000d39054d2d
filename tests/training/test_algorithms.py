"""Whole updates of every algorithm, by the trainer and by plain PyTorch and transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch

from relax_infer.contracts.training import TrainResult
from relax_infer.training import PolicyTrainer
from relax_infer.training.hf_folder import read_tensors
from relax_infer.transfer import rows_of_table
from tests.training.conftest import MEGATRON_WARNS, InThread, make_spec, write_model
from tests.training.test_parity import reference
from tests.transfer.tables import read_table, scored_table, with_support, write_table

pytestmark = [pytest.mark.real, *MEGATRON_WARNS, pytest.mark.timeout(180)]

CASES: dict[str, dict[str, Any]] = {
    "dr_grpo": {
        "algorithm": {
            "normalise_std": False,
            "loss_aggregation": "sequence_sum",
            "old_log_probs": "trainer",
            "importance": "token",
            "importance_cap": 1.5,
        },
        "distillation": 0.0,
    },
    "rloo": {
        "algorithm": {
            "estimator": "rloo",
            "loss_aggregation": "sequence_mean",
            "dual_clip": 1.5,
            "kl_coefficient": 0.1,
            "kl_in": "reward",
            "kl_estimator": "k1",
        },
    },
    "reinforce_plus_plus": {
        "algorithm": {
            "estimator": "reinforce_plus_plus",
            "gamma": 0.9,
            "kl_coefficient": 0.3,
            "kl_in": "loss",
            "old_log_probs": "trainer",
            "importance": "sequence",
        },
    },
    "baseline": {
        "algorithm": {
            "estimator": "reinforce_plus_plus_baseline",
            "kl_coefficient": 0.3,
            "kl_estimator": "k2",
            "entropy_coefficient": 0.05,
        },
    },
    "ppo": {
        "algorithm": {"estimator": "ppo", "gamma": 0.95, "gae_lambda": 0.9},
        "critic": {"learning_rate": 1e-2, "value_clip": 0.1},
        "distillation": 0.0,
    },
    "teacher_topk": {"distillation_mode": "teacher_topk", "divergence": "forward_kl"},
    "union": {"distillation_mode": "union", "divergence": "jensen_shannon"},
    "student_topk": {"distillation_mode": "student_topk", "weight_decay": 0.1},
}


@pytest.mark.parametrize("case", CASES)
def test_the_new_weights_are_those_of_plain_pytorch(
    tmp_path: Path, in_thread: InThread, case: str
) -> None:
    model = write_model(tmp_path / "model")
    changes = {"longest_response": 5, "top_k": 3, "learning_rate": 3e-4, **CASES[case]}
    spec = make_spec(tmp_path / "store", model, **changes)
    tables = [str(tmp_path / f"{step}.arrow") for step in (1, 2)]
    for step, path in enumerate(tables, start=1):
        table = scored_table(groups=6, samples=4, seed=step)
        if spec.distils_support:
            ragged = spec.distillation_mode == "union"
            table = with_support(table, k=3, ragged=ragged, seed=step)
        write_table(table, path)
    wanted = reference(tmp_path, model, spec.model_dump(mode="json"), tables)

    policy = PolicyTrainer(spec)
    try:
        in_thread(policy.onload)
        results = [
            in_thread(lambda s=step, t=table: policy.train(s, rows_of_table(read_table(t))))
            for step, table in enumerate(tables, start=1)
        ]
    finally:
        in_thread(policy.close)

    assert [r.loss for r in results] == pytest.approx(wanted["losses"], abs=1e-4)
    ours = read_tensors(Path(results[1].weights.uri.removeprefix("file://")))
    before = read_tensors(model)
    for name, tensor in wanted["weights"].items():
        torch.testing.assert_close(ours[name], tensor, atol=1e-4, rtol=0, msg=name)
        assert (tensor - before[name]).abs().max() > 3e-4, f"{name} hardly moved"
    metrics = results[1].metrics
    if spec.critic is not None:
        halves = [wanted["critic"][:2], wanted["critic"][2:]]
        found = [result.metrics["critic_loss"] for result in results]
        assert found == pytest.approx([sum(half) / 2 for half in halves], abs=1e-4)
        assert metrics["explained_variance"] != 0
    algorithm = spec.algorithm
    assert ("reference_kl" in metrics) == algorithm.needs_reference
    assert ("divergence" in metrics) == spec.distils_support
    assert (metrics["importance_max"] != 1.0) == (algorithm.importance != "none")
    assert metrics["entropy"] > 0


@pytest.mark.parametrize(
    ("changes", "metric"),
    [
        ({"algorithm": {"kl_coefficient": 0.5}}, "reference_kl"),
        (
            {
                "algorithm": {"estimator": "ppo"},
                "critic": {"learning_rate": 1e-3, "value_clip": 0.2},
            },
            "critic_loss",
        ),
    ],
)
def test_reference_and_critic_are_the_same_after_a_resume_and_a_release(
    tmp_path: Path, in_thread: InThread, changes: dict[str, Any], metric: str
) -> None:
    model = write_model(tmp_path / "model")

    def train(store: str, *turns: list[int]) -> list[Any]:
        spec = make_spec(tmp_path / store, model, **changes)
        results: list[Any] = []
        for turn in turns:
            policy = PolicyTrainer(spec)
            in_thread(policy.onload)
            for step in turn:
                in_thread(policy.offload)
                in_thread(policy.onload)
                rows = rows_of_table(scored_table(groups=6, samples=4, seed=step))
                results.append(in_thread(lambda p=policy, s=step, r=rows: p.train(s, r)))
            in_thread(policy.close)
        return results

    whole, resumed = train("whole", [1, 2, 3]), train("resumed", [1, 2], [3])
    assert resumed[2].weights.digest == whole[2].weights.digest
    assert resumed[2].metrics[metric] == whole[2].metrics[metric] > 0


def test_the_size_of_micro_batches_changes_nothing(tmp_path: Path, in_thread: InThread) -> None:
    """One sequence alone is laid out otherwise than several."""
    model = write_model(tmp_path / "model")
    changes = {
        "algorithm": {"entropy_coefficient": 0.1, "kl_coefficient": 0.3},
        "distillation_mode": "union",
        "mini_batches": 1,
    }
    tables = [with_support(scored_table(seed=s), k=3, ragged=True, seed=s) for s in (1, 2)]

    def train(store: str, **more: Any) -> list[TrainResult]:
        policy = PolicyTrainer(make_spec(tmp_path / store, model, **changes, **more))
        in_thread(policy.onload)
        rows = [rows_of_table(table) for table in tables]
        results = [in_thread(lambda n=n: policy.train(n + 1, rows[n])) for n in range(2)]
        in_thread(policy.close)
        return results

    wanted = train("many")
    for name, more in {"one": {"micro_batch_tokens": 1}, "packed": {"packed": True}}.items():
        for result, one in zip(train(name, **more), wanted, strict=True):
            assert result.loss == pytest.approx(one.loss, abs=1e-4)
            assert result.grad_norm == pytest.approx(one.grad_norm, rel=1e-3)
            told = {n: v for n, v in one.metrics.items() if not n.endswith("_seconds")}
            assert {n: result.metrics[n] for n in told} == pytest.approx(told, rel=1e-3, abs=1e-5)
