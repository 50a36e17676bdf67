"""`DecoderCache`: every layer's caches, the lengths, and the steps that advance them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from translator.cache.fixed import FixedStep
from translator.cache.layer_step import LayerStep, StackStep
from translator.cache.lengths import Lengths
from translator.cache.source import SourceState
from translator.cache.spec import CacheSpec
from translator.cache.state import LayerState


class DecoderCache:
    """The state of a decoder between steps, over a fixed grid of `B` sentences by `K` beams.

    A step is a transaction on the whole stack::

        step = cache.begin(T)                 # positions, masks and slots, from the lengths
        k, v = step.layers[i].update(k, v)    # in each layer's self-attention
        cache.commit(step)                    # the only place where lengths advance

    A step that isn't committed never happened. `lengths` is the only source of positions and masks.
    """

    def __init__(
        self,
        states: Sequence[LayerState],
        sources: Sequence[SourceState],
        spec: CacheSpec,
        *,
        batch_size: int,
        source_visible: Tensor | None = None,
        computed_in: torch.dtype | None = None,
    ) -> None:
        """An empty cache of each layer's own state and its K and V of the source.

        `batch_size` is B; `source_visible` `(B, S)`, True for a real source token, None when none is padding;
        `computed_in` what the decoder computes in where K and V are kept in another type. Raises
        `TypeError` for what is no `LayerState`.
        """
        for index, state in enumerate(states):
            if not isinstance(state, LayerState):
                raise TypeError(f"layer {index}: {type(state).__name__} is not a LayerState")
        self.states = list(states)
        self.sources = list(sources)
        self.spec = spec
        self.batch_size = batch_size
        self.beams = spec.beams
        self.source_visible = source_visible
        self.computed_in = computed_in or self.dtype
        self.layout = 0
        """Changes whenever something may lie elsewhere than at the step before, or rows may have parted."""
        self._lengths = Lengths(batch_size * spec.beams)
        self._open: StackStep | None = None

    # -- what callers read -------------------------------------------------------------------------------------------

    @property
    def rows(self) -> int:
        """Rows of the grid, `B * K`."""
        return self.batch_size * self.beams

    @property
    def device(self) -> torch.device:
        """Where K and V live."""
        return self.sources[0].k.device

    @property
    def dtype(self) -> torch.dtype:
        """What K and V are held in."""
        return self.sources[0].k.dtype

    @property
    def lengths(self) -> Tensor:
        """Committed tokens in each row, `(rows,)`, int64, on the host."""
        return self._lengths.tensor().clone()

    @property
    def held(self) -> Lengths:
        """The same as the cache keeps them."""
        return self._lengths

    @property
    def length(self) -> int:
        """Committed tokens in the longest row."""
        return self._lengths.longest

    @property
    def nbytes(self) -> int:
        """Bytes allocated for K and V, self- and cross-attention, used or not."""
        return sum(state.nbytes for state in self.states) + sum(source.nbytes for source in self.sources)

    def __repr__(self) -> str:
        lengths = self._lengths
        held = str(lengths.uniform) if lengths.ragged is None else f"{int(lengths.ragged.min())} to {lengths.longest}"
        kinds = sorted({state.kind for state in self.states})
        return (
            f"{type(self).__name__}({' and '.join(kinds)}, {len(self.states)} layers, {self.batch_size} sentences of "
            f"{self.beams} beams, {held} tokens held, source of {self.sources[0].length}, "
            f"{str(self.dtype).removeprefix('torch.')} on {self.device}, {self.nbytes:,} bytes)"
        )

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "DecoderCache":
        """This cache with K and V on another device or in another type; returns itself. An open step is forgotten."""
        self._require("to", "be moved or converted")
        self.rollback()
        self.layout += 1
        for state in self.states:
            state.to(device, dtype)
        for source in self.sources:
            source.to(device, dtype)
        if self.source_visible is not None:
            self.source_visible = self.source_visible.to(device)
        if dtype is not None:
            self.computed_in = dtype
        return self

    def positions(self, T: int) -> Tensor:
        """Positions of the next T tokens, `(rows, T)`, int64: what a caller's own embedding has to look up.

        Rows come first whatever the decoder's layout: transpose what is looked up for a sequence-first decoder.
        """
        return self._lengths.positions(T, self.device)

    # -- the transaction ---------------------------------------------------------------------------------------------

    def begin(self, T: int, given: Tensor | None = None) -> StackStep:
        """A step of T tokens; `given` `(…, T or 1, past + T)` is a caller's own mask, which hides more.

        Each state says which slots it shows, and gets the mask that goes with them; unused slots of a block are zero
        and masked. Raises `ValueError` for T below 1 and `CacheFullError` (before anything is written) when T don't
        fit.
        """
        if T < 1:
            raise ValueError(f"a step needs at least one token, not {T}")
        self.rollback()
        step = StackStep(
            T,
            self._lengths,
            self.device,
            block=self.spec.block,
            source_mask=None if self.source_visible is None else self.source_visible[:, None, None, :],
            given=given,
        )
        step.layers = [LayerStep(*parts, step) for parts in zip(self.states, self.sources, strict=True)]
        self._open = step
        return step

    def commit(self, step: StackStep) -> None:
        """Advances the lengths by `step.T`; raises `RuntimeError` for a stale step or a layer that wasn't updated."""
        if step is not self._open:
            raise RuntimeError("this step is not the open one: it was committed, rolled back or made by another cache")
        missing = [index for index, part in enumerate(step.layers) if part.state.needs_write and not part.written]
        if missing:
            raise RuntimeError(f"step can't be committed: layers {missing} were not updated")
        for state in self.states:
            state.commit(step)
        self._open, step.closed = None, True
        self._lengths = self._lengths.advanced(step.T)

    def rollback(self) -> None:
        """Forgets an open step, if there is one: what it wrote is zeroed, lengths are as they were."""
        if self._open is not None:
            step, self._open = self._open, None
            step.closed = True
            for state in self.states:
                state.rollback(step)

    # -- steps that are recorded once and run again ------------------------------------------------------------------

    def prefix(self, sentences: int, source_length: int | None = None) -> "DecoderCache":
        """The first sentences of this grid, none of them begun, in the same memory; see `LayerState.prefix`.

        `source_length` source tokens are shown, by default as many as here.
        """
        shown = self.sources[0].length if source_length is None else source_length
        return DecoderCache(
            [state.prefix(sentences * self.beams) for state in self.states],
            [source.prefix(sentences, shown) for source in self.sources],
            self.spec,
            batch_size=sentences,
            computed_in=self.computed_in,
        )

    def begin_fixed(self, positions: Tensor, visible: int, source_mask: Tensor | None) -> FixedStep:
        """A step of one token that can be recorded: see `FixedStep`. Nothing is committed; `advance` counts it."""
        visible = min(visible, self.spec.capacity or visible)  # the last block may be shorter; states know
        step = FixedStep(positions, visible, self.dtype, self.spec.block, source_mask)
        step.layers = [LayerStep(*parts, step) for parts in zip(self.states, self.sources, strict=True)]
        return step

    def check_room(self, T: int) -> None:
        """Raises `CacheFullError` where the longest row has no room for T more tokens."""
        for state in self.states:
            state.check_room(self.length + T)

    def again(self) -> None:
        """A step of one token like the one before, written by kernels that work in place; `advance` counts it.

        For callers who have seen that `layout` is still the same and that there is room. As with `begin`, a step left
        open is forgotten.
        """
        self.rollback()
        for state in self.states:
            state.again(self._lengths)

    def advance(self, T: int) -> None:
        """Counts T tokens in every row that a recorded step has written, in place of `begin` and `commit`."""
        self._lengths = self._lengths.advanced(T)

    # -- the life of a grid ------------------------------------------------------------------------------------------

    def expand(self, beams: int) -> None:
        """Gives every sentence `beams` rows, copies of its one row; K and V of the source stay one a sentence."""
        if self.beams != 1:
            raise ValueError(f"expand({beams}): the cache already holds {self.beams} beams")
        if beams < 1:
            raise ValueError(f"beams {beams} must be at least 1")
        self._require("expand", "expand")
        self.rollback()
        self.layout += 1
        for state in self.states:
            state.expand(beams, self.length)
        self.spec, self.beams = self.spec.with_beams(beams), beams
        lengths = self._lengths
        if lengths.ragged is not None:
            self._lengths = Lengths.of(lengths.ragged.repeat_interleave(beams))
        else:
            self._lengths = Lengths(self.rows, lengths.uniform)

    def reorder(self, beam: Tensor) -> None:
        """Row `(b, k)` becomes the old row `(b, beam[b, k])`; `beam` is `(B, K)`, indices **within** a sentence.

        From the host, an identity costs nothing and indices are checked. Indices on a device stay there, and nothing
        waits for them (but where rows differ in length, which is the host's to know): they are the caller's promise.
        """
        rows = self.beam_rows(beam)
        if rows is not None:
            self.layout += self._lengths.ragged is not None
            self._select_rows(rows)

    def beam_rows(self, beam: Tensor) -> Tensor | None:
        """The row that each row goes on from `(rows,)`, for `reorder` by `beam`; None for an identity on the host."""
        if tuple(beam.shape) != (self.batch_size, self.beams):
            raise ValueError(f"reorder needs (B, K) = ({self.batch_size}, {self.beams}), not {tuple(beam.shape)}")
        # On the host a few indices are looked at in less time than an operator takes to start.
        if beam.device.type == "cpu":
            K, by_sentence = self.beams, beam.tolist()
            rows = [slot * K + int(row) for slot, mine in enumerate(by_sentence) for row in mine]
            if rows == list(range(len(rows))):
                return None
            if not all(0 <= row < K for mine in by_sentence for row in mine):
                raise ValueError(f"reorder indices must lie within a sentence, 0 to {K - 1}")
            return torch.tensor(rows)
        first = torch.arange(self.batch_size, device=beam.device).unsqueeze(1) * self.beams
        return (first + beam.to(torch.int64)).reshape(-1)

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
        self.layout += 1
        self._select_rows((keep.unsqueeze(1) * self.beams + torch.arange(self.beams)).reshape(-1))
        sentences = keep.to(self.device)
        for source in self.sources:
            source.select(sentences)
        if self.source_visible is not None:
            kept = self.source_visible.index_select(0, sentences)
            with torch.inference_mode():  # in its place: recorded steps look there
                self.source_visible = self.source_visible[: len(kept)].copy_(kept)
        self.batch_size = len(keep)

    def admit(self, slots: int | Sequence[int], source: "DecoderCache") -> None:
        """Sentences `slots` become those of `source` (of 1 or K beams), in order, with whatever they have decoded.

        Raises `ValueError` for slots outside the grid, named twice, or not as many as there are sentences.
        """
        slots = [slots] if isinstance(slots, int) else list(slots)
        if not all(0 <= slot < self.batch_size for slot in slots) or len(set(slots)) < len(slots):
            raise ValueError(f"admit: slots {slots} must be different ones from 0 to {self.batch_size - 1}")
        if source.batch_size != len(slots) or source.beams not in (1, self.beams):
            raise ValueError(f"admit needs {len(slots)} sentences of 1 or {self.beams} beams, not "
                             f"{source.batch_size} of {source.beams}")  # fmt: skip
        self._check_same_layers("admit", source)
        self.rollback()
        source.rollback()
        self.layout += 1
        self._require("write", "admit")
        source._require("read", "be read, which admit needs of the newcomer")
        for state in self.states:
            state.check_room(source.length)
        lengths, K = self._lengths.tensor().clone(), source.beams
        beams = source._lengths.tensor().view(-1, K)
        parted = bool((beams != beams[:, :1]).any())
        if parted:
            self._require("clear", "admit beams of unequal lengths")
        longest, places = beams.amax(dim=1).tolist(), [slice(s * self.beams, (s + 1) * self.beams) for s in slots]
        for mine, other in zip(self.states, source.states, strict=True):
            mine.check_admit(places, other, longest, K)
        for index, rows in enumerate(places):
            theirs = slice(index * K, (index + 1) * K)
            for mine, other in zip(self.states, source.states, strict=True):
                mine.admit(rows, other, theirs, longest[index])
            lengths[rows] = beams[index]
        before = self.sources[0].length
        for mine_source, other_source in zip(self.sources, source.sources, strict=True):
            mine_source.admit(slots, other_source)
        self._admit_visible(slots, source, before)
        self._lengths = Lengths.of(lengths)
        if parted:  # what a shorter beam gave beyond its length may be anything
            for state in self.states:
                state.clear(self._lengths, source.length)

    def hold(self, rows: slice, length: int) -> None:
        """Says that these rows hold `length` tokens, which their states were given without a step."""
        lengths = self._lengths.tensor().clone()
        lengths[rows] = length
        self.layout += 1
        self._lengths = Lengths.of(lengths)

    def crop(self, lengths: int | Tensor) -> None:
        """Shortens every row to `lengths`, one number or `(rows,)`; raises `ValueError` where that would lengthen."""
        self.rollback()
        self.layout += 1
        wanted = Lengths(self.rows, lengths) if isinstance(lengths, int) else Lengths.of(lengths)
        shorter = wanted.tensor()
        if len(shorter) != self.rows or bool((shorter < 0).any()) or bool((shorter > self.lengths).any()):
            raise ValueError(f"crop to {shorter.tolist()} does not shorten rows of lengths {self.lengths.tolist()}")
        for state in self.states:
            state.check_clear(wanted)
        for state in self.states:
            state.clear(wanted, self._lengths.longest)
        self._lengths = wanted

    def reset(self, source: "DecoderCache | None" = None) -> None:
        """Empties every row. The source stays, unless `source` brings another of the same grid to be decoded next."""
        if source is not None:
            self._check_same_layers("reset", source)
            if source.batch_size != self.batch_size:
                raise ValueError(f"reset needs a source of {self.batch_size} sentences, not {source.batch_size}")
        self.crop(0)
        if source is not None:
            for mine, theirs in zip(self.sources, source.sources, strict=True):
                mine.replaced(theirs)
            visible = source.source_visible
            self.source_visible = None if visible is None else visible.clone()

    # ----------------------------------------------------------------------------------------------------------------

    def _check_same_layers(self, operation: str, source: "DecoderCache") -> None:
        mine, theirs = ([(part.k.shape[1], part.k.shape[3]) for part in cache.sources] for cache in (self, source))
        if mine != theirs:
            raise ValueError(f"{operation}: the source has {len(theirs)} layers of (heads, head width) {theirs[:1]}, "
                             f"this cache {len(mine)} of {mine[:1]}")  # fmt: skip

    def _require(self, method: str, operation: str) -> None:
        # All are asked before the first is changed: a stack that is half one thing, half another, is of no use.
        for state in self.states:
            state.require(method, operation)

    def _select_rows(self, rows: Tensor) -> None:
        self._require("select", "reorder or compact")
        self.rollback()
        on_device = rows.to(self.device)
        for state in self.states:
            state.select(on_device, self.length)
        if self._lengths.ragged is not None and len(rows):
            self._lengths = Lengths.of(self._lengths.ragged[rows.to("cpu")])
        else:
            self._lengths = Lengths(len(rows), self._lengths.uniform or 0)

    def _admit_visible(self, slots: Sequence[int], source: "DecoderCache", before: int) -> None:
        now, new = self.sources[0].length, source.sources[0].length
        if now == before == new and self.source_visible is None and source.source_visible is None:
            return
        visible = torch.zeros(self.batch_size, now, dtype=torch.bool, device=self.device)
        visible[:, :before] = True if self.source_visible is None else self.source_visible
        for index, slot in enumerate(slots):
            visible[slot] = False
            visible[slot, :new] = True if source.source_visible is None else source.source_visible[index]
        self.source_visible = visible
