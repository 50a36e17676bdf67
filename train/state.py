"""What a run needs to go on exactly where it stopped, as safetensors and JSON beside the model."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from translator.checkpoint import Checkpoint, read_tensors, replaced_folder, write_checkpoint, write_tensors
from translator.errors import UserError
from translator.textio import atomic_write_bytes

STATE, COUNTERS = "training.safetensors", "training.json"


@dataclasses.dataclass(slots=True)
class Counters:
    """Where a run stands. `position` is the next batch of epoch `epoch`; times are seconds of training; `logged_…` add
    up since the last line of the log."""

    step: int = 0
    epoch: int = 0
    position: int = 0
    target_tokens: int = 0
    seconds: float = 0.0
    logged_loss: float = 0.0
    logged_tokens: int = 0
    logged_steps: int = 0
    logged_seconds: float = 0.0
    best: float | None = None
    best_step: int = 0
    stale_validations: int = 0
    fingerprint: str = ""


def save_state(
    run: Path,
    checkpoint: Checkpoint,
    weights: dict[str, Tensor],
    optimizer: torch.optim.Optimizer,
    counters: Counters,
    recipe: dict[str, Any],
) -> Path:
    """Writes `run/step-N` as a checkpoint anyone can translate with, plus the training state; returns the folder.

    `checkpoint.model` holds the averaged weights, `weights` the ones being trained. Nothing appears under the final
    name before all of it is on disk. Raises `UserError` on a full disk.
    """
    folder = run / f"step-{counters.step:08d}"
    if not folder.exists():
        with replaced_folder(folder) as unfinished:
            write_checkpoint(unfinished, checkpoint)
            tensors = {f"model.{name}": tensor for name, tensor in weights.items()}
            tensors |= _optimizer_tensors(optimizer)
            tensors["rng.cpu"] = torch.get_rng_state()
            if torch.cuda.is_available():
                tensors["rng.cuda"] = torch.cuda.get_rng_state()
            write_tensors(unfinished / STATE, tensors)
            text = json.dumps({"counters": dataclasses.asdict(counters), "recipe": recipe}, indent=2)
            atomic_write_bytes(unfinished / COUNTERS, text.encode())
    return folder


def point(link: Path, folder: Path) -> None:
    """Makes `link` (`last`, `best`) lead to `folder`, in one step."""
    fresh = link.with_name(f".{link.name}.new")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(folder.name)
    fresh.replace(link)


def sweep(run: Path) -> None:
    """Deletes saved steps that neither `last` nor `best` leads to, and leftovers of interrupted writes."""
    kept = {link.resolve() for link in (run / "last", run / "best")}
    for folder in [*run.glob("step-*"), *run.glob(".step-*.unfinished")]:
        if folder.resolve() not in kept:
            shutil.rmtree(folder, ignore_errors=True)


def load_counters(folder: Path) -> Counters:
    """The counters of a saved step; raises `UserError` when there is no training state or it is broken."""
    path = folder / COUNTERS
    try:
        return TypeAdapter(Counters).validate_python(json.loads(path.read_text(encoding="utf-8"))["counters"])
    except FileNotFoundError:
        raise UserError(f"{folder}: there is no training state to resume from, {COUNTERS} is missing") from None
    except (OSError, KeyError, TypeError, json.JSONDecodeError, ValidationError):
        raise UserError(f"{path}: not a training state of this program") from None


def load_state(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Puts weights, optimiser and random state back as they were when `folder` was saved."""
    path = folder / STATE
    tensors = read_tensors(path)
    try:
        model.load_state_dict({name: tensors[f"model.{name}"] for name in model.state_dict()})
        _load_optimizer(optimizer, tensors)
        torch.set_rng_state(tensors["rng.cpu"])
        if torch.cuda.is_available() and "rng.cuda" in tensors:
            torch.cuda.set_rng_state(tensors["rng.cuda"])
    except (KeyError, RuntimeError) as error:
        raise UserError(f"{path}: does not fit this recipe's model ({str(error).splitlines()[0]})") from None


def _optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    state = optimizer.state_dict()["state"]
    return {f"optimizer.{index}.{name}": value for index, values in state.items() for name, value in values.items()}


def _load_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        if key.startswith("optimizer."):
            _, index, name = key.split(".")
            state.setdefault(int(index), {})[name] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
