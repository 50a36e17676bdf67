"""Checkpoints: a folder of `model.safetensors`, `config.json` and `tokenizer.model`; no pickle is written or read."""

import dataclasses
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

import safetensors.torch
import torch
from pydantic.dataclasses import dataclass
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.overrides import TorchFunctionMode

from translator.config import STRICT, DecodeConfig, ModelConfig, from_json, to_json
from translator.errors import UserError, quoted
from translator.languages import LanguageCode
from translator.model import TranslationModel
from translator.search.base import check_finite
from translator.textio import atomic_write_bytes, check_file
from translator.tokenizer import Tokenizer

DEFAULT_CHECKPOINT = Path(__file__).resolve().parent.parent / "checkpoints" / "en-zh"

WEIGHTS, CONFIG, TOKENIZER = "model.safetensors", "config.json", "tokenizer.model"
PACKED_WEIGHTS = "packed.safetensors"  # in place of WEIGHTS, in what `translator export --to packed` writes
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


C = TypeVar("C", bound=CheckpointConfig)


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
        if is_packed(folder):
            raise UserError(f"{folder}: holds packed weights, for translating alone; name what they were made from")
        for name in (CONFIG, TOKENIZER, WEIGHTS):
            if not os.path.lexists(folder / name):
                raise UserError(f"{folder}: not a checkpoint of this program, {name} is missing")
    except OSError as error:
        raise UserError(f"{folder}: cannot be read ({error.strerror})") from None
    return folder


def is_packed(folder: Path) -> bool:
    """Whether `folder` holds packed weights, and not those that they were made from."""
    return os.path.lexists(folder / PACKED_WEIGHTS) and not os.path.lexists(folder / WEIGHTS)


def read_checkpoint(folder: Path, device: torch.device | str = "cpu") -> Checkpoint:
    """The checkpoint in `folder`, or in its `best`, with its weights in fp32 on `device`, the model in eval mode.

    Nothing of the model's size is allocated before the files have been found to fit each other. Raises `UserError` for
    a missing, truncated, inconsistent, damaged or foreign checkpoint.
    """
    folder = checkpoint_folder(folder)
    config, tokenizer = read_around(folder, CheckpointConfig)
    with opened(folder / WEIGHTS) as tensors:
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
    folder = checkpoint_folder(folder)
    config, tokenizer = read_around(folder, CheckpointConfig)
    with opened(folder / WEIGHTS) as tensors:
        model = _skeleton(config, tensors, folder)
        model.make_buffers()
        weights = {name: read_tensor(tensors, name, folder / WEIGHTS) for name in model.state_dict()}
    for name, weight in weights.items():
        if weight.dim() == 1 or "positions" in name or weight.dtype == torch.float64:
            weights[name] = weight = weight.float()
            if not bool(weight.isfinite().all()):
                raise UserError(_damaged(folder / WEIGHTS, name))
    model.load_state_dict(weights, assign=True)
    return Checkpoint(model.eval().requires_grad_(False), tokenizer, config)


def read_around(folder: Path, kind: type[C]) -> tuple[C, Tokenizer]:
    """A folder's files but for the weights; raises `UserError` when they don't fit each other."""
    config = from_json(kind, folder / CONFIG)
    tokenizer = Tokenizer.load(folder / TOKENIZER)
    if tokenizer.vocab_size != config.model.vocab_size:
        raise UserError(
            f"{folder}: {TOKENIZER} has {tokenizer.vocab_size} pieces and {CONFIG} says {config.model.vocab_size}"
        )
    return config, tokenizer


def _skeleton(config: CheckpointConfig, tensors: safe_open, folder: Path) -> TranslationModel:
    """The model without storage, found to fit the file."""
    model = shape_of(config.model, tensors, folder / WEIGHTS)
    check_fits(model.state_dict(), tensors, folder / WEIGHTS)
    return model


class Unfilled(TorchFunctionMode):
    """Leaves tensors as they are where they would be filled with random numbers: without storage, PyTorch would load
    its compiler for that, which takes longer than a translation.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (Tensor.normal_, Tensor.uniform_) or getattr(func, "__module__", None) == torch.nn.init.__name__:
            return args[0] if args else kwargs["tensor"]
        return (torch.empty if func is torch.randn else func)(*args, **kwargs)


def shape_of(config: ModelConfig, tensors: safe_open, path: Path) -> TranslationModel:
    """The model without storage, on the meta device; raises `UserError` when the file can't hold so many layers."""
    layers, found = config.num_encoder_layers + config.num_decoder_layers, len(tensors.keys())
    if found < layers:  # even a model without storage takes seconds to put together when it has many layers
        raise UserError(f"{path}: {found} tensors are too few for the {layers} layers of {CONFIG}")
    with torch.device("meta"), Unfilled():
        return TranslationModel(config)


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


_FLOATS, _BYTES = ("F16", "BF16", "F32", "F64"), ("U8",)


def check_fits(wanted: Mapping[str, Tensor], tensors: safe_open, path: Path) -> None:
    """Compares the file's header with tensors by name, which may be on the meta device.

    Raises `UserError` for other names, shapes, or types: bytes are bytes, and a weight is of any float type.
    """
    names = set(tensors.keys())
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
        allowed = _BYTES if tensor.dtype == torch.uint8 else _FLOATS
        if dtype not in allowed:
            raise UserError(f"{path}: tensor {name!r} holds {dtype}; weights are {', '.join(allowed)}")


@torch.no_grad()
def _copy_weights(model: torch.nn.Module, tensors: safe_open, path: Path) -> None:
    """One tensor at a time, so that no second copy of all is ever held."""
    for name, mine in model.state_dict().items():
        mine.copy_(read_tensor(tensors, name, path))
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
def opened(path: Path) -> Iterator[safe_open]:
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


def read_tensor(tensors: safe_open, name: str, path: Path) -> Tensor:
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
