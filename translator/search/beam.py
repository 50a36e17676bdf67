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
        K = grid.rows
        # K + 1 of each row are enough for K that go on, whichever rows these come from: a row has one end token.
        values, ids = on_host(*candidates(scores, K + 1, banned, forced))
        choice = Choice([], [], [], [], [])
        for slot, (member, so_far) in enumerate(zip(grid.members, grid.totals, strict=True)):
            first = slot * K
            found = [
                (so_far[row] + value, row, token)
                for row in range(K)
                if so_far[row] > NEVER
                for value, token in zip(values[first + row], ids[first + row], strict=True)
            ]
            found.sort(key=_total, reverse=True)  # stable: among equals the earlier row, then its better token
            self._take(choice, slot, found, K, member.sentence.end_id)
        return choice

    @staticmethod
    def _take(choice: Choice, slot: int, found: list[tuple[float, int, int]], K: int, end_id: int) -> None:
        """Adds what becomes of a sentence's rows, of its continuations (total, row, token) from the best down."""
        going: list[tuple[float, int, int]] = []
        for rank, continuation in enumerate(found[: 2 * K]):
            total, row, token = continuation
            if not total > NEVER:
                break
            if token != end_id:
                going.append(continuation)
                if len(going) == K:
                    break
            elif rank < K:
                choice.ended.append((slot, row, total))
        live = len(going)
        going += [(NEVER, 0, end_id)] * (K - live)
        choice.tokens.append([token for _, _, token in going])
        choice.totals.append([total for total, _, _ in going])
        choice.live.append([row < live for row in range(K)])
        assert choice.parents is not None
        choice.parents.append([row for _, row, _ in going])

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


def _total(continuation: tuple[float, int, int]) -> float:
    return continuation[0]
