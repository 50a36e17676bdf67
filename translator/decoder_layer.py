"""`CachedDecoderLayer`: a drop-in for `nn.TransformerDecoderLayer`; `CachedDecoder`: the stack around it.

One code path serves training and stepping. What differs is where K and V come from: the input itself and the encoder
output, or a `LayerStep` of a cache.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple, cast, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from translator.attention import CachedMultiheadAttention, attend, merge_heads, split_heads
from translator.cache import DecoderCache, LayerStep
from translator.masks import merge_masks, padding_visible, restrict

Projection = Callable[[Tensor], Tensor]
Activation = Callable[[Tensor], Tensor]


class LayerProjections(NamedTuple):
    """The matrix products of one layer by name. Training gives views of the packed weights; a faster form of the same
    weights is another object of this type, and the layer's code stays the one below."""

    qkv: Projection
    out: Projection
    cross_q: Projection
    cross_kv: Projection
    cross_out: Projection
    ffn_in: Projection
    ffn_out: Projection


class LayerMasks(NamedTuple):
    """Masks of both attentions in `scaled_dot_product_attention`'s polarity, the same for every layer."""

    self_attn: Tensor | None
    self_is_causal: bool
    cross_attn: Tensor | None


def activation_function(activation: str | Activation) -> Activation:
    """`"relu"`, `"gelu"` or any callable, as `nn.TransformerDecoderLayer` takes it; `RuntimeError` for other names."""
    if activation == "relu":
        return F.relu
    if activation == "gelu":
        return F.gelu
    if callable(activation):
        return activation
    raise RuntimeError(f"activation should be relu, gelu or a callable, not {activation!r}")


class CachedDecoderLayer(nn.Module):
    """`nn.TransformerDecoderLayer` with the same constructor, `forward` and `state_dict`, and room for a cache."""

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Activation = F.relu,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory = {"bias": bias, "device": device, "dtype": dtype}
        self.batch_first = batch_first
        self.norm_first = norm_first
        self.self_attn = CachedMultiheadAttention(d_model, nhead, dropout, batch_first=batch_first, **factory)  # type: ignore[arg-type]
        self.multihead_attn = CachedMultiheadAttention(d_model, nhead, dropout, batch_first=batch_first, **factory)  # type: ignore[arg-type]
        self.linear1 = nn.Linear(d_model, dim_feedforward, **factory)  # type: ignore[arg-type]
        self.dropout: nn.Module = nn.Dropout(dropout)
        self.linear2 = nn.Linear(dim_feedforward, d_model, **factory)  # type: ignore[arg-type]
        self.norm1 = nn.LayerNorm(d_model, eps=layer_norm_eps, **factory)  # type: ignore[arg-type]
        self.norm2 = nn.LayerNorm(d_model, eps=layer_norm_eps, **factory)  # type: ignore[arg-type]
        self.norm3 = nn.LayerNorm(d_model, eps=layer_norm_eps, **factory)  # type: ignore[arg-type]
        self.dropout1: nn.Module = nn.Dropout(dropout)
        self.dropout2: nn.Module = nn.Dropout(dropout)
        self.dropout3: nn.Module = nn.Dropout(dropout)
        self.activation = activation_function(activation)

    @classmethod
    def from_torch(cls, layer: nn.Module) -> "CachedDecoderLayer":
        """A layer that shares the parameters of `layer`, no copy; a `CachedDecoderLayer` is returned as it is.

        Raises `TypeError` for any other class than `nn.TransformerDecoderLayer`, subclasses included: they may compute
        something else.
        """
        if type(layer) is cls:
            return layer
        if type(layer) is not nn.TransformerDecoderLayer:
            raise TypeError(
                f"{type(layer).__module__}.{type(layer).__qualname__} is not nn.TransformerDecoderLayer; "
                "only that class (or CachedDecoderLayer) is known to compute what a cached layer computes"
            )
        attention = layer.self_attn
        with torch.device("meta"):
            shared = cls(
                attention.embed_dim,
                attention.num_heads,
                layer.linear1.out_features,
                activation=layer.activation,
                batch_first=attention.batch_first,
                norm_first=layer.norm_first,
            )
        for name in ("self_attn", "multihead_attn"):
            _share_attention(getattr(shared, name), getattr(layer, name))
        for name, module in layer.named_children():
            if name not in ("self_attn", "multihead_attn"):
                setattr(shared, name, module)
        if shared.activation is not layer.activation:
            # PyTorch's layer computes F.relu in place of an activation module once it was copied, as
            # nn.TransformerDecoder copies it; the module stays in its state_dict, unused.
            shared.__dict__["activation"] = layer.activation
        shared.training = layer.training
        return shared

    def projections(self) -> LayerProjections:
        """The plain form of this layer's matrix products: views of the packed weights, linear layers as they are."""
        return LayerProjections(
            qkv=self.self_attn.qkv,
            out=self.self_attn.out_proj,
            cross_q=self.multihead_attn.q,
            cross_kv=self.multihead_attn.kv,
            cross_out=self.multihead_attn.out_proj,
            ffn_in=self.linear1,
            ffn_out=self.linear2,
        )

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
    ) -> Tensor:
        """Without a cache, as `nn.TransformerDecoderLayer.forward`: `tgt` `(B, T, D)`, `memory` `(B, S, D)` (sequence
        first unless `batch_first`, or unbatched), masks with True = hidden. To step with a cache use `CachedDecoder`.
        """
        x, source = as_batch(tgt, self.batch_first), as_batch(memory, self.batch_first)
        masks = training_masks(
            self.self_attn.num_heads,
            x,
            source,
            (tgt_mask, tgt_key_padding_mask, tgt_is_causal),
            (memory_mask, memory_key_padding_mask, memory_is_causal),
        )
        return as_given(self.run(x, source, masks), tgt, self.batch_first)

    def run(
        self, x: Tensor, source: Tensor | LayerStep, masks: LayerMasks, proj: LayerProjections | None = None
    ) -> Tensor:
        """The layer itself, batch first: `x` `(rows, T, D)`, `source` the memory `(B, S, D)` or a step of a cache."""
        proj = proj or self.projections()
        if self.norm_first:
            x = x + self.dropout1(self._self_attention(self.norm1(x), source, masks, proj))
            x = x + self.dropout2(self._cross_attention(self.norm2(x), source, masks, proj))
            return x + self.dropout3(self._feed_forward(self.norm3(x), proj))
        x = self.norm1(x + self.dropout1(self._self_attention(x, source, masks, proj)))
        x = self.norm2(x + self.dropout2(self._cross_attention(x, source, masks, proj)))
        return self.norm3(x + self.dropout3(self._feed_forward(x, proj)))

    def _self_attention(
        self, x: Tensor, source: Tensor | LayerStep, masks: LayerMasks, proj: LayerProjections
    ) -> Tensor:
        heads = self.self_attn.num_heads
        q, k, v = (split_heads(part, heads) for part in proj.qkv(x).chunk(3, dim=-1))
        if isinstance(source, LayerStep):
            k, v = source.update(k, v)
        dropout = self.self_attn.dropout_now()
        return proj.out(merge_heads(attend(q, k, v, masks.self_attn, masks.self_is_causal, dropout)))

    def _cross_attention(
        self, x: Tensor, source: Tensor | LayerStep, masks: LayerMasks, proj: LayerProjections
    ) -> Tensor:
        if isinstance(source, LayerStep):
            k, v = source.cache.cross_attn.k, source.cache.cross_attn.v
        else:
            k, v = self.cross_kv(source, proj)
        # The K beams of a sentence are K * T query rows against one copy of its keys: (B * K, T, D) -> (B, K * T, D).
        beams = x.shape[0] // max(k.shape[0], 1)
        q = proj.cross_q(x).view(k.shape[0], beams * x.shape[1], x.shape[2])
        q = split_heads(q, self.multihead_attn.num_heads)
        dropout = self.multihead_attn.dropout_now()
        attended = attend(q, k, v, masks.cross_attn, dropout=dropout)
        return proj.cross_out(merge_heads(attended).view_as(x))

    def cross_kv(self, memory: Tensor, proj: LayerProjections | None = None) -> tuple[Tensor, Tensor]:
        """K and V of the encoder output `(B, S, D)`, each `(B, H, S, D_head)`."""
        k, v = (self.multihead_attn.kv if proj is None else proj.cross_kv)(memory).chunk(2, dim=-1)
        heads = self.multihead_attn.num_heads
        return split_heads(k, heads), split_heads(v, heads)

    def _feed_forward(self, x: Tensor, proj: LayerProjections) -> Tensor:
        return proj.ffn_out(self.dropout(self.activation(proj.ffn_in(x))))


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
        Raises `TypeError` for a class it doesn't know, by name.
        """
        if type(module) is nn.Transformer:
            return module.encoder, cls.from_torch(module.decoder)
        if type(module) is not nn.TransformerDecoder:
            raise TypeError(
                f"{type(module).__module__}.{type(module).__qualname__} is neither nn.TransformerDecoder "
                "nor nn.Transformer"
            )
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
        don't fit, an unknown kind or a missing capacity.
        """
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
        cached step. Returns the shape of `tgt`. Raises `ValueError` for masks or rows that don't fit, and
        `CacheFullError`; the cache is then as it was.
        """
        x = as_batch(tgt, self.batch_first)
        if isinstance(memory, DecoderCache):
            if memory_mask is not None or memory_key_padding_mask is not None:
                raise ValueError("with a cache, source masks are given once, to start()")
            return as_given(self._step(x, memory, tgt_mask, tgt_key_padding_mask), tgt, self.batch_first)
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
        past, T = cache.length, x.shape[1]
        shape = (x.shape[0], self.num_heads, T, past + T)
        given, _ = merge_masks(tgt_mask, _rows(tgt_key_padding_mask), shape, x.dtype, past=past)
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


MaskTriple = tuple[Tensor | None, Tensor | None, bool]


def training_masks(heads: int, x: Tensor, source: Tensor, tgt: MaskTriple, memory: MaskTriple) -> LayerMasks:
    """Both attentions' masks for `x` `(B, T, D)` and `source` `(B, S, D)`, from (mask, key padding, causal) of each."""
    if x.shape[0] != source.shape[0]:
        raise ValueError(f"tgt has {x.shape[0]} rows and memory {source.shape[0]}")
    if memory[2] and memory[0] is None:
        raise ValueError("memory_is_causal is a hint about memory_mask and needs one")
    B, T, S = x.shape[0], x.shape[1], source.shape[1]
    self_mask, self_causal = merge_masks(tgt[0], _rows(tgt[1]), (B, heads, T, T), x.dtype, tgt[2] and tgt[0] is None)
    cross_mask, _ = merge_masks(memory[0], _rows(memory[1]), (B, heads, T, S), x.dtype)
    return LayerMasks(self_mask, self_causal, cross_mask)


def _rows(key_padding_mask: Tensor | None) -> Tensor | None:
    return (
        key_padding_mask.unsqueeze(0)
        if key_padding_mask is not None and key_padding_mask.dim() == 1
        else key_padding_mask
    )


def as_batch(x: Tensor, batch_first: bool) -> Tensor:
    """`(B, T, D)` from `(B, T, D)`, `(T, B, D)` or an unbatched `(T, D)`; raises `ValueError` for other ranks."""
    if x.dim() == 2:
        return x.unsqueeze(0)
    if x.dim() != 3:
        raise ValueError(f"expected (B, T, D), (T, B, D) or unbatched (T, D), not a tensor of {x.dim()} dimensions")
    return x if batch_first else x.transpose(0, 1)


def as_given(x: Tensor, given: Tensor, batch_first: bool) -> Tensor:
    """`x` `(B, T, D)` in the layout of `given`."""
    if given.dim() == 2:
        return x.squeeze(0)
    return x if batch_first else x.transpose(0, 1)


def _share_attention(mine: CachedMultiheadAttention, theirs: nn.Module) -> None:
    if type(theirs) is CachedMultiheadAttention:
        plain = True
    else:
        plain = (
            type(theirs) is nn.MultiheadAttention
            and theirs._qkv_same_embed_dim
            and theirs.bias_k is None
            and not theirs.add_zero_attn
        )
    if not plain:
        raise TypeError(
            f"{type(theirs).__module__}.{type(theirs).__qualname__} is not a plain nn.MultiheadAttention "
            "(one width for Q, K and V, no bias_k, no add_zero_attn)"
        )
    mine.in_proj_weight = theirs.in_proj_weight  # type: ignore[assignment]
    mine.in_proj_bias = theirs.in_proj_bias  # type: ignore[assignment]
    mine.out_proj = theirs.out_proj  # type: ignore[assignment]
    mine.dropout = theirs.dropout  # type: ignore[assignment]
    mine.training = theirs.training
