"""Published rows as the tensors that the policy is trained on."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from relax_infer.transfer.rows import Array, PublishedRows

MICRO_BATCH_TOKENS = 16_384
"""Tokens of one forward and backward pass, padding included."""


@dataclass(frozen=True)
class Batch:
    """Sequences padded on the right: [samples, tokens]; or packed, one after another: [1, tokens].

    A value about a response token is at the position that predicts it, one before its own."""

    ids: torch.Tensor
    """int64, prompt and response."""
    labels: torch.Tensor
    """int64, the next token."""
    mask: torch.Tensor
    """float32, 1 where the next token is trained on."""
    lengths: torch.Tensor
    """int64 [samples], tokens of each sequence."""
    rollout_log_probs: torch.Tensor
    """float32."""
    teacher_log_probs: torch.Tensor
    """float32; zeros without a Teacher."""
    advantages: torch.Tensor
    """float32; zeros until they are computed."""
    weights: torch.Tensor
    """float32, of each token in the mini-batch's loss; the mask until they are computed."""
    shares: torch.Tensor
    """int32 [samples], part of each sample in what the weighted sum is divided by."""
    old_log_probs: torch.Tensor
    """float32, what the ratio is taken against."""
    importance: torch.Tensor
    """float32, truncated importance weights."""
    reference_log_probs: torch.Tensor | None = None
    """float32, of the frozen initial policy."""
    support_ids: torch.Tensor | None = None
    """int64 [samples, tokens, K], tokens that are distilled over; -1 fills shorter rows."""
    support_teacher: torch.Tensor | None = None
    """float32 [samples, tokens, K], the Teacher's log-probs of them."""
    returns: torch.Tensor | None = None
    """float32, what a critic's values are to meet."""
    old_values: torch.Tensor | None = None
    """float32, a critic's values before the update."""
    packed: bool = False

    def __len__(self) -> int:
        return len(self.lengths)

    def select(self, indices: torch.Tensor) -> "Batch":
        return self._mapped(lambda tensor: tensor[indices])

    def to(self, device: torch.device) -> "Batch":
        return self._mapped(lambda tensor: tensor.to(device))

    def with_(self, **changes: Any) -> "Batch":
        return dataclasses.replace(self, **changes)

    def micro_batches(
        self, tokens: int = MICRO_BATCH_TOKENS, *, packed: bool = False, multiple: int = 1
    ) -> list["Batch"]:
        """Of at most ``tokens`` tokens, or of one sequence, in order.

        Args:
            packed: sequences one after another, without padding between them.
            multiple: the number of tokens of a sequence, or of a pack, is made one of it.
        """
        if not packed:
            rows = max(1, tokens // self.ids.shape[1])
            return [self.select(part) for part in torch.arange(len(self)).split(rows)]
        micro: list[Batch] = []
        start, total = 0, 0
        for row, length in enumerate(self.lengths.tolist()):
            if row > start and total + length > tokens:
                micro.append(self._pack(start, row, multiple))
                start, total = row, 0
            total += length
        return [*micro, self._pack(start, len(self), multiple)]

    def padded_to(self, multiple: int) -> "Batch":
        """With as many more columns of padding as make their number a multiple."""
        more = -self.ids.shape[1] % multiple
        return self if more == 0 else self._mapped(lambda t: _longer(t, more))

    def _pack(self, start: int, stop: int, multiple: int) -> "Batch":
        lengths = self.lengths[start:stop]
        more = int(-lengths.sum() % multiple)
        real = torch.arange(self.ids.shape[1]) < lengths[:, None]

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.dim() == 1:
                return tensor[start:stop]
            return _longer(tensor[start:stop][real][None], more)

        packed = self._mapped(pack)
        # Padding is a sequence of its own, that no other sees.
        filled = torch.cat([lengths, torch.tensor([more])]) if more else lengths
        return packed.with_(lengths=filled, packed=True)

    def _mapped(self, change: Any) -> "Batch":
        tensors = {f.name: getattr(self, f.name) for f in fields(self)}
        return self.with_(
            **{n: change(t) for n, t in tensors.items() if isinstance(t, torch.Tensor)}
        )


def _longer(tensor: torch.Tensor, more: int) -> torch.Tensor:
    """With ``more`` zeros at the end of dimension 1; 1-dimensional ones stay."""
    if tensor.dim() == 1 or more == 0:
        return tensor
    return torch.cat([tensor, tensor.new_zeros(len(tensor), more, *tensor.shape[2:])], 1)


def build_batch(rows: PublishedRows, top_k: int = 0) -> Batch:
    """All rows of a partition, in key order, without advantages.

    ``top_k``: entries of each token's row in the distillation columns, where no
    ``opd_topk_ksz`` says it.
    """
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
    mask = torch.from_numpy(channels["loss_mask"])
    rollout = torch.from_numpy(channels["rollout_log_probs"])
    support = _support(rows, shape, top_k) if "opd_topk_token_ids" in rows.columns else (None, None)
    return Batch(
        ids=torch.from_numpy(ids),
        labels=torch.from_numpy(labels),
        mask=mask,
        lengths=torch.from_numpy(prompts.lengths + responses.lengths),
        rollout_log_probs=rollout,
        teacher_log_probs=torch.from_numpy(channels["teacher_log_probs"]),
        advantages=torch.zeros(shape),
        weights=mask,
        shares=mask.sum(1).to(torch.int32),
        old_log_probs=rollout,
        importance=torch.ones(shape),
        support_ids=support[0],
        support_teacher=support[1],
    )


def _support(
    rows: PublishedRows, shape: tuple[int, int], top_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens to distil over and the Teacher's log-probs of them, as rectangles."""
    starts = rows.ragged("prompt_ids").lengths - 1
    responses = rows.ragged("response_ids").lengths
    if "opd_topk_ksz" in rows.columns:
        widths: list[Array] = rows.ragged("opd_topk_ksz").rows()
    else:
        widths = [np.full(length, top_k) for length in responses]
    widest = max((int(width.max()) for width in widths if len(width)), default=0)
    ids = np.full((*shape, widest), -1, np.int64)
    teacher = np.zeros((*shape, widest), np.float32)
    columns = (rows.ragged("opd_topk_token_ids"), rows.ragged("opd_topk_teacher_log_probs"))
    for target, column in zip((ids, teacher), columns, strict=True):
        for row, (start, width, flat) in enumerate(zip(starts, widths, column.rows(), strict=True)):
            target[row, start : start + len(width)][np.arange(widest) < width[:, None]] = flat
    return torch.from_numpy(ids), torch.from_numpy(teacher)


def mini_batches(samples: int, parts: int, seed: int, step: int) -> Iterator[torch.Tensor]:
    """Sample indices of each optimizer step: a permutation that (seed, step) alone decides, cut
    into nearly equal parts; no part is empty while there are enough samples."""
    generator = torch.Generator().manual_seed(step_seed(seed, step))
    yield from torch.randperm(samples, generator=generator).tensor_split(min(parts, samples))


def step_seed(seed: int, step: int) -> int:
    """A seed of its own for each step of each run seed."""
    return int(np.random.SeedSequence([seed, step]).generate_state(1, np.uint64)[0] >> 1)
