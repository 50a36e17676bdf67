"""The one place where masks change polarity: PyTorch's modules hide with True, `scaled_dot_product_attention` shows."""

import torch
import torch.nn.functional as F
from torch import Tensor


def merge_masks(
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    is_causal: bool = False,
    past: int = 0,
) -> tuple[Tensor | None, bool]:
    """`(mask, is_causal)` as `scaled_dot_product_attention` wants them, for scores of shape `(B, H, T, S)`.

    `attn_mask`: `(T, S)`, `(B * H, T, S)` or `(B, H, T, S)`; `key_padding_mask`: `(B, S)`; bool with True = hidden, or
    floats to add. `past` is how many of the S keys a cache already held, for the message. Raises `ValueError` for a
    mask of another shape: one that merely broadcasts would hide or show the wrong keys.
    """
    if attn_mask is None and key_padding_mask is None:
        return None, is_causal
    B, H, T, S = shape
    expected = f"past + step = {past} + {S - past} = {S} keys" if past else f"{S} keys"
    if attn_mask is not None:
        shapes = [(T, S), (B * H, T, S), (B, H, T, S)]
        if tuple(attn_mask.shape) not in shapes:
            raise ValueError(
                f"attention mask has shape {tuple(attn_mask.shape)}; for {T} queries and {expected} it must be "
                f"{shapes[0]} or {shapes[1]}"
            )
        if attn_mask.dim() == 3:
            attn_mask = attn_mask.view(B, H, T, S)
    if key_padding_mask is not None:
        if tuple(key_padding_mask.shape) != (B, S):
            raise ValueError(
                f"key padding mask has shape {tuple(key_padding_mask.shape)}; for {B} rows and {expected} it must be "
                f"{(B, S)}"
            )
        key_padding_mask = key_padding_mask[:, None, None, :]
    if is_causal and attn_mask is None:
        attn_mask = causal_mask(T, S, key_padding_mask.device)  # type: ignore[union-attr]
    masks = [mask for mask in (attn_mask, key_padding_mask) if mask is not None]
    return _merged(masks, dtype), False


def _merged(masks: list[Tensor], dtype: torch.dtype) -> Tensor:
    if all(mask.dtype == torch.bool for mask in masks):
        hidden = masks[0] if len(masks) == 1 else masks[0] | masks[1]
        return ~hidden.contiguous()
    added = [_additive(mask, dtype) for mask in masks]
    # Kernels refuse a mask whose last dimension is not contiguous, with a message about a "bias".
    return (added[0] if len(added) == 1 else added[0] + added[1]).contiguous()


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))
    if not mask.is_floating_point():
        raise ValueError(f"masks are bool (True = hidden) or floating point (added), not {mask.dtype}")
    return mask.to(dtype)


def view_mask(
    past: int | Tensor,
    T: int,
    visible: int,
    device: torch.device,
    window: int | None = None,
    keys: Tensor | None = None,
    chunk: int = 0,
) -> tuple[Tensor | None, bool]:
    """`(mask, is_causal)` for T new tokens on rows of `past` tokens, one number or `(rows,)`, that see `visible` slots.

    Token `i` of a row stands at position `past + i` and sees the keys at or before it, the last `window` of them at
    most, and with a `chunk` those of its own chunk of so many positions alone. `keys` `(visible,)` or `(rows, visible)`
    are the positions of the slots, -1 for an empty one; by default slot `j` stands at `j`. The mask is None,
    `(T, visible)` or `(rows, 1, T, visible)`, True = visible.
    """
    if isinstance(past, int) and keys is None:
        hides_none = (window is None or window >= visible) and (not chunk or chunk >= visible)
        if visible == past + T and hides_none and (T == 1 or past == 0):
            return None, T > 1
    places = torch.arange(visible, device=device) if keys is None else keys
    if isinstance(past, int):
        queries = torch.arange(past, past + T, device=device).unsqueeze(1)  # (T, 1)
    else:
        queries = past.to(device)[:, None, None] + torch.arange(T, device=device).unsqueeze(1)  # (rows, T, 1)
    if places.dim() == 2:
        places = places.unsqueeze(1)  # (rows, 1, visible)
    seen = places <= queries
    if window is not None:
        seen &= places > queries - window
    if chunk:
        seen &= places >= queries // chunk * chunk
    if keys is not None:
        seen &= places >= 0
    return (seen if seen.dim() == 2 else seen.unsqueeze(1)), False


def restrict(mask: Tensor, visible: Tensor | None, is_causal: bool, T: int, keys: Tensor | None = None) -> Tensor:
    """A caller's `mask` `(…, T or 1, S)` over positions (True = visible, or floats to add), narrowed to a step's own.

    T is told, not read off `mask`: one made of key padding alone has a single row for all T queries. `keys` are the
    positions of the slots where they aren't 0, 1, 2, …; see `view_mask`.
    """
    if visible is None:
        if not is_causal:
            return mask
        visible = ~causal_mask(T, mask.shape[-1], mask.device)
    if keys is not None:
        mask = _at(mask, keys.clamp(0, mask.shape[-1] - 1))
    elif visible.shape[-1] > mask.shape[-1]:  # slots beyond the last token, which `visible` hides
        mask = F.pad(mask, (0, visible.shape[-1] - mask.shape[-1]))
    return mask & visible if mask.dtype == torch.bool else mask.masked_fill(~visible, float("-inf"))


def _at(mask: Tensor, keys: Tensor) -> Tensor:
    if keys.dim() == 1:
        return mask[..., keys]
    mask = mask if mask.dim() == 4 else mask[None, None]
    mask = mask.expand(keys.shape[0], -1, -1, -1)
    return mask.gather(3, keys[:, None, None, :].expand(-1, mask.shape[1], mask.shape[2], -1))


def causal_mask(T: int, S: int, device: torch.device | None = None) -> Tensor:
    """`(T, S)`, True = hidden, bottom-right aligned: query `i` of T sees the keys up to `S - T + i`."""
    return torch.arange(S, device=device) > torch.arange(S - T, S, device=device).unsqueeze(1)


def padding_visible(key_padding_mask: Tensor | None, batch_size: int, length: int) -> Tensor | None:
    """`(B, S)` True = a real token, from PyTorch's True = padding; None when nothing is padded.

    Raises `ValueError` for another shape or a mask that isn't boolean.
    """
    if key_padding_mask is None:
        return None
    if tuple(key_padding_mask.shape) != (batch_size, length):
        raise ValueError(
            f"memory_key_padding_mask has shape {tuple(key_padding_mask.shape)}; "
            f"the memory needs {(batch_size, length)}"
        )
    if key_padding_mask.is_floating_point():
        if not bool(((key_padding_mask == 0) | key_padding_mask.isneginf()).all()):
            raise ValueError("a float memory_key_padding_mask may hold only 0 and -inf; or pass a bool one")
        key_padding_mask = key_padding_mask != 0
    elif key_padding_mask.dtype != torch.bool:
        raise ValueError(f"memory_key_padding_mask must be bool (True = padding), not {key_padding_mask.dtype}")
    return None if not bool(key_padding_mask.any()) else ~key_padding_mask.contiguous()
