"""The checkpoint a run begins with: an untrained model and a new tokenizer, or another run's to fine-tune."""

import dataclasses
from pathlib import Path

import torch

from train.auto import Auto
from train.data import Data, Say, vocabulary_text
from train.recipe import Recipe
from translator.checkpoint import Checkpoint, CheckpointConfig, read_checkpoint
from translator.config import ModelConfig, preset
from translator.device import check_memory
from translator.errors import UserError
from translator.languages import language
from translator.model import TranslationModel
from translator.tokenizer import Tokenizer

_BYTES = 5 * 4  # a parameter in fp32, its gradient, its two moments, its average


def new_tokenizer(recipe: Recipe, data: Data) -> Tokenizer:
    """A tokenizer trained on the training text."""
    size = recipe.tokenizer.vocab_size
    languages = recipe.source_language, recipe.target_language
    sentences = vocabulary_text(data.train, languages, recipe.tokenizer.slots)
    return Tokenizer.train(sentences, None if isinstance(size, Auto) else size, slots=recipe.tokenizer.slots)


def new_checkpoint(recipe: Recipe, tokenizer: Tokenizer, say: Say) -> Checkpoint:
    """An untrained model of the shape that a fitted `recipe` names; raises `UserError` when the memory is too small."""
    config = CheckpointConfig(
        source_language=recipe.source_language,
        target_language=recipe.target_language,
        model=preset(recipe.model.preset, tokenizer.vocab_size, **recipe.model.overrides()),
        decode=recipe.decode,
    )
    size = parameters(config.model)
    torch.manual_seed(recipe.seed)
    model = TranslationModel(config.model)
    say(f"model {recipe.model.preset}: {size / 1e6:.1f} M parameters, vocabulary {tokenizer.vocab_size:,}")
    return Checkpoint(model, tokenizer, config)


def parameters(config: ModelConfig) -> int:
    """How many parameters a model to be trained has; raises `UserError` when the memory is too small for training."""
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in TranslationModel(config).parameters())
    check_memory(size * _BYTES, f"training a model of {size / 1e6:,.1f} M parameters")
    return size


def initial_checkpoint(folder: Path, recipe: Recipe) -> Checkpoint:
    """The checkpoint to fine-tune, with the recipe's dropout where it names one.

    A checkpoint of the same two languages the other way round will do: trained in both directions, it knows this one
    too. Raises `UserError` where the recipe asks for other languages or another shape than the checkpoint has.
    """
    checkpoint = read_checkpoint(folder)
    if _languages(recipe) == _languages(checkpoint.config)[::-1]:
        checkpoint.config = dataclasses.replace(
            checkpoint.config, source_language=recipe.source_language, target_language=recipe.target_language
        )
    for key in ("source_language", "target_language"):
        wanted, given = (language(getattr(place, key)) for place in (recipe, checkpoint.config))
        if (wanted.primary, wanted.script) != (given.primary, given.script):
            raise UserError(f"{key} is {getattr(recipe, key)!r} in the recipe and {getattr(checkpoint.config, key)!r} "
                            f"in {folder}")  # fmt: skip
    for key, value in recipe.model.overrides().items():
        given = getattr(checkpoint.config.model, key)
        if key != "dropout" and value != given:
            raise UserError(f"model.{key} = {value}: {folder} has {given}; what is fine-tuned keeps its shape")
    if recipe.model.dropout is None:
        return checkpoint
    config = dataclasses.replace(checkpoint.config.model, dropout=recipe.model.dropout)
    model = TranslationModel(config)
    model.load_state_dict(checkpoint.model.state_dict())
    return Checkpoint(model, checkpoint.tokenizer, dataclasses.replace(checkpoint.config, model=config))


def _languages(place: Recipe | CheckpointConfig) -> list[tuple[str, str | None]]:
    spoken = [language(code) for code in (place.source_language, place.target_language)]
    return [(one.primary, one.script) for one in spoken]
