"""What a cache should be like, checked once; and what containers there are."""

from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import torch

from translator.attention.band import Band
from translator.cache.codes import BITS
from translator.errors import UserError

CACHE_KINDS: dict[str, Any] = {}
"""Containers (subclasses of `KeyValueState`) by kind: settings, command line, diagnostics, tests read it from here."""

APPROXIMATE_KINDS: dict[str, Any] = {}
"""Those that don't keep everything, whose results are other ones: apart, since no proof of equality holds for them."""

Container = TypeVar("Container", bound=type)


def register(container: Container) -> Container:
    """Class decorator: makes a container known under its `kind`."""
    kinds = CACHE_KINDS if container.loses is None else APPROXIMATE_KINDS  # type: ignore[attr-defined]
    kinds[container.kind] = container  # type: ignore[attr-defined]
    return container


def container_of(kind: str) -> Any:
    """The container of that kind; raises `UserError` for an unknown one."""
    for kinds in (CACHE_KINDS, APPROXIMATE_KINDS):
        if kind in kinds:
            return kinds[kind]
    known = f"{', '.join(sorted(CACHE_KINDS))}; approximate: {', '.join(sorted(APPROXIMATE_KINDS))}"
    raise UserError(f"unknown cache kind {kind!r}; known: {known}")


def cache_options(text: str) -> dict[str, Any]:
    """A kind with what can be chosen of it, `quantised,bits=8`, as the fields of a `CacheSpec`.

    Raises `UserError` for an unknown kind or option, or a value that isn't a whole number.
    """
    kind, *settings = text.split(",")
    known = container_of(kind).options
    chosen: dict[str, Any] = {"kind": kind}
    for setting in settings:
        name, _, value = setting.partition("=")
        if name not in known:
            known_ = f"knows {', '.join(known)}" if known else "takes no options"
            raise UserError(f"--cache {text}: kind {kind!r} {known_}, not {name!r}")
        if not value.isascii() or not value.isdigit() or len(value) > 9:
            raise UserError(f"--cache {text}: {name} = {value!r} is not a whole number")
        chosen[name] = int(value)
    try:
        CacheSpec(**{**chosen, "capacity": 1})
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"--cache {text}: {error}") from None
    return chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSpec:
    """How a decoder keeps its state. Raises `ValueError` for an unknown kind or impossible sizes.

    `capacity`: tokens a row has room for (a kind that grows starts with it); `beams` K: rows a sentence; `block`: keys
    are shown in whole blocks of so many slots; `dtype` of K and V, by default the decoder's; `sentences`: slots of the
    grid, by default as many as the first memory brings; `source_capacity`: source tokens a slot has room for, by
    default as many as it needs.

    Of kind `paged`: `page` tokens a block, `blocks` in all (by default what the memory allows, see `BlockPool`), or a
    `pool` of them that several caches use. Of `quantised`: `bits` of a code, tokens and channels in a `group` that
    shares a scale, and how many of the newest tokens, the `residual`, stay exact at least. Of `sliding`: the `window`
    in tokens, a query's own included, and whether to keep the `past` that it doesn't show (1 or 0). Of `offloaded`:
    `offload` to host "memory" or a "file", by default the first for a GPU and the second for a CPU.
    """

    kind: str = "dynamic"
    capacity: int | None = None
    beams: int = 1
    block: int = 1
    dtype: torch.dtype | None = None
    sentences: int | None = None
    source_capacity: int | None = None
    page: int = 16
    blocks: int | None = None
    pool: Any = field(default=None, compare=False, repr=False)
    bits: int = 4
    group: int = 32
    residual: int = 32
    window: int | None = None
    past: int = 0
    offload: str | None = None

    def __post_init__(self) -> None:
        container = container_of(self.kind)
        for name in ("capacity", "beams", "block", "sentences", "source_capacity", "page", "blocks", "group", "window"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} {value} must be at least 1")
        if self.bits not in BITS:
            raise ValueError(f"bits {self.bits}: codes have {', '.join(map(str, BITS))} bits")
        if self.residual < 0:
            raise ValueError(f"residual {self.residual} must be at least 0")
        if self.offload not in (None, "memory", "file"):
            raise ValueError(f"offload {self.offload!r} must be 'memory' or 'file'")
        container.check_spec(self)
        if self.capacity is None and container.needs_capacity:
            raise ValueError(f"cache kind {self.kind!r} needs a capacity: the most tokens a row will hold")

    @classmethod
    def for_targets(cls, kind: str, longest: int, *, beams: int = 1) -> "CacheSpec":
        """For targets of at most `longest` tokens: a kind that must know gets that capacity, another grows."""
        if container_of(kind).needs_capacity:
            return cls(kind=kind, capacity=longest, beams=beams)
        return cls(kind=kind, beams=beams)

    def opened(self, device: torch.device | None = None) -> "OpenedSpec":
        """The same for one cache: what its layers' states are made from."""
        return OpenedSpec(**{part.name: getattr(self, part.name) for part in fields(CacheSpec)}, device=device)

    def with_beams(self, beams: int) -> "CacheSpec":
        """The same with another number of beams."""
        return replace(self, beams=beams)

    def pooled(self) -> "CacheSpec":
        """The same with a pool for all caches that are made from it, where the kind has such a thing."""
        return self if self.pool is not None else replace(self, pool=container_of(self.kind).new_pool(self))

    def key_value_state(
        self,
        rows: int,
        heads: int,
        width: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        value_width: int | None = None,
    ) -> Any:
        """An empty container of this kind, a `KeyValueState`: what structures with K and V return from `new_state`.

        Values are as wide as keys, or `value_width`; raises `UnsupportedCacheOperation` for a kind that can't do that.
        """
        container = container_of(self.kind)
        factory: dict[str, Any] = {"dtype": self.dtype or dtype, "device": self._placed(device)}
        if value_width not in (None, width):
            container.check_uneven(width, value_width)
            factory["value_width"] = value_width
        return container(self, rows, heads, width, **factory)

    def named_state(
        self, rows: int, shapes: dict[str, tuple[int, ...]], *, dtype: torch.dtype, device: torch.device
    ) -> Any:
        """An empty `NamedState` of tensors `(rows, …)`: what recurrent structures return from `new_state`."""
        from translator.cache.named import NamedState  # it is built on this module

        return NamedState(rows, shapes, dtype=dtype, device=self._placed(device))

    def window_state(
        self, rows: int, heads: int, width: int, *, band: Band, dtype: torch.dtype, device: torch.device
    ) -> Any:
        """An empty `WindowState`, in the place of a container: it is small, and of one size at any length."""
        from translator.cache.window import WindowState

        return WindowState(rows, heads, width, band=band, dtype=self.dtype or dtype, device=self._placed(device))

    def empty_state(self) -> Any:
        """An `EmptyState`: of a layer without self-attention."""
        from translator.cache.empty import EmptyState

        return EmptyState()

    def shared_state(self, owner: int) -> Any:
        """A `SharedState`: of a layer that reads what the layer with the number `owner` keeps."""
        from translator.cache.empty import SharedState

        return SharedState(owner)

    def compressed_state(
        self,
        rows: int,
        shapes: dict[str, tuple[int, ...]],
        *,
        rate: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Any:
        """An empty `CompressedState`: an entry of `width` numbers for every `rate` tokens, and tensors by name."""
        from translator.cache.compressed import CompressedState  # it is built on this module

        return CompressedState(
            rows, shapes, rate=rate, width=width, capacity=self.capacity, dtype=self.dtype or dtype,
            device=self._placed(device), limit=self.capacity if container_of(self.kind).needs_capacity else None,
        )  # fmt: skip

    def _placed(self, device: torch.device) -> torch.device:
        return device


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedSpec(CacheSpec):
    """A spec while one cache is made: `shared` is where its layers' states find what they have in common.

    `device` is where state is kept if not beside the structure's own weights: an engine that has packed them may leave
    nothing there.
    """

    device: torch.device | None = None
    shared: dict[str, Any] = field(default_factory=dict, compare=False)

    def _placed(self, device: torch.device) -> torch.device:
        return self.device or device
