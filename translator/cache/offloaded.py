"""The container whose layers live in host memory or in a file: only what is computed with has to be near."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from translator.attention.kernels import Kernel
from translator.cache.dense import DenseCache, normal_tensors
from translator.cache.dynamic import GrowingCache
from translator.cache.host import MappedFile, pinned
from translator.cache.lengths import Lengths
from translator.cache.spec import CacheSpec, register
from translator.cache.state import WritingStep
from translator.cache.step import Step, View

STACK = "offloaded"


class Staged(DenseCache):
    """A layer's K and V beside the computation, for one step."""

    def __init__(self, k: Tensor, v: Tensor, clean: int) -> None:
        self.k, self.v, self.clean = k, v, clean


class OffloadedStack:
    """The offloaded layers of a stack in their order, and what is on its way from one of them.

    On a GPU a layer is copied on a stream of its own while the one before computes; the computation waits for the
    copy's event and for nothing else. On a CPU, where layers lie in a file, the system is told to read the next one.
    """

    def __init__(self) -> None:
        self._layers: list[weakref.ref[OffloadedCache]] = []  # weak: they hold this
        self._staged: dict[int, tuple[Staged, Any]] = {}
        self._streams: dict[torch.device, Any] = {}

    def join(self, layer: OffloadedCache) -> int:
        """The layer's place among those that are offloaded."""
        self._layers.append(weakref.ref(layer))
        return len(self._layers) - 1

    def start(self) -> None:
        """A step begins: what was staged for another is old, and the first layer is fetched."""
        self._staged.clear()
        self.fetch(0)

    def fetch(self, index: int) -> None:
        """Begins to bring a layer, if there is one."""
        layer = self._layers[index]() if index < len(self._layers) else None
        if layer is None or index in self._staged:
            return
        if not layer.stages:
            layer.come()
            return
        device = layer.device
        if device.type != "cuda":
            k, v = (part.to(device, copy=True) for part in (layer.k, layer.v))
            self._staged[index] = Staged(k, v, layer.clean), None
            return
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]
        with normal_tensors(), torch.cuda.stream(stream):
            # Whole buffers, used or not: a part of one isn't contiguous, and would be copied on the host first.
            k, v = (part.to(device, non_blocking=True) for part in (layer.k, layer.v))
            self._staged[index] = Staged(k, v, layer.clean), stream.record_event()

    def take(self, index: int) -> Staged:
        """The layer beside the computation, which from here on waits for it."""
        self.fetch(index)
        staged, event = self._staged[index]
        if event is not None:
            current = torch.cuda.current_stream(staged.k.device)
            current.wait_event(event)
            for part in (staged.k, staged.v):
                part.record_stream(current)  # made on the other stream: not to be reused before this one is done
        return staged

    def done(self, index: int) -> None:
        """The layer has attended: what was staged of it goes."""
        self._staged.pop(index, None)

    def staged_bytes(self, index: int) -> int:
        """Bytes of a layer that are staged now."""
        return self._staged[index][0].nbytes if index in self._staged else 0


@register
class OffloadedCache(GrowingCache):
    """Rows as in `dynamic`, but each layer's K and V live on the host: in a file (`CacheSpec.offload` "file", by
    default on a CPU) or in page-locked memory ("memory", by default on a GPU); the next layer comes while one computes.

    A file has no name, so that nothing is left of it whatever happens, and lies where `tempfile` puts it; it saves
    memory where that is a disk. A layer gives its pages back once it has attended. Structures that keep a window
    (`WindowState`) or something of fixed size aren't asked for a container: too small to pay, they stay where they are.
    """

    kind = "offloaded"

    def __init__(self, spec: CacheSpec, rows: int, heads: int, width: int, **factory: Any) -> None:
        self.device = torch.empty(0, device=factory.pop("device", None)).device
        self.where = spec.offload or ("file" if self.device.type == "cpu" else "memory")
        self._files: dict[str, MappedFile] = {}
        self.clean = 0
        super().__init__(spec, rows, heads, width, device=torch.device("cpu"), **factory)
        shared: dict[str, Any] = getattr(spec, "shared", {})
        self.stack: OffloadedStack = shared.setdefault(STACK, OffloadedStack())
        self.index = self.stack.join(self)

    @property
    def k(self) -> Tensor:
        """K on the host, `(rows, H_kv, slots, D_head)`."""
        return self._k

    @k.setter
    def k(self, new: Tensor) -> None:
        self._k = self._housed("k", new)

    @property
    def v(self) -> Tensor:
        """V on the host."""
        return self._v

    @v.setter
    def v(self, new: Tensor) -> None:
        self._v = self._housed("v", new)

    @property
    def stages(self) -> bool:
        """Whether attention reads a copy on another device."""
        return self.device.type != "cpu"

    @property
    def bytes_by_place(self) -> dict[str, int]:
        """`nbytes` by where they are ("file" or "memory"), and beside them what is staged on the device now."""
        return {self.where: self.nbytes, "device": self.stack.staged_bytes(self.index)}

    def come(self) -> None:
        """Has the system read the file's pages, without waiting."""
        for file in self._files.values():
            file.come()

    def begin(self, step: Step) -> View:
        """Room for the step; the first layer is fetched."""
        view = super().begin(step)
        if self.index == 0:
            self.stack.start()
        return view

    def append(self, k: Tensor, v: Tensor, step: Step, view: View) -> None:
        """Writes `k, v` `(rows, H_kv, T, D_head)` on the host, and into what is staged."""
        if not self.stages:
            super().append(k, v, step, view)
            return
        self.stack.take(self.index).append(k, v, step, view)
        there = Step(step.T, step.lengths, torch.device("cpu"))
        super().append(k.to("cpu"), v.to("cpu"), there, view)

    def shown(self, view: View) -> tuple[Tensor, Tensor]:
        """K and V `(rows, H_kv, view.visible, D_head)`, where the layer computes."""
        return self.stack.take(self.index).shown(view) if self.stages else super().shown(view)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: WritingStep, kernel: Kernel, dropout: float) -> Tensor:
        """As `KeyValueState.attend`, while the next layer comes; then this one goes."""
        if self.stages:
            self.stack.take(self.index)  # first, so that its copy is before the next one's on their stream
        self.stack.fetch(self.index + 1)
        attended = super().attend(q, k, v, step, kernel, dropout)
        self.stack.done(self.index)
        for file in self._files.values():
            file.go()
        return attended

    def select(self, rows: Tensor, length: int) -> None:
        """Row `i` becomes the old row `rows[i]`."""
        super().select(rows.to("cpu"), length)

    def read(self, rows: slice, length: int) -> dict[str, Tensor]:
        """`k` and `v` `(rows, H_kv, length, D_head)`, on the device that the layer computes on."""
        return {name: part.to(self.device) for name, part in super().read(rows, length).items()}

    def clear(self, lengths: Lengths, until: int) -> None:
        """Zeroes each row's slots from its length up to `until`."""
        self.stack.done(self.index)
        super().clear(lengths, until)

    def prefix(self, rows: int) -> Any:
        """Refused: attention reads a copy that comes and goes."""
        raise self.cannot("keep its addresses, which a captured step needs")

    def to(self, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        """Converts both buffers, which stay on the host; from now on they are staged on `device`."""
        self.stack.done(self.index)
        if device is not None:
            self.device = torch.empty(0, device=device).device
        super().to(None, dtype)

    def _housed(self, name: str, new: Tensor) -> Tensor:
        """`new` where this layer lives; of a buffer that isn't there yet the first `clean` slots are copied."""
        old: Tensor | None = getattr(self, f"_{name}", None)
        if old is not None and new.untyped_storage().data_ptr() == old.untyped_storage().data_ptr():
            return new
        if self.where == "file":
            file = MappedFile(new.shape, new.dtype)
            self._files[name] = file
            housed = file.tensor
        elif self.stages:
            housed = pinned(new.shape, new.dtype)
        else:
            return new
        housed[:, :, : self.clean] = new[:, :, : self.clean]
        return housed
