"""What a run needs to go on exactly where it stopped, as safetensors and JSON beside the model."""

from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass
from safetensors import SafetensorError, safe_open
from torch import Tensor

from train.auto import Auto
from train.optimizer import Optimizer
from train.recipe import MetricName, Recipe
from translator.checkpoint import Checkpoint, write_checkpoint, write_tensors
from translator.config import STRICT, from_json, to_json
from translator.errors import UserError
from translator.textio import atomic_write_bytes

STATE, COUNTERS = "training.safetensors", "training.json"
_MOST = 10**15  # of anything counted; beyond it sums in floats are no longer exact


_Count = Annotated[int, Field(ge=0, le=_MOST, strict=True)]
_Amount = Annotated[float, Field(ge=0, le=_MOST, strict=True)]


@dataclass(config=STRICT, slots=True)
class Counters:
    """Where a run stands. `position` is the next batch of epoch `epoch`, which counts from 1; times are seconds of
    training; `logged_…` add up since the last line of the log; `best` is the best value of `best_metric` so far, turned
    so that more is better, and `best_step` the step it was found at."""

    step: _Count = 0
    epoch: Annotated[_Count, Field(ge=1)] = 1
    position: _Count = 0
    target_tokens: _Count = 0
    seconds: _Amount = 0.0
    logged_loss: Annotated[float, Field(ge=-1, le=_MOST, strict=True)] = 0.0  # rounding may end just below 0
    logged_tokens: _Count = 0
    logged_steps: _Count = 0
    logged_seconds: _Amount = 0.0
    best: Annotated[float, Field(strict=True)] | None = None
    best_metric: MetricName | None = None
    best_step: _Count = 0
    stale_validations: _Count = 0
    fingerprint: Annotated[str, Field(max_length=64)] = ""

    @model_validator(mode="after")
    def _check(self) -> "Counters":
        for name, most in (("epoch", self.step + 1), ("best_step", self.step), ("logged_steps", self.step),
                           ("stale_validations", self.step), ("logged_tokens", self.target_tokens)):  # fmt: skip
            if getattr(self, name) > most:
                raise ValueError(f"{name} = {getattr(self, name)} cannot be: the run is at step {self.step}")
        if (self.best is None) != (self.best_metric is None):
            raise ValueError("best and best_metric go together, one of them is missing")
        return self


@dataclass(config=STRICT, frozen=True, kw_only=True)
class Saved:
    """What `training.json` holds: the run that wrote it, where it stood, and the recipe it followed."""

    run: str
    counters: Counters
    recipe: Recipe
    format: Literal[2] = 2

    @model_validator(mode="after")
    def _check(self) -> "Saved":
        for name in ("tokenizer", "training", "evaluation"):
            for key, value in vars(getattr(self.recipe, name)).items():
                if isinstance(value, Auto):
                    raise ValueError(f"recipe.{name}.{key} is auto; a saved step has the number that was worked out")
        return self


def write_state(
    folder: Path, checkpoint: Checkpoint, weights: dict[str, Tensor], optimizer: Optimizer, saved: Saved
) -> None:
    """Writes a checkpoint anyone can translate with, plus the training state, into an existing folder.

    `checkpoint.model` holds the averaged weights, `weights` the ones being trained. Raises `UserError` on a full disk.
    """
    write_checkpoint(folder, checkpoint)
    tensors = {f"model.{name}": tensor for name, tensor in weights.items()}
    tensors |= {f"optimizer.{name}": value for name, value in optimizer.state().items()}
    tensors["rng.cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        tensors["rng.cuda"] = torch.cuda.get_rng_state()
    write_tensors(folder / STATE, tensors)
    atomic_write_bytes(folder / COUNTERS, to_json(saved).encode())


def read_saved(folder: Path) -> Saved:
    """The counters and recipe of a saved step; raises `UserError` that names the field when they are missing or broken.

    Tensors and data are not looked at: `load_state` and the trainer compare those.
    """
    if not (folder / COUNTERS).exists():
        raise UserError(f"{folder}: there is no training state to resume from, {COUNTERS} is missing")
    return from_json(Saved, folder / COUNTERS)


def load_state(folder: Path, model: torch.nn.Module, optimizer: Optimizer, step: int) -> None:
    """Puts weights, optimiser and random state back as they were when `folder` was saved after `step` steps.

    Everything is checked before anything is loaded: a fused optimiser trusts shapes and types blindly. Raises
    `UserError` that names the file and the tensor.
    """
    path = folder / STATE
    tensors = _read_fitting(path, _expected(model, optimizer))
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise UserError(f"{path}: tensor {name!r} holds values that are not finite")
        if name.endswith(".exp_avg_sq") and bool((tensor < 0).any()):
            raise UserError(f"{path}: tensor {name!r} holds negative values, squares are none")
        if name.startswith("optimizer.") and name.endswith(".step") and float(tensor) != step:
            raise UserError(f"{path}: tensor {name!r} is {float(tensor):g}, {COUNTERS} has counters.step = {step}")
    try:
        torch.set_rng_state(tensors["rng.cpu"])
        if torch.cuda.is_available() and "rng.cuda" in tensors:
            torch.cuda.set_rng_state(tensors["rng.cuda"])
    except RuntimeError as error:
        raise UserError(f"{path}: 'rng' is not a generator's state ({str(error).splitlines()[0]})") from None
    model.load_state_dict({name: tensors[f"model.{name}"] for name in model.state_dict()})
    prefix = "optimizer."
    optimizer.load({key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)})


def _expected(model: torch.nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Shapes and types, without values, of every tensor that must be there (`rng.cuda` only may)."""
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    tensors |= {f"optimizer.{name}": tensor for name, tensor in optimizer.expected().items()}
    tensors["rng.cpu"] = torch.get_rng_state()
    tensors["rng.cuda"] = (
        torch.cuda.get_rng_state() if torch.cuda.is_available() else torch.zeros(16, dtype=torch.uint8)
    )
    return {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}


def _read_fitting(path: Path, expected: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a file that has just those of `expected`, `rng.cuda` or not; its header is compared first."""
    most = sum(tensor.nbytes for tensor in expected.values()) + 1024 * len(expected)  # with room for the header
    try:
        if path.stat().st_size > most:
            raise UserError(f"{path}: {path.stat().st_size:,} bytes are more than this model's state, {most:,} at most")
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            for name in sorted((names ^ expected.keys()) - ({"rng.cuda"} - names)):
                state = "is missing" if name in expected else "is unknown"
                raise UserError(f"{path}: tensor {name!r} {state}; the file belongs to another model")
            tensors = {}
            for name in sorted(names):
                found, wanted = file.get_slice(name), expected[name]
                if tuple(found.get_shape()) != tuple(wanted.shape):
                    raise UserError(f"{path}: tensor {name!r} has shape {tuple(found.get_shape())}, the model asks for "
                                    f"{tuple(wanted.shape)}")  # fmt: skip
                if found.get_dtype() != _DTYPES[wanted.dtype]:
                    raise UserError(
                        f"{path}: tensor {name!r} is {found.get_dtype()}, the model asks for {_DTYPES[wanted.dtype]}"
                    )
            for name in names:
                tensors[name] = file.get_tensor(name)
            return tensors
    except (SafetensorError, OSError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path}: not a whole safetensors file ({error})") from None


_DTYPES = {torch.float32: "F32", torch.uint8: "U8"}
