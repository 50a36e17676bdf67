"""Exact mode: results that are the same to the bit whatever is decoded beside them, in whatever way.

The packed engine keeps that promise by the order in which its kernels sum, and so always: `check_exact` refuses every
other engine, and looks once whether this machine keeps it, at a model's own sizes, before anyone relies on it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from translator.attention import CachedMultiheadAttention
from translator.engine.base import Engine
from translator.engine.ensemble import EnsembleEngine
from translator.engine.native.library import GELU, Kernels, available, missing
from translator.engine.native.operations import Native, NativeAttention, product
from translator.engine.native.weights import PackedProduct
from translator.engine.packed import PackedEngine
from translator.engine.scores import NativeScores
from translator.errors import UserError
from translator.search.sampling import gumbel, log_mass

ROWS = 96
"""Rows of the largest product that is tried: several times as many as a kernel takes at once."""

KEYS = 150
"""Keys of the longest attention that is tried."""

Work = Callable[[Native, slice], Sequence[Tensor]]
"""Computes some rows of a fixed input: the first dimension of what it gives are these rows."""


def check_exact(engine: Engine) -> None:
    """Raises `UserError` unless `engine` gives the same bits in any company, here and now.

    Only packed engines on native kernels do, and ensembles of them. Kernels and the functions of PyTorch that stand
    between them are tried at the sizes of each model, with one row and many, on 1 thread … as many as there are.
    """
    for member in engine.engines if isinstance(engine, EnsembleEngine) else (engine,):
        if not isinstance(member, PackedEngine):
            raise UserError(f"exact mode{_refusal(member)}")
        if any(type(layer.self_attn) is not CachedMultiheadAttention for layer in member.model.decoder.stack):
            other = next(name for name in member.model.config.structures if name != "multihead")
            raise UserError(f"exact mode: nothing is known of attention {other!r}; multihead attention is exact")
        found = first_difference(member)
        if found is not None:
            raise UserError(f"exact mode: this machine doesn't keep the promise: {found}")


def first_difference(engine: PackedEngine) -> str | None:
    """In which part of the engine's work a row's bits hang on the rows beside it or on the threads; None for none."""
    native = engine.operations.native
    counts = thread_counts(native.threads)
    for name, work, rows in _works(engine):
        for threads, count in _deviations(work, native.library, counts, rows):
            return f"{name}, {count} rows on {threads} threads differ from each row alone"
    return None if _steps_are_a_pass(engine, counts) else "attention, steps with a cache differ from a whole pass"


def thread_counts(most: int) -> list[int]:
    """At most five numbers of threads from 1 to `most`."""
    return sorted({1, 2, 3, (most + 1) // 2, most} & {*range(1, most + 1)})


def _refusal(engine: Engine) -> str:
    if not available():
        return f" needs the native kernels, and there are none: {missing()}"
    name = type(engine).__name__
    return f": {name} sums a row in another order beside other rows; engine packed, on a CPU, never does"


def _deviations(work: Work, library: Kernels, counts: Iterable[int], rows: int) -> Iterator[tuple[int, int]]:
    """(threads, rows) with which a row of `work` isn't what it is alone."""
    one = Native(library, 1)
    alone = [torch.cat(parts) for parts in zip(*(work(one, slice(row, row + 1)) for row in range(rows)), strict=True)]
    for threads in counts:
        # Each kernel on one thread; what several threads share differs by a few sizes only.
        several = (*range(1, 17), 29, 65) if threads == 1 else (1, 8)
        for count in sorted({*several, rows} & {*range(1, rows + 1)}):
            some = slice(rows - count, rows)
            found = work(Native(library, threads), some)
            if not all(torch.equal(mine, whole[some]) for mine, whole in zip(found, alone, strict=True)):
                yield threads, count


def _works(engine: PackedEngine) -> Iterator[tuple[str, Work, int]]:
    """What is tried: a name, the work and the rows of its input."""
    generator = torch.Generator().manual_seed(1)
    sizes: dict[tuple[int, int, int], PackedProduct] = {}
    for made in engine.operations.weights.products.values():
        sizes.setdefault((made.N, made.K, made.type), made)
    for (N, K, _), made in sizes.items():
        # A few huge rows tell as much as many, and take less than a second.
        rows = max(16, min(ROWS, ROWS * (1 << 22) // (N * K)))
        yield f"the product {N} by {K} in {engine.compute_type}", _product_work(made, rows, generator), rows
    config = engine.model.config
    shape = (12, config.nhead, KEYS, config.d_model // config.nhead)
    yield f"attention of {config.nhead} heads", _padded_attention(shape, generator), shape[0]
    logits = torch.randn(24, config.vocab_size, generator=generator).mul_(4)
    yield f"scores of {config.vocab_size} tokens", _scores_work(logits), len(logits)
    yield f"noise of {config.vocab_size} tokens", _noise_work(config.vocab_size), 12


def _product_work(made: PackedProduct, rows: int, generator: torch.Generator) -> Work:
    """With everything that a product may have: a norm before it, an activation and a residual behind."""
    x = torch.randn(rows, 1, made.K, generator=generator)
    residual = torch.randn(rows, 1, made.N, generator=generator)
    norm = nn.LayerNorm(made.K)
    return lambda native, some: (product(native, made, x[some], norm, GELU, residual[some]),)


def _padded_attention(shape: tuple[int, int, int, int], generator: torch.Generator) -> Work:
    """Sources of unequal length: alone without padding, together with it."""
    q, k, v = (torch.randn(shape, generator=generator) for _ in range(3))
    lengths = torch.arange(len(q)) * 53 % KEYS + 1

    def work(native: Native, some: slice) -> Sequence[Tensor]:
        longest = int(lengths[some].max())
        visible = torch.arange(longest) < lengths[some].unsqueeze(1)
        mask = None if bool(visible.all()) else visible[:, None, None]
        found = NativeAttention(native)(q[some, :, :1], k[some, :, :longest], v[some, :, :longest], mask)
        return (found,)

    return work


def _scores_work(logits: Tensor) -> Work:
    def work(native: Native, some: slice) -> Sequence[Tensor]:
        scores = NativeScores(native.library, logits[some], native.threads)
        return (scores.log_z, *scores.top(1), *scores.top(9))

    return work


def _noise_work(vocab_size: int) -> Work:
    """What PyTorch computes of a search: a number's place in a tensor may not matter to it."""
    tokens = torch.arange(vocab_size).unsqueeze(0)

    def work(native: Native, some: slice) -> Sequence[Tensor]:
        seeds = torch.arange(some.start, some.stop) * 7919
        noise = gumbel(seeds, seeds % 5, tokens)
        return noise, log_mass(noise)

    return work


def _steps_are_a_pass(engine: PackedEngine, counts: Iterable[int]) -> bool:
    """Whether tokens that come one by one, or a few at once, see of a cache what they see in one causal pass."""
    config, library = engine.model.config, engine.operations.native.library
    shape = (2, config.nhead, KEYS, config.d_model // config.nhead)
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(shape, generator=generator) for _ in range(3))
    whole = NativeAttention(Native(library, 1))(q, k, v, None, True)
    for threads in counts:
        native = Native(library, threads)
        if not torch.equal(NativeAttention(native)(q, k, v, None, True), whole):
            return False
        keys, values, held = torch.zeros(shape), torch.zeros(shape), 0
        for T in (1, 1, 2, 5, 1, 30, 1, 1, KEYS - 42):
            q_new, k_new, v_new = (part[:, :, held : held + T] for part in (q, k, v))
            lengths = torch.full((2,), held, dtype=torch.int32)
            found = NativeAttention(native.for_steps(2)).in_place(q_new, k_new, v_new, lengths, keys, values)
            if not torch.equal(found, whole[:, :, held : held + T]):
                return False
            held += T
    return True
