"""Sampling: the token whose log-probability, with noise of its own added, is the highest (Gumbel-max)."""

import hashlib
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from translator.config import DecodeConfig
from translator.engine.base import Scores
from translator.search.base import NEVER
from translator.search.grid import Grid
from translator.search.policy import Choice, Policy, each_by_itself, register
from translator.search.rules import NONE

FIRST_WIDTH = 64
"""Ranked tokens a row that a nucleus is first looked for in."""


@register
class Sampling(Policy):
    """`config.n_best` samples of each sentence, best first.

    The draws of a sentence depend on its settings, `config.seed` and its key alone, never on its batch mates.
    `log_prob` is the model's own, before temperature.
    """

    name = "sampling"

    @classmethod
    def rows(cls, config: DecodeConfig) -> int:
        """`n_best`."""
        return config.n_best

    def choose(self, scores: Scores, grid: Grid, banned: Tensor | None, forced: Tensor | None) -> Choice:
        """See `Policy.choose`."""
        tokens = drawn(scores, banned, Draws.of(grid, scores.log_z.device))  # (B * K,)
        if forced is not None:
            tokens = torch.where(forced == NONE, tokens, forced)
        return each_by_itself(grid, tokens, scores.at(tokens.unsqueeze(1))[:, 0])


@dataclass(frozen=True, slots=True)
class Draws:
    """What each row draws by: `seeds` and `steps` `(rows,)` int64, the settings `(rows, 1)`, `top_k` 0 for all."""

    seeds: Tensor
    steps: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor

    @classmethod
    def of(cls, grid: Grid, device: torch.device) -> "Draws":
        """Those of a grid's rows."""
        K = grid.shape[1]
        configs = [member.config for member in grid.members for _ in range(K)]
        seeds = [draw_seed(member.config.seed, member.key, row) for member in grid.members for row in range(K)]
        return cls(
            torch.tensor(seeds, device=device),
            grid.lengths.repeat_interleave(K).to(device),
            torch.tensor([[config.temperature] for config in configs], dtype=torch.float64, device=device),
            torch.tensor([[config.top_k] for config in configs], device=device),
            torch.tensor([[config.top_p] for config in configs], dtype=torch.float64, device=device),
        )

    @property
    def truncated(self) -> Tensor:
        """`(rows,)`: those that draw from their likeliest tokens only."""
        return ((self.top_k > 0) | (self.top_p < 1)).squeeze(1)


def drawn(scores: Scores, banned: Tensor | None, draws: Draws) -> Tensor:
    """Token ids `(rows,)`. A row without any token left takes any."""
    truncated = draws.truncated
    some, every = bool(truncated.any()), bool(truncated.all())
    likely = _best(*perturbed_likely(scores, banned, draws)) if some else None
    if every and likely is not None:
        return likely
    whole = _best(*perturbed_all(scores, banned, draws))
    return whole if likely is None else torch.where(truncated, likely, whole)


def perturbed_all(scores: Scores, banned: Tensor | None, draws: Draws) -> tuple[Tensor, Tensor]:
    """Perturbed log-probabilities `(rows, V)` in nats, in fp64, -inf where banned, and the tokens they are of.

    Draws from temperature alone. The noise is a function of the seed, the sentence's key, the row of the sentence, the
    step and the token, computed in integers: the same in any batch and on any machine. So two machines, or two batches,
    whose sums round differently choose differently only where two perturbed log-probabilities, or the mass before a
    token and top-p, are nearly equal.
    """
    kept = _without(scores.logits() - scores.log_z.unsqueeze(1), banned)  # (rows, V)
    tokens = torch.arange(scores.vocab_size, device=kept.device).expand_as(kept)
    return kept + draws.temperature * gumbel(draws.seeds, draws.steps, tokens), tokens


def perturbed_likely(scores: Scores, banned: Tensor | None, draws: Draws) -> tuple[Tensor, Tensor]:
    """As `perturbed_all`, `(rows, n)`, for temperature, then top-k, then top-p (Holtzman et al. 2020): -inf beyond.

    Of the ranked tokens, top-p takes the first whose mass reaches it, at least one; n grows until all rows are served.
    """
    V = scores.vocab_size
    most = torch.where(draws.top_k > 0, draws.top_k, V).clamp(max=V)  # (rows, 1)
    open_ended = (draws.top_k == 0) & (draws.top_p < 1)  # (rows, 1)
    counted = most.masked_fill(~(draws.top_k > 0), min(FIRST_WIDTH, V))
    width = int(counted.max())
    whole = None
    if bool(open_ended.any()):
        whole = _without(scores.logits().double() / draws.temperature, banned).logsumexp(
            dim=1, keepdim=True
        )  # (rows, 1)
        whole = whole - scores.log_z.unsqueeze(1) / draws.temperature
    while True:
        values, tokens = scores.top(width, banned)  # (rows, n)
        n = values.shape[1]
        beyond = torch.arange(n, device=values.device) >= most  # (rows, n)
        scaled = (values / draws.temperature).masked_fill(beyond, NEVER)
        mass = scaled.logsumexp(dim=1, keepdim=True)
        if whole is not None:  # with top-k, top-p is a share of what that left
            mass = torch.where(open_ended, whole, mass)
        probs = (scaled - mass).exp().nan_to_num(nan=1.0)  # NaN: a row without any token left
        before = probs.cumsum(dim=1) - probs  # (rows, n)
        cut = beyond | ((before >= draws.top_p) & (draws.top_p < 1))
        served = ~open_ended | (before[:, -1:] >= draws.top_p)
        if n >= V or bool(served.all()):
            kept = values.masked_fill(cut, NEVER)
            return kept + draws.temperature * gumbel(draws.seeds, draws.steps, tokens), tokens
        width = min(8 * width, V)


def _best(perturbed: Tensor, tokens: Tensor) -> Tensor:
    return tokens.gather(1, perturbed.argmax(dim=1, keepdim=True)).squeeze(1)


def _without(values: Tensor, banned: Tensor | None) -> Tensor:
    """Writes -inf into `values` `(rows, V)`, the caller's own, where `banned` `(rows, n)` says."""
    if banned is None:
        return values
    never = torch.where(banned == NONE, -NEVER, NEVER).to(values.dtype)  # fillers leave the id they point at alone
    return values.scatter_reduce_(1, banned.clamp(min=0), never, "amin")


# SplitMix64 (Steele, Lea, Flood 2014): a counter times an odd constant, mixed. Products wrap, as they do in int64.
_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64


def gumbel(seeds: Tensor, steps: Tensor, tokens: Tensor) -> Tensor:
    """Standard Gumbel noise `(rows, n)` in fp64 for `seeds` and `steps` `(rows,)` int64 and `tokens` `(rows, n)`."""
    at_step = _mix(seeds + (steps + 1) * _GAMMA).unsqueeze(1)
    bits = _mix(at_step + (tokens + 1) * _GAMMA)
    uniform = (_shifted(bits, 12).double() + 0.5) * 2.0**-52  # strictly between 0 and 1
    return -(-uniform.log()).log()


def _mix(bits: Tensor) -> Tensor:
    bits = (bits ^ _shifted(bits, 30)) * _MIX_1
    bits = (bits ^ _shifted(bits, 27)) * _MIX_2
    return bits ^ _shifted(bits, 31)


def _shifted(bits: Tensor, places: int) -> Tensor:
    """A logical shift to the right; int64's own keeps the sign."""
    return (bits >> places) & ((1 << (64 - places)) - 1)


@lru_cache(maxsize=1 << 16)
def draw_seed(seed: int, key: tuple[int, ...], row: int) -> int:
    """What the noise of one row of the sentence called `key` hangs on, int64."""
    digest = hashlib.blake2b(repr((seed, tuple(key), row)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
