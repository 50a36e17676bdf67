"""A recipe: one TOML file that describes a whole run. Every key is checked before anything is read or written."""

import dataclasses
import tomllib
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass

from train.filters import FilterConfig
from translator.config import PRESETS, STRICT, DecodeConfig, apply_setting, parse
from translator.errors import UserError
from translator.languages import LanguageCode

RECIPES = Path(__file__).resolve().parent / "recipes"


@dataclass(config=STRICT, frozen=True, kw_only=True)
class SplitConfig:
    """Where dev and test come from: named corpora, or else the hash rule on the `key` side of the training corpora."""

    key: Literal["source", "target"] = "source"
    dev: list[Any] = dataclasses.field(default_factory=list)
    test: list[Any] = dataclasses.field(default_factory=list)


@dataclass(config=STRICT, frozen=True, kw_only=True)
class TokenizerConfig:
    """The joint vocabulary. `sampling_alpha` above 0 draws another segmentation of the training text each epoch."""

    vocab_size: int = Field(default=8000, ge=261)
    sampling_alpha: float = Field(default=0.0, ge=0, le=1)


# Without protected namespaces a key may be called `model`.
@dataclass(config=ConfigDict(extra="forbid", protected_namespaces=()), frozen=True, kw_only=True)
class ModelSection:
    """A preset and what to change in it; `vocab_size` comes from the tokenizer."""

    preset: str = "small"
    d_model: int | None = None
    nhead: int | None = None
    num_encoder_layers: int | None = None
    num_decoder_layers: int | None = None
    dim_feedforward: int | None = None
    dropout: float | None = None
    activation: str | None = None
    positions: str | None = None
    max_positions: int | None = None

    @model_validator(mode="after")
    def _check_preset(self) -> "ModelSection":
        if self.preset not in PRESETS:
            raise ValueError(f"preset {self.preset!r} is unknown; known: {', '.join(sorted(PRESETS))}")
        return self

    def overrides(self) -> dict[str, Any]:
        """The keys that were given, as arguments of `translator.config.preset`."""
        return {key: value for key, value in vars(self).items() if value is not None and key in _OVERRIDES}


_OVERRIDES = {field.name for field in dataclasses.fields(ModelSection)} - {"preset"}


@dataclass(config=STRICT, frozen=True, kw_only=True)
class TrainingConfig:
    """Optimiser and loop. A batch holds at most `batch_tokens` target tokens, padding included; `accumulate` batches
    make one step. The learning rate rises over `warmup_steps` and then falls, to zero at `max_steps` where the
    schedule is cosine or linear."""

    max_steps: int = Field(default=10_000, ge=1)
    batch_tokens: int = Field(default=3072, ge=16)
    accumulate: int = Field(default=1, ge=1)
    learning_rate: float = Field(default=1e-3, gt=0)
    warmup_steps: int = Field(default=500, ge=0)
    schedule: Literal["inverse_sqrt", "cosine", "linear", "constant"] = "cosine"
    weight_decay: float = Field(default=0.01, ge=0)
    adam_betas: tuple[float, float] = (0.9, 0.98)
    label_smoothing: float = Field(default=0.1, ge=0, lt=1)
    clip_norm: float = Field(default=1.0, gt=0)
    average_decay: float = Field(default=0.999, ge=0, lt=1)
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    max_tokens: int = Field(default=128, ge=4)
    log_every: int = Field(default=50, ge=1)
    save_every: int = Field(default=500, ge=1)


@dataclass(config=STRICT, frozen=True, kw_only=True)
class EvaluationConfig:
    """Validation every `every` steps: loss and real translations of at most `sentences` dev sentences. Training stops
    when `metric` has not improved for `patience` validations; 0 never stops early."""

    every: int = Field(default=500, ge=1)
    sentences: int = Field(default=1000, ge=1)
    metric: Literal["bleu", "chrf", "loss"] = "bleu"
    patience: int = Field(default=0, ge=0)
    samples: int = Field(default=3, ge=0)
    beam_size: int = Field(default=1, ge=1)


@dataclass(config=STRICT, frozen=True, kw_only=True)
class Recipe:
    """A whole run."""

    source_language: LanguageCode
    target_language: LanguageCode
    corpora: list[Any]
    output: str
    seed: int = 1
    simplify_chinese: bool = True
    split: SplitConfig = dataclasses.field(default_factory=SplitConfig)
    filters: FilterConfig = dataclasses.field(default_factory=FilterConfig)
    tokenizer: TokenizerConfig = dataclasses.field(default_factory=TokenizerConfig)
    model: ModelSection = dataclasses.field(default_factory=ModelSection)
    training: TrainingConfig = dataclasses.field(default_factory=TrainingConfig)
    evaluation: EvaluationConfig = dataclasses.field(default_factory=EvaluationConfig)
    decode: DecodeConfig = dataclasses.field(default_factory=DecodeConfig)

    @model_validator(mode="after")
    def _check_languages(self) -> "Recipe":
        # Most often a slip. Who means it says which variety of the language is which.
        if self.source_language == self.target_language:
            code = self.source_language
            raise ValueError(
                f"source_language and target_language are both {code!r}; where they are varieties of one language, "
                f'name them, e.g. target_language = "{code}-x-simple"'
            )
        return self


def read_recipe(name: str, settings: list[str] | None = None) -> tuple[Recipe, Path]:
    """The recipe at path `name`, or shipped under that name, and the folder its relative paths start from.

    `settings` are `key=value` changes, keys dotted (`training.max_steps=100`), values TOML (a bare word is text).
    Raises `UserError` for a missing file, broken TOML, or a key or value that doesn't fit.
    """
    path = Path(name)
    if not path.is_file() and (RECIPES / f"{name}.toml").is_file():
        path = RECIPES / f"{name}.toml"
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        shipped = ", ".join(sorted(recipe.stem for recipe in RECIPES.glob("*.toml")))
        raise UserError(f"{name}: no such recipe; give a TOML file, or one of the shipped: {shipped}") from None
    except OSError as error:
        raise UserError(f"{name}: cannot be read ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{name}: not valid TOML ({error})") from None
    for setting in settings or ():
        apply_setting(values, setting)
    return parse(Recipe, values, where=name), path.resolve().parent
