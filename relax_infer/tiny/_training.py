"""Supervised training of one model, in plain torch and transformers, on one core.

Only the maker process imports this module.
"""

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as functional
from transformers import Qwen3Config, Qwen3ForCausalLM

from relax_infer.samples.tasks import Problem, UnparsableVerdict
from relax_infer.tiny.examples import Example, judged, spoilt
from relax_infer.tiny.lessons import Lesson
from relax_infer.tiny.task import HELD_OUT, Sort4Task, split
from relax_infer.tiny.vocabulary import EOS, PAD, TOKENS

PEAK, FLOOR = 5e-3, 0.02
"""Learning rate at its height, and the share of it at the end of the cosine."""
NEW_TOKENS = 5
_UNTRAINED = -100
_SPOILING_SEED = 5


def new_model(seed: int) -> Qwen3ForCausalLM:
    """78,208 parameters in float32; the context is as long as the engines are started with."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(TOKENS),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    return Qwen3ForCausalLM(config).float()


def teach(model: Any, lesson: Lesson, seed: int, told: Callable[[int, float], None]) -> None:
    """Cross-entropy on the targets; ``told(update, loss)`` hears of every hundredth update."""
    draw = lesson.draw(split()[0])
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.01)
    model.train()
    for update in range(lesson.updates):
        for group in optimizer.param_groups:
            group["lr"] = PEAK * _share(update, lesson)
        inputs, targets = _pack([draw(rng) for _ in range(lesson.batch)])
        logits = model(inputs).logits[:, :-1]
        loss = functional.cross_entropy(
            logits.reshape(-1, logits.shape[-1]),
            targets[:, 1:].reshape(-1),
            ignore_index=_UNTRAINED,
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (update + 1) % 100 == 0:
            told(update + 1, loss.item())
    model.eval()


def _share(update: int, lesson: Lesson) -> float:
    """Linear warm-up, then a cosine down to ``FLOOR``."""
    cosine = 0.5 * (1 + math.cos(math.pi * update / lesson.updates))
    return min(1.0, (update + 1) / lesson.warm_up) * (FLOOR + (1 - FLOOR) * cosine)


def _pack(examples: Sequence[Example]) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets [examples, longest]; prompts and padding are not trained on."""
    longest = max(len(prompt) + len(target) for prompt, target in examples)
    inputs, targets = [], []
    for prompt, target in examples:
        padding = longest - len(prompt) - len(target)
        inputs.append(prompt + target + [PAD] * padding)
        targets.append([_UNTRAINED] * len(prompt) + target + [_UNTRAINED] * padding)
    return torch.tensor(inputs), torch.tensor(targets)


def accuracy(name: str, model: Any) -> float:
    """Share of held-out problems that the model answers (the GenRM: judges) right, greedily."""
    held = Sort4Task().held_out(HELD_OUT)
    return _judging(model, held) if name == "genrm" else _answering(model, held)


def _answering(model: Any, problems: Sequence[Problem]) -> float:
    task = Sort4Task()
    answers = _greedy(model, [list(p.prompt_ids) for p in problems], NEW_TOKENS)
    right = [task.check(p.answer, ids) for p, ids in zip(problems, answers, strict=True)]
    return sum(right) / len(right)


def _judging(model: Any, problems: Sequence[Problem]) -> float:
    """Every problem twice: with its right answer and with a spoilt one."""
    task = Sort4Task()
    rng = random.Random(_SPOILING_SEED)
    shown: list[tuple[list[int], float]] = []
    for problem in problems:
        shown.append((judged(problem, problem.answer), 1.0))
        shown.append((judged(problem, spoilt(problem.answer, rng, problems)), 0.0))
    by_length: dict[int, list[tuple[list[int], float]]] = {}
    for prompt, due in shown:
        by_length.setdefault(len(prompt), []).append((prompt, due))
    right = 0
    for rows in by_length.values():
        said = _greedy(model, [prompt for prompt, _ in rows], 2)
        right += sum(_verdict(task, ids) == due for ids, (_, due) in zip(said, rows, strict=True))
    return right / len(shown)


def _verdict(task: Sort4Task, ids: list[int]) -> float | None:
    try:
        return task.verdict(ids)
    except UnparsableVerdict:
        return None


@torch.no_grad()
def _greedy(model: Any, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """Likeliest continuations of prompts of one length, each up to its end token."""
    ids = torch.tensor(prompts)
    start = ids.shape[1]
    for _ in range(new_tokens):
        likeliest = model(ids).logits[:, -1].argmax(-1, keepdim=True)
        ids = torch.cat([ids, likeliest], 1)
    return [_until_end(row) for row in ids[:, start:].tolist()]


def _until_end(ids: list[int]) -> list[int]:
    return ids[: ids.index(EOS) + 1] if EOS in ids else ids
