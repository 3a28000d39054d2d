"""Every layout of ranks trains as transformers and plain PyTorch do."""

from pathlib import Path
from typing import Any

import pytest
import torch

from relax_infer.contracts.training import TrainResult
from relax_infer.training import weights_digest
from relax_infer.training.hf_folder import read_tensors
from tests.marks import wide
from tests.training.conftest import make_spec, write_model
from tests.training.groups import run_group
from tests.training.test_parity import reference
from tests.transfer.tables import scored_table, with_support, write_table

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

# One optimizer step for each training step: what comes out after three is compared.
CHANGES: dict[str, Any] = {"mini_batches": 1, "learning_rate": 1e-3, "grad_clip": 0.2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "world-1": {},
    "packed": {"packed": True, "micro_batch_tokens": 40},
    "dp-2": {"ranks": 2, "micro_batch_tokens": 60},
    "pp-2": {"ranks": 2, "pipeline_parallel": 2, "micro_batch_tokens": 60},
    "pp-2-packed": {
        "ranks": 2,
        "pipeline_parallel": 2,
        "packed": True,
        "micro_batch_tokens": 50,
    },
    "tp-2": {"ranks": 2, "tensor_parallel": 2},
    "tp-2-sequence-packed": {
        "ranks": 2,
        "tensor_parallel": 2,
        "sequence_parallel": True,
        "packed": True,
    },
}


class Wanted:
    """The model, three steps' tables, and what the reference makes of them."""

    def __init__(self, folder: Path, *, tied: bool, architecture: str = "qwen3") -> None:
        self.model = write_model(folder / "model", tied=tied, architecture=architecture)
        self.tables = {step: str(folder / f"{step}.arrow") for step in (1, 2, 3)}
        for step, path in self.tables.items():
            write_table(scored_table(groups=5, samples=3, seed=step), path)
        spec = make_spec(folder / "store", self.model, **CHANGES)
        paths = list(self.tables.values())
        found = reference(folder, self.model, spec.model_dump(mode="json"), paths)
        self.losses, self.weights = found["losses"], found["weights"]
        self.gradients = found["gradients"]


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Wanted:
    return Wanted(tmp_path_factory.mktemp("untied"), tied=False)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Wanted:
    return Wanted(tmp_path_factory.mktemp("tied"), tied=True)


# Two ranks that talk in every layer are slow where cores are few.
WIDE = ("packed", "pp-2", "pp-2-packed", "tp-2", "tp-2-sequence-packed")


@pytest.mark.parametrize(
    "layout",
    [*(name for name in LAYOUTS if name not in WIDE), *wide(*WIDE)],
)
def test_log_probs_gradients_and_weights_are_those_of_plain_pytorch(
    tmp_path: Path, untied: Wanted, layout: str
) -> None:
    check(tmp_path, untied, LAYOUTS[layout])


@pytest.mark.wide
@pytest.mark.parametrize("layout", ["pp-2"])
def test_a_tied_embedding_is_trained_as_one(tmp_path: Path, tied: Wanted, layout: str) -> None:
    check(tmp_path, tied, LAYOUTS[layout])


@pytest.mark.wide
def test_biases_of_two_tensor_parallel_ranks_are_trained_too(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    wanted = Wanted(tmp_path_factory.mktemp("qwen2"), tied=True, architecture="qwen2")
    check(tmp_path, wanted, LAYOUTS["tp-2"])


ALGORITHMS: dict[str, dict[str, Any]] = {
    "critic": {
        "algorithm": {"estimator": "ppo", "gae_lambda": 0.9},
        "critic": {"learning_rate": 1e-2, "value_clip": 0.1},
    },
    "support": {
        "algorithm": {
            "kl_coefficient": 0.3,
            "entropy_coefficient": 0.1,
            "old_log_probs": "trainer",
            "importance": "sequence",
            "loss_aggregation": "sequence_mean",
        },
        "distillation_mode": "union",
    },
}


@pytest.mark.wide
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(
    "layout", ["dp-2", pytest.param("tp-2-sequence-packed", marks=pytest.mark.wide)]
)
def test_two_ranks_do_what_one_does_which_is_compared_with_plain_pytorch_elsewhere(
    tmp_path: Path, untied: Wanted, algorithm: str, layout: str
) -> None:
    changes = CHANGES | ALGORITHMS[algorithm]
    tables = {step: str(tmp_path / f"{step}.arrow") for step in (1, 2)}
    for step, path in tables.items():
        table = scored_table(groups=5, samples=3, seed=step)
        write_table(with_support(table, k=3, ragged=True, seed=step), path)

    def run(name: str, **more: Any) -> tuple[list[TrainResult], dict[str, torch.Tensor]]:
        spec = make_spec(tmp_path / name / "store", untied.model, **changes, **more)
        results = run_group(tmp_path / name / "group", spec, tables, [1, 2])[0]
        return results, read_tensors(Path(results[1].weights.uri.removeprefix("file://")))

    wanted, weights = run("one")
    found, ours = run("two", **LAYOUTS[layout])
    for one, two in zip(wanted, found, strict=True):
        assert two.loss == pytest.approx(one.loss, abs=1e-3)
        assert two.grad_norm == pytest.approx(one.grad_norm, rel=1e-3)
        told = {n: v for n, v in one.metrics.items() if not n.endswith("_seconds")}
        same = {name: two.metrics[name] for name in told}
        assert same == pytest.approx(told, abs=1e-3, rel=1e-3)
    assert told.keys() & {"critic_loss", "divergence"}
    for name, tensor in weights.items():
        torch.testing.assert_close(ours[name], tensor, atol=3e-4, rtol=0, msg=name)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("architecture", "layout"), [("qwen2", "tp-2"), ("llama", "pp-2"), ("qwen3", "tp-2")]
)
def test_weights_that_were_spread_over_ranks_come_back_as_they_were(
    tmp_path: Path, architecture: str, layout: str
) -> None:
    model = write_model(tmp_path / "model", architecture=architecture)
    spec = make_spec(tmp_path / "store", model, **LAYOUTS[layout])
    run_group(tmp_path / "group", spec, {}, [], round_trip=True)
    assert (tmp_path / "group" / "digest-0").read_text() == weights_digest(model)


def check(tmp_path: Path, wanted: Wanted, layout: dict[str, Any]) -> None:
    spec = make_spec(tmp_path / "store", wanted.model, **CHANGES, **layout)
    everyone = run_group(
        tmp_path / "group", spec, wanted.tables, [1, 2, 3], gradients=True, round_trip=True
    )
    assert (tmp_path / "group" / "digest-0").read_text() == weights_digest(wanted.model)
    results = everyone[0]
    assert all(others == results for others in everyone)

    assert results[0].metrics["logprob_gap_max"] < 1e-5
    gradients: dict[str, torch.Tensor] = {}
    for path in sorted((tmp_path / "group").glob("gradients-*")):
        from safetensors.torch import load_file

        gradients |= load_file(path)
    assert gradients.keys() == wanted.gradients.keys()
    for name, gradient in wanted.gradients.items():
        torch.testing.assert_close(gradients[name], gradient, atol=1e-5, rtol=0, msg=name)
    norm = torch.stack([g.norm() for g in wanted.gradients.values()]).norm()
    assert results[0].grad_norm == pytest.approx(float(norm), rel=1e-4)
    assert norm > spec.grad_clip, "nothing was clipped"
    assert max(float(g.abs().max()) for g in wanted.gradients.values()) > 0.01

    assert [r.loss for r in results] == pytest.approx(wanted.losses, abs=1e-4)
    folder = Path(results[2].weights.uri.removeprefix("file://"))
    assert weights_digest(folder) == results[2].weights.digest
    ours = read_tensors(folder)
    assert ours.keys() == wanted.weights.keys()
    tolerance = 3e-4 if spec.tensor_parallel > 1 else 1e-4
    for name, tensor in wanted.weights.items():
        torch.testing.assert_close(ours[name], tensor, atol=tolerance, rtol=0, msg=name)
