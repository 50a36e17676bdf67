"""A recipe: one TOML file that describes a whole run. Every key is checked before anything is read or written."""

import dataclasses
import sys
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass

from train.auto import AUTO, MOST_STEPS, AutoCount, AutoSize, AutoSteps, Count
from train.filters import FilterConfig
from train.optimizer import OPTIMIZERS
from train.paths import usable_path
from train.schedule import SCHEDULES, learning_rate
from translator.attention import STRUCTURES
from translator.bounds import MOST_POSITIONS, MOST_ROWS
from translator.config import PRESETS, STRICT, DecodeConfig, LayerEntry, apply_setting, parse, preset
from translator.errors import UserError
from translator.languages import LanguageCode
from translator.metrics import METRICS
from translator.positions import POSITIONS
from translator.structures import builder
from translator.textio import read_limited

LARGEST_RECIPE = 1 << 20  # bytes
LOSS = "loss"
"""The metric that isn't one of translations."""

RECIPES = Path(__file__).resolve().parent / "recipes"


def _one_of(what: str, known: Iterable[str]) -> Callable[[str], str]:
    def check(name: str) -> str:
        if name not in known:
            raise ValueError(f"unknown {what}; known: {', '.join(known)}")
        return name

    return check


MetricName = Annotated[str, AfterValidator(_one_of("metric", (*METRICS, LOSS)))]
"""What "best" may mean."""


@dataclass(config=STRICT, frozen=True, kw_only=True)
class SplitConfig:
    """Where dev and test come from: named corpora, or else the hash rule on the `key` side of the training corpora."""

    key: Literal["source", "target"] = "source"
    dev: list[Any] = dataclasses.field(default_factory=list)
    test: list[Any] = dataclasses.field(default_factory=list)


@dataclass(config=STRICT, frozen=True, kw_only=True)
class TokenizerConfig:
    """The joint vocabulary. `sampling_alpha` above 0 draws another segmentation of the training text each epoch. With
    `slots`, text is brought into one form and what must come through whole is cut out of it: `translator.typed`."""

    vocab_size: AutoSize = AUTO
    slots: bool = False
    sampling_alpha: float = Field(default=0.0, ge=0, le=1)


# Without protected namespaces a key may be called `model`.
@dataclass(config=ConfigDict(extra="forbid", protected_namespaces=()), frozen=True, kw_only=True)
class ModelSection:
    """A preset and what to change in it; `vocab_size` comes from the tokenizer."""

    preset: str = "auto"
    d_model: int | None = None
    nhead: int | None = None
    num_encoder_layers: int | None = None
    num_decoder_layers: int | None = None
    dim_feedforward: int | None = None
    dropout: float | None = None
    activation: str | None = None
    layer_norm_eps: float | None = None
    positions: str | None = None
    attention: str | None = None
    decoder_layers: list[LayerEntry] | None = None
    max_positions: int | None = None

    @model_validator(mode="after")
    def _check(self) -> "ModelSection":
        if self.preset != "auto" and self.preset not in PRESETS:
            raise ValueError(f"preset {self.preset!r} is unknown; known: auto, {', '.join(sorted(PRESETS))}")
        # A slip shows before any text is read; the vocabulary comes from the text.
        preset("small" if self.preset == "auto" else self.preset, 1000, **self.overrides())
        for key, known in (("positions", POSITIONS), ("attention", STRUCTURES)):
            if getattr(self, key) not in (None, *known):
                raise ValueError(f"{key} {getattr(self, key)!r} is unknown; known: {', '.join(known)}")
        for index, entry in enumerate(self.decoder_layers or ()):
            builder(entry, f"decoder_layers[{index}]")
        return self

    def overrides(self) -> dict[str, Any]:
        """The keys that were given, as arguments of `translator.config.preset`."""
        given = {key: value for key, value in vars(self).items() if value is not None and key in _OVERRIDES}
        if self.decoder_layers:  # they say how many there are, too
            given.setdefault("num_decoder_layers", len(self.decoder_layers))
        return given


_OVERRIDES = {field.name for field in dataclasses.fields(ModelSection)} - {"preset"}

_Beta = Annotated[float, Field(ge=0, lt=1)]


@dataclass(config=STRICT, frozen=True, kw_only=True)
class TrainingConfig:
    """Optimiser and loop. A batch holds at most `batch_tokens` target tokens; `accumulate` batches
    make one step. The learning rate rises over `warmup_steps`, at most a quarter of the run, and then falls, to zero at
    `max_steps` where the schedule is cosine or linear."""

    max_steps: AutoCount = AUTO
    batch_tokens: int = Field(default=3072, ge=16, le=10_000_000)
    accumulate: int = Field(default=1, ge=1, le=100_000)
    optimizer: Annotated[str, AfterValidator(_one_of("optimizer", OPTIMIZERS))] = "adamw"
    learning_rate: float = Field(default=1e-3, gt=0, le=100)
    warmup_steps: AutoSteps = AUTO
    schedule: Annotated[str, AfterValidator(_one_of("schedule", SCHEDULES))] = "cosine"
    weight_decay: float = Field(default=0.01, ge=0, le=1)
    adam_betas: tuple[_Beta, _Beta] = (0.9, 0.98)
    label_smoothing: float = Field(default=0.1, ge=0, lt=1)
    clip_norm: float = Field(default=1.0, gt=0, le=1e9)
    drop_final_mark: float = Field(default=0.0, ge=0, le=1)
    average_decay: float = Field(default=0.999, ge=0, lt=1)
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    max_tokens: int = Field(default=128, ge=4, le=MOST_POSITIONS)
    tensorboard: bool = False
    log_every: Count = 50
    save_every: Count = 500

    def rate(self, step: int) -> float:
        """The learning rate of step `step`, counted from 1."""
        return learning_rate(
            self.schedule, step, peak=self.learning_rate, warmup_steps=self.warmup_steps, max_steps=self.max_steps
        )


@dataclass(config=STRICT, frozen=True, kw_only=True)
class EvaluationConfig:
    """Validation every `every` steps: loss and real translations of at most `sentences` dev sentences. Training stops
    when `metric` has not improved for `patience` validations; 0 never stops early."""

    every: AutoCount = AUTO
    sentences: Count = 1000
    metric: MetricName = "bleu"
    patience: int = Field(default=0, ge=0, le=MOST_STEPS)
    samples: int = Field(default=3, ge=0, le=1000)
    beam_size: int = Field(default=1, ge=1, le=MOST_ROWS)


@dataclass(config=STRICT, frozen=True, kw_only=True)
class Recipe:
    """A whole run."""

    source_language: LanguageCode
    target_language: LanguageCode
    corpora: list[Any]
    output: Annotated[str, AfterValidator(usable_path)]
    seed: int = Field(default=1, ge=0, lt=2**32)
    simplify_chinese: bool = True
    both_directions: bool = False
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


def read_recipe(name: str, settings: list[str] | None = None, folder: Path | None = None) -> tuple[Recipe, Path]:
    """The recipe at path `name`, or shipped under that name, and the folder its relative paths start from.

    That is `folder`, or else the recipe's own; for a shipped one, or `-` for standard input, the working folder.

    `settings` are `key=value` changes, keys dotted (`training.max_steps=100`), values TOML (a bare word is text).
    Raises `UserError` for a missing file, broken TOML, or a key or value that doesn't fit.
    """
    data, base = _found(name)
    try:
        values = tomllib.loads(data.decode("utf-8-sig"))
    except RecursionError:
        raise UserError(f"{name}: not valid TOML (nested too deep)") from None
    except ValueError as error:  # no TOML, no UTF-8, a number of thousands of digits
        raise UserError(f"{name}: not valid TOML ({error})") from None
    for setting in settings or ():
        apply_setting(values, setting)
    if folder is not None:
        if not folder.is_dir():
            raise UserError(f"--data: {folder} is not a folder")
        base = folder
    return parse(Recipe, values, where=name), base


def _found(name: str) -> tuple[bytes, Path]:
    """What the recipe holds, and the folder its relative paths start from."""
    if name == "-":
        return sys.stdin.buffer.read(LARGEST_RECIPE), Path.cwd()
    path = Path(usable_path(name))
    base = path.resolve().parent
    if not path.is_file() and (RECIPES / f"{name}.toml").is_file():
        path, base = RECIPES / f"{name}.toml", Path.cwd()
    if not path.exists():
        shipped = ", ".join(sorted(recipe.stem for recipe in RECIPES.glob("*.toml")))
        raise UserError(f"{name}: no such recipe; give a TOML file, or one of the shipped: {shipped}")
    return read_limited(path, LARGEST_RECIPE), base
