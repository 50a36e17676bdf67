"""Sampling: the token whose log-probability, with noise of its own added, is the highest (Gumbel-max)."""

import hashlib

import torch
from torch import Tensor

from translator.config import DecodeConfig
from translator.search.base import NEVER, Sentences

FIRST_WIDTH = 64
"""Ranked tokens a row that a nucleus is first looked for in."""


class Sampler:
    """Draws from temperature, then top-k, then top-p (Holtzman et al. 2020) by perturbing what they leave.

    The noise is a function of the seed, the sentence's key, the row of the sentence, the step and the token, computed
    in integers: the same in any batch and on any machine. So two machines, or two batches, whose sums round differently
    choose differently only where two perturbed log-probabilities, or the mass before a token and top-p, are nearly
    equal.
    """

    def __init__(self, sentences: Sentences, config: DecodeConfig, beams: int) -> None:
        self.config = config
        keys = sentences.keys or [(index,) for index in range(len(sentences.max_lengths))]
        seeds = [[_seed(config.seed, key, beam) for beam in range(beams)] for key in keys]
        self.seeds = torch.tensor(seeds, dtype=torch.int64).view(len(keys), beams)

    def __call__(self, log_probs: Tensor, active: list[int], t: int) -> Tensor:
        """Token ids `(rows,)` at step `t` for `log_probs` `(rows, V)`, -inf where forbidden.

        `active` are the original indices of the sentences in the grid. A row without any token left takes any.
        """
        perturbed, tokens = self.perturbed(log_probs, active, t)
        return tokens.gather(1, perturbed.argmax(dim=1, keepdim=True)).squeeze(1)

    def perturbed(self, log_probs: Tensor, active: list[int], t: int) -> tuple[Tensor, Tensor]:
        """`(rows, n)` perturbed log-probabilities in nats, in fp64, -inf where left out, and the tokens they are of."""
        kept, tokens = self._kept(log_probs)
        noise = gumbel(self.seeds[active].flatten().to(tokens.device), t, tokens)
        return kept + self.config.temperature * noise, tokens

    def _kept(self, log_probs: Tensor) -> tuple[Tensor, Tensor]:
        V = log_probs.shape[1]
        most = min(self.config.top_k or V, V)
        if self.config.top_p < 1:
            return self._nucleus(log_probs, most)
        if most < V:
            values, tokens = log_probs.topk(most, dim=1)
            return values, tokens
        return log_probs, torch.arange(V, device=log_probs.device).expand_as(log_probs)

    def _nucleus(self, log_probs: Tensor, most: int) -> tuple[Tensor, Tensor]:
        """The first tokens of the `most` likely ones whose mass reaches top-p; at least one."""
        scaled = log_probs / self.config.temperature
        width = most if self.config.top_k else min(FIRST_WIDTH, most)
        whole = scaled.logsumexp(dim=1, keepdim=True)
        while True:
            values, tokens = scaled.topk(width, dim=1)
            if self.config.top_k:  # then top-p is a share of what top-k left
                whole = values.logsumexp(dim=1, keepdim=True)
            probs = (values - whole).exp().nan_to_num(nan=1.0)  # NaN: a row without any token left
            before = probs.cumsum(dim=1) - probs
            if width == most or bool((before[:, -1] >= self.config.top_p).all()):
                return log_probs.gather(1, tokens).masked_fill(before >= self.config.top_p, NEVER), tokens
            width = min(8 * width, most)


# SplitMix64 (Steele, Lea, Flood 2014): a counter times an odd constant, mixed. Products wrap, as they do in int64.
_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64


def gumbel(seeds: Tensor, t: int, tokens: Tensor) -> Tensor:
    """Standard Gumbel noise `(rows, n)` in fp64 for `seeds` `(rows,)` int64, step `t` and `tokens` `(rows, n)`."""
    at_step = _mix(seeds + torch.full_like(seeds, t + 1) * _GAMMA).unsqueeze(1)
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


def _seed(seed: int, key: tuple[int, ...], beam: int) -> int:
    digest = hashlib.blake2b(repr((seed, tuple(key), beam)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
