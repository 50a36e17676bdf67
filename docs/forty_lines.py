"""Attention, a cache and a layer in about forty lines: a prefill and single steps give the same numbers, to the bit.

"The same kernel, therefore equal" falls short: libraries choose the order of a sum by the shape of the call, and a
prefill of S rows and a step of one are two shapes. `plain` below is one kernel in one dtype, and the two differ at some
lengths by a few 1e-7. So the order is fixed here: rows come in blocks of B, each at its own place in one, and keys are
summed block by block.
"""

import torch
import torch.nn.functional as F

B, L, H, H_KV, D = 16, 1, 4, 2, 64  # rows in a block; layers, query heads, key heads, width
D_HEAD = D // H
ANGLES = torch.arange(512).unsqueeze(1) * 10_000 ** (-torch.arange(0, D_HEAD, 2) / D_HEAD)  # (positions, D_head / 2)
COS, SIN = ANGLES.cos().repeat(1, 2), ANGLES.sin().repeat(1, 2)


class Cache:
    def __init__(self):
        self.k = self.v = torch.zeros(H_KV, 0, D_HEAD)

    def update(self, k, v):  # what it returns is everything so far, the new ones included
        self.k, self.v = torch.cat([self.k, k], dim=-2), torch.cat([self.v, v], dim=-2)
        return self.k, self.v


def by_block(f, x, at):  # row i of x is position at + i: always in the same row of a block of the same shape
    padded = F.pad(x, (0, 0, at % B, -(at + x.shape[-2]) % B))
    done = [f(block.contiguous(), index) for index, block in enumerate(padded.split(B, dim=-2), at // B)]
    return torch.cat(done, dim=-2).narrow(-2, at % B, x.shape[-2])


def attend(q, k, v, at):  # (H, T, D_head) on (H_kv, S, D_head): heads are repeated here, behind the cache
    k, v = (F.pad(part.repeat_interleave(H // H_KV, 0), (0, 0, 0, -part.shape[-2] % B)) for part in (k, v))
    keys, values = ([block.contiguous() for block in part.split(B, dim=-2)] for part in (k, v))

    def rows(q, index):
        future = torch.full((B, B), -torch.inf).triu(1)  # only in the block on the diagonal
        scores = [q @ key.mT * D_HEAD**-0.5 + (future if j == index else 0) for j, key in enumerate(keys[: index + 1])]
        top = torch.stack(scores).amax(dim=(0, -1)).unsqueeze(-1)  # a maximum has no order
        weights = [(score - top).exp() for score in scores]
        mixed = sum(p @ value for p, value in zip(weights, values, strict=False))  # block after block
        return mixed / sum(p.sum(-1, keepdim=True) for p in weights)

    return by_block(rows, q, at)


def layer(x, cache, weights, attention=attend, by_block=by_block):  # (T, D): the next T tokens, as many as there are
    at = cache.k.shape[-2]  # positions come from the cache
    qkv = by_block(lambda rows, _: F.rms_norm(rows, (D,)) @ weights["qkv"], x, at)
    q, k, v = qkv.unflatten(-1, (-1, D_HEAD)).transpose(0, 1).split([H, H_KV, H_KV])
    cos, sin = COS[at : at + len(x)], SIN[at : at + len(x)]
    q, k = (part * cos + torch.cat([-part[..., D_HEAD // 2 :], part[..., : D_HEAD // 2]], -1) * sin for part in (q, k))
    k, v = cache.update(k, v)  # the one line that knows of caching; these keys are turned, and never again
    mixed = attention(q, k, v, at).transpose(0, 1).flatten(1)
    return x + by_block(lambda rows, _: rows @ weights["out"], mixed, at)


def plain(q, k, v, at):  # eager attention as it is usually written
    k, v = (part.repeat_interleave(H // H_KV, 0) for part in (k, v))
    future = torch.full((q.shape[-2], k.shape[-2]), -torch.inf).triu(1 + at)
    return torch.softmax(q @ k.mT * D_HEAD**-0.5 + future, dim=-1) @ v


def last_rows(x, weights, **how):  # the last row of one pass over x, and that of the last of len(x) steps
    whole, steps = Cache(), Cache()
    prefill = layer(x, whole, weights, **how)[-1]
    return prefill, [layer(row, steps, weights, **how) for row in x.split(1)][-1][0], steps


def main():
    torch.manual_seed(0)
    weights = {"qkv": torch.randn(D, D + 2 * H_KV * D_HEAD) * D**-0.5, "out": torch.randn(D, D) * D**-0.5}
    usual = {"attention": plain, "by_block": lambda f, x, at: f(x, 0)}
    differs = 0.0
    for S in (1, 2, 7, 16, 17, 33, 64, 100):
        x = torch.randn(S, D)
        prefill, step, cache = last_rows(x, weights)
        assert torch.equal(prefill, step), S
        other = last_rows(x, weights, **usual)
        assert torch.allclose(prefill, other[0], atol=1e-5), S
        differs = max(differs, float((other[0] - other[1]).abs().max()))
    held = cache.k.nbytes + cache.v.nbytes
    assert held == 2 * L * H_KV * D_HEAD * 4 * S  # fp32: 4 bytes a number
    print(f"equal to the bit; written as usual it differs by up to {differs:.1e}; {held // S} bytes a token")
    print(f"32 layers of 32 heads of 128, two bytes a number: {2 * 32 * 32 * 128 * 2:,} bytes a token")


if __name__ == "__main__":
    main()
