"""What turns gradients into a step: AdamW, or Muon for the matrices of the layers and AdamW for the rest."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:  # a recipe reads the names of the optimisers from here
    from train.recipe import TrainingConfig


class Optimizer:
    """One or two of PyTorch's optimisers under one rate, with their state by parameter, in the model's order."""

    def __init__(self, model: nn.Module, settings: TrainingConfig) -> None:
        self.parameters = list(model.parameters())
        self.parts = OPTIMIZERS[settings.optimizer](model, settings)
        self._part_of = {
            parameter: part for part in self.parts for group in part.param_groups for parameter in group["params"]
        }

    def set_rate(self, rate: float) -> None:
        """The learning rate of the next step."""
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = rate

    def step(self, side_by_side: Callable[[list[Callable[[], None]]], None]) -> None:
        """Changes the parameters by their gradients, and forgets those; `side_by_side` does several things at once."""
        side_by_side([partial(_step, part) for part in self.parts])

    def state(self) -> dict[str, Tensor]:
        """Everything remembered between steps, by `parameter.name`."""
        return {
            f"{index}.{name}": value
            for index, parameter in enumerate(self.parameters)
            for name, value in self._part_of[parameter].state[parameter].items()
        }

    def expected(self) -> dict[str, Tensor]:
        """Shapes and types of what `state` gives after a step; their values mean nothing."""
        found: dict[str, Tensor] = {}
        for index, parameter in enumerate(self.parameters):
            if isinstance(self._part_of[parameter], torch.optim.AdamW):
                found |= {f"{index}.exp_avg": parameter, f"{index}.exp_avg_sq": parameter}
                found[f"{index}.step"] = torch.tensor(0.0)
            else:
                found[f"{index}.momentum_buffer"] = parameter
        return found

    def load(self, state: dict[str, Tensor]) -> None:
        """Puts back what `state` gave; names, shapes and types have been compared before."""
        for key, value in state.items():
            index, name = key.split(".")
            parameter = self.parameters[int(index)]
            self._part_of[parameter].state[parameter][name] = value if name == "step" else value.to(parameter.device)


def _step(part: torch.optim.Optimizer) -> None:
    part.step()
    part.zero_grad(set_to_none=True)


def _adamw(parameters: list[nn.Parameter], settings: TrainingConfig) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        parameters,
        lr=settings.learning_rate,
        betas=settings.adam_betas,
        weight_decay=settings.weight_decay,
        fused=True,
    )


def _adamw_alone(model: nn.Module, settings: TrainingConfig) -> list[torch.optim.Optimizer]:
    return [_adamw(list(model.parameters()), settings)]


def _muon(model: nn.Module, settings: TrainingConfig) -> list[torch.optim.Optimizer]:
    """Jordan et al. 2024, with the rate made AdamW's (Liu et al. 2025, "Muon is scalable"), so that one rate does."""
    stacks = (model.get_submodule("encoder"), model.get_submodule("decoder"))
    hidden = [parameter for stack in stacks for parameter in stack.parameters() if parameter.dim() == 2]
    chosen = {id(parameter) for parameter in hidden}
    rest = [parameter for parameter in model.parameters() if id(parameter) not in chosen]
    muons: list[torch.optim.Optimizer] = [
        torch.optim.Muon(
            share, lr=settings.learning_rate, weight_decay=settings.weight_decay, adjust_lr_fn="match_rms_adamw"
        )
        for share in (hidden[::2], hidden[1::2])
        if share
    ]
    return [*muons, _adamw(rest, settings)]


OPTIMIZERS: dict[str, Callable[[nn.Module, TrainingConfig], list[torch.optim.Optimizer]]] = {
    "adamw": _adamw_alone,
    "muon": _muon,
}
"""By the name that `training.optimizer` gives."""
