"""One GRPO and distillation update, by the trainer and by plain PyTorch and transformers."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from relax_infer.training import PolicyTrainer
from relax_infer.training.hf_folder import read_tensors
from relax_infer.transfer import rows_of_table
from tests.marks import wide
from tests.training.conftest import MEGATRON_WARNS, InThread, make_spec, write_model
from tests.transfer.tables import read_table, scored_table, write_table

pytestmark = [
    pytest.mark.real,
    *MEGATRON_WARNS,
    pytest.mark.timeout(180),
]

_ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("architecture", "tied"),
    [
        ("qwen3", False),
        ("qwen3", True),
        *wide(("qwen2", True), ("llama", False)),
    ],
)
def test_loss_log_probs_and_new_weights_are_those_of_plain_pytorch(
    tmp_path: Path, in_thread: InThread, architecture: str, tied: bool
) -> None:
    model = write_model(tmp_path / "model", tied=tied, architecture=architecture)
    spec = make_spec(tmp_path / "store", model)
    # The second table's log-probs are far from the policy's: both sides of the clip come in.
    tables = [str(tmp_path / f"{step}.arrow") for step in (1, 2)]
    for step, path in enumerate(tables, start=1):
        write_table(scored_table(groups=8, samples=4, seed=step), path)
    wanted = reference(tmp_path, model, spec.model_dump(mode="json"), tables)

    policy = PolicyTrainer(spec)
    try:
        in_thread(policy.onload)
        first = in_thread(lambda: policy.train(1, rows_of_table(read_table(tables[0]))))
        second = in_thread(lambda: policy.train(2, rows_of_table(read_table(tables[1]))))
    finally:
        in_thread(policy.close)

    assert first.metrics["logprob_gap_max"] < 1e-5
    assert second.clip_fraction > 0.2
    assert [first.loss, second.loss] == pytest.approx(wanted["losses"], abs=1e-4)
    ours = read_tensors(Path(second.weights.uri.removeprefix("file://")))
    assert ours.keys() == wanted["weights"].keys()
    before = read_tensors(model)
    for name, tensor in wanted["weights"].items():
        torch.testing.assert_close(ours[name], tensor, atol=1e-4, rtol=0, msg=name)
        assert (tensor - before[name]).abs().max() > 5e-4, f"{name} hardly moved"


def reference(folder: Path, model: Path, spec: dict[str, Any], tables: list[str]) -> dict[str, Any]:
    out = folder / "reference"
    out.mkdir()
    orders = {"model": str(model), "spec": spec, "tables": tables, "out": str(out)}
    (folder / "orders.json").write_text(json.dumps(orders))
    shim = _ROOT / "relax_infer" / "engines" / "cpu_shim"
    subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.training.reference", folder / "orders.json"],
        cwd=_ROOT,
        env={**os.environ, "PYTHONPATH": f"{shim}{os.pathsep}{_ROOT}"},
        check=True,
        timeout=150,
    )
    losses = json.loads((out / "losses.json").read_text())
    gradients = load_file(folder / "gradients.safetensors")
    found = {"losses": losses, "weights": read_tensors(out), "gradients": gradients}
    critic = folder / "critic.json"
    return found | ({"critic": json.loads(critic.read_text())} if critic.exists() else {})
