"""The same update by other means: plain PyTorch and transformers, written from the papers.

``python -m tests.training.reference ORDERS`` with the CPU shim on PYTHONPATH; ORDERS is a JSON
file, see :func:`main`. Shares with the trainer the choice of mini-batches and nothing else.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from transformers import Qwen3ForCausalLM

from relax_infer.training.batch import mini_batches
from tests.transfer.tables import read_table, write_table


def log_probs(model: Any, row: dict[str, Any]) -> torch.Tensor:
    """[response tokens] of one sample, alone and without padding."""
    prompt, response = row["prompt_ids"], row["response_ids"]
    logits = model(torch.tensor([prompt + response])).logits[0].float()
    predicting = logits[len(prompt) - 1 : len(prompt) + len(response) - 1]
    return predicting.log_softmax(-1)[range(len(response)), response]


def sample_advantages(rows: list[dict[str, Any]], eps: float) -> list[float]:
    by_group: dict[int, list[float]] = {}
    for row in rows:
        by_group.setdefault(row["group"], []).append(row["reward"])
    advantages: list[float] = []
    for row in rows:
        rewards = torch.tensor(by_group[row["group"]])
        advantage = (row["reward"] - rewards.mean()) / (rewards.std() + eps)
        advantages.append(advantage.item())
    return advantages


def update(
    model: Any, optimizer: Any, rows: list[dict[str, Any]], step: int, spec: dict[str, Any]
) -> float:
    """One pass over the rows; the mean over mini-batches of the token-mean loss."""
    advantages = sample_advantages(rows, spec["advantage_eps"])
    losses: list[float] = []
    for part in mini_batches(len(rows), spec["mini_batches"], spec["seed"], step):
        total, tokens = torch.zeros(()), 0
        for index in part.tolist():
            row = rows[index]
            if not row["response_ids"]:
                continue
            old = torch.tensor(row["rollout_log_probs"])
            teacher = torch.tensor(row["teacher_log_probs"])
            advantage = advantages[index] + spec["distillation"] * (teacher - old)
            ratio = (log_probs(model, row) - old).exp()
            clipped = ratio.clamp(1 - spec["clip_low"], 1 + spec["clip_high"])
            total = total - torch.min(ratio * advantage, clipped * advantage).sum()
            tokens += len(row["response_ids"])
        loss = total / tokens
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), spec["grad_clip"])
        optimizer.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)


def main(orders: dict[str, Any]) -> None:
    """Orders: ``model`` folder, trainer ``spec``, ``tables`` of each step (Arrow files), ``out``.

    The first table's rollout log-probs are replaced by those of the model itself, as an engine
    with the same weights would give them, and written back.
    """
    torch.set_num_threads(1)
    spec, out = orders["spec"], Path(orders["out"])
    model = Qwen3ForCausalLM.from_pretrained(orders["model"], attn_implementation="eager").float()
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=spec["learning_rate"],
        betas=tuple(spec["betas"]),
        weight_decay=spec["weight_decay"],
    )
    losses: list[float] = []
    for step, path in enumerate(orders["tables"], start=1):
        table = read_table(path)
        rows = table.to_pylist()
        if step == 1:
            with torch.no_grad():
                for row in rows:
                    row["rollout_log_probs"] = log_probs(model, row).tolist()
            write_table(pa.Table.from_pylist(rows, schema=table.schema), path)
        losses.append(update(model, optimizer, rows, step, spec))
    (out / "losses.json").write_text(json.dumps(losses))
    model.save_pretrained(out)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
