"""The ways of decoding that a latency profile compares, each driven one token at a time."""

from typing import Literal, Protocol

import torch
from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass as validated
from torch import Tensor, nn

from translator.cache import CACHE_KINDS, DecoderCache
from translator.config import STRICT
from translator.diagnostics.bench import torch_decoder
from translator.model import TranslationModel

UNCACHED, TORCH = "none", "torch"
ARMS = (UNCACHED, *sorted(CACHE_KINDS), TORCH)


@validated(config=STRICT, frozen=True, kw_only=True)
class LatencySettings:
    """What to measure. Lengths in tokens; `capacity` is that of the static cache, `tokens` when None.

    `threads` None leaves PyTorch's setting. `warmup` passes of every arm come before `repeats` timed ones; the first is
    the check that arms agree. Raises `pydantic.ValidationError` for impossible values.
    """

    source_length: int = Field(default=40, ge=1)
    tokens: int = Field(default=128, ge=1)
    batch: int = Field(default=1, ge=1)
    beams: int = Field(default=1, ge=1)
    threads: int | None = Field(default=None, ge=1)
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    device: str = "cpu"
    repeats: int = Field(default=5, ge=1)
    warmup: int = Field(default=1, ge=1)
    capacity: int | None = Field(default=None, ge=1)
    arms: tuple[str, ...] = (UNCACHED, "dynamic", "static")
    seed: int = 0

    @model_validator(mode="after")
    def _check(self) -> "LatencySettings":
        unknown = [arm for arm in self.arms if arm not in ARMS]
        if unknown or not self.arms or len(set(self.arms)) < len(self.arms):
            raise ValueError(f"arms {self.arms} must be different ones of {', '.join(ARMS)}")
        if self.capacity is not None and self.capacity < self.tokens:
            raise ValueError(f"capacity {self.capacity} must hold the {self.tokens} tokens")
        return self


class Arm(Protocol):
    """One way of decoding, driven from outside: the next token is always the caller's."""

    def start(self) -> None:
        """Once before the first token of a pass."""

    def step(self, tokens: Tensor, t: int) -> Tensor:
        """Logits `(rows, V)` for the token after `tokens[:, t]`; `tokens` is `(rows, tokens)` with t + 1 filled in."""

    def finish(self) -> None:
        """Once after the last token: nobody waits for a token any more."""


class CachedArm:
    """A cache of one kind: each step sees one token."""

    def __init__(self, model: TranslationModel, memory: Tensor, kind: str, capacity: int | None, beams: int) -> None:
        self.model, self.memory, self.beams = model, memory, beams
        self.kind, self.capacity = kind, capacity
        self.cache: DecoderCache | None = None

    def start(self) -> None:
        """`model.start()`."""
        self.cache = self.model.start(self.memory, kind=self.kind, capacity=self.capacity, beams=self.beams)

    def step(self, tokens: Tensor, t: int) -> Tensor:
        """See `Arm.step`."""
        assert self.cache is not None
        return self.model.logits(self.model.decode(tokens[:, t : t + 1], self.cache)[:, -1])

    def finish(self) -> None:
        """Frees the cache."""
        self.cache = None


class UncachedArm:
    """The whole prefix at every token through the same decoder; one row of memory for each row of tokens."""

    def __init__(self, model: TranslationModel, memory: Tensor, beams: int) -> None:
        self.model, self.memory = model, memory.repeat_interleave(beams, dim=0)

    def start(self) -> None:
        """Nothing is kept between tokens, so nothing is made ready."""

    def finish(self) -> None:
        """Nothing to free."""

    def step(self, tokens: Tensor, t: int) -> Tensor:
        """See `Arm.step`."""
        return self.model.logits(self.model.decode(tokens[:, : t + 1], self.memory)[:, -1])


class TorchArm(UncachedArm):
    """`UncachedArm` with `nn.TransformerDecoder` in place of the cached decoder, its parameters shared."""

    def __init__(self, model: TranslationModel, memory: Tensor, beams: int, tokens: int) -> None:
        super().__init__(model, memory, beams)
        self.decoder = torch_decoder(model)
        self.mask = nn.Transformer.generate_square_subsequent_mask(tokens, device=memory.device, dtype=memory.dtype)

    def step(self, tokens: Tensor, t: int) -> Tensor:
        """See `Arm.step`."""
        positions = self.model.target_positions(torch.arange(t + 1, device=tokens.device))
        x = self.model._embed(tokens[:, : t + 1], positions)
        mask = self.mask[: t + 1, : t + 1]
        return self.model.logits(self.decoder(x, self.memory, tgt_mask=mask, tgt_is_causal=True)[:, -1])


def make_arms(model: TranslationModel, settings: LatencySettings, memory: Tensor) -> dict[str, Arm]:
    """The arms of `settings` by name, all on `model` and the encoder output `memory` `(B, S, D)`."""
    arms: dict[str, Arm] = {}
    for name in settings.arms:
        if name == UNCACHED:
            arms[name] = UncachedArm(model, memory, settings.beams)
        elif name == TORCH:
            arms[name] = TorchArm(model, memory, settings.beams, settings.tokens)
        else:
            capacity = (settings.capacity or settings.tokens) if name == "static" else None
            arms[name] = CachedArm(model, memory, name, capacity, settings.beams)
    return arms
