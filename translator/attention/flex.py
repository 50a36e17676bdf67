"""`flex_attention`: what is hidden is said by a function of positions, not by a tensor (Dong et al. 2024)."""

import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from translator.attention.named_kernels import AttentionKernel, in_one_type, register_kernel

_MODULE = "torch.nn.attention.flex_attention"


@register_kernel
class FlexKernel(AttentionKernel):
    """A mask function, and a block mask made of it that lets whole blocks of keys be left out.

    It is compiled on GPUs; elsewhere PyTorch works it out plainly, which stores the scores and gains nothing.
    """

    name = "flex"
    mask = "a function, and a block mask of it"

    def stores_scores(self, device: torch.device) -> bool:
        """Where it isn't compiled."""
        return device.type != "cuda"

    def missing(self, device: torch.device) -> str:
        """See `AttentionKernel.missing`."""
        return "" if importlib.util.find_spec(_MODULE) else f"this PyTorch has no {_MODULE}"

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool = False, dropout: float = 0.0
    ) -> Tensor:
        """See `AttentionKernel`."""
        from torch.nn.attention.flex_attention import create_block_mask

        if dropout:
            raise self.cannot("drop attention weights: train with another one, or without attention dropout")
        given = q.dtype
        q, mask = in_one_type(q, k, mask)
        sizes = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        options: dict[str, Any] = {"enable_gqa": q.shape[1] != k.shape[1]}
        if is_causal:
            options["block_mask"] = create_block_mask(seen_before(*sizes[2:]), None, None, *sizes[2:], device=q.device)
        elif mask is not None and mask.dtype == torch.bool:
            options["block_mask"] = create_block_mask(shown_by(mask.expand(sizes)), *sizes, device=q.device)
        elif mask is not None:
            options["score_mod"] = added(mask.expand(sizes))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r".*flex_attention called without torch\.compile", append=False)
            return _attention(q.device)(q, k, v, **options).to(given)


Positions = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""`(batch, head, query, key)` → whether that query sees that key."""


def seen_before(T: int, S: int) -> Positions:
    """The mask function of T queries that end with S keys."""
    return lambda batch, head, query, key: key <= query + (S - T)


def shown_by(mask: Tensor) -> Positions:
    """The mask function of a mask `(B, H, T, S)`, True = visible."""
    return lambda batch, head, query, key: mask[batch, head, query, key]


def added(mask: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The score function that adds a mask `(B, H, T, S)` of floats."""
    return lambda score, batch, head, query, key: score + mask[batch, head, query, key]


_compiled: list[Any] = []


def _attention(device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    if device.type != "cuda":
        return flex_attention
    if not _compiled:
        _compiled.append(torch.compile(flex_attention, dynamic=True))
    return _compiled[0]
