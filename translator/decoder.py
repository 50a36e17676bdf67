"""`CachedDecoder`: the stack of layers, `nn.TransformerDecoder`'s `state_dict` and training, and steps with a cache."""

from collections.abc import Iterable
from typing import cast, overload

import torch
from torch import Tensor, nn

from translator.cache import DecoderCache
from translator.decoder_layer import (
    CachedDecoderLayer,
    LayerMasks,
    as_batch,
    as_given,
    batched_padding,
    training_masks,
)
from translator.masks import merge_masks, padding_visible, restrict
from translator.plain import check_plain


class CachedDecoder(nn.Module):
    """A stack of `CachedDecoderLayer`s: `nn.TransformerDecoder`'s `state_dict` and training, and steps with a cache.

    >>> decoder = CachedDecoder.from_torch(trained)                       # an nn.TransformerDecoder, parameters shared
    >>> cache = decoder.start(memory, memory_key_padding_mask=padding)    # cross-attention K and V, once
    >>> hidden = decoder(embed(tokens, cache.positions(1)), cache)        # one step, of one token or of several
    """

    def __init__(self, layers: Iterable[CachedDecoderLayer], norm: nn.Module | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.norm = norm
        if not len(self.layers):
            raise ValueError("a decoder needs at least one layer")
        first = self.stack[0]
        self.batch_first = first.batch_first  # whether inputs are (B, T, D); else (T, B, D)
        self.num_heads = first.self_attn.num_heads

    @overload
    @classmethod
    def from_torch(cls, module: nn.TransformerDecoder) -> "CachedDecoder": ...
    @overload
    @classmethod
    def from_torch(cls, module: nn.Transformer) -> "tuple[nn.Module, CachedDecoder]": ...
    @classmethod
    def from_torch(cls, module: nn.Module) -> "CachedDecoder | tuple[nn.Module, CachedDecoder]":
        """A cached decoder around the parameters of `module`, shared, not copied; nothing is converted or retrained.

        `nn.TransformerDecoder` gives a `CachedDecoder`; `nn.Transformer` gives its own encoder and the cached decoder.
        Modes aren't shared: `train()` and `eval()` of one leave the other alone. Raises `TypeError`, naming the part,
        for a class it doesn't know, and for hooks, parametrised, pruned or replaced parts.
        """
        check_plain(module, "from_torch", (nn.TransformerDecoder, nn.Transformer))
        if isinstance(module, nn.Transformer):
            return module.encoder, cls.from_torch(module.decoder)
        assert isinstance(module, nn.TransformerDecoder)
        decoder = cls([CachedDecoderLayer.from_torch(layer) for layer in module.layers], module.norm)
        decoder.training = module.training
        return decoder

    @property
    def stack(self) -> list[CachedDecoderLayer]:
        """`layers`, with their type."""
        return cast(list[CachedDecoderLayer], list(self.layers))

    @torch.no_grad()
    def start(
        self,
        memory: Tensor,
        memory_key_padding_mask: Tensor | None = None,
        kind: str = "dynamic",
        capacity: int | None = None,
        beams: int = 1,
    ) -> DecoderCache:
        """An empty cache for the sentences of `memory` `(B, S, D)` (`(S, B, D)` unless `batch_first`).

        `memory_key_padding_mask` `(B, S)`, True = padding, holds for every step. `kind` is `"dynamic"` (grows) or
        `"static"` (`capacity` tokens a row, allocated now, `CacheFullError` beyond). `beams` rows are kept for each
        sentence, row `b * beams + k`; K and V of the source stay one a sentence. Raises `ValueError` for shapes that
        don't fit, an unknown kind or a missing capacity, and `RuntimeError` when the module this decoder was made from
        has got other parameters since.
        """
        self._check_shared()
        source = as_batch(memory, self.batch_first)
        layers = self.stack
        width = layers[0].self_attn.embed_dim
        if source.shape[-1] != width:
            raise ValueError(f"memory is {source.shape[-1]} wide and the decoder {width}")
        if memory.dim() == 2 and memory_key_padding_mask is not None and memory_key_padding_mask.dim() == 1:
            memory_key_padding_mask = memory_key_padding_mask.unsqueeze(0)
        visible = padding_visible(memory_key_padding_mask, source.shape[0], source.shape[1])
        if visible is not None:  # an encoder may leave NaN at padding, and a mask alone doesn't stop it
            source = source.masked_fill(~visible.unsqueeze(-1), 0)
        cross = [layer.cross_kv(source) for layer in layers]
        if source.shape[0] > 1:  # pays in attention after a few steps; for one sentence it would delay the first token
            cross = [(k.contiguous(), v.contiguous()) for k, v in cross]
        return DecoderCache.build(cross, kind=kind, capacity=capacity, beams=beams, source_visible=visible)

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor | DecoderCache,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
    ) -> Tensor:
        """With a tensor for `memory`, as `nn.TransformerDecoder.forward`. With a cache: the next T tokens of each row.

        With a cache, `tgt` is `(rows, T, D)`, causality and source padding come from the cache, and a caller's own
        `tgt_mask` `(T, past + T)` or `tgt_key_padding_mask` `(rows, past + T)` hides more. No gradients flow through a
        cached step. Returns the shape of `tgt`. Raises `ValueError` for masks or rows that don't fit, `RuntimeError`
        under active dropout or when decoder and cache differ in type or device, and `CacheFullError`; the cache is then
        as it was.
        """
        x = as_batch(tgt, self.batch_first)
        if isinstance(memory, DecoderCache):
            if memory_mask is not None or memory_key_padding_mask is not None:
                raise ValueError("with a cache, source masks are given once, to start()")
            return as_given(self._step(x, memory, tgt_mask, tgt_key_padding_mask), tgt, self.batch_first)
        self._check_shared()
        source = as_batch(memory, self.batch_first)
        masks = training_masks(
            self.num_heads,
            x,
            source,
            (tgt_mask, tgt_key_padding_mask, bool(tgt_is_causal)),
            (memory_mask, memory_key_padding_mask, memory_is_causal),
        )
        for layer in self.stack:
            x = layer.run(x, source, masks)
        return as_given(x if self.norm is None else self.norm(x), tgt, self.batch_first)

    @torch.no_grad()
    def _step(
        self, x: Tensor, cache: DecoderCache, tgt_mask: Tensor | None, tgt_key_padding_mask: Tensor | None
    ) -> Tensor:
        if x.shape[0] != cache.rows or len(cache.layers) != len(self.layers):
            raise ValueError(
                f"the step has {x.shape[0]} rows and {len(self.layers)} layers; the cache holds "
                f"{cache.rows} rows ({cache.batch_size} sentences of {cache.beams}) and {len(cache.layers)} layers"
            )
        self._check_shared()
        self._check_repeatable()
        self._check_same_place(cache)
        past, T = cache.length, x.shape[1]
        shape = (x.shape[0], self.num_heads, T, past + T)
        given, _ = merge_masks(tgt_mask, batched_padding(tgt_key_padding_mask), shape, x.dtype, past=past)
        step = cache.begin(T)
        if given is None:
            masks = LayerMasks(step.mask, step.is_causal, step.source_mask)
        else:
            masks = LayerMasks(restrict(given, step.mask, step.is_causal, T), False, step.source_mask)
        for layer, layer_step in zip(self.stack, step.layers, strict=True):
            x = layer.run(x, layer_step, masks)
        x = x if self.norm is None else self.norm(x)
        cache.commit(step)
        return x

    def _check_shared(self) -> None:
        for index, layer in enumerate(self.stack):
            part = layer.parted_from_original()
            if part is not None:
                raise RuntimeError(
                    f"layers.{index}.{part}: the module this decoder was made from has another one since "
                    "(load_state_dict with assign=True, or an assignment): call CachedDecoder.from_torch again"
                )

    def _check_repeatable(self) -> None:
        for index, layer in enumerate(self.stack):
            if layer.dropout_is_active():
                raise RuntimeError(
                    f"layers.{index}: a step with a cache under active dropout would keep K and V that no other pass "
                    "gives again: call eval() on the cached decoder first (it has a mode of its own)"
                )

    def _check_same_place(self, cache: DecoderCache) -> None:
        weight = self.stack[0].linear1.weight
        device, dtype = weight.device, weight.dtype
        if torch.is_autocast_enabled(device.type):
            dtype = torch.get_autocast_dtype(device.type)
        if (cache.dtype, cache.device) != (dtype, device):
            raise RuntimeError(
                f"cache holds {_short(cache.dtype)} on {cache.device}, the decoder is now {_short(dtype)} on {device}: "
                "call start() again, or move the cache with cache.to(…)"
            )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
