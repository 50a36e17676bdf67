"""Validated settings. Each is checked on construction and written beside every checkpoint."""

import dataclasses
import difflib
import json
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from translator.bounds import MOST_POSITIONS, MOST_ROWS, MOST_VOCABULARY
from translator.errors import UserError, quoted
from translator.textio import json_text, read_limited

STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)

T = TypeVar("T")

LayerEntry = str | dict[str, Any]
"""A decoder layer's self-attention: a structure's name, or a table with that name under `attention` and its options."""

LARGEST_POSITIONS = 1 << 26  # numbers in one table of positions: 256 MiB in fp32
LARGEST_JSON = 1 << 20  # bytes of a settings file


@dataclass(config=STRICT, frozen=True, kw_only=True)
class ModelConfig:
    """Shape of a `TranslationModel`; names are those of `torch.nn.Transformer`.

    `vocab_size` is V, `d_model` D, `nhead` H. `positions` is one of `translator.positions.POSITIONS`, `attention` (the
    decoder's self-attention) one of `translator.attention.STRUCTURES`. `decoder_layers` says it layer by layer in its
    place: names, or tables such as `{ attention = "window", window = 8 }`. `max_positions` bounds both the source and
    the target length, in tokens, end token included. Raises `pydantic.ValidationError` for impossible values.

    The upper bounds are about twice the largest encoder-decoder models published (XLM-V's 1,000,002 pieces, T5-11B's
    feed-forward of 65,536, 200 layers of M2M's deepest): beyond them a file is damaged or means harm.
    """

    vocab_size: int = Field(ge=5, le=MOST_VOCABULARY)
    d_model: int = Field(default=256, ge=2, le=8192)
    nhead: int = Field(default=4, ge=1, le=256)
    num_encoder_layers: int = Field(default=6, ge=0, le=256)
    num_decoder_layers: int = Field(default=3, ge=1, le=256)
    dim_feedforward: int = Field(default=1024, ge=1, le=131_072)
    dropout: float = Field(default=0.1, ge=0, lt=1)
    activation: Literal["relu", "gelu"] = "relu"
    layer_norm_eps: float = Field(default=1e-5, gt=0, le=1)
    positions: str = Field(default="learned", max_length=64)
    attention: str = Field(default="multihead", max_length=64)
    decoder_layers: tuple[LayerEntry, ...] = Field(default=(), max_length=256)
    max_positions: int = Field(default=256, ge=4, le=MOST_POSITIONS)

    @model_validator(mode="after")
    def _check_heads(self) -> "ModelConfig":
        if self.d_model % self.nhead:
            raise ValueError(f"d_model {self.d_model} must be a multiple of nhead {self.nhead}")
        if self.decoder_layers and len(self.decoder_layers) != self.num_decoder_layers:
            raise ValueError(
                f"decoder_layers names {len(self.decoder_layers)} layers and num_decoder_layers is "
                f"{self.num_decoder_layers}"
            )
        for entry in self.decoder_layers:
            layer_name(entry)
        # A table of positions may be computed, so that no file has to be large to ask for a lot of memory.
        if self.max_positions * self.d_model > LARGEST_POSITIONS:
            raise ValueError(
                f"max_positions {self.max_positions} times d_model {self.d_model} is more than {LARGEST_POSITIONS:,}"
            )
        return self

    @property
    def structures(self) -> tuple[str, ...]:
        """The name of each decoder layer's self-attention."""
        return tuple(map(layer_name, self.decoder_layers)) or (self.attention,) * self.num_decoder_layers


def layer_name(entry: LayerEntry) -> str:
    """The structure that an entry of `decoder_layers` names; raises `ValueError` for a table without one."""
    name = entry if isinstance(entry, str) else entry.get("attention")
    if not isinstance(name, str) or len(name) > 64:
        raise ValueError(
            f"decoder_layers: a layer is a structure's name or a table with `attention`, not {entry!r:.80}"
        )
    return name


# `xianyan` is the model of the project's source text; `small` is sized for training on two CPU cores, `tiny` for a few
# thousand sentences: what has little to learn from forgets more of it on purpose.
PRESETS: dict[str, dict[str, Any]] = {
    "xianyan": {
        "d_model": 384,
        "nhead": 6,
        "num_encoder_layers": 8,
        "num_decoder_layers": 8,
        "dim_feedforward": 1536,
    },
    "small": {
        "d_model": 256,
        "nhead": 4,
        "num_encoder_layers": 6,
        "num_decoder_layers": 3,
        "dim_feedforward": 1024,
    },
    "tiny": {
        "d_model": 128,
        "nhead": 4,
        "num_encoder_layers": 3,
        "num_decoder_layers": 2,
        "dim_feedforward": 512,
        "dropout": 0.3,
    },
}


def preset(name: str, vocab_size: int, **overrides: Any) -> ModelConfig:
    """The `ModelConfig` of a named preset; raises `UserError` for an unknown name."""
    if name not in PRESETS:
        raise UserError(f"unknown model preset {name!r}; known: {', '.join(sorted(PRESETS))}")
    return parse(ModelConfig, {**PRESETS[name], "vocab_size": vocab_size, **overrides}, where=f"preset {name}")


@dataclass(config=STRICT, frozen=True, kw_only=True)
class DecodeConfig:
    """How one sentence is decoded. The defaults are those of the command line.

    A hypothesis scores `log_prob / length ** length_penalty`; its length counts the end token.
    `max_length` tokens, end token included, is at most `max_length_factor * S + max_length_extra` for a source of S
    tokens. `early_stopping=True` ends a sentence when `beam_size` hypotheses are complete (Bahdanau et al. 2014, as
    Marian and fairseq do); `False` goes on until no live hypothesis can still beat the worst kept one (Huang et al.
    2017, "When to Finish?"). An n-gram of up to four tokens comes at most `max_in_a_row` times in a row, unless the
    source repeats itself as often; 0: as often as it likes. `search` names a registered search; "auto": the other
    settings say which.
    """

    beam_size: int = Field(default=4, ge=1, le=MOST_ROWS)
    length_penalty: float = Field(default=1.0, ge=0, le=10)
    n_best: int = Field(default=1, ge=1, le=MOST_ROWS)
    early_stopping: bool = True
    max_length_factor: float = Field(default=2.0, ge=0, le=1000)
    max_length_extra: int = Field(default=10, ge=1, le=MOST_POSITIONS)
    no_repeat_ngram_size: int = Field(default=0, ge=0, le=MOST_POSITIONS)
    max_in_a_row: int = Field(default=0, ge=0, le=MOST_POSITIONS)
    search: str = Field(default="auto", min_length=1, max_length=80)
    sampling: bool = False
    temperature: float = Field(default=1.0, ge=0.001, le=1000)
    top_k: int = Field(default=0, ge=0, le=MOST_VOCABULARY)
    top_p: float = Field(default=1.0, gt=0, le=1)
    seed: int = Field(default=0, gt=-(2**127), lt=2**127)

    @model_validator(mode="after")
    def _check_n_best(self) -> "DecodeConfig":
        if self.search_name in ("greedy", "beam") and self.n_best > self.beam_size:
            raise ValueError(
                f"n_best {self.n_best} is more than beam_size {self.beam_size}; a beam gives at most its size"
            )
        return self

    @property
    def search_name(self) -> str:
        """Which search: what `search` names, else `sampling`, or `beam`, or `greedy` for one beam."""
        if self.search != "auto":
            return self.search
        return "sampling" if self.sampling else "beam" if self.beam_size > 1 else "greedy"

    def max_length(self, source_length: int) -> int:
        """Longest target, in tokens, for a source of `source_length` tokens."""
        return int(self.max_length_factor * source_length) + self.max_length_extra


def parse(cls: type[T], values: object, *, where: str) -> T:
    """`cls` from plain values; raises `UserError` in one line that names `where`, the key and what would be right."""
    try:
        return TypeAdapter(cls).validate_python(values)
    except ValidationError as error:
        raise UserError(f"{where}: {_describe(error, cls)}") from None


MOST_KEYS = 20  # unknown keys that are named; looking for the nearest known one takes time
_UNKNOWN = ("unexpected_keyword_argument", "extra_forbidden")


def _describe(error: ValidationError, cls: type) -> str:
    found = error.errors()
    # A misspelt key is also a missing one when it is required; the spelling is what helps.
    unknown = [one["loc"] for one in found if one["type"] in _UNKNOWN]
    if unknown:
        return _describe_unknown(unknown, cls)
    first = found[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "missing":
        return f"missing key {key!r}"
    message = first["msg"].removeprefix("Value error, ")
    if not key:
        return message
    return f"{key} = {quoted(first['input'])}: {message[0].lower()}{message[1:]}"


def _describe_unknown(places: list[tuple[int | str, ...]], cls: type) -> str:
    """Unknown keys, `MOST_KEYS` of them at most, each with the nearest known one, and what their sections know."""
    told = []
    for place in places[:MOST_KEYS]:
        key, here = ".".join(map(str, place))[:80], ".".join(map(str, place[:-1]))
        near = _nearest(str(place[-1])[:80], here, _paths(cls))
        told.append(f"{key!r}" + (f"; did you mean {near!r}?" if near else ""))
    if len(places) > MOST_KEYS:
        told.append(f"and {len(places) - MOST_KEYS:,} more")
    sections = dict.fromkeys(place[:-1] for place in places[:MOST_KEYS])
    valid = [
        f"[{'.'.join(map(str, section))}] knows: {', '.join(keys)}" if section else f"known: {', '.join(keys)}"
        for section in sections
        if (keys := _keys(cls, section))
    ]
    return f"unknown key{'s' if len(told) > 1 else ''} {', '.join(told)}" + "".join(f"; {line}" for line in valid)


def _nearest(key: str, section: str, paths: list[tuple[str, ...]]) -> str | None:
    """The known key most like `key`: by its name alone in the same section, dotted in another."""
    likeness: dict[str, float] = {}
    for *sections, last in paths:
        own = ".".join(sections) == section
        ratio = difflib.SequenceMatcher(None, key, last).ratio()
        # In its own section a near spelling will do, in another only nearly the same one.
        if ratio >= (0.6 if own else 0.85):
            likeness[last if own else ".".join((*sections, last))] = ratio + own * 1e-6
    return max(likeness, key=lambda name: likeness[name], default=None)


def _paths(cls: Any) -> list[tuple[str, ...]]:
    """Every key of `cls`, those of its sections behind the section's name."""
    paths: list[tuple[str, ...]] = []
    for field in dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ():
        paths.append((field.name,))
        paths += [(field.name, *path) for path in _paths(field.type)]
    return paths


def _keys(cls: Any, sections: tuple[int | str, ...]) -> list[str]:
    """The keys that a (nested) section of `cls` knows; none for what isn't a dataclass."""
    return [path[-1] for path in _paths(cls) if path[:-1] == tuple(sections)]


def apply_setting(values: dict[str, Any], setting: str) -> None:
    """Puts `key=value` into nested `values`: keys dotted, values TOML, a bare word text. Raises `UserError`."""
    key, equals, text = setting.partition("=")
    if not equals or not key.strip():
        raise UserError(f"--set {setting}: write key=value, e.g. --set training.max_steps=1000")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):  # no TOML, a number of thousands of digits, brackets without end
        value = text
    *sections, last = key.strip().split(".")
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise UserError(f"--set {setting}: {section!r} is not a section")
    values[last] = value


def to_json(config: object) -> str:
    """A config as indented JSON, read back by `from_json`."""
    return json_text(TypeAdapter(type(config)).dump_python(config, mode="json"), indent=2, sort_keys=True) + "\n"


def from_json(cls: type[T], path: Path) -> T:
    """Reads a config written by `to_json`.

    Raises `UserError` when the file is missing, larger than `LARGEST_JSON`, not JSON, holds a key twice or is foreign.
    """
    try:
        text = read_limited(path, LARGEST_JSON).decode("utf-8-sig")
        values = json.loads(text, object_pairs_hook=_without_repeats, parse_constant=_refuse_constant)
    except UserError:
        raise
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read as JSON ({error})") from None
    return parse(cls, values, where=str(path))


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        [(repeated, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"key {quoted(repeated)} stands there twice")
    return values


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")
