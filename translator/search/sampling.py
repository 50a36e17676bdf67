"""Sampling: the token whose log-probability, with noise of its own added, is the highest (Gumbel-max)."""

import hashlib
from dataclasses import dataclass
from functools import cached_property, lru_cache

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

NUMBERS_AT_ONCE = 1 << 15
"""Perturbed numbers that a CPU works out at once: they stay in its cache through all operations."""


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


@dataclass(eq=False)
class Draws:
    """What each row draws by: `seeds` and `steps` `(rows,)` int64, the settings `(rows, 1)`, `top_k` 0 for all.

    All but the steps stay while the sentences do, and so does what follows from it.
    """

    seeds: Tensor
    steps: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor

    @classmethod
    def of(cls, grid: Grid, device: torch.device) -> "Draws":
        """Those of a grid's rows."""
        draws = grid.once("draws", lambda: cls._of_members(grid, device))
        draws.steps = grid.lengths.repeat_interleave(grid.rows).to(device)
        return draws

    @classmethod
    def _of_members(cls, grid: Grid, device: torch.device) -> "Draws":
        rows = [(member, row) for member in grid.members for row in range(grid.rows)]
        seeds = [draw_seed(member.config.seed, member.key, row) for member, row in rows]
        configs = [member.config for member, _ in rows]
        return cls(
            torch.tensor(seeds, device=device),
            torch.empty(0),  # set at each step
            torch.tensor([[config.temperature] for config in configs], dtype=torch.float64, device=device),
            torch.tensor([[config.top_k] for config in configs], device=device),
            torch.tensor([[config.top_p] for config in configs], dtype=torch.float64, device=device),
        )

    @cached_property
    def truncated(self) -> Tensor:
        """`(rows,)`: those that draw from their likeliest tokens only."""
        return ((self.top_k > 0) | (self.top_p < 1)).squeeze(1)

    @cached_property
    def shares(self) -> tuple[bool, bool]:
        """Whether some rows are truncated, and whether all are."""
        return bool(self.truncated.any()), bool(self.truncated.all())

    @cached_property
    def open_ended(self) -> Tensor:
        """`(rows, 1)`: those whose nucleus may be of any size."""
        return (self.top_k == 0) & (self.top_p < 1)

    @cached_property
    def nuclei(self) -> tuple[bool, bool]:
        """Whether top-p leaves something out in some rows, and whether in open-ended ones."""
        return bool((self.top_p < 1).any()), bool(self.open_ended.any())

    @cached_property
    def most(self) -> Tensor:
        """`(rows, 1)`: ranked tokens that top-k leaves."""
        return torch.where(self.top_k > 0, self.top_k, torch.iinfo(torch.int64).max)

    @cached_property
    def first_width(self) -> int:
        """Ranked tokens to look at first."""
        return int(torch.where(self.top_k > 0, self.top_k, FIRST_WIDTH).max())


def drawn(scores: Scores, banned: Tensor | None, draws: Draws) -> Tensor:
    """Token ids `(rows,)`. A row without any token left takes any."""
    some, every = draws.shares
    likely = _best(*perturbed_likely(scores, banned, draws)) if some else None
    if every and likely is not None:
        return likely
    at_once = max(1, NUMBERS_AT_ONCE // scores.vocab_size) if draws.seeds.device.type == "cpu" else scores.rows
    parts = [slice(row, row + at_once) for row in range(0, scores.rows, at_once)]
    whole = torch.cat([_best(*perturbed_all(scores, banned, draws, rows)) for rows in parts])
    return whole if likely is None else torch.where(draws.truncated, likely, whole)


def perturbed_all(
    scores: Scores, banned: Tensor | None, draws: Draws, rows: slice = slice(None)
) -> tuple[Tensor, Tensor]:
    """Perturbed log-probabilities `(rows, V)` of some rows in nats, fp64, -inf where banned, and their tokens.

    Draws from temperature alone. The noise is a function of the seed, the sentence's key, the row of the sentence,
    the step and the token, computed in integers: the same in any batch and on any machine. So two machines, or two
    batches, whose sums round differently choose differently only where two perturbed log-probabilities, or the mass
    before a token and top-p, are nearly equal.
    """
    banned = None if banned is None else banned[rows]
    kept = _without(scores.logits()[rows] - scores.log_z[rows].unsqueeze(1), banned)  # (rows, V)
    tokens = torch.arange(scores.vocab_size, device=kept.device).unsqueeze(0)  # (1, V)
    noise = gumbel(draws.seeds[rows], draws.steps[rows], tokens)
    return kept.add_(noise.mul_(draws.temperature[rows])), tokens.expand_as(kept)


def perturbed_likely(scores: Scores, banned: Tensor | None, draws: Draws) -> tuple[Tensor, Tensor]:
    """As `perturbed_all`, `(rows, n)`, for temperature, then top-k, then top-p (Holtzman et al. 2020): -inf beyond.

    Of the ranked tokens, top-p takes the first whose mass reaches it, at least one; n grows until all rows are served.
    """
    V = scores.vocab_size
    some_nuclei, some_open = draws.nuclei
    whole = _whole_mass(scores, banned, draws) if some_open else None
    width, served = min(draws.first_width, V), False
    while True:
        values, tokens = scores.top(width, banned)  # (rows, n)
        n = values.shape[1]
        cut = torch.arange(n, device=values.device) >= draws.most  # (rows, n)
        if some_nuclei:
            before = _mass_before(values, cut, draws, whole)  # (rows, n)
            cut |= (before >= draws.top_p) & (draws.top_p < 1)
            served = n >= V or bool((~draws.open_ended | (before[:, -1:] >= draws.top_p)).all())
        if served or not some_nuclei:
            noise = gumbel(draws.seeds, draws.steps, tokens)
            return values.masked_fill(cut, NEVER).add_(noise.mul_(draws.temperature)), tokens
        width = min(8 * width, V)


def _whole_mass(scores: Scores, banned: Tensor | None, draws: Draws) -> Tensor:
    """`(rows, 1)`: the logarithm of all tokens' mass, each log-probability divided by the temperature."""
    mass = log_mass(_without(scores.logits() / draws.temperature, banned))
    return mass - scores.log_z.unsqueeze(1) / draws.temperature


def _mass_before(values: Tensor, beyond: Tensor, draws: Draws, whole: Tensor | None) -> Tensor:
    """`(rows, n)`: the share of mass of the tokens ranked before each; with top-k, a share of what that left."""
    scaled = (values / draws.temperature).masked_fill_(beyond, NEVER)
    mass = log_mass(scaled)
    if whole is not None:
        mass = torch.where(draws.open_ended, whole, mass)
    probs = scaled.sub_(mass).exp_().nan_to_num_(nan=1.0)  # NaN: a row without any token left
    return probs.cumsum(dim=1).sub_(probs)


def log_mass(values: Tensor) -> Tensor:
    """`(rows, 1)`: the logarithm of the sum of exponentials, added from first to last.

    PyTorch's own `logsumexp` adds in an order that hangs on the whole tensor's shape, so on the rows beside.
    """
    most = values.amax(dim=1, keepdim=True)
    return most + (values - most).exp_().cumsum(dim=1)[:, -1:].log()


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
    """Standard Gumbel noise `(rows, n)` in fp64 for `seeds` and `steps` `(rows,)` int64, `tokens` `(rows, n)`."""
    at_step = _mix(seeds + (steps + 1) * _GAMMA).unsqueeze(1)
    bits = _mix(at_step + (tokens + 1) * _GAMMA)
    uniform = _shifted(bits, 12).double().add_(0.5).mul_(2.0**-52)  # strictly between 0 and 1
    return uniform.log_().neg_().log_().neg_()


def _mix(bits: Tensor) -> Tensor:
    """In place."""
    bits.bitwise_xor_(_shifted(bits, 30)).mul_(_MIX_1)
    bits.bitwise_xor_(_shifted(bits, 27)).mul_(_MIX_2)
    return bits.bitwise_xor_(_shifted(bits, 31))


def _shifted(bits: Tensor, places: int) -> Tensor:
    """A logical shift to the right; int64's own keeps the sign."""
    return (bits >> places).bitwise_and_((1 << (64 - places)) - 1)


@lru_cache(maxsize=1 << 16)
def draw_seed(seed: int, key: tuple[int, ...], row: int) -> int:
    """What the noise of one row of the sentence called `key` hangs on, int64."""
    digest = hashlib.blake2b(repr((seed, tuple(key), row)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
