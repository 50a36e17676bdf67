"""`DecoderCache`: every layer's caches, the lengths, and the steps that advance them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from translator.cache.base import (
    CrossAttentionCache,
    LayerCache,
    LayerStep,
    Lengths,
    SelfAttentionCache,
    Step,
    step_mask,
)
from translator.cache.dynamic import DynamicCache
from translator.cache.static import StaticCache

CACHE_KINDS: dict[str, type[DynamicCache] | type[StaticCache]] = {cls.kind: cls for cls in (DynamicCache, StaticCache)}


class DecoderCache:
    """The state of a decoder between steps, over a fixed grid of `B` sentences by `K` beams.

    A step is a transaction on the whole stack::

        step = cache.begin(T)                 # positions, mask and slots, from the lengths
        k, v = step.layers[i].update(k, v)    # in each layer's self-attention
        cache.commit(step)                    # the only place where lengths advance

    A step that isn't committed never happened. `lengths` is the only source of positions and masks.
    """

    def __init__(
        self,
        layers: Sequence[LayerCache],
        *,
        batch_size: int,
        beams: int = 1,
        source_visible: Tensor | None = None,
    ) -> None:
        """`source_visible` `(B, S)`, True for a real source token; None when none is padding."""
        for index, layer in enumerate(layers):
            if not isinstance(layer.self_attn, SelfAttentionCache):
                raise TypeError(f"layer {index}: {type(layer.self_attn).__name__} is not a SelfAttentionCache")
        self.layers = list(layers)
        self.batch_size = batch_size
        self.beams = beams
        self.source_visible = source_visible
        self._lengths = Lengths(batch_size * beams)
        self._open: Step | None = None

    @classmethod
    def build(
        cls,
        cross: Sequence[tuple[Tensor, Tensor]],
        *,
        kind: str = "dynamic",
        capacity: int | None = None,
        beams: int = 1,
        source_visible: Tensor | None = None,
    ) -> "DecoderCache":
        """An empty cache of `kind` around the cross-attention K and V `(B, H, S, D_head)` of each layer.

        Raises `ValueError` for an unknown kind, a static cache without capacity, or a capacity below 1.
        """
        if kind not in CACHE_KINDS:
            raise ValueError(f"unknown cache kind {kind!r}; known: {', '.join(sorted(CACHE_KINDS))}")
        if capacity is not None and capacity < 1:
            raise ValueError(f"capacity {capacity} must be at least 1")
        if beams < 1:
            raise ValueError(f"beams {beams} must be at least 1")
        batch_size = cross[0][0].shape[0]
        container = CACHE_KINDS[kind]
        with torch.inference_mode(False):  # once here, since entering it for each buffer takes longer than allocating
            layers = [
                LayerCache(container(batch_size * beams, k, capacity), CrossAttentionCache(k, v)) for k, v in cross
            ]
        return cls(layers, batch_size=batch_size, beams=beams, source_visible=source_visible)

    # -- what callers read -------------------------------------------------------------------------------------------

    @property
    def rows(self) -> int:
        """Rows of the grid, `B * K`."""
        return self.batch_size * self.beams

    @property
    def device(self) -> torch.device:
        """Where K and V live."""
        return self.layers[0].cross_attn.k.device

    @property
    def dtype(self) -> torch.dtype:
        """What K and V are held in."""
        return self.layers[0].cross_attn.k.dtype

    @property
    def lengths(self) -> Tensor:
        """Committed tokens in each row, `(rows,)`, int64, on the host."""
        return self._lengths.tensor().clone()

    @property
    def length(self) -> int:
        """Committed tokens in the longest row."""
        return self._lengths.longest

    @property
    def nbytes(self) -> int:
        """Bytes allocated for K and V, self- and cross-attention, used or not."""
        return sum(layer.self_attn.nbytes + layer.cross_attn.nbytes for layer in self.layers)

    def __repr__(self) -> str:
        lengths = self._lengths
        held = str(lengths.uniform) if lengths.ragged is None else f"{int(lengths.ragged.min())} to {lengths.longest}"
        first = self.layers[0]
        kinds = sorted({layer.self_attn.kind for layer in self.layers})
        return (
            f"{type(self).__name__}({' and '.join(kinds)}, {len(self.layers)} layers, {self.batch_size} sentences of "
            f"{self.beams} beams, {held} tokens held, source of {first.cross_attn.k.shape[2]}, "
            f"{str(self.dtype).removeprefix('torch.')} on {self.device}, {self.nbytes:,} bytes)"
        )

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "DecoderCache":
        """This cache with K and V on another device or in another type; returns itself. An open step is forgotten."""
        self.rollback()
        for layer in self.layers:
            layer.self_attn.to(device, dtype)
            layer.cross_attn.to(device, dtype)
        if self.source_visible is not None:
            self.source_visible = self.source_visible.to(device)
        return self

    def positions(self, T: int) -> Tensor:
        """Positions of the next T tokens, `(rows, T)`, int64: what a caller's own embedding has to look up.

        Rows come first whatever the decoder's layout: transpose what is looked up for a sequence-first decoder.
        """
        past = self._lengths.uniform
        if past is not None:
            return torch.arange(past, past + T, device=self.device).expand(self.rows, T)
        return self._lengths.tensor().to(self.device).unsqueeze(1) + torch.arange(T, device=self.device)

    # -- the transaction ---------------------------------------------------------------------------------------------

    def begin(self, T: int, *, block: int = 1) -> Step:
        """A step of T tokens. Keys are shown in whole blocks of `block` slots, the unused ones zero and masked.

        Raises `ValueError` for T below 1 and `CacheFullError` (before anything is written) when T don't fit.
        """
        if T < 1:
            raise ValueError(f"a step needs at least one token, not {T}")
        self.rollback()
        end = self._lengths.longest + T
        visible = min(layer.self_attn.reserve(end, block) for layer in self.layers)
        mask, is_causal = step_mask(self._lengths, T, visible, self.device)
        step = Step(
            T=T,
            start=self._lengths.uniform,
            slots=None if self._lengths.uniform is not None else self.positions(T),
            visible=visible,
            mask=mask,
            is_causal=is_causal,
            source_mask=None if self.source_visible is None else self.source_visible[:, None, None, :],
        )
        step.layers = [LayerStep(layer, step) for layer in self.layers]
        self._open = step
        return step

    def commit(self, step: Step) -> None:
        """Advances the lengths by `step.T`; raises `RuntimeError` for a stale step or a layer that wasn't updated."""
        if step is not self._open:
            raise RuntimeError("this step is not the open one: it was committed, rolled back or made by another cache")
        missing = [index for index, layer in enumerate(step.layers) if not layer.written]
        if missing:
            raise RuntimeError(f"step can't be committed: layers {missing} were not updated")
        self._open, step.closed = None, True
        self._lengths = self._lengths.advanced(step.T)

    def rollback(self) -> None:
        """Forgets an open step, if there is one: what it wrote is zeroed, lengths are as they were."""
        if self._open is not None:
            until = self._lengths.longest + self._open.T
            self._open.closed, self._open = True, None
            for layer in self.layers:
                layer.self_attn.clear(self._lengths, until)

    # -- the life of a grid ------------------------------------------------------------------------------------------

    def expand(self, beams: int) -> None:
        """Gives every sentence `beams` rows, copies of its one row; K and V of the source stay one a sentence."""
        if self.beams != 1:
            raise ValueError(f"expand({beams}): the cache already holds {self.beams} beams")
        if beams < 1:
            raise ValueError(f"beams {beams} must be at least 1")
        self.rollback()
        for layer in self.layers:
            layer.self_attn.expand(beams, self.length)
        self.beams = beams
        lengths = self._lengths
        if lengths.ragged is not None:
            self._lengths = Lengths.of(lengths.ragged.repeat_interleave(beams))
        else:
            self._lengths = Lengths(self.rows, lengths.uniform)

    def reorder(self, beam: Tensor) -> None:
        """Row `(b, k)` becomes the old row `(b, beam[b, k])`; `beam` is `(B, K)`, indices **within** a sentence.

        An identity costs nothing. Pass a host tensor: a device tensor is copied to the host first, to be checked.
        """
        if tuple(beam.shape) != (self.batch_size, self.beams):
            raise ValueError(f"reorder needs (B, K) = ({self.batch_size}, {self.beams}), not {tuple(beam.shape)}")
        beam = beam.to("cpu", torch.int64)
        if torch.equal(beam, torch.arange(self.beams).expand_as(beam)):
            return
        if int(beam.min()) < 0 or int(beam.max()) >= self.beams:
            raise ValueError(f"reorder indices must lie within a sentence, 0 to {self.beams - 1}")
        self._select_rows((torch.arange(self.batch_size).unsqueeze(1) * self.beams + beam).reshape(-1))

    def compact(self, keep: Tensor) -> None:
        """Keeps the sentences `keep`, indices `(B',)` or a bool mask `(B,)`, with all their beams."""
        keep = keep.to("cpu")
        if keep.dim() != 1 or keep.is_floating_point():
            raise ValueError(f"compact needs indices (B',) or a mask (B,), not {keep.dtype} {tuple(keep.shape)}")
        if keep.dtype == torch.bool:
            if keep.shape != (self.batch_size,):
                raise ValueError(f"compact needs a mask of {self.batch_size} sentences, not {tuple(keep.shape)}")
            keep = keep.nonzero().reshape(-1)
        if len(keep) and (int(keep.min()) < 0 or int(keep.max()) >= self.batch_size):
            raise ValueError(f"compact indices must lie between 0 and {self.batch_size - 1}")
        if len(keep) > self.batch_size or len(set(keep.tolist())) < len(keep):
            raise ValueError("compact keeps each sentence at most once")
        self._select_rows((keep.unsqueeze(1) * self.beams + torch.arange(self.beams)).reshape(-1))
        sentences = keep.to(self.device)
        for layer in self.layers:
            layer.cross_attn.select(sentences)
        if self.source_visible is not None:
            self.source_visible = self.source_visible.index_select(0, sentences)
        self.batch_size = len(keep)

    def admit(self, slot: int, source: "DecoderCache") -> None:
        """Sentence `slot` becomes the one sentence of `source` (its beams 1 or K), with whatever it has decoded."""
        if not 0 <= slot < self.batch_size:
            raise ValueError(f"admit: slot {slot} is outside 0 to {self.batch_size - 1}")
        if source.batch_size != 1 or source.beams not in (1, self.beams):
            raise ValueError(f"admit needs one sentence of 1 or {self.beams} beams, not "
                             f"{source.batch_size} of {source.beams}")  # fmt: skip
        self._check_same_layers("admit", source)
        self.rollback()
        source.rollback()
        for layer in self.layers:
            layer.self_attn.reserve(source.length, 1)
        rows = range(slot * self.beams, (slot + 1) * self.beams)
        old = self.layers[0].cross_attn.k.shape[2]
        new = source.layers[0].cross_attn.k.shape[2]
        for mine, theirs in zip(self.layers, source.layers, strict=True):
            mine.self_attn.admit(rows, theirs.self_attn, source.length)
            mine.cross_attn.admit(slot, theirs.cross_attn, max(old, new))
        self._admit_source(slot, source, old, new)
        lengths = self._lengths.tensor().clone()
        lengths[rows.start : rows.stop] = source._lengths.tensor()
        self._lengths = Lengths.of(lengths)

    def crop(self, lengths: int | Tensor) -> None:
        """Shortens every row to `lengths`, one number or `(rows,)`; raises `ValueError` where that would lengthen."""
        self.rollback()
        wanted = Lengths(self.rows, lengths) if isinstance(lengths, int) else Lengths.of(lengths)
        shorter = wanted.tensor()
        if len(shorter) != self.rows or bool((shorter < 0).any()) or bool((shorter > self.lengths).any()):
            raise ValueError(f"crop to {shorter.tolist()} does not shorten rows of lengths {self.lengths.tolist()}")
        for layer in self.layers:
            layer.self_attn.clear(wanted, self._lengths.longest)
        self._lengths = wanted

    def reset(self, source: "DecoderCache | None" = None) -> None:
        """Empties every row. The source stays, unless `source` brings another of the same grid to be decoded next."""
        if source is not None:
            self._check_same_layers("reset", source)
            if source.batch_size != self.batch_size:
                raise ValueError(f"reset needs a source of {self.batch_size} sentences, not {source.batch_size}")
        self.crop(0)
        if source is not None:
            for mine, theirs in zip(self.layers, source.layers, strict=True):
                mine.cross_attn = CrossAttentionCache(theirs.cross_attn.k, theirs.cross_attn.v)
            self.source_visible = source.source_visible

    # ----------------------------------------------------------------------------------------------------------------

    def _check_same_layers(self, operation: str, source: "DecoderCache") -> None:
        mine, theirs = (
            [(layer.cross_attn.k.shape[1], layer.cross_attn.k.shape[3]) for layer in cache.layers]
            for cache in (self, source)
        )
        if mine != theirs:
            raise ValueError(f"{operation}: the source has {len(theirs)} layers of (heads, head width) {theirs[:1]}, "
                             f"this cache {len(mine)} of {mine[:1]}")  # fmt: skip

    def _select_rows(self, rows: Tensor) -> None:
        self.rollback()
        on_device = rows.to(self.device)
        for layer in self.layers:
            layer.self_attn.select(on_device, self.length)
        if self._lengths.ragged is not None and len(rows):
            self._lengths = Lengths.of(self._lengths.ragged[rows])
        else:
            self._lengths = Lengths(len(rows), self._lengths.uniform or 0)

    def _admit_source(self, slot: int, source: "DecoderCache", old: int, new: int) -> None:
        if old == new and self.source_visible is None and source.source_visible is None:
            return
        visible = torch.zeros(self.batch_size, max(old, new), dtype=torch.bool, device=self.device)
        visible[:, :old] = True if self.source_visible is None else self.source_visible
        visible[slot] = False
        visible[slot, :new] = True if source.source_visible is None else source.source_visible[0]
        self.source_visible = visible
