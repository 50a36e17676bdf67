"""What a recipe leaves to the run with "auto": a model, a length and a pace that fit its text."""

import dataclasses
import math
from typing import Any

from train.auto import Auto
from train.batches import plan_epoch
from train.data import Data, encode_pairs, prepared, within
from train.recipe import Recipe
from translator.tokenizer import Tokenizer

# Below as many target tokens of training text (about 15,000 short sentences) the `small` model only learns by heart.
_TINY_BELOW = 200_000
# A run sees its text this often: as often as gives it `_STEPS`, but neither less nor more than these.
_STEPS, _FEWEST_EPOCHS, _MOST_EPOCHS = 1500, 15, 100
_LONGEST_WARMUP, _RAREST_VALIDATION = 500, 500


def fitted(recipe: Recipe, data: Data, tokenizer: Tokenizer, *, new: bool) -> Recipe:
    """`recipe` with a number, or a name, for every "auto"; the preset only where the model is to be a `new` one."""
    training, evaluation, model = recipe.training, recipe.evaluation, recipe.model
    if new and model.preset == "auto":
        tokens = sum(len(tokenizer.encode(pair.target)) + 1 for pair in data.train)
        model = dataclasses.replace(model, preset="tiny" if tokens < _TINY_BELOW else "small")
    steps = training.max_steps
    if isinstance(steps, Auto):
        per_epoch = math.ceil(batches_an_epoch(recipe, data, tokenizer) / training.accumulate)
        epochs = min(max(_STEPS / per_epoch, _FEWEST_EPOCHS), _MOST_EPOCHS)
        steps = math.ceil(epochs * per_epoch)
    tenth = max(1, steps // 10)
    warmup = min(_LONGEST_WARMUP, tenth) if isinstance(training.warmup_steps, Auto) else training.warmup_steps
    every = min(_RAREST_VALIDATION, tenth) if isinstance(evaluation.every, Auto) else evaluation.every
    return dataclasses.replace(
        recipe,
        tokenizer=dataclasses.replace(recipe.tokenizer, vocab_size=tokenizer.vocab_size),
        model=model,
        training=dataclasses.replace(training, max_steps=steps, warmup_steps=warmup),
        evaluation=dataclasses.replace(evaluation, every=every),
    )


def as_saved(recipe: Recipe, saved: Recipe) -> Recipe:
    """`recipe` with what a run was saved with for every "auto": what it worked out at its start still holds."""

    def settled(mine: Any, other: Any) -> Any:
        values = {
            field.name: getattr(other, field.name)
            for field in dataclasses.fields(mine)
            if isinstance(getattr(mine, field.name), Auto)
        }
        return dataclasses.replace(mine, **values) if values else mine

    model = recipe.model
    if model.preset == "auto":
        model = dataclasses.replace(model, preset=saved.model.preset)
    return dataclasses.replace(
        recipe,
        tokenizer=settled(recipe.tokenizer, saved.tokenizer),
        model=model,
        training=settled(recipe.training, saved.training),
        evaluation=settled(recipe.evaluation, saved.evaluation),
    )


def batches_an_epoch(recipe: Recipe, data: Data, tokenizer: Tokenizer) -> int:
    """Batches that one pass over the training text takes."""
    train = prepared(data.train, tokenizer, (recipe.source_language, recipe.target_language))
    pairs = within(train, tokenizer, recipe.training.max_tokens)
    return max(1, len(plan_epoch(encode_pairs(pairs, tokenizer), recipe.training.batch_tokens, recipe.seed, 0)))
