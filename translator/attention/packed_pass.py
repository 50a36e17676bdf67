"""A pass over whole sequences that lie one after another, no padding between them: training.

Padding is work that no loss asks for: a quarter of a batch of sentences, even of sorted ones. Products, norms and
dropout see one long row of N tokens; only attention has to know where a sequence begins.
"""

from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from translator.attention.kernels import Kernel, merge_heads, split_heads
from translator.attention.masks import causal_mask


class Packing:
    """Where each of `B` sequences lies among the `N` tokens of a packed row."""

    def __init__(self, lengths: Sequence[int], device: torch.device | str = "cpu") -> None:
        """`lengths` in tokens, none below 1."""
        if not lengths or min(lengths) < 1:
            raise ValueError("a packed row has at least one sequence, and none of them is empty")
        self.lengths = torch.tensor(lengths, dtype=torch.int64)
        self.widest = max(lengths)
        self.device = torch.device(device)

    @property
    def count(self) -> int:
        """N."""
        return int(self.lengths.sum())

    @cached_property
    def starts(self) -> Tensor:
        """`(B + 1,)` int32: where each sequence begins, and the end of the last, in host memory."""
        return torch.nn.functional.pad(self.lengths.cumsum(0), (1, 0)).to(torch.int32)

    @cached_property
    def positions(self) -> Tensor:
        """`(N,)`: each token's position in its sequence, from 0."""
        steps = torch.arange(self.count)
        return (steps - self.starts[:-1].to(torch.int64).repeat_interleave(self.lengths)).to(self.device)

    @cached_property
    def places(self) -> Tensor:
        """`(N,)`: where each token lies in a padded batch of `B * widest` places."""
        rows = torch.arange(len(self.lengths)).repeat_interleave(self.lengths).to(self.device)
        return rows * self.widest + self.positions

    @cached_property
    def visible(self) -> Tensor | None:
        """`(B, 1, 1, widest)`, True = a real token; None where nothing is padded."""
        if bool((self.lengths == self.widest).all()):
            return None
        return (torch.arange(self.widest) < self.lengths.unsqueeze(1))[:, None, None].to(self.device)

    def padded(self, x: Tensor) -> Tensor:
        """`(1, H, N, D_head)` → `(B, H, widest, D_head)`, zeros in between."""
        heads = x.shape[1]
        flat = _Spread.apply(merge_heads(x)[0], self.places, len(self.lengths) * self.widest)
        return split_heads(flat.view(len(self.lengths), self.widest, -1), heads)

    def packed(self, x: Tensor) -> Tensor:
        """`(B, H, widest, D_head)` → `(1, H, N, D_head)`."""
        heads = x.shape[1]
        flat = merge_heads(x).flatten(0, 1)
        return split_heads(_Gather.apply(flat, self.places).unsqueeze(0), heads)


class PackedPass:
    """An `AttentionStep` over packed sequences, those of the target or, in an encoder, of the source.

    x is `(1, N, D)`. `is_causal` for a decoder; `memory` `(1, N_source, D)` is packed as `source` says.
    """

    state = None

    def __init__(
        self, packing: Packing, is_causal: bool = False, memory: Tensor | None = None, source: Packing | None = None
    ) -> None:
        self.packing = packing
        self.is_causal = is_causal
        self.memory = memory
        self.source_packing = source
        self._last: tuple[Tensor, Tensor] | None = None

    @property
    def positions(self) -> Tensor:
        """`(1, N)`: within each sequence, from 0."""
        return self.packing.positions.unsqueeze(0)

    @cached_property
    def mask(self) -> Tensor | None:
        """What a padded batch of these sequences hides beyond a causal mask; True = visible."""
        visible = self.packing.visible
        if visible is None or not self.is_causal:
            return visible
        T = self.packing.widest
        return ~causal_mask(T, T, self.packing.device) & visible

    def attend(self, q: Tensor, k: Tensor, v: Tensor, kernel: Kernel, dropout: float = 0.0) -> Tensor:
        """See `AttentionStep.attend`; q, k, v `(1, H, N, D_head)`."""
        self._last = k, v
        if (packed := getattr(kernel, "packed", None)) and not dropout:
            return packed(q, k, v, self.packing, self.packing, self.is_causal)
        q, k, v = (self.packing.padded(part) for part in (q, k, v))
        return self.packing.packed(kernel(q, k, v, self.mask, self.is_causal and self.mask is None, dropout))

    def attend_again(self, q: Tensor, kernel: Kernel, dropout: float = 0.0) -> Tensor:
        """See `AttentionStep.attend_again`: over the last K and V that came by."""
        assert self._last is not None
        return self.attend(q, *self._last, kernel, dropout)

    def apart(self, x: Tensor) -> Tensor:
        """See `AttentionStep.apart`: `(1, N, D)` → `(B, widest, D)`."""
        if not self.is_causal:
            raise ValueError("this attention is causal: an encoder's tokens see each other")
        return self.packing.padded(x.unsqueeze(1))[:, 0]

    def together(self, x: Tensor) -> Tensor:
        """See `AttentionStep.together`: `(B, widest, D)` → `(1, N, D)`."""
        return self.packing.packed(x.unsqueeze(1))[:, 0]

    def source(self, project: Callable[[Tensor], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor | None]:
        """See `AttentionStep.source`; K and V are packed, and `attend_source` knows how."""
        if self.memory is None or self.source_packing is None:
            raise ValueError("an encoder's pass has no source to attend to")
        k, v = project(self.memory)
        return k, v, None

    def attend_source(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, kernel: Kernel, dropout: float = 0.0
    ) -> Tensor:
        """See `AttentionStep.attend_source`; q `(1, H, N, D_head)`, k and v `(1, H, N_source, D_head)`."""
        source = self.source_packing
        assert source is not None
        if (packed := getattr(kernel, "packed", None)) and not dropout:
            return packed(q, k, v, self.packing, source, False)
        k, v = source.padded(k), source.padded(v)
        return self.packing.packed(kernel(self.packing.padded(q), k, v, source.visible, False, dropout))


class _Spread(torch.autograd.Function):
    """Rows `(N, width)` to their `places` among `count` rows; backward gathers, where plain autograd would add up."""

    @staticmethod
    def forward(ctx, x: Tensor, places: Tensor, count: int) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(places)
        return x.new_zeros(count, x.shape[1]).index_copy_(0, places, x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[no-untyped-def]
        return grad.index_select(0, ctx.saved_tensors[0]), None, None


class _Gather(torch.autograd.Function):
    """The rows `(N, width)` at `places`, no two alike; the reverse of `_Spread`."""

    @staticmethod
    def forward(ctx, x: Tensor, places: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(places)
        ctx.count = x.shape[0]
        return x.index_select(0, places)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]
        (places,) = ctx.saved_tensors
        return grad.new_zeros(ctx.count, grad.shape[1]).index_copy_(0, places, grad), None
