"""Several models that decode as one: against brute force, itself, and mistakes."""

import itertools
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers import CHINESE, ENGLISH, tiny_checkpoint, tiny_model, tiny_model64
from translator.cache import CacheSpec
from translator.checkpoint import Checkpoint, write_checkpoint
from translator.config import DecodeConfig, ModelConfig
from translator.engine.eager import EagerEngine
from translator.engine.ensemble import EnsembleEngine
from translator.errors import UserError
from translator.model import TranslationModel
from translator.pipeline import Translator
from translator.search import Driver, Sentence, rows_per_sentence, search, starter
from translator.tokenizer import Tokenizer

pytestmark = pytest.mark.numeric

BEAM = DecodeConfig(beam_size=4, n_best=3)
every_search = pytest.mark.parametrize(
    "config",
    [DecodeConfig(beam_size=1), BEAM, DecodeConfig(sampling=True, n_best=2)],
    ids=["greedy", "beam", "sampling"],
)


def small_model(seed: int, **sizes: int) -> TranslationModel:
    """Seven tokens: padding, unknown, start, end and three words; as unsure as untrained models are, and less equal."""
    torch.manual_seed(seed)
    settings = {"d_model": 16, "nhead": 2, "num_encoder_layers": 1, "num_decoder_layers": 1, "dim_feedforward": 16}
    model = TranslationModel(ModelConfig(vocab_size=7, max_positions=16, **(settings | sizes)))
    with torch.no_grad():
        model.embedding.weight.mul_(3)
    return model.double().eval().requires_grad_(False)


def small_sentence(longest: int) -> Sentence:
    return Sentence(max_length=longest, start_id=2, end_id=3, suppressed=(0, 1, 2))


def test_of_two_models_it_finds_the_best_mean_of_all_targets():
    """Models of different sizes; every target of at most four tokens is scored by both."""
    models = [small_model(1), small_model(2, d_model=24, num_decoder_layers=2, nhead=3)]
    source, longest = [4, 6, 5, 3], 4
    targets = [
        [*words, 3] if length < longest else list(words)
        for length in range(longest + 1)
        for words in itertools.product([4, 5, 6], repeat=length)
    ]
    means = {}
    for target in targets:
        by_model = []
        for model in models:
            logits = model(torch.tensor([source]), torch.tensor([[2, *target[:-1]]]))[0]
            by_model.append(float(logits.log_softmax(1).gather(1, torch.tensor(target).unsqueeze(1)).sum()))
        means[tuple(target)] = sum(by_model) / 2
        assert not math.isclose(*by_model, abs_tol=1e-3), "they should be of different minds"
    config = DecodeConfig(beam_size=120, n_best=100, early_stopping=False, length_penalty=0.0)
    start = starter(EnsembleEngine([EagerEngine(model) for model in models]), CacheSpec(beams=120))
    (found,) = search(start([source], None), [small_sentence(longest)], config)
    complete = sorted((t for t in means if t[-1] == 3), key=lambda target: -means[target])
    assert [tuple(h.tokens) for h in found if h.finished] == complete
    assert [h.log_prob for h in found] == pytest.approx([means[tuple(h.tokens)] for h in found], abs=1e-9)


@every_search
def test_of_one_model_with_itself_it_says_what_the_model_says(config):
    alone = Translator(tiny_checkpoint(model=tiny_model64()))
    twice = Translator(*[tiny_checkpoint(model=tiny_model64())] * 2)
    for mine, theirs in zip(twice.candidates(ENGLISH, config), alone.candidates(ENGLISH, config), strict=True):
        assert [candidate.tokens for candidate in mine] == [candidate.tokens for candidate in theirs]
        assert [c.score for c in mine] == pytest.approx([c.score for c in theirs], abs=1e-6)


def test_its_scores_are_the_means_of_its_members_scores():
    checkpoints = [tiny_checkpoint(model=tiny_model(seed).double()) for seed in (11, 12)]
    both, *members = Translator(*checkpoints), *(Translator(checkpoint) for checkpoint in checkpoints)
    found = [candidates[0] for candidates in both.candidates(ENGLISH, BEAM, split=False)]
    sources, tokens = [c.sources[0] for c in found], [c.tokens[0] for c in found]
    totals = [[total for total, _ in member.score(sources, tokens)] for member in members]
    means = [sum(parts) / 2 for parts in zip(*totals, strict=True)]
    assert [c.log_prob for c in found] == pytest.approx(means, abs=1e-4)
    assert [total for total, _ in both.score(sources, tokens)] == pytest.approx(means, abs=1e-4)
    assert any(
        c.text != member.translate([s], BEAM)[0] for c, s in zip(found, sources, strict=True) for member in members
    )


@every_search
def test_sentences_may_come_while_others_are_decoded(config):
    engine = EnsembleEngine([EagerEngine(small_model(1)), EagerEngine(small_model(2, num_decoder_layers=2))])
    start = starter(engine, CacheSpec(beams=rows_per_sentence(config)))
    sources = [[4, 3], [4, 5, 6, 5, 4, 3], [6, 3], [5, 5, 5, 3]]
    asked = [Sentence(max_length=9, start_id=2, end_id=3, suppressed=(0, 2), key=(index,)) for index in range(4)]
    driver = Driver(config, start, room=2)
    for sentence, source in zip(asked, sources, strict=True):
        driver.add(sentence, source)
        driver.step()
    for index, found in driver.run().items():
        (alone,) = search(start([sources[index]], None), [asked[index]], config)
        assert [h.tokens for h in found] == [h.tokens for h in alone]
        assert [h.score for h in found] == pytest.approx([h.score for h in alone], abs=1e-9)


def test_members_of_different_vocabularies_are_refused():
    other = TranslationModel(ModelConfig(vocab_size=9, d_model=8, nhead=2, num_decoder_layers=1, num_encoder_layers=1))
    with pytest.raises(ValueError, match="one vocabulary"):
        EnsembleEngine([EagerEngine(small_model(1)), EagerEngine(other)])
    with pytest.raises(ValueError, match="one vocabulary"):
        EnsembleEngine([])


# -- from the command line ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models that go together, one of other languages, one of other tokens."""
    folder = tmp_path_factory.mktemp("ensemble")
    first, second = tiny_checkpoint(), tiny_checkpoint(model=tiny_model(12))
    languages = Checkpoint(first.model, first.tokenizer, tiny_checkpoint().config)
    object.__setattr__(languages.config, "target_language", "ja")
    tokens = Checkpoint(first.model, Tokenizer.train(CHINESE + ENGLISH[:9], 420, threads=1), first.config)
    for name, checkpoint in {"a": first, "b": second, "languages": languages, "tokens": tokens}.items():
        (folder / name).mkdir()
        write_checkpoint(folder / name, checkpoint)
    return folder


def command(*arguments: object) -> tuple[int, str]:
    words = [sys.executable, "-m", "translator", *(str(argument) for argument in arguments)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
    return done.returncode, done.stderr


def test_several_checkpoints_translate_together(folders, tmp_path):
    (tmp_path / "in").write_text("\n".join(ENGLISH) + "\n", encoding="utf-8")
    a, b = folders / "a", folders / "b"
    status, error = command(
        "translate", "--checkpoint", a, "--checkpoint", b, "--input", tmp_path / "in", "--output", tmp_path / "out"
    )
    assert (status, error) == (0, "")
    expected = Translator.from_checkpoint(a, b).translate(ENGLISH)
    assert (tmp_path / "out").read_text(encoding="utf-8").splitlines() == expected
    assert expected not in (
        Translator.from_checkpoint(a).translate(ENGLISH),
        Translator.from_checkpoint(b).translate(ENGLISH),
    )


@pytest.mark.parametrize(
    ("other", "message"), [("languages", "translates en to ja"), ("tokens", "tokenizer.model is ")]
)
def test_checkpoints_that_do_not_go_together_are_refused_by_name(folders, other, message):
    with pytest.raises(UserError, match=f"{other}: {message}"):
        Translator.from_checkpoint(folders / "a", folders / other)


def test_on_the_command_line_too_in_one_line(folders):
    status, error = command("translate", "--checkpoint", folders / "a", "--checkpoint", folders / "languages", "Yes.")
    assert status == 2 and "Traceback" not in error
    (line,) = error.splitlines()
    assert "languages: translates en to ja and" in line
