"""Whether a PyTorch layer is just what its class says: what a drop-in must know before it takes the layer's place."""

from torch import nn

from translator.attention.multihead import CachedMultiheadAttention

_LINEAR = (nn.Linear, nn.modules.linear.NonDynamicallyQuantizableLinear)
_PARTS: dict[str, tuple[type[nn.Module], ...]] = {
    "self_attn": (nn.MultiheadAttention, CachedMultiheadAttention),
    "multihead_attn": (nn.MultiheadAttention, CachedMultiheadAttention),
    "self_attn.out_proj": _LINEAR,
    "multihead_attn.out_proj": _LINEAR,
    **dict.fromkeys(("linear1", "linear2"), _LINEAR),
    **dict.fromkeys(("norm1", "norm2", "norm3"), (nn.LayerNorm,)),
    **dict.fromkeys(("dropout", "dropout1", "dropout2", "dropout3"), (nn.Dropout,)),
}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def check_plain_layer(layer: nn.Module) -> None:
    """Raises `TypeError`, naming the part, unless `layer` is an `nn.TransformerDecoderLayer` of unchanged parts.

    Refused are subclasses, hooks, a `forward` put over the class's own, parametrised or pruned weights, and modules put
    in the place of a part: each may compute what a cached layer doesn't.
    """
    check_plain(layer, "the layer", (nn.TransformerDecoderLayer,))
    for name, classes in _PARTS.items():
        part = layer.get_submodule(name)
        check_plain(part, name, classes)
        if isinstance(part, nn.MultiheadAttention) and not (
            part._qkv_same_embed_dim and part.bias_k is None and not part.add_zero_attn
        ):
            raise TypeError(
                f"{name}: this MultiheadAttention is not plain; a cached one has one width for Q, K and V, no bias_k "
                "and no add_zero_attn"
            )


def check_plain(module: nn.Module, name: str, classes: tuple[type[nn.Module], ...]) -> None:
    """Raises `TypeError` unless `module` is of one of `classes` itself, and nothing was hung on it."""
    kind = f"{type(module).__module__}.{type(module).__qualname__}"
    if type(module) not in classes:
        raise TypeError(
            f"{name}: {kind} is not {' or '.join(_public(known) for known in classes)}; only that class itself is "
            "known to compute what a cached layer computes (merge or remove a wrapper or parametrisation first)"
        )
    hooks = [hook for attribute in _HOOKS for hook in getattr(module, attribute).values()]
    if hooks:
        pruned = any(hasattr(hook, "_tensor_name") for hook in hooks)
        what = "its weights are pruned (make it permanent with torch.nn.utils.prune.remove)" if pruned else (
            f"it has {len(hooks)} hook{'s' * (len(hooks) > 1)} that a cached layer would not call; remove them first"
        )  # fmt: skip
        raise TypeError(f"{name}: {kind}: {what}")
    if "forward" in vars(module):
        raise TypeError(f"{name}: {kind}: its forward was replaced, and a cached layer would not call the new one")


def _public(known: type[nn.Module]) -> str:
    return f"nn.{known.__name__}" if hasattr(nn, known.__name__) else known.__name__
