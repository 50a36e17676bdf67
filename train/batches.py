"""Token ids to batches: sorted by length, filled by token count, in an order that seed and epoch decide alone."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from translator.attention import Packing


@dataclass(slots=True)
class Batch:
    """Ids of `B` pairs, one sentence after another, without padding.

    `source` `(N_source,)`, `target_in` `(N,)`, each target with the start token first, `target_out` `(N,)`, each with
    the end token last; where sentences begin is in the packings.
    """

    source: Tensor
    target_in: Tensor
    target_out: Tensor
    source_packing: Packing
    target_packing: Packing

    @property
    def tokens(self) -> int:
        """Target tokens, end tokens included: N."""
        return len(self.target_out)

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch on `device`."""
        source, target = (Packing(one.lengths.tolist(), device) for one in (self.source_packing, self.target_packing))
        return Batch(self.source.to(device), self.target_in.to(device), self.target_out.to(device), source, target)


@dataclass(slots=True)
class Encoded:
    """A corpus as ids: `sources[i]` ends with the end token, `targets[i]` carries neither start nor end token."""

    sources: list[list[int]]
    targets: list[list[int]]


def plan_epoch(encoded: Encoded, batch_tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """Indices of each batch of an epoch: neighbours in length, batches and ties in random order.

    A batch holds at most `batch_tokens` target tokens, and as many source tokens, end tokens included; a longer pair
    makes a batch of its own.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(len(encoded.sources), generator=generator).tolist()
    order.sort(key=lambda index: (len(encoded.targets[index]), len(encoded.sources[index])))
    batches: list[list[int]] = []
    batch: list[int] = []
    sources = targets = 0
    for index in order:
        source, target = len(encoded.sources[index]), len(encoded.targets[index]) + 1
        if batch and max(sources + source, targets + target) > batch_tokens:
            batches.append(batch)
            batch, sources, targets = [], 0, 0
        batch.append(index)
        sources, targets = sources + source, targets + target
    if batch:
        batches.append(batch)
    return [batches[place] for place in torch.randperm(len(batches), generator=generator).tolist()]


def divided(indices: Sequence[int], parts: int) -> list[Sequence[int]]:
    """A batch in `parts` of like length, or fewer where it has fewer pairs: neighbours in length go to each in turn."""
    return [indices[start::parts] for start in range(min(parts, len(indices)))]


def collate(
    encoded: Encoded, indices: Sequence[int], bos_id: int, eos_id: int, device: torch.device | str = "cpu"
) -> Batch:
    """The pairs `indices` as one batch on `device`."""
    sources = [encoded.sources[index] for index in indices]
    targets = [encoded.targets[index] for index in indices]

    def ids(sentences: Iterable[Sequence[int]]) -> Tensor:
        return torch.tensor([*chain.from_iterable(sentences)], dtype=torch.int64).to(device, non_blocking=True)

    return Batch(
        ids(sources),
        ids([bos_id, *target] for target in targets),
        ids([*target, eos_id] for target in targets),
        Packing([len(source) for source in sources], device),
        Packing([len(target) + 1 for target in targets], device),
    )
