"""The same update by other means: plain PyTorch and transformers, written from the papers.

``python -m tests.training.reference ORDERS`` with the CPU shim on PYTHONPATH; ORDERS is a JSON
file, see :func:`main`. Shares with the trainer the choice of mini-batches and nothing else.
"""

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from relax_infer.training.batch import mini_batches
from tests.transfer.tables import read_table, write_table

Row = dict[str, Any]


def all_log_probs(model: Any, row: Row) -> torch.Tensor:
    """[response tokens, vocabulary] of one sample, alone and without padding."""
    prompt, response = row["prompt_ids"], row["response_ids"]
    logits = model(torch.tensor([prompt + response])).logits[0].float()
    predicting = logits[len(prompt) - 1 : len(prompt) + len(response) - 1]
    return predicting.log_softmax(-1)


def log_probs(model: Any, row: Row) -> torch.Tensor:
    """[response tokens]."""
    return all_log_probs(model, row)[range(len(row["response_ids"])), row["response_ids"]]


def estimate_kl(policy: torch.Tensor, reference: torch.Tensor, kind: str) -> torch.Tensor:
    ratio = (reference - policy).exp()
    return {
        "k1": policy - reference,
        "k2": 0.5 * (policy - reference).square(),
        "k3": ratio - 1 - (reference - policy),
    }[kind]


def advantages_of(rows: list[Row], told: list[Row], spec: dict[str, Any]) -> list[torch.Tensor]:
    """Of each response token; ``told`` has each row's ``old`` and ``reference`` log-probs."""
    algorithm = spec["algorithm"]
    penalties = [torch.zeros(len(row["response_ids"])) for row in rows]
    if algorithm["kl_coefficient"] and algorithm["kl_in"] == "reward":
        kind = algorithm["kl_estimator"]
        penalties = [
            algorithm["kl_coefficient"] * estimate_kl(t["old"], t["reference"], kind) for t in told
        ]
    totals = [row["reward"] - p.sum().item() for row, p in zip(rows, penalties, strict=True)]
    by_group: dict[int, list[float]] = {}
    for row, total in zip(rows, totals, strict=True):
        by_group.setdefault(row["group"], []).append(total)
    found: list[torch.Tensor] = []
    for row, total, penalty in zip(rows, totals, penalties, strict=True):
        group = torch.tensor(by_group[row["group"]])
        tokens = len(row["response_ids"])
        if algorithm["estimator"] == "grpo":
            scale = group.std() + spec["advantage_eps"] if algorithm["normalise_std"] else 1.0
            found.append(((total - group.mean()) / scale).expand(tokens))
        elif algorithm["estimator"] == "rloo":
            others = (group.sum() - total) / (len(group) - 1)
            found.append((total - others).expand(tokens))
        elif algorithm["estimator"] == "reinforce_plus_plus_baseline":
            found.append((total - group.mean()).expand(tokens))
        else:
            paid = -penalty
            if tokens:
                paid[-1] += row["reward"]
            powers = algorithm["gamma"] ** torch.arange(tokens)
            found.append(
                torch.tensor(
                    [float((paid[t:] * powers[: tokens - t]).sum()) for t in range(tokens)]
                )
            )
    if algorithm["estimator"].startswith("reinforce"):
        together = torch.cat(found)
        found = [(each - together.mean()) / together.std() for each in found]
    return found


class Critic:
    """A value for each response token, from the policy's own network and a head of zeros."""

    def __init__(self, model: Any, spec: dict[str, Any]) -> None:
        self.network = copy.deepcopy(model.model)
        self.head = torch.zeros(model.config.hidden_size, requires_grad=True)
        self.parameters = [*self.network.parameters(), self.head]
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=spec["critic"]["learning_rate"],
            betas=tuple(spec["betas"]),
            weight_decay=0.0,
        )
        self.spec = spec
        self.losses: list[float] = []

    def values(self, row: Row) -> torch.Tensor:
        prompt, response = row["prompt_ids"], row["response_ids"]
        hidden = self.network(torch.tensor([prompt + response])).last_hidden_state[0]
        return hidden[len(prompt) - 1 : len(prompt) + len(response) - 1] @ self.head

    def estimate(self, rows: list[Row]) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Of each row its values, advantages and returns."""
        algorithm = self.spec["algorithm"]
        gamma, lam = algorithm["gamma"], algorithm["gae_lambda"]
        found: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        for row in rows:
            with torch.no_grad():
                values = self.values(row)
            advantages, later = torch.zeros_like(values), 0.0
            for t in reversed(range(len(values))):
                last = t == len(values) - 1
                target = row["reward"] if last else gamma * values[t + 1].item()
                later = target - values[t].item() + gamma * lam * (0.0 if last else later)
                advantages[t] = later
            found.append((values, advantages, advantages + values))
        return found

    def update(self, rows: list[Row], known: list[Any], part: list[int]) -> None:
        clip = self.spec["critic"]["value_clip"]
        each: list[torch.Tensor] = []
        for index in part:
            old, _, wanted = known[index]
            if len(old):
                new = self.values(rows[index])
                bounded = old + (new - old).clamp(-clip, clip)
                each.append(torch.max((new - wanted) ** 2, (bounded - wanted) ** 2) / 2)
        loss = torch.cat(each).mean()
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, self.spec["grad_clip"])
        self.optimizer.step()
        self.losses.append(loss.item())


def divergence_of(every: torch.Tensor, row: Row, spec: dict[str, Any]) -> torch.Tensor:
    """[response tokens], over the named tokens and the rest."""
    found: list[torch.Tensor] = []
    named = zip(row["opd_topk_token_ids"], row["opd_topk_teacher_log_probs"], strict=True)
    for at, (ids, teacher) in zip(every, named, strict=True):
        p, q = at[ids].exp(), torch.tensor(teacher).exp()
        p, q = torch.cat([p, 1 - p.sum()[None]]), torch.cat([q, 1 - q.sum()[None]])
        m = (p + q) / 2
        found.append(
            {
                "reverse_kl": (p * (p / q).log()).sum(),
                "forward_kl": (q * (q / p).log()).sum(),
                "jensen_shannon": ((p * (p / m).log()).sum() + (q * (q / m).log()).sum()) / 2,
            }[spec["divergence"]]
        )
    return torch.stack(found)


def importance_of(trainer: torch.Tensor, rollout: torch.Tensor, algorithm: Any) -> torch.Tensor:
    if algorithm["importance"] == "none":
        return torch.ones_like(trainer)
    ratio = (trainer - rollout).exp()
    if algorithm["importance"] == "sequence":
        ratio = ratio.prod().expand_as(ratio)
    return ratio.clamp(max=algorithm["importance_cap"])


def update(
    model: Any,
    frozen: Any,
    optimizer: Any,
    rows: list[Row],
    step: int,
    spec: dict[str, Any],
    gradients: dict[str, torch.Tensor],
    critic: Critic | None = None,
) -> float:
    """One pass over the rows; the mean over mini-batches of the aggregated loss. The first
    backward pass ever leaves its ``gradients``."""
    algorithm = spec["algorithm"]
    told: list[Row] = []
    with torch.no_grad():
        for row in rows:
            rollout = torch.tensor(row["rollout_log_probs"])
            trainer = log_probs(model, row)
            old = trainer if algorithm["old_log_probs"] == "trainer" else rollout
            weight = importance_of(trainer, rollout, algorithm)
            told.append({"old": old, "weight": weight, "reference": log_probs(frozen, row)})
    known_values = critic.estimate(rows) if critic else []
    if critic:
        together = torch.cat([advantage for _, advantage, _ in known_values])
        advantages = [(a - together.mean()) / together.std() for _, a, _ in known_values]
    else:
        advantages = advantages_of(rows, told, spec)
    over_support = spec["distillation"] > 0 and spec["distillation_mode"] != "student_sampled"
    losses: list[float] = []
    for part in mini_batches(len(rows), spec["mini_batches"], spec["seed"], step):
        each: list[torch.Tensor] = []
        for index in part.tolist():
            row, known = rows[index], told[index]
            if not row["response_ids"]:
                continue
            every = all_log_probs(model, row)
            new = every[range(len(row["response_ids"])), row["response_ids"]]
            advantage = advantages[index]
            if not over_support:
                teacher = torch.tensor(row["teacher_log_probs"])
                rollout = torch.tensor(row["rollout_log_probs"])
                advantage = advantage + spec["distillation"] * (teacher - rollout)
            ratio = (new - known["old"]).exp()
            clipped = ratio.clamp(1 - spec["clip_low"], 1 + spec["clip_high"])
            gain = torch.min(ratio * advantage, clipped * advantage)
            if algorithm["dual_clip"]:
                floor = torch.max(gain, algorithm["dual_clip"] * advantage)
                gain = torch.where(advantage < 0, floor, gain)
            loss = -known["weight"] * gain
            if algorithm["kl_coefficient"] and algorithm["kl_in"] == "loss":
                kind = algorithm["kl_estimator"]
                loss = loss + algorithm["kl_coefficient"] * estimate_kl(
                    new, known["reference"], kind
                )
            if over_support:
                loss = loss + spec["distillation"] * divergence_of(every, row, spec)
            entropy = -(every.exp() * every).sum(-1)
            each.append(loss - algorithm["entropy_coefficient"] * entropy)
        if algorithm["loss_aggregation"] == "token_mean":
            total = torch.cat(each).mean()
        elif algorithm["loss_aggregation"] == "sequence_mean":
            total = torch.stack([loss.mean() for loss in each]).mean()
        else:
            total = torch.stack([loss.sum() / spec["longest_response"] for loss in each]).mean()
        optimizer.zero_grad()
        total.backward()
        if not gradients:
            gradients |= {n: p.grad.clone() for n, p in model.named_parameters()}
        torch.nn.utils.clip_grad_norm_(model.parameters(), spec["grad_clip"])
        optimizer.step()
        losses.append(total.item())
        if critic:
            critic.update(rows, known_values, part.tolist())
    return sum(losses) / len(losses)


def main(orders: dict[str, Any]) -> None:
    """Orders: ``model`` folder, trainer ``spec``, ``tables`` of each step (Arrow files), ``out``.

    The first table's rollout log-probs are replaced by those of the model itself, as an engine
    with the same weights would give them, and written back.
    """
    torch.set_num_threads(1)
    spec, out = orders["spec"], Path(orders["out"])
    model = AutoModelForCausalLM.from_pretrained(
        orders["model"], attn_implementation="eager"
    ).float()
    frozen = copy.deepcopy(model)
    # Norms and biases, which have one dimension, do not decay.
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": spec["weight_decay"]},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=spec["learning_rate"],
        betas=tuple(spec["betas"]),
    )
    critic = Critic(model, spec) if spec["critic"] else None
    losses: list[float] = []
    gradients: dict[str, torch.Tensor] = {}
    for step, path in enumerate(orders["tables"], start=1):
        table = read_table(path)
        rows = table.to_pylist()
        if step == 1:
            with torch.no_grad():
                for row in rows:
                    row["rollout_log_probs"] = log_probs(model, row).tolist()
            write_table(pa.Table.from_pylist(rows, schema=table.schema), path)
        losses.append(update(model, frozen, optimizer, rows, step, spec, gradients, critic))
    (out / "losses.json").write_text(json.dumps(losses))
    if critic:
        out.with_name("critic.json").write_text(json.dumps(critic.losses))
    save_file(gradients, out.with_name("gradients.safetensors"))
    model.save_pretrained(out)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
