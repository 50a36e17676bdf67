"""Beam search over a fixed grid of sentences by beams."""

from torch import Tensor

from translator.config import DecodeConfig
from translator.engine.base import Scores
from translator.search.base import NEVER, normalised, ranked
from translator.search.grid import Grid, Member
from translator.search.policy import Choice, Policy, on_host, register
from translator.search.rules import candidates


@register
class Beam(Policy):
    """The best `config.n_best` hypotheses of each sentence, best first.

    At each step the best continuations of a sentence are ranked: an end token among the first K completes a
    hypothesis, the best K others go on. A complete hypothesis is out of the beam and can't be overwritten. Hypotheses
    cut at the maximum length rank below complete ones.
    """

    name = "beam"
    alike = True

    @classmethod
    def rows(cls, config: DecodeConfig) -> int:
        """`beam_size`."""
        return config.beam_size

    def choose(self, scores: Scores, grid: Grid, banned: Tensor | None, forced: Tensor | None) -> Choice:
        """See `Policy.choose`."""
        B, K = grid.shape
        # K + 1 of each row are enough for K that go on, whichever rows these come from: a row has one end token.
        values, ids = candidates(scores, K + 1, banned, forced)  # (B * K, m), m = K + 1 or V
        m = values.shape[1]
        so_far = grid.totals.to(values.device).unsqueeze(2)  # (B, K, 1)
        totals = (values.view(B, K, m) + so_far).view(B, K * m)
        best, places = totals.topk(min(2 * K, K * m), dim=1)  # (B, 2K)
        tokens = ids.reshape(B, K * m).gather(1, places)  # (B, 2K)
        tokens, best, places = on_host(tokens, best, places)
        parents = places // m  # (B, 2K)
        ends = tokens == grid.end_ids.unsqueeze(1)  # (B, 2K)
        complete = (ends & (best > NEVER))[:, :K]
        ended = [
            (slot, int(parents[slot, rank]), float(best[slot, rank])) for slot, rank in complete.nonzero().tolist()
        ]
        going = ends.int().argsort(dim=1, stable=True)[:, :K]  # (B, K): the others in their order, then ends
        totals = best.masked_fill(ends, NEVER).gather(1, going)  # (B, K)
        return Choice(tokens.gather(1, going), totals, totals > NEVER, ended, parents.gather(1, going))

    def is_done(self, member: Member, best_live: float) -> bool:
        """See `Policy.is_done`; the two rules are `DecodeConfig.early_stopping`'s."""
        config, found = member.config, member.found
        if config.early_stopping:
            return len(found) >= config.beam_size
        if len(found) < config.n_best:
            return False
        # Log-probabilities only fall, so a live hypothesis scores at best as if it reached the longest length free.
        attainable = normalised(best_live, member.sentence.limit, config.length_penalty)
        return attainable <= ranked(found)[config.n_best - 1].score
