"""`translator train --dry-run`: what a run would read, drop, keep and do, without doing it."""

from collections.abc import Sequence
from pathlib import Path

from train.corpus import Pair
from train.data import Say, fits, load_data
from train.filters import SAMPLES
from train.fit import batches_an_epoch, fitted
from train.initial import initial_checkpoint, new_tokenizer, parameters
from train.recipe import Recipe, read_recipe
from translator.config import ModelConfig, preset
from translator.tokenizer import Tokenizer

_WIDEST = 60  # characters of a side that are shown


def dry_run(name: str, settings: list[str], init_from: Path | None, say: Say, folder: Path | None = None) -> None:
    """Reads, filters and splits the text of a recipe, fits vocabulary, model and length, and says all of it.

    Trains nothing and writes nothing. Raises `UserError` where the run itself would.
    """
    recipe, base = read_recipe(name, settings, folder)
    checkpoint = initial_checkpoint(init_from, recipe) if init_from else None
    dropped: dict[str, list[Pair]] = {}
    data = load_data(recipe, base, say, dropped)
    for reason, pairs in dropped.items():
        _show(f"dropped, {reason}", pairs, say)
    _show("kept", _spread(data.train), say)
    _show("dev", _spread(data.dev_pairs), say)
    tokenizer = checkpoint.tokenizer if checkpoint else new_tokenizer(recipe, data)
    recipe = fitted(recipe, data, tokenizer, new=checkpoint is None)
    model = checkpoint.config.model if checkpoint else _shape(recipe, tokenizer)
    fits(data.train, tokenizer, min(recipe.training.max_tokens, model.max_positions), say)
    pieces = tokenizer.pieces(tokenizer.encode(data.train[0].target))
    say(f"vocabulary {tokenizer.vocab_size:,}, e.g. {' '.join(pieces)}")
    kind = f"of {init_from}" if checkpoint else recipe.model.preset
    say(f"model {kind}: {parameters(model) / 1e6:.1f} M parameters, width {model.d_model}, "
        f"{model.num_encoder_layers} + {model.num_decoder_layers} layers")  # fmt: skip
    _tell_length(recipe, batches_an_epoch(recipe, data, tokenizer), say)
    say(f"nothing was trained or written; without --dry-run the run goes to {recipe.output}")


def _shape(recipe: Recipe, tokenizer: Tokenizer) -> ModelConfig:
    return preset(recipe.model.preset, tokenizer.vocab_size, **recipe.model.overrides())


def _tell_length(recipe: Recipe, batches: int, say: Say) -> None:
    training = recipe.training
    epochs = training.max_steps * training.accumulate / batches
    say(f"{batches:,} batches an epoch, {training.max_steps:,} steps: {epochs:,.1f} epochs; warm-up "
        f"{training.warmup_steps:,} steps, validation every {recipe.evaluation.every:,}")  # fmt: skip


def _spread(pairs: Sequence[Pair]) -> list[Pair]:
    """A few of `pairs`, from beginning to end."""
    return [pairs[len(pairs) * place // SAMPLES] for place in range(min(SAMPLES, len(pairs)))]


def _show(heading: str, pairs: Sequence[Pair], say: Say) -> None:
    if pairs:
        say(f"{heading}, e.g.")
    for pair in pairs:
        say(f"    {pair.origin}: {_short(pair.source)} → {_short(pair.target)}")


def _short(text: str) -> str:
    return text if len(text) <= _WIDEST else f"{text[:_WIDEST]}…"
