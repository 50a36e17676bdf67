"""Beam search over a fixed grid of sentences by beams."""

import torch
from torch import Tensor

from translator.config import DecodeConfig
from translator.search.base import NEVER, Hypothesis, Rules, Sentences, Stepper, next_log_probs, normalised


@torch.no_grad()
def beam_search(stepper: Stepper, sentences: Sentences, config: DecodeConfig) -> list[list[Hypothesis]]:
    """The best `config.n_best` hypotheses of each sentence, best first.

    At each step the 2 K best continuations of a sentence are ranked: an end token among the first K completes a
    hypothesis, the best K others go on. A complete hypothesis is out of the beam and can't be overwritten. Sentences
    leave the grid when they are done. Hypotheses cut at the maximum length rank below complete ones.
    """
    beam = _Beam(stepper, sentences, config)
    while beam.rules.active:
        beam.step()
    return [_ranked(found)[: config.n_best] for found in beam.found]


def _ranked(found: list[Hypothesis]) -> list[Hypothesis]:
    return sorted(found, key=lambda hypothesis: (not hypothesis.finished, -hypothesis.score))


class _Beam:
    def __init__(self, stepper: Stepper, sentences: Sentences, config: DecodeConfig) -> None:
        B, K = stepper.batch_size, stepper.beams
        self.stepper = stepper
        self.config = config
        self.rules = Rules(sentences, config)
        self.found: list[list[Hypothesis]] = [[] for _ in range(B)]
        self.tokens = torch.full((B * K,), sentences.bos_id)
        self.history = torch.zeros(B, K, 0, dtype=torch.int64)
        # All beams of a sentence start equal: only the first may be continued, or they would stay equal.
        # In fp64, as greedy search adds up too: a long target's rounding would otherwise show in its score.
        self.scores = torch.full((B, K), NEVER, dtype=torch.float64)
        self.scores[:, 0] = 0

    def step(self) -> None:
        """One token for every live hypothesis: rank, complete, go on, leave."""
        B, K, t = self.history.shape
        log_probs = next_log_probs(self.stepper, self.tokens)
        V = log_probs.shape[1]
        log_probs = self.rules.apply(log_probs, self.history.view(B * K, t)).view(B, K, V)
        totals = log_probs + self.scores.to(log_probs.dtype).unsqueeze(2)
        flat = totals.view(B, K * V).topk(min(2 * K, K * V), dim=1).indices
        parents, tokens = flat // V, flat % V
        best = self.scores.gather(1, parents) + log_probs.view(B, K * V).gather(1, flat)
        ends = tokens == self.rules.sentences.eos_id
        self._complete(best, parents, ends)
        self.scores, places = best.masked_fill(ends, NEVER).topk(min(K, best.shape[1]), dim=1)
        parents, tokens = parents.gather(1, places), tokens.gather(1, places)
        if parents.shape[1] < K:  # fewer continuations than beams: the spare beams are dead
            spare = K - parents.shape[1]
            self.scores = torch.cat([self.scores, self.scores.new_full((B, spare), NEVER)], dim=1)
            parents = torch.cat([parents, parents.new_zeros(B, spare)], dim=1)
            tokens = torch.cat([tokens, tokens.new_full((B, spare), self.rules.sentences.eos_id)], dim=1)
        grown = self.history.gather(1, parents.unsqueeze(2).expand(B, K, t))
        self.history = torch.cat([grown, tokens.unsqueeze(2)], dim=2)
        self._cut_at_limits()
        self._leave(parents)

    def _complete(self, best: Tensor, parents: Tensor, ends: Tensor) -> None:
        """Keeps the hypotheses whose end token ranks among the first K."""
        complete = ends & (best > NEVER)
        complete[:, self.stepper.beams :] = False
        for slot, rank in complete.nonzero().tolist():
            tokens = [*self.history[slot, int(parents[slot, rank])].tolist(), self.rules.sentences.eos_id]
            self._keep(slot, tokens, float(best[slot, rank]), finished=True)

    def _cut_at_limits(self) -> None:
        """Keeps live hypotheses of sentences at their maximum length, unfinished as they are."""
        for slot, limit in enumerate(self.rules.limits()):
            if self.history.shape[2] >= limit:
                for beam in (self.scores[slot] > NEVER).nonzero().flatten().tolist():
                    tokens = self.history[slot, beam].tolist()
                    self._keep(slot, tokens, float(self.scores[slot, beam]), finished=False)
                self.scores[slot] = NEVER

    def _keep(self, slot: int, tokens: list[int], log_prob: float, *, finished: bool) -> None:
        score = normalised(log_prob, len(tokens), self.config.length_penalty)
        self.found[self.rules.active[slot]].append(Hypothesis(tokens, log_prob, score, finished))

    def _leave(self, parents: Tensor) -> None:
        """Takes sentences that are done out of the grid and moves the others' beams to where they belong."""
        going = [slot for slot in range(len(self.rules.active)) if not self._is_done(slot)]
        keep = torch.tensor(going, dtype=torch.int64)
        if len(going) < len(self.rules.active):
            self.rules.active = [self.rules.active[slot] for slot in going]
            self.history, self.scores, parents = self.history[keep], self.scores[keep], parents[keep]
            if going:
                self.stepper.compact(keep)
        if going:
            self.stepper.reorder(parents)
            self.tokens = self.history[:, :, -1].reshape(-1)

    def _is_done(self, slot: int) -> bool:
        best_live = float(self.scores[slot].max())
        if best_live == NEVER:
            return True
        found = self.found[self.rules.active[slot]]
        if self.config.early_stopping:
            return len(found) >= self.stepper.beams
        if len(found) < self.config.n_best:
            return False
        # Log-probabilities only fall, so a live hypothesis scores at best as if it reached the longest length free.
        attainable = normalised(best_live, self.rules.limits()[slot], self.config.length_penalty)
        return attainable <= _ranked(found)[self.config.n_best - 1].score
