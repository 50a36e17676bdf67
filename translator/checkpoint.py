"""Checkpoints: a folder of `model.safetensors`, `config.json` and `tokenizer.model`; no pickle is written or read."""

import dataclasses
import json
import shutil
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import safetensors.torch
import torch
from pydantic.dataclasses import dataclass
from safetensors import SafetensorError
from torch import Tensor

from translator.config import STRICT, DecodeConfig, ModelConfig, from_json, to_json
from translator.errors import UserError
from translator.languages import LanguageCode
from translator.model import TranslationModel
from translator.textio import atomic_write_bytes
from translator.tokenizer import Tokenizer

DEFAULT_CHECKPOINT = Path(__file__).resolve().parent.parent / "checkpoints" / "default"

WEIGHTS, CONFIG, TOKENIZER = "model.safetensors", "config.json", "tokenizer.model"


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


def read_checkpoint(folder: Path, device: torch.device | str = "cpu") -> Checkpoint:
    """The checkpoint in `folder`, its weights in fp32 on `device`, the model in eval mode.

    Raises `UserError` for a missing, truncated, inconsistent or foreign checkpoint.
    """
    if not folder.is_dir():
        hint = "; a PyTorch pickle is never read" if folder.is_file() else ""
        raise UserError(f"{folder}: a checkpoint is a folder with {WEIGHTS}, {CONFIG} and {TOKENIZER}{hint}")
    for name in (CONFIG, TOKENIZER, WEIGHTS):
        if not (folder / name).is_file():
            raise UserError(f"{folder}: not a checkpoint of this program, {name} is missing")
    config = from_json(CheckpointConfig, folder / CONFIG)
    tokenizer = Tokenizer.load(folder / TOKENIZER)
    if tokenizer.vocab_size != config.model.vocab_size:
        raise UserError(
            f"{folder}: {TOKENIZER} has {tokenizer.vocab_size} pieces and {CONFIG} says {config.model.vocab_size}"
        )
    model = TranslationModel(config.model)
    load_weights(model, read_tensors(folder / WEIGHTS), folder / WEIGHTS)
    return Checkpoint(model.to(device).eval(), tokenizer, config)


def load_weights(model: torch.nn.Module, tensors: dict[str, Tensor], path: Path) -> None:
    """Copies tensors into a model of just these names and shapes; raises `UserError` naming the first that differs."""
    wanted = model.state_dict()
    for name in sorted(wanted.keys() | tensors.keys()):
        if name not in tensors:
            raise UserError(f"{path}: tensor {name!r} is missing; the file belongs to another model")
        if name not in wanted:
            raise UserError(f"{path}: tensor {name!r} is unknown; the file belongs to another model")
        if wanted[name].shape != tensors[name].shape:
            raise UserError(
                f"{path}: tensor {name!r} has shape {tuple(tensors[name].shape)}, the configuration asks for "
                f"{tuple(wanted[name].shape)}"
            )
    model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """A safetensors file, written beside and renamed; raises `UserError` on a full disk."""
    data = safetensors.torch.save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    atomic_write_bytes(path, data)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file, on the CPU; raises `UserError` when it isn't one or is cut short."""
    try:
        return safetensors.torch.load_file(path)
    except (SafetensorError, OSError, struct.error, json.JSONDecodeError) as error:
        raise UserError(f"{path}: not a whole safetensors file ({error})") from None


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
