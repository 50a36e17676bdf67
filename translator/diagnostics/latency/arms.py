"""The ways of decoding that a latency profile compares, each driven one token at a time."""

from typing import Literal, Protocol

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass as validated
from torch import Tensor

from translator.cache import CACHE_KINDS, CacheSpec, DecoderCache
from translator.config import STRICT
from translator.diagnostics.subject import Subject
from translator.errors import UserError

UNCACHED, TORCH = "none", "torch"


def known_arms() -> tuple[str, ...]:
    """Every way of decoding there is: without a cache, with each container, PyTorch's own decoder."""
    return (UNCACHED, *sorted(CACHE_KINDS), TORCH)


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
        known = known_arms()
        unknown = [arm for arm in self.arms if arm not in known]
        if unknown or not self.arms or len(set(self.arms)) < len(self.arms):
            raise ValueError(f"arms {self.arms} must be different ones of {', '.join(known)}")
        if self.capacity is not None and self.capacity < self.tokens:
            raise ValueError(f"capacity {self.capacity} must hold the {self.tokens} tokens")
        return self


class Arm(Protocol):
    """One way of decoding, driven from outside: the next token is always the caller's.

    `nbytes` is what its cache held at the end of the last pass.
    """

    nbytes: int

    def start(self) -> None:
        """Once before the first token of a pass."""

    def step(self, tokens: Tensor, t: int) -> Tensor:
        """Logits `(rows, V)` for the token after `tokens[:, t]`; `tokens` is `(rows, tokens)` with t + 1 filled in."""

    def finish(self) -> None:
        """Once after the last token: nobody waits for a token any more."""


class CachedArm:
    """A cache of one kind: each step sees one token."""

    def __init__(self, subject: Subject, memory: Tensor, spec: CacheSpec) -> None:
        self.subject, self.memory, self.spec = subject, memory, spec
        self.cache: DecoderCache | None = None
        self.nbytes = 0

    def start(self) -> None:
        """Cross-attention K and V, and an empty cache."""
        self.cache = self.subject.start(self.memory, None, self.spec)

    def step(self, tokens: Tensor, t: int) -> Tensor:
        """See `Arm.step`."""
        assert self.cache is not None
        return self.subject.cached(tokens[:, t : t + 1], self.cache)[:, -1]

    def finish(self) -> None:
        """Frees the cache, having noted its bytes."""
        if self.cache is not None:
            self.nbytes = self.cache.nbytes
        self.cache = None


class UncachedArm:
    """The whole prefix at every token through the same decoder; one row of memory for each row of tokens."""

    nbytes = 0

    def __init__(self, subject: Subject, memory: Tensor, beams: int) -> None:
        self.subject, self.memory = subject, memory.repeat_interleave(beams, dim=0)

    def start(self) -> None:
        """Nothing is kept between tokens, so nothing is made ready."""

    def finish(self) -> None:
        """Nothing to free."""

    def step(self, tokens: Tensor, t: int) -> Tensor:
        """See `Arm.step`."""
        return self.subject.uncached(tokens[:, : t + 1], self.memory, None, since=t)[:, -1]


class TorchArm(UncachedArm):
    """`UncachedArm` with `nn.TransformerDecoder` in place of the cached decoder, with the same weights."""

    def step(self, tokens: Tensor, t: int) -> Tensor:
        """See `Arm.step`."""
        return self.subject.by_another(tokens[:, : t + 1], self.memory, since=t)[:, -1]


def make_arms(subject: Subject, settings: LatencySettings, memory: Tensor) -> dict[str, Arm]:
    """The arms of `settings` by name, all on `subject` and the encoder output `memory` `(B, S, D)`.

    Raises `UserError` for `torch` where there is no second implementation of the decoder.
    """
    arms: dict[str, Arm] = {}
    for name in settings.arms:
        if name == UNCACHED:
            arms[name] = UncachedArm(subject, memory, settings.beams)
        elif name == TORCH:
            if subject.independent is None:
                raise UserError("arm 'torch': PyTorch has no decoder with this attention structure")
            arms[name] = TorchArm(subject, memory, settings.beams)
        else:
            spec = CacheSpec.for_targets(name, settings.capacity or settings.tokens, beams=settings.beams)
            arms[name] = CachedArm(subject, memory, spec)
    return arms
