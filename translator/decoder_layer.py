"""`CachedDecoderLayer`: a drop-in for `nn.TransformerDecoderLayer`.

One code path serves training and stepping. What differs is the step it runs on: a pass over whole sequences, whose K
and V come from the input itself and the encoder output, or a `LayerStep` of a cache.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from translator.attention import AttentionStep, CachedMultiheadAttention, FullPass, Product, Structure
from translator.attention.masks import merge_masks
from translator.operations import Activation, EagerOperations, Operations
from translator.plain import check_plain_layer


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
        *,
        structure: Callable[..., Structure] | None = None,
    ) -> None:
        """The arguments of `nn.TransformerDecoderLayer`, and what builds the self-attention where it is another: a
        class of `Structure`, or a partial of one with its options."""
        super().__init__()
        factory: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        self.batch_first = batch_first
        self.norm_first = norm_first
        heads: dict[str, Any] = {"dropout": dropout, "batch_first": batch_first, **factory}
        self.self_attn: Structure = (structure or CachedMultiheadAttention)(d_model, nhead, **heads)
        self.multihead_attn = CachedMultiheadAttention(d_model, nhead, **heads)
        self.linear1 = nn.Linear(d_model, dim_feedforward, **factory)
        self.dropout: nn.Module = nn.Dropout(dropout)
        self.linear2 = nn.Linear(dim_feedforward, d_model, **factory)
        self.norm1 = nn.LayerNorm(d_model, eps=layer_norm_eps, **factory)
        self.norm2 = nn.LayerNorm(d_model, eps=layer_norm_eps, **factory)
        self.norm3 = nn.LayerNorm(d_model, eps=layer_norm_eps, **factory)
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
        whole = full_pass(
            self.multihead_attn.num_heads,
            x,
            source,
            (tgt_mask, tgt_key_padding_mask, tgt_is_causal),
            (memory_mask, memory_key_padding_mask, memory_is_causal),
        )
        return as_given(self.run(x, whole, EagerOperations(self)), tgt, self.batch_first)

    def dropout_is_active(self) -> bool:
        """Whether two equal calls would give different results: some dropout module is in training mode."""
        for name in ("dropout", "dropout1", "dropout2", "dropout3"):
            module = self._modules[name]
            if module.training and module.p:  # type: ignore[union-attr]
                return True
        for name in ("self_attn", "multihead_attn"):
            attention = self._modules[name]
            if attention.training and attention.dropout:  # type: ignore[union-attr]
                return True
        return False

    def run(self, x: Tensor, step: AttentionStep, ops: Operations) -> Tensor:
        """The layer itself, `x` `(rows, T, D)`; `step` is a whole pass or this layer's share of a cached one."""
        self_attn, cross_attn = self.self_attn, self.multihead_attn
        own, cross = ops.of("self_attn"), ops.of("multihead_attn")
        if self.norm_first:
            x = self_attn.attend(x, step, own, norm="norm1", dropout="dropout1", residual=x)
            x = cross_attn.attend_source(x, step, cross, norm="norm2", dropout="dropout2", residual=x)
            hidden = ops.product("linear1", x, norm="norm3", activation=self.activation, dropout="dropout")
            return ops.product("linear2", hidden, dropout="dropout3", residual=x)
        x = ops.norm("norm1", self_attn.attend(x, step, own, dropout="dropout1", residual=x))
        x = ops.norm("norm2", cross_attn.attend_source(x, step, cross, dropout="dropout2", residual=x))
        hidden = ops.product("linear1", x, activation=self.activation, dropout="dropout")
        return ops.norm("norm3", ops.product("linear2", hidden, dropout="dropout3", residual=x))

    def products(self) -> dict[str, Product]:
        """Weight and bias of every product, by part and name: what an engine prepares."""
        cross = self.multihead_attn.products()
        return {
            **{f"self_attn.{name}": product for name, product in self.self_attn.products().items()},
            **{f"multihead_attn.{name}": cross[name] for name in ("q", "kv", "out_proj")},
            "linear1": (self.linear1.weight, self.linear1.bias),
            "linear2": (self.linear2.weight, self.linear2.bias),
        }


MaskTriple = tuple[Tensor | None, Tensor | None, bool]


def full_pass(heads: int, x: Tensor, source: Tensor, tgt: MaskTriple, memory: MaskTriple) -> FullPass:
    """A pass of `x` `(B, T, D)` over `source` `(B, S, D)` under (mask, key padding, causal) of both attentions."""
    if x.shape[0] != source.shape[0]:
        raise ValueError(f"tgt has {x.shape[0]} rows and memory {source.shape[0]}")
    if memory[2] and memory[0] is None:
        raise ValueError("memory_is_causal is a hint about memory_mask and needs one")
    B, T, S = x.shape[0], x.shape[1], source.shape[1]
    is_causal = tgt[2] and tgt[0] is None
    mask, is_causal = merge_masks(tgt[0], batched_padding(tgt[1]), (B, heads, T, T), x.dtype, is_causal)
    source_mask, _ = merge_masks(memory[0], batched_padding(memory[1]), (B, heads, T, S), x.dtype)
    return FullPass(T, mask, is_causal, source, source_mask)


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
