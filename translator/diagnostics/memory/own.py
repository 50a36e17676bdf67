"""The account of a model of this project: each structure in each container, from sizes alone."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from translator.attention import Band, Structure
from translator.cache import CACHE_KINDS, CacheSpec, CompressedState, LayerState, UnsupportedCacheOperation
from translator.checkpoint import Unfilled
from translator.config import ModelConfig
from translator.decoder import CachedDecoder
from translator.diagnostics.memory.figures import last_within
from translator.model import TranslationModel


@dataclass(frozen=True)
class InContainer:
    """Keys and values of one layer in the container that its spec names."""

    spec: CacheSpec
    heads: int
    widths: tuple[int, int]
    dtype: torch.dtype

    @property
    def shared(self) -> Any:
        """The container, whose layers may have something in common."""
        return CACHE_KINDS[self.spec.kind]

    def nbytes(self, rows: int, length: int) -> int:
        """Bytes allocated once `rows` rows hold `length` tokens."""
        return CACHE_KINDS[self.spec.kind].account(self.spec, rows, self.heads, self.widths, length, self.dtype)

    def kept(self, length: int) -> int:
        """Bytes of one row's tokens, without room that isn't used: what a step reads."""
        return CACHE_KINDS[self.spec.kind].account_read(self.spec, self.heads, self.widths, length, self.dtype)

    read = kept


@dataclass(frozen=True)
class FixedSize:
    """State whose size no token changes."""

    numbers: int
    dtype: torch.dtype

    shared = None

    def nbytes(self, rows: int, length: int) -> int:
        """Bytes of `rows` rows."""
        return rows * self.numbers * self.dtype.itemsize

    def kept(self, length: int) -> int:
        """Bytes of one row, all of which a step reads."""
        return self.nbytes(1, length)

    read = kept


@dataclass(frozen=True)
class InWindow:
    """Keys and values of the tokens that the next one may still see, `slots` of them at most."""

    slots: int
    numbers: int
    dtype: torch.dtype

    shared = None

    def nbytes(self, rows: int, length: int) -> int:
        """Bytes allocated, full or not."""
        return rows * self.slots * self.numbers * self.dtype.itemsize

    def kept(self, length: int) -> int:
        """Bytes of one row's tokens: what a step reads."""
        return min(length, self.slots) * self.numbers * self.dtype.itemsize

    read = kept


@dataclass(frozen=True)
class Again:
    """What another layer keeps, read once more."""

    owner: Any

    shared = None

    def nbytes(self, rows: int, length: int) -> int:
        """Nothing more."""
        return 0

    def kept(self, length: int) -> int:
        """Nothing more."""
        return 0

    def read(self, length: int) -> int:
        """As much as the layer that keeps it reads."""
        return int(self.owner.read(length))


@dataclass(frozen=True)
class Entries:
    """An entry of `width` numbers for every `rate` tokens, beside `numbers` that no token changes."""

    numbers: int
    rate: int
    width: int
    capacity: int | None
    dtype: torch.dtype

    shared = None

    def nbytes(self, rows: int, length: int) -> int:
        """Bytes allocated once `rows` rows hold `length` tokens."""
        slots = CompressedState.slots_for(self.rate, self.capacity, length)
        return rows * (self.numbers + slots * self.width) * self.dtype.itemsize

    def kept(self, length: int) -> int:
        """Bytes of one row, all of which a step reads: an indexer looks at every entry to choose some."""
        return (self.numbers + length // self.rate * self.width) * self.dtype.itemsize

    read = kept


@dataclass(frozen=True, slots=True, kw_only=True)
class AskingSpec(CacheSpec):
    """A spec that makes no state: it notes what a structure asks of it, and nothing is allocated."""

    earlier: list[Any] = field(default_factory=list, compare=False)
    """What the layers before the one that asks keep."""

    def key_value_state(
        self,
        rows: int,
        heads: int,
        width: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        value_width: int | None = None,
    ) -> InContainer:
        """See `CacheSpec.key_value_state`."""
        if value_width not in (None, width):
            CACHE_KINDS[self.kind].check_uneven(width, value_width)
        return InContainer(self, heads, (width, value_width or width), self.dtype or dtype)

    def named_state(
        self, rows: int, shapes: dict[str, tuple[int, ...]], *, dtype: torch.dtype, device: torch.device
    ) -> FixedSize:
        """See `CacheSpec.named_state`."""
        return FixedSize(sum(torch.Size(shape).numel() for shape in shapes.values()), dtype)

    def window_state(
        self, rows: int, heads: int, width: int, *, band: Band, dtype: torch.dtype, device: torch.device
    ) -> InWindow:
        """See `CacheSpec.window_state`."""
        return InWindow(band.size - 1, 2 * heads * width, self.dtype or dtype)

    def empty_state(self) -> FixedSize:
        """See `CacheSpec.empty_state`."""
        return FixedSize(0, torch.uint8)

    def shared_state(self, owner: int) -> Again:
        """See `CacheSpec.shared_state`."""
        return Again(self.earlier[owner])

    def compressed_state(
        self,
        rows: int,
        shapes: dict[str, tuple[int, ...]],
        *,
        rate: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Entries:
        """See `CacheSpec.compressed_state`."""
        numbers = sum(torch.Size(shape).numel() for shape in shapes.values())
        return Entries(numbers, rate, width, self.capacity, self.dtype or dtype)


@dataclass(frozen=True)
class StackAccount:
    """One decoder's layers in one container; `refused` says why there is none. Bytes are those of one sentence."""

    kind: str
    beams: int
    layers: tuple[Any, ...] = ()
    spec: CacheSpec | None = None
    source_bytes: int = 0
    refused: str = ""

    def nbytes(self, length: int, sentences: int = 1) -> int:
        """Bytes allocated once all rows hold `length` tokens, K and V of the source included."""
        rows = sentences * self.beams
        own = sum(layer.nbytes(rows, length) for layer in self.layers)
        common = {layer.shared for layer in self.layers if layer.shared is not None}
        return own + sum(one.account_shared(self.spec, rows, length) for one in common) + sentences * self.source_bytes

    def kept(self, length: int) -> int:
        """Bytes of the sentence's keys, values and states themselves, without room, tables and the source."""
        return self.beams * sum(layer.kept(length) for layer in self.layers)

    def read(self, length: int) -> int:
        """Bytes of these that a step of the sentence's rows reads, some of them more than once."""
        return self.beams * sum(layer.read(length) for layer in self.layers)

    def outweighs(self, weights: int) -> int | None:
        """The last length at which a step reads no more of the cache than `weights`; None where that goes on."""
        return last_within(lambda length: self.read(length) + self.source_bytes, weights)


@dataclass(frozen=True)
class OwnAccount:
    """A decoder's structures in every container asked for; `weights` are the bytes that a step reads of the model."""

    structure: str
    weights: int
    stacks: tuple[StackAccount, ...]


def account_of(
    model: TranslationModel, spec: CacheSpec, kinds: Iterable[str], length: int, *, source_length: int
) -> OwnAccount:
    """The account of a model, which may be on the meta device, in each of `kinds`, as `spec` says otherwise.

    A kind that must know its capacity gets `length`.
    """
    decoder = model.decoder
    dtype = spec.dtype or model.embedding.weight.dtype
    sides = sum(_source_numbers(layer) for layer in decoder.stack) * source_length * dtype.itemsize
    stacks = [_stack(decoder.structures, replace(spec, **_of_kind(kind, spec, length)), sides) for kind in kinds]
    return OwnAccount(" + ".join(dict.fromkeys(model.config.structures)), _weights_read(decoder, model), tuple(stacks))


def _of_kind(kind: str, spec: CacheSpec, length: int) -> dict[str, Any]:
    capacity = length if CACHE_KINDS[kind].needs_capacity else spec.capacity
    return {"kind": kind, "capacity": capacity}


def _stack(structures: Sequence[Structure], spec: CacheSpec, source_bytes: int) -> StackAccount:
    asking = AskingSpec(**{name: getattr(spec, name) for name in CacheSpec.__dataclass_fields__})
    try:
        for structure in structures:
            layer = structure.new_state(asking, spec.beams)
            if isinstance(layer, LayerState):
                raise layer.cannot("give an account of its bytes")
            layer.nbytes(1, 1)
            asking.earlier.append(layer)
    except (UnsupportedCacheOperation, NotImplementedError) as error:
        return StackAccount(spec.kind, spec.beams, refused=str(error))
    return StackAccount(spec.kind, spec.beams, tuple(asking.earlier), spec, source_bytes)


def _source_numbers(layer: Any) -> int:
    """Numbers that a layer keeps of a source token: K and V."""
    return int(layer.multihead_attn.products()["kv"][0].shape[0])


def _weights_read(decoder: CachedDecoder, model: TranslationModel) -> int:
    """Bytes of what a step reads: decoder and output; not the product that made K and V of the source."""
    read = [*decoder.parameters(), model.embedding.weight]
    once = [layer.multihead_attn.products()["kv"] for layer in decoder.stack]
    total = sum(weight.nbytes for weight in read)
    return total - sum(part.nbytes for product in once for part in product if part is not None)


def unallocated(config: ModelConfig, dtype: torch.dtype) -> TranslationModel:
    """A model of these sizes without storage; raises `UserError` for an unknown structure."""
    with torch.device("meta"), Unfilled():
        return TranslationModel(config).to(dtype)
