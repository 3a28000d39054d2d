"""Published rows as the tensors that the policy is trained on."""

from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np
import torch

from relax_infer.transfer.rows import PublishedRows

MICRO_BATCH_TOKENS = 16_384
"""Padded tokens of one forward and backward pass."""


@dataclass(frozen=True)
class Batch:
    """Sequences padded on the right. Every tensor is [samples, tokens]; a value about a response
    token is at the position that predicts it, one before its own."""

    ids: torch.Tensor
    """int64, prompt and response."""
    labels: torch.Tensor
    """int64, the next token."""
    mask: torch.Tensor
    """float32, 1 where the next token is trained on."""
    rollout_log_probs: torch.Tensor
    """float32."""
    teacher_log_probs: torch.Tensor
    """float32; zeros without a Teacher."""
    advantages: torch.Tensor
    """float32; zeros until they are computed."""

    def __len__(self) -> int:
        return len(self.ids)

    def select(self, indices: torch.Tensor) -> "Batch":
        return Batch(**{f.name: getattr(self, f.name)[indices] for f in fields(self)})

    def to(self, device: torch.device) -> "Batch":
        return Batch(**{f.name: getattr(self, f.name).to(device) for f in fields(self)})

    def micro_batches(self) -> list["Batch"]:
        """Of at most ``MICRO_BATCH_TOKENS`` padded tokens, in order."""
        rows = max(1, MICRO_BATCH_TOKENS // self.ids.shape[1])
        return [self.select(part) for part in torch.arange(len(self)).split(rows)]


def build_batch(rows: PublishedRows) -> Batch:
    """All rows of a partition, in key order, without advantages."""
    prompts, responses = rows.ragged("prompt_ids"), rows.ragged("response_ids")
    shape = (len(rows), int((prompts.lengths + responses.lengths).max()))
    ids, labels = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    channels = {
        name: np.zeros(shape, np.float32)
        for name in ("loss_mask", "rollout_log_probs", "teacher_log_probs")
    }
    for row, (prompt, response) in enumerate(zip(prompts.rows(), responses.rows(), strict=True)):
        sequence = np.concatenate([prompt, response])
        ids[row, : len(sequence)] = sequence
        labels[row, : len(sequence) - 1] = sequence[1:]
    for name, channel in channels.items():
        if name in rows.columns:
            values = rows.ragged(name).rows()
            for row, (start, value) in enumerate(zip(prompts.lengths - 1, values, strict=True)):
                channel[row, start : start + len(value)] = value
    return Batch(
        ids=torch.from_numpy(ids),
        labels=torch.from_numpy(labels),
        mask=torch.from_numpy(channels["loss_mask"]),
        rollout_log_probs=torch.from_numpy(channels["rollout_log_probs"]),
        teacher_log_probs=torch.from_numpy(channels["teacher_log_probs"]),
        advantages=torch.zeros(shape),
    )


def mini_batches(samples: int, parts: int, seed: int, step: int) -> Iterator[torch.Tensor]:
    """Sample indices of each optimizer step: a permutation that (seed, step) alone decides, cut
    into nearly equal parts; no part is empty while there are enough samples."""
    generator = torch.Generator().manual_seed(step_seed(seed, step))
    yield from torch.randperm(samples, generator=generator).tensor_split(min(parts, samples))


def step_seed(seed: int, step: int) -> int:
    """A seed of its own for each step of each run seed."""
    return int(np.random.SeedSequence([seed, step]).generate_state(1, np.uint64)[0] >> 1)
