"""Token ids to batches: sorted by length, filled by token count, in an order that seed and epoch decide alone."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from translator.padding import pad, padding


@dataclass(slots=True)
class Batch:
    """Padded ids. `target_in` starts with the start token, `target_out` ends with the end token; `B` pairs.

    `source` `(B, S)` with `source_padding` `(B, S)` True = padding; `target_in`, `target_out` `(B, T)` with `real`
    `(B, T)` True where a target token counts; `tokens` is how many do.
    """

    source: Tensor
    source_padding: Tensor
    target_in: Tensor
    target_out: Tensor
    real: Tensor
    tokens: int

    def to(self, device: torch.device) -> "Batch":
        """The same batch on `device`."""
        moved = (self.source, self.source_padding, self.target_in, self.target_out, self.real)
        source, source_padding, target_in, target_out, real = (part.to(device, non_blocking=True) for part in moved)
        return Batch(source, source_padding, target_in, target_out, real, self.tokens)


@dataclass(slots=True)
class Encoded:
    """A corpus as ids: `sources[i]` ends with the end token, `targets[i]` carries neither start nor end token."""

    sources: list[list[int]]
    targets: list[list[int]]


def plan_epoch(encoded: Encoded, batch_tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """Indices of each batch of an epoch: neighbours in length, batches and ties in random order.

    A batch holds at most `batch_tokens` target tokens, and as many source tokens, padding and end token included; a
    longer pair makes a batch of its own.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(len(encoded.sources), generator=generator).tolist()
    order.sort(key=lambda index: (len(encoded.targets[index]), len(encoded.sources[index])))
    batches: list[list[int]] = []
    batch: list[int] = []
    widest = 0
    for index in order:
        width = max(len(encoded.targets[index]) + 1, len(encoded.sources[index]), widest)
        if batch and width * (len(batch) + 1) > batch_tokens:
            batches.append(batch)
            batch, width = [], max(len(encoded.targets[index]) + 1, len(encoded.sources[index]))
        batch.append(index)
        widest = width
    if batch:
        batches.append(batch)
    return [batches[place] for place in torch.randperm(len(batches), generator=generator).tolist()]


def collate(encoded: Encoded, indices: Sequence[int], bos_id: int, eos_id: int, pad_id: int) -> Batch:
    """The pairs `indices` as one padded batch."""
    source = pad([encoded.sources[index] for index in indices], pad_id)
    targets = [encoded.targets[index] for index in indices]
    target_in = pad([[bos_id, *target] for target in targets], pad_id)
    target_out = pad([[*target, eos_id] for target in targets], pad_id)
    # From lengths, never from ids: a token that happens to equal pad_id is still a token.
    source_padding = padding([len(encoded.sources[index]) for index in indices])
    real = ~padding([len(target) + 1 for target in targets])
    return Batch(source, source_padding, target_in, target_out, real, sum(len(target) + 1 for target in targets))
