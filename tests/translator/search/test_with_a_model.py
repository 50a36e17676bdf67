"""Searches on a model: with a cache as without, in a batch as alone."""

import pytest
import torch

from tests.helpers import tiny_model64
from tests.translator.search.models import WholePrefixDecoding, assert_same, sentences
from translator.cache import CACHE_KINDS, CacheSpec
from translator.config import DecodeConfig
from translator.engine import Decoding
from translator.engine.eager import EagerEngine
from translator.model import TranslationModel
from translator.search import Sentence, rows_per_sentence, search, starter

pytestmark = pytest.mark.numeric

SOURCES = [
    [21, 3],
    [300, 301, 302, 288, 270, 3],
    [*range(262, 300), 3],
    [400, 410, 3],
    [3],
]
LIMITS = [14, 22, 40, 16, 12]
CONFIGS = {
    "greedy": DecodeConfig(beam_size=1),
    "beam 3": DecodeConfig(beam_size=3, n_best=3),
    "beam 4 to the end": DecodeConfig(beam_size=4, n_best=4, early_stopping=False, length_penalty=0.6),
    "sampling": DecodeConfig(sampling=True, n_best=3),
    "no repeats": DecodeConfig(beam_size=3, n_best=3, no_repeat_ngram_size=2),
}
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=list(CONFIGS))


def of_model(max_lengths: list[int], **options) -> list[Sentence]:
    return sentences(max_lengths, start_id=2, end_id=3, suppressed=(0, 2), **options)


def cached(model: TranslationModel, sources: list[list[int]], config: DecodeConfig, kind: str) -> Decoding:
    return starter(EagerEngine(model), CacheSpec(kind=kind, capacity=64, beams=rows_per_sentence(config)))(
        sources, None
    )


@every_config
@pytest.mark.parametrize("kind", sorted(CACHE_KINDS))
def test_a_search_with_a_cache_equals_one_without(config, kind):
    """Tokens and scores, for beams that swap places and sentences that finish at different steps."""
    model = tiny_model64()
    found = search(cached(model, SOURCES, config, kind), of_model(LIMITS), config)
    whole = WholePrefixDecoding(model, SOURCES, rows_per_sentence(config))
    expected = search(whole, of_model(LIMITS), config)
    for mine, theirs in zip(found, expected, strict=True):
        assert_same(mine, theirs)
    assert len({len(hypotheses[0].tokens) for hypotheses in found}) > 1, "they should end at different steps"


@every_config
@pytest.mark.parametrize("order", [[0, 2], [2, 0], [0, 1, 3], [0, 1, 2, 3, 4]], ids=str)
def test_in_a_batch_as_alone(config, order):
    """A short sentence is not changed by a long one beside it, nor three by one another."""
    model = tiny_model64()
    together = search(
        cached(model, [SOURCES[i] for i in order], config, "dynamic"),
        of_model([LIMITS[i] for i in order], keys=[(i,) for i in order]),
        config,
    )
    for index, found in zip(order, together, strict=True):
        stepper = cached(model, [SOURCES[index]], config, "dynamic")
        (alone,) = search(stepper, of_model([LIMITS[index]], keys=[(index,)]), config)
        assert_same(found, alone)


def test_an_output_on_the_way_is_not_changed_by_later_steps():
    """Every n-best target of a long search is what the model gives it, not a mixture of beams."""
    model, config = tiny_model64(), DecodeConfig(beam_size=6, n_best=6, early_stopping=False)
    found = search(cached(model, SOURCES, config, "static"), of_model(LIMITS), config)
    for source, hypotheses in zip(SOURCES, found, strict=True):
        for hypothesis in hypotheses:
            ids = torch.tensor([hypothesis.tokens])
            with torch.no_grad():
                logits = model(torch.tensor([source]), torch.cat([torch.tensor([[2]]), ids[:, :-1]], dim=1))
            total = logits.log_softmax(-1).gather(2, ids.unsqueeze(2)).sum()
            assert hypothesis.log_prob == pytest.approx(float(total), abs=1e-9)
