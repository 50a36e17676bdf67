"""`CachedDecoderLayer`: a drop-in for `nn.TransformerDecoderLayer`.

One code path serves training and stepping. What differs is where K and V come from: the input itself and the encoder
output, or a `LayerStep` of a cache.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from translator.attention import CachedMultiheadAttention, attend, merge_heads, split_heads
from translator.cache import LayerStep
from translator.masks import merge_masks
from translator.plain import check_plain_layer

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

        Modes aren't shared: train() and eval() of one leave the other alone. Raises `TypeError` for any other class
        than `nn.TransformerDecoderLayer`, subclasses included, and for parts that are hooked, parametrised, pruned or
        replaced: they may compute something else.
        """
        if type(layer) is cls:
            return layer
        check_plain_layer(layer)
        assert isinstance(layer, nn.TransformerDecoderLayer)
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
            if isinstance(module, nn.Dropout):
                # A module of its own: shared, it would follow the original's train() and eval() as well as this one's.
                setattr(shared, name, nn.Dropout(module.p).train(module.training))
            elif name not in ("self_attn", "multihead_attn"):
                setattr(shared, name, module)
        if shared.activation is not layer.activation:
            # PyTorch's layer computes F.relu in place of an activation module once it was copied, as
            # nn.TransformerDecoder copies it; the module stays in its state_dict, unused.
            shared.__dict__["activation"] = layer.activation
        shared.training = layer.training
        # Not as an attribute: a module held by a module would be registered, saved and trained twice.
        shared.__dict__["_original"] = layer
        return shared

    def parted_from_original(self) -> str | None:
        """The first part that the layer this one was made from no longer shares with it; None while all are shared."""
        if "_original" not in self.__dict__:
            return None
        mine, theirs = self._modules, self.__dict__["_original"]._modules
        for name in ("linear1", "linear2", "norm1", "norm2", "norm3"):
            if mine[name] is not theirs[name]:
                return name
        for name in ("self_attn", "multihead_attn"):
            my, their = mine[name], theirs[name]
            if my._modules["out_proj"] is not their._modules["out_proj"]:  # type: ignore[union-attr]
                return f"{name}.out_proj"
            for packed in ("in_proj_weight", "in_proj_bias"):
                if my._parameters[packed] is not their._parameters[packed]:  # type: ignore[union-attr]
                    return f"{name}.{packed}"
        return None

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

    def dropout_is_active(self) -> bool:
        """Whether two equal calls would give different results: some dropout module is in training mode."""
        for name in ("dropout", "dropout1", "dropout2", "dropout3"):
            module = self._modules[name]
            if module.training and module.p:  # type: ignore[union-attr]
                return True
        return self.self_attn.dropout_is_active() or self.multihead_attn.dropout_is_active()

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


MaskTriple = tuple[Tensor | None, Tensor | None, bool]


def training_masks(heads: int, x: Tensor, source: Tensor, tgt: MaskTriple, memory: MaskTriple) -> LayerMasks:
    """Both attentions' masks for `x` `(B, T, D)` and `source` `(B, S, D)`, from (mask, key padding, causal) of each."""
    if x.shape[0] != source.shape[0]:
        raise ValueError(f"tgt has {x.shape[0]} rows and memory {source.shape[0]}")
    if memory[2] and memory[0] is None:
        raise ValueError("memory_is_causal is a hint about memory_mask and needs one")
    B, T, S = x.shape[0], x.shape[1], source.shape[1]
    self_mask, self_causal = merge_masks(
        tgt[0], batched_padding(tgt[1]), (B, heads, T, T), x.dtype, tgt[2] and tgt[0] is None
    )
    cross_mask, _ = merge_masks(memory[0], batched_padding(memory[1]), (B, heads, T, S), x.dtype)
    return LayerMasks(self_mask, self_causal, cross_mask)


def batched_padding(key_padding_mask: Tensor | None) -> Tensor | None:
    """`(B, S)` from `(B, S)` or an unbatched `(S,)`."""
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
    mine.in_proj_weight = theirs.in_proj_weight  # type: ignore[assignment]
    mine.in_proj_bias = theirs.in_proj_bias  # type: ignore[assignment]
    mine.out_proj = theirs.out_proj  # type: ignore[assignment]
    mine.dropout = theirs.dropout  # type: ignore[assignment]
    mine.training = theirs.training
