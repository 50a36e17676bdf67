"""The attention kernels, on every instruction set of the machine: against the formula in fp64, and themselves."""

import pytest
import torch
from torch import Tensor

from tests.translator.engine.native import attend_cached, attend_dense, attention, each_isa
from translator.engine.native import library

NAN = float("nan")
# (rows, T, H, H_kv, S, D_head): heads of every width from one number to many vectors, one key to many.
SHAPES = [
    (1, 1, 1, 1, 1, 1),
    (3, 1, 6, 6, 17, 64),
    (2, 5, 4, 2, 33, 32),
    (4, 2, 3, 1, 7, 5),
    (2, 3, 8, 8, 40, 16),
    (1, 4, 2, 2, 130, 96),
    (2, 1, 5, 5, 65, 23),
    (1, 2, 2, 1, 64, 200),
]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found.double(), wanted, rtol=2e-5, atol=2e-6)


def off_grid(x: Tensor) -> Tensor:
    """The same numbers with gaps between the rows and beginning at an odd address."""
    *outer, last = x.shape
    wide = torch.full((x.numel() // last * (last + 3) + 1,), NAN)
    view = wide[1:].view(*outer, last + 3)[..., :last]
    view.copy_(x)
    return view


@each_isa
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("causal", [False, True])
def test_given_keys(isa: str, shape: tuple[int, ...], causal: bool) -> None:
    rows, steps, heads, kv_heads, keys, width = shape
    q, k, v = (
        drawn(rows, steps, heads, width),
        drawn(rows, kv_heads, keys, width),
        drawn(rows, kv_heads, keys, width, seed=1),
    )
    visible = drawn(rows, keys, seed=2) > -0.5
    shown = visible.unsqueeze(1).expand(rows, steps, keys)
    if causal:
        shown = shown & torch.ones(steps, keys, dtype=torch.bool).tril(keys - steps)
    q = q.reshape(rows, steps, -1)
    queries = off_grid(q).unflatten(-1, (heads, width))
    found = attend_dense(library.load(isa), queries, off_grid(k), off_grid(v), visible, causal=causal)
    close(found, attention(queries, k, v, shown))


@each_isa
def test_what_is_hidden_may_hold_anything(isa: str) -> None:
    q, k, v = drawn(3, 2, 4, 24), drawn(3, 4, 21, 24), drawn(3, 4, 21, 24, seed=1)
    visible = torch.ones(3, 21, dtype=torch.bool)
    visible[0, 15:] = visible[1, ::3] = visible[2] = False
    hidden = ~visible[:, None, :, None]
    wanted = attention(q, k, v, visible.unsqueeze(1).expand(3, 2, 21))
    for anything in (NAN, float("inf"), -float("inf"), 3e38):
        dirty = k.masked_fill(hidden, anything), v.masked_fill(hidden, anything)
        found = attend_dense(library.load(isa), q, *dirty, visible)
        close(found, wanted)
        assert torch.equal(found[2], torch.zeros(2, 4, 24))


@each_isa
def test_padding_changes_no_bit(isa: str) -> None:
    kernels = library.load(isa)
    q, k, v = drawn(1, 3, 2, 40), drawn(1, 2, 19, 40), drawn(1, 2, 19, 40, seed=1)
    alone = attend_dense(kernels, q, k, v)
    for more in (1, 4, 29):
        filling = torch.full((1, 2, more, 40), NAN)
        visible = torch.arange(19 + more).unsqueeze(0) < 19
        padded = attend_dense(kernels, q, torch.cat([k, filling], 2), torch.cat([v, filling], 2), visible)
        assert torch.equal(alone, padded)


@each_isa
def test_neither_batch_mates_nor_threads_change_a_bit(isa: str) -> None:
    kernels = library.load(isa)
    q, k, v = drawn(12, 2, 6, 24), drawn(4, 3, 35, 24), drawn(4, 3, 35, 24, seed=1)  # 3 beams a sentence
    k[1], v[1] = 1e30, NAN
    for causal in (False, True):
        together = attend_dense(kernels, q, k, v, causal=causal)
        for threads in (2, 3, 7):
            again = attend_dense(kernels, q, k, v, causal=causal, threads=threads)
            assert torch.equal(again.nan_to_num(7), together.nan_to_num(7))
        for row in (0, 2, 7, 11):
            sentence = slice(row // 3, row // 3 + 1)
            alone = attend_dense(kernels, q[row : row + 1], k[sentence], v[sentence], causal=causal)
            assert torch.equal(alone[0], together[row])


@each_isa
def test_numbers_that_are_none_and_huge_ones(isa: str) -> None:
    kernels = library.load(isa)
    q, k, v = drawn(1, 1, 1, 16), drawn(1, 1, 9, 16), drawn(1, 1, 9, 16, seed=1)
    largest = attend_dense(kernels, q * 1e4, k * 1e4, v)  # scores of about 1e8: the softmax is one key's
    close(largest, attention(q * 1e4, k * 1e4, v, torch.ones(1, 1, 9, dtype=torch.bool)))
    k[0, 0, 5, 3] = NAN
    assert attend_dense(kernels, q, k, v).isnan().all()
    k[0, 0, 5, 3], v[0, 0, 5, 3] = 0.0, NAN
    assert attend_dense(kernels, q, k, v).isnan().flatten().nonzero().flatten().tolist() == [3]


class Rows:
    """A cache and the plain account of what it should hold: per row, the keys and values it has been given."""

    def __init__(self, rows: int, kv_heads: int, slots: int, width: int) -> None:
        self.keys, self.values = (torch.full((rows, kv_heads, slots, width), NAN) for _ in range(2))
        self.lengths = torch.zeros(rows, dtype=torch.int32)
        self.seen = [[torch.zeros(kv_heads, 0, width)] * 2 for _ in range(rows)]

    def note(self, k: Tensor, v: Tensor) -> None:  # (rows, T, H_kv, D_head)
        for row, both in enumerate(self.seen):
            self.seen[row] = [
                torch.cat([old, new[row].transpose(0, 1)], 1) for old, new in zip(both, (k, v), strict=True)
            ]

    def wanted(self, q: Tensor) -> Tensor:
        steps, outputs = q.shape[1], []
        for row, (k, v) in enumerate(self.seen):
            total = k.shape[1]
            shown = torch.ones(1, steps, total, dtype=torch.bool).tril(total - steps)
            outputs.append(attention(q[row : row + 1], k.unsqueeze(0), v.unsqueeze(0), shown))
        return torch.cat(outputs)


@each_isa
@pytest.mark.parametrize("shape", SHAPES)
def test_steps_with_a_cache(isa: str, shape: tuple[int, ...]) -> None:
    rows, steps, heads, kv_heads, slots, width = shape
    kernels, cache, seed = library.load(isa), Rows(rows, kv_heads, slots + 3, width), 0
    for count in (1, steps, 1, steps):
        if int(cache.lengths.max()) + count > slots + 3:
            break
        seed += 3
        packed = drawn(rows, count, (heads + 2 * kv_heads) * width + 3, seed=seed)[
            ..., 3:
        ]  # as a product of three gives
        q, k, v = packed.split([heads * width, kv_heads * width, kv_heads * width], dim=-1)
        q, k, v = (
            q.unflatten(-1, (heads, width)),
            k.unflatten(-1, (kv_heads, width)),
            v.unflatten(-1, (kv_heads, width)),
        )
        cache.note(k, v)
        found = attend_cached(kernels, q, k, v, cache.keys, cache.values, cache.lengths, threads=seed % 2 + 1)
        close(found, cache.wanted(q))
        cache.lengths += count
    assert cache.keys[:, :, int(cache.lengths.max()) :].isnan().all()  # nothing else was written


@each_isa
def test_rows_of_unequal_length(isa: str) -> None:
    kernels, lengths = library.load(isa), torch.tensor([0, 17, 4])
    keys, values = drawn(3, 2, 30, 24), drawn(3, 2, 30, 24, seed=1)
    q, k, v = drawn(3, 2, 4, 24, seed=2), drawn(3, 2, 2, 24, seed=3), drawn(3, 2, 2, 24, seed=4)
    for row, length in enumerate(lengths.tolist()):
        keys[row, :, length:], values[row, :, length:] = NAN, NAN
    found = attend_cached(kernels, q, k, v, keys, values, lengths)
    for row, length in enumerate(lengths.tolist()):
        shown = torch.ones(1, 2, length + 2, dtype=torch.bool).tril(length)
        one = slice(row, row + 1)
        close(found[one], attention(q[one], keys[one, :, : length + 2], values[one, :, : length + 2], shown))
        assert torch.equal(keys[row, :, length : length + 2], k[row].transpose(0, 1))


@each_isa
@pytest.mark.parametrize("width", [64, 24, 5])
def test_a_causal_pass_gives_the_bits_of_steps(isa: str, width: int) -> None:
    kernels, total = library.load(isa), 45
    q, k, v = (drawn(2, total, heads, width, seed=heads) for heads in (4, 2, 2))
    whole = attend_dense(kernels, q, k.transpose(1, 2), v.transpose(1, 2), causal=True)
    keys, values = torch.full((2, 2, total, width), NAN), torch.full((2, 2, total, width), NAN)
    for count in (1, 3):  # one token at a time, then three
        for begin in range(0, total, count):
            part = slice(begin, begin + count)
            lengths = torch.full((2,), begin)
            now = (x[:, part].contiguous() for x in (q, k, v))
            step = attend_cached(kernels, *now, keys, values, lengths)
            assert torch.equal(step, whole[:, part])


@each_isa
@pytest.mark.parametrize("threads", [1, 2])
def test_beams_by_ancestry_are_beams_that_were_copied(isa: str, threads: int) -> None:
    kernels, rows, slots = library.load(isa), 6, 40  # two sentences of three beams
    still = [torch.full((rows, 2, slots, 24), NAN) for _ in range(2)]
    copied = [torch.full((rows, 2, slots, 24), NAN) for _ in range(2)]
    origin, home = torch.zeros(rows, slots, dtype=torch.int64), torch.tensor([2, 0, 1, 4, 5, 3])
    draw = torch.Generator().manual_seed(7)
    for length in range(slots):
        parents = torch.randint(3, (rows,), generator=draw) + torch.arange(rows) // 3 * 3
        origin, copied = origin[parents], [x[parents] for x in copied]
        origin[:, length:] = home.unsqueeze(1)
        q, k, v = (drawn(rows, 1, heads, 24, seed=length * 7) for heads in (4, 2, 2))
        lengths = torch.full((rows,), length)
        ancestral = attend_cached(kernels, q, k, v, *still, lengths, origin, home, threads=threads)
        assert torch.equal(ancestral, attend_cached(kernels, q, k, v, *copied, lengths))
