"""Greedy search and sampling: each row goes its own way, so there is nothing to reorder."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from translator.config import DecodeConfig
from translator.search.base import Hypothesis, Rules, Sentences, Stepper, next_log_probs, normalised
from translator.search.sampling import Sampler

# (log-probabilities (rows, V), original index of each sentence in the grid, step) -> token ids (rows,)
Choice = Callable[[Tensor, list[int], int], Tensor]
# (tokens so far (rows, t), the hypotheses that ended with this step, by sentence)
Progress = tuple[Tensor, list[tuple[int, Hypothesis]]]


def greedy_search(stepper: Stepper, sentences: Sentences, config: DecodeConfig) -> list[list[Hypothesis]]:
    """The most probable token at each step; one hypothesis a sentence."""
    return _run(stepper, sentences, config, _most_probable)


def sample(stepper: Stepper, sentences: Sentences, config: DecodeConfig) -> list[list[Hypothesis]]:
    """`stepper.beams` samples of each sentence, best first; see `Sampler`.

    The draws of a sentence depend on `config.seed` and its key alone, never on its batch mates. `log_prob` is the
    model's own, before temperature.
    """
    return _run(stepper, sentences, config, Sampler(sentences, config, stepper.beams))


def greedy_steps(stepper: Stepper, sentences: Sentences, config: DecodeConfig) -> Iterator[Progress]:
    """Greedy search step by step, for callers that show tokens as they come."""
    return _steps(stepper, sentences, config, _most_probable)


def _most_probable(log_probs: Tensor, active: list[int], t: int) -> Tensor:
    return log_probs.argmax(dim=1)


def _run(stepper: Stepper, sentences: Sentences, config: DecodeConfig, choose: Choice) -> list[list[Hypothesis]]:
    found: list[list[Hypothesis]] = [[] for _ in range(stepper.batch_size)]
    for _, ended in _steps(stepper, sentences, config, choose):
        for index, hypothesis in ended:
            found[index].append(hypothesis)
    return [sorted(hypotheses, key=lambda h: (not h.finished, -h.score)) for hypotheses in found]


@torch.no_grad()
def _steps(stepper: Stepper, sentences: Sentences, config: DecodeConfig, choose: Choice) -> Iterator[Progress]:
    """One `Progress` a step; a sentence leaves the grid when all its rows have ended."""
    B, K = stepper.batch_size, stepper.beams
    rules = Rules(sentences, config)
    tokens = torch.full((B * K,), sentences.bos_id)
    history = torch.zeros(B * K, 0, dtype=torch.int64)
    log_prob = torch.zeros(B * K, dtype=torch.float64)
    ended = torch.zeros(B * K, dtype=torch.bool)
    while rules.active:
        log_probs = rules.apply(next_log_probs(stepper, tokens), history)
        tokens = choose(log_probs, rules.active, history.shape[1])
        log_prob += log_probs.gather(1, tokens.unsqueeze(1)).squeeze(1).masked_fill_(ended, 0)
        history = torch.cat([history, tokens.unsqueeze(1)], dim=1)
        t = history.shape[1]
        limits = torch.tensor(rules.limits()).repeat_interleave(K)
        ending = ~ended & ((tokens == sentences.eos_id) | (t >= limits))
        yield (
            history,
            [
                (
                    rules.active[row // K],
                    Hypothesis(
                        history[row].tolist(),
                        float(log_prob[row]),
                        normalised(float(log_prob[row]), t, config.length_penalty),
                        finished=bool(tokens[row] == sentences.eos_id),
                    ),
                )
                for row in ending.nonzero().flatten().tolist()
            ],
        )
        ended |= ending
        going = (~ended.view(-1, K).all(dim=1)).nonzero().flatten()
        if len(going) < len(rules.active):
            rules.active = [rules.active[slot] for slot in going.tolist()]
            rows = (going.unsqueeze(1) * K + torch.arange(K)).flatten()
            tokens, history, log_prob, ended = tokens[rows], history[rows], log_prob[rows], ended[rows]
            if rules.active:
                stepper.compact(going)
