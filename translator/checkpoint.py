"""Checkpoints: a folder of `model.safetensors`, `config.json` and `tokenizer.model`; no pickle is written or read."""

import dataclasses
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import safetensors.torch
import torch
from pydantic.dataclasses import dataclass
from safetensors import SafetensorError, safe_open
from torch import Tensor

from translator.config import STRICT, DecodeConfig, ModelConfig, from_json, to_json
from translator.errors import UserError, quoted
from translator.languages import LanguageCode
from translator.model import TranslationModel
from translator.search.base import check_finite
from translator.textio import atomic_write_bytes, check_file
from translator.tokenizer import Tokenizer

DEFAULT_CHECKPOINT = Path(__file__).resolve().parent.parent / "checkpoints" / "default"

WEIGHTS, CONFIG, TOKENIZER = "model.safetensors", "config.json", "tokenizer.model"
BEST = "best"  # what a training run calls its best checkpoint
LARGEST_HEADER = 16 << 20  # bytes of names and shapes; the largest model allowed needs a fifth


@dataclass(config=STRICT, frozen=True, kw_only=True)
class CheckpointConfig:
    """What `config.json` holds: languages, the model's shape, and how to decode by default."""

    source_language: LanguageCode
    target_language: LanguageCode
    model: ModelConfig
    decode: DecodeConfig = dataclasses.field(default_factory=DecodeConfig)
    format: Literal[1] = 1


@dataclasses.dataclass(slots=True)
class Checkpoint:
    """A loaded checkpoint."""

    model: TranslationModel
    tokenizer: Tokenizer
    config: CheckpointConfig


def write_checkpoint(folder: Path, checkpoint: Checkpoint, weights: dict[str, Tensor] | None = None) -> None:
    """Writes the three files into an existing folder; `weights` stand in for the model's own (in half precision, say).

    Raises `UserError` when the disk is full or the folder can't be written.
    """
    tensors = checkpoint.model.state_dict() if weights is None else weights
    write_tensors(folder / WEIGHTS, tensors)
    atomic_write_bytes(folder / CONFIG, to_json(checkpoint.config).encode())
    atomic_write_bytes(folder / TOKENIZER, checkpoint.tokenizer.model)


def checkpoint_folder(folder: Path) -> Path:
    """`folder` when it holds a checkpoint; its `best` when it is the folder of a training run.

    Raises `UserError` when it is neither.
    """
    try:
        if not folder.is_dir():
            hint = "; a PyTorch pickle is never read" if folder.is_file() else ""
            raise UserError(f"{folder}: a checkpoint is a folder with {WEIGHTS}, {CONFIG} and {TOKENIZER}{hint}")
        if not os.path.lexists(folder / CONFIG) and os.path.lexists(folder / BEST):
            folder = folder / BEST
            if not folder.is_dir():
                raise UserError(f"{folder}: leads nowhere; name the checkpoint's own folder")
        for name in (CONFIG, TOKENIZER, WEIGHTS):
            if not os.path.lexists(folder / name):
                raise UserError(f"{folder}: not a checkpoint of this program, {name} is missing")
    except OSError as error:
        raise UserError(f"{folder}: cannot be read ({error.strerror})") from None
    return folder


def read_checkpoint(folder: Path, device: torch.device | str = "cpu") -> Checkpoint:
    """The checkpoint in `folder`, or in its `best`, with its weights in fp32 on `device`, the model in eval mode.

    Nothing of the model's size is allocated before the files have been found to fit each other. Raises `UserError` for
    a missing, truncated, inconsistent, damaged or foreign checkpoint.
    """
    folder, config, tokenizer = _read_around(folder)
    with _opened(folder / WEIGHTS) as tensors:
        _skeleton(config, tensors, folder)
        model = TranslationModel(config.model)
        _copy_weights(model, tensors, folder / WEIGHTS)
    model = model.to(device).eval()
    with torch.inference_mode():  # finite weights may still be too large to compute with
        token = torch.tensor([[tokenizer.bos_id]], device=device)
        try:
            check_finite(model(token, token))
        except UserError as error:
            raise UserError(f"{folder / WEIGHTS}: {error}") from None
    return Checkpoint(model, tokenizer, config)


def map_checkpoint(folder: Path) -> Checkpoint:
    """As `read_checkpoint`, but with matrices where the file has them and in the type it stores them: nothing of the
    model's size is copied. For engines that pack them, and find numbers that aren't finite then.
    """
    folder, config, tokenizer = _read_around(folder)
    with _opened(folder / WEIGHTS) as tensors:
        model = _skeleton(config, tensors, folder)
        model.make_buffers()
        weights = {name: _read(tensors, name, folder / WEIGHTS) for name in model.state_dict()}
    for name, weight in weights.items():
        if weight.dim() == 1 or "positions" in name or weight.dtype == torch.float64:
            weights[name] = weight = weight.float()
            if not bool(weight.isfinite().all()):
                raise UserError(_damaged(folder / WEIGHTS, name))
    model.load_state_dict(weights, assign=True)
    return Checkpoint(model.eval().requires_grad_(False), tokenizer, config)


def _read_around(folder: Path) -> tuple[Path, CheckpointConfig, Tokenizer]:
    """The checkpoint's own folder, and its files but for the weights."""
    folder = checkpoint_folder(folder)
    config = from_json(CheckpointConfig, folder / CONFIG)
    tokenizer = Tokenizer.load(folder / TOKENIZER)
    if tokenizer.vocab_size != config.model.vocab_size:
        raise UserError(
            f"{folder}: {TOKENIZER} has {tokenizer.vocab_size} pieces and {CONFIG} says {config.model.vocab_size}"
        )
    return folder, config, tokenizer


def _skeleton(config: CheckpointConfig, tensors: safe_open, folder: Path) -> TranslationModel:
    """The model without storage, found to fit the file."""
    layers, found = config.model.num_encoder_layers + config.model.num_decoder_layers, len(tensors.keys())
    if found < layers:  # even a model without storage takes seconds to put together when it has many layers
        raise UserError(f"{folder / WEIGHTS}: {found} tensors are too few for the {layers} layers of {CONFIG}")
    with torch.device("meta"):
        model = TranslationModel(config.model)
    _check_fits(model, tensors, folder / WEIGHTS)
    return model


def check_ensemble(checkpoints: Sequence[Checkpoint], names: Sequence[object]) -> None:
    """Raises `UserError`, naming the first that differs, unless all translate between the same languages and tokens."""
    first = checkpoints[0]
    for checkpoint, name in zip(checkpoints[1:], names[1:], strict=True):
        languages = (checkpoint.config.source_language, checkpoint.config.target_language)
        wanted = (first.config.source_language, first.config.target_language)
        if languages != wanted:
            raise UserError(
                f"{name}: translates {' to '.join(languages)} and {names[0]} {' to '.join(wanted)}; "
                "models decode together when their languages are the same"
            )
        if checkpoint.tokenizer.model != first.tokenizer.model:
            raise UserError(
                f"{name}: {TOKENIZER} is another one than in {names[0]}; models decode together when they share it"
            )


_FLOATS = ("F16", "BF16", "F32", "F64")


def _check_fits(model: torch.nn.Module, tensors: safe_open, path: Path) -> None:
    """Compares the file's header with the model, which may be on the meta device."""
    wanted, names = model.state_dict(), set(tensors.keys())
    for name in sorted(wanted.keys() - names)[:1]:
        raise UserError(f"{path}: tensor {name!r} is missing; the file belongs to another model")
    for name in sorted(names - wanted.keys())[:1]:
        raise UserError(f"{path}: tensor {quoted(name)} is unknown; the file belongs to another model")
    for name, tensor in wanted.items():
        found = tensors.get_slice(name)
        shape, dtype = tuple(found.get_shape()), found.get_dtype()
        if shape != tuple(tensor.shape):
            raise UserError(
                f"{path}: tensor {name!r} has shape {quoted(shape)}, the configuration asks for {tuple(tensor.shape)}"
            )
        if dtype not in _FLOATS:
            raise UserError(f"{path}: tensor {name!r} holds {dtype}; weights are {', '.join(_FLOATS)}")


@torch.no_grad()
def _copy_weights(model: torch.nn.Module, tensors: safe_open, path: Path) -> None:
    """One tensor at a time, so that no second copy of all is ever held."""
    for name, mine in model.state_dict().items():
        mine.copy_(_read(tensors, name, path))
        if not bool(mine.isfinite().all()):
            raise UserError(_damaged(path, name))


def _damaged(path: Path, name: str) -> str:
    return f"{path}: tensor {name!r} holds NaN or infinite values; the model is damaged"


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """A safetensors file, written beside and renamed; raises `UserError` on a full disk."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    data = safetensors.torch.save(plain, metadata)
    atomic_write_bytes(path, data)


@contextmanager
def _opened(path: Path) -> Iterator[safe_open]:
    """A safetensors file of which only the header was read; raises `UserError` when it isn't one or is cut short."""
    check_file(path)
    try:
        with path.open("rb") as stream:
            header = int.from_bytes(stream.read(8), "little")
        if header > LARGEST_HEADER:
            raise UserError(f"{path}: no model needs a header of {header:,} bytes; at most {LARGEST_HEADER:,} are read")
        tensors = safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: not a whole safetensors file ({error})") from None
    with tensors:
        yield tensors


def _read(tensors: safe_open, name: str, path: Path) -> Tensor:
    try:
        return tensors.get_tensor(name)
    except (SafetensorError, OSError, AttributeError, RuntimeError, TypeError) as error:
        raise UserError(f"{path}: tensor {quoted(name)} cannot be read ({error})") from None


@contextmanager
def replaced_folder(folder: Path) -> Iterator[Path]:
    """A new folder to fill, which becomes `folder` when the block ends well and vanishes when it doesn't.

    Raises `UserError` when `folder` can't be made. `folder` must not exist yet: a rename can't replace a full one.
    """
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        yield unfinished
        unfinished.replace(folder)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror})") from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
