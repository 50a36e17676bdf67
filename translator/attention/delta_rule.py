"""The gated delta rule (Yang, Kautz & Hatamizadeh 2024, Gated Delta Networks): a memory that fades and is corrected.

A memory `S` `(D_k, D_v)` answers a key with a value. Each token lets it fade by `alpha`, asks it for the token's key,
and writes the share `beta` of what the answer lacks; then it is read with the token's query:

    S ← alpha S
    S ← S + k (beta (v - Sᵀ k))ᵀ
    o = Sᵀ q

Its size doesn't depend on how many tokens it has seen.
"""

import torch
from torch import Tensor

CHUNK = 64
"""Tokens worked on at once: products of `CHUNK` by `CHUNK` in the place of as many steps."""


def delta_rule(q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, beta: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    """`(o, S)`: what T tokens read, `(rows, H, T, D_v)`, and the memory after the last of them.

    q and k `(rows, H, T, D_k)`, k of length 1; v `(rows, H, T, D_v)`; `log_alpha`, at most 0, and `beta`, 0 to 1,
    `(rows, H, T)`; S `(rows, H, D_k, D_v)`.
    """
    outputs = []
    parts = (each.split(CHUNK, dim=2) for each in (q, k, v, log_alpha, beta))
    for q_part, k_part, v_part, fading, strength in zip(*parts, strict=True):
        read, S = _chunk(q_part, k_part, v_part, fading, strength, S)
        outputs.append(read)
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)), S


def _chunk(q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, beta: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens of a chunk at once.

    With `g_t` the product of the alphas up to t and `u_t = beta_t (v_t - (faded S before t)ᵀ k_t)` what t writes, the
    memory after t is `g_t S + Σ_{i ≤ t} g_t/g_i k_i u_iᵀ`. Put into `u_t`, that is a triangular system in all the u.
    """
    faded = log_alpha.cumsum(-1)  # (rows, H, C)
    T = q.shape[2]
    later = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
    since = (faded.unsqueeze(-1) - faded.unsqueeze(-2)).masked_fill(later, -torch.inf).exp()  # g_t / g_i for i <= t
    start, strength = faded.exp().unsqueeze(-1), beta.unsqueeze(-1)  # (rows, H, C, 1)
    wanted = strength * (v - start * (k @ S))
    if T > 1:
        earlier = (strength * since * (k @ k.transpose(-1, -2))).tril(-1)
        wanted = torch.linalg.solve_triangular(earlier, wanted, upper=False, unitriangular=True)
    read = start * (q @ S) + (since * (q @ k.transpose(-1, -2))) @ wanted
    kept = since[:, :, -1].unsqueeze(-1) * k  # g_C / g_i k_i
    return read, start[:, :, -1:] * S + kept.transpose(-1, -2) @ wanted
