"""What becomes of typed text in training: prepared pairs, a vocabulary with slots, final marks that go."""

import functools
import signal
from pathlib import Path

import pytest

from tests.helpers import CHINESE, ENGLISH
from tests.train.runs import WriteRecipe, same_run, stop_after
from train.data import encode_pairs, load_data, prepared, vocabulary_text
from train.recipe import read_recipe
from train.run import run_recipe
from train.sources import Pair
from translator.checkpoint import read_checkpoint
from translator.errors import UserError
from translator.tokenizer import Tokenizer
from translator.typed.slots import NUMBERS, OTHERS, SLOTS

SLOTTED = ["tokenizer.slots=true", "tokenizer.vocab_size=300", "training.drop_final_mark=0.5"]


@functools.lru_cache
def tokenizer() -> Tokenizer:
    return Tokenizer.train(ENGLISH + CHINESE, 440, threads=1, slots=True)


def pair(source: str, target: str) -> Pair:
    return Pair(source, target, "here")


def test_each_side_is_prepared_as_the_side_it_is() -> None:
    forward = pair("“The price” is 12…", "“价格”：12，好…")
    (one, other) = prepared([forward, forward.turn()], tokenizer(), ("en", "zh"))
    slot = next(char for char in one.source if char in NUMBERS)
    assert (one.source, one.target) == (f'"The price" is {slot}...', f"“价格”：{slot}，好…")
    slot = next(char for char in other.source if char in NUMBERS)
    assert (other.source, other.target) == (f'"价格"：{slot}，好...', f"“The price” is {slot}…")


def test_a_vocabulary_is_made_from_text_without_spans() -> None:
    pairs = [pair("“It” is 12 %s\u00ad", "是 12 %s")]
    assert vocabulary_text(pairs, ("en", "zh"), slots=True) == [
        f'"It" is {NUMBERS[0]} {OTHERS[0]}', f"是 {NUMBERS[0]} {OTHERS[0]}"
    ]  # fmt: skip
    assert vocabulary_text([*pairs, pairs[0].turn()], ("en", "zh"), slots=False) == ["“It” is 12 %s", "是 12 %s"]


def test_a_share_of_the_sources_loses_its_mark_and_the_targets_keep_theirs() -> None:
    pairs = [pair(f"The cat sat on the mat{mark}", "猫坐在垫子上。") for mark in ".?!" * 200] + [pair("a.", "猫。")]
    usual = encode_pairs(pairs, tokenizer())
    first, again, other = (encode_pairs(pairs, tokenizer(), seed=seed, drop_final_mark=0.3) for seed in (1, 1, 2))
    assert first == again != other
    bare = [*tokenizer().encode("The cat sat on the mat"), tokenizer().eos_id]
    shares = [sum(source == bare for source in found.sources) / 600 for found in (usual, first, other)]
    assert shares[0] == 0 and 0.2 < shares[1] < 0.4 and 0.2 < shares[2] < 0.4
    assert first.targets == usual.targets
    assert first.sources[-1] == usual.sources[-1]
    kept = [mine for mine, whole in zip(first.sources, usual.sources, strict=True) if mine != bare]
    assert all(source in usual.sources for source in kept)


def test_a_run_with_slots_is_resumed_exactly_and_keeps_them(
    recipe: WriteRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def marked(name: str) -> str:
        path = recipe(name)
        for side in ("pairs.src", "pairs.tgt"):
            text = (tmp_path / side).read_text(encoding="utf-8")
            (tmp_path / side).write_text(text.replace("\n", " 12.\n"), encoding="utf-8")
        return str(path)

    run_recipe(marked("whole"), SLOTTED)
    assert set(SLOTS) <= read_checkpoint(tmp_path / "whole" / "best").tokenizer.characters
    with monkeypatch.context() as patch:
        stop_after(patch, 13, signal.SIGTERM)
        assert run_recipe(marked("stopped"), SLOTTED) is signal.SIGTERM
    run_recipe(marked("stopped"), SLOTTED, resume=True)
    same_run(tmp_path / "whole", tmp_path / "stopped")


# -- a model for both directions -------------------------------------------------------------------------------------

BOTH = "both_directions=true"


def both(recipe: WriteRecipe, name: str) -> str:
    """A recipe between English and its copy in capitals: which side is which can be seen."""
    path = recipe(name)
    for part in ("pairs", "dev"):
        file = path.parent / f"{part}.tgt"
        file.write_text(file.read_text(encoding="utf-8").upper(), encoding="utf-8")
    return str(path)


def test_training_text_is_turned_and_held_out_text_is_not(recipe: WriteRecipe) -> None:
    path = both(recipe, "run")
    one, two = (load_data(*read_recipe(path, settings), lambda line: None) for settings in ([], [BOTH]))
    assert two.train == [*one.train, *(pair.turn() for pair in one.train)]
    assert {pair.source.isupper() for pair in two.train} == {False, True}
    assert (two.dev_pairs, two.dev, two.test) == (one.dev_pairs, one.dev, one.test)
    assert not any(source.isupper() for source in (*two.dev.sources, *two.test.sources))
    assert one.fingerprint() != two.fingerprint()


def test_a_run_in_both_directions_is_resumed_exactly_and_only_as_one(
    recipe: WriteRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = "tokenizer.vocab_size=310"
    run_recipe(both(recipe, "whole"), [BOTH, size])
    with monkeypatch.context() as patch:
        stop_after(patch, 13, signal.SIGTERM)
        assert run_recipe(both(recipe, "stopped"), [BOTH, size]) is signal.SIGTERM
    with pytest.raises(UserError, match="both_directions: True → False"):
        run_recipe(both(recipe, "stopped"), [size], resume=True)
    run_recipe(both(recipe, "stopped"), [BOTH, size], resume=True)
    same_run(tmp_path / "whole", tmp_path / "stopped")
