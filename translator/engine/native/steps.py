"""Steps of a cache on native calls: the first of one token is recorded, later ones are replayed.

A replay needs every tensor that the recorded calls point to in its old place. Where one has moved (a cache has grown,
sentences have left or come), the next step is recorded anew.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from translator.cache import DecoderCache, Lengths, StackStep
from translator.engine.native.operations import Native
from translator.engine.native.program import Program, Tape, Watch

Run = Callable[[Native, Tensor, Tensor, Sequence[Any]], Tensor]
"""`run(native, inputs, lengths, steps)` makes a step's calls and returns its output."""


class Steps:
    """Steps of one cache: the first of one token is recorded, later ones are replayed while what they use stays put."""

    def __init__(self, native: Native, run: Run, structures: Iterable[nn.Module]) -> None:
        """`structures` are the layers' own; with one whose steps aren't alike, every step runs the layers' code."""
        self._native = native
        self._run = run
        self._recording: Recording | None = None
        self._replayable = all(vars(type(each)).get("steps_alike", False) for each in structures)

    def step(self, cache: DecoderCache, inputs: Tensor) -> Tensor:
        """`inputs` `(rows, T, …)` → the run's output, valid until the next step; the cache then holds T tokens more."""
        recording, T = self._recording, inputs.shape[1]
        if inputs.shape[0] != cache.rows:
            raise ValueError(f"the step has {inputs.shape[0]} rows and the cache {cache.rows}")
        if T == 1 and recording is not None and recording.holds_still(cache):
            cache.again()
            output = recording.run(inputs, self._native.threads)
            cache.advance(1)
            recording.held = cache.length
            return output
        return self._anew(cache, inputs, T)

    @torch.no_grad()
    def _anew(self, cache: DecoderCache, inputs: Tensor, T: int) -> Tensor:
        """A step through the layers' own code, recorded if it can be, or replayed after a look at all it points to."""
        step = cache.begin(T)
        if self._recording is None or len(self._recording.lengths) < cache.rows:
            self._recording = Recording(cache.rows)
        recording = self._recording
        step.held = recording.hold(step.lengths)
        if T > 1 or not self._replayable:
            output = self._run(self._native.for_steps(cache.rows), inputs, step.held, step.layers)
        elif recording.replays(cache, step):
            output = recording.run(inputs, self._native.threads)
        else:
            output = self._recorded(cache, recording, inputs, step)
        cache.commit(step)
        return output

    def _recorded(self, cache: DecoderCache, recording: "Recording", inputs: Tensor, step: StackStep) -> Tensor:
        recording.inputs = inputs.clone()
        tape, watch = Tape(), Watch()
        native = self._native.for_steps(cache.rows, tape)
        with watch:
            output = self._run(native, recording.inputs, recording.lengths, step.layers)
        self._replayable = watch.computed is None and recording.keep(cache, step)
        if self._replayable:
            recording.replay(Program(self._native.library, tape, recording.lengths))
        return output


class Recording:
    """A recorded step of one cache, and what it points to."""

    program: Program
    inputs: Tensor

    def __init__(self, rows: int) -> None:
        self.lengths = torch.zeros(rows, dtype=torch.int32)
        self._parts: list[Tensor] | None = None
        self._places: list[tuple[int, torch.Size]] = []
        self._layout, self._room, self.held = -1, 0, -1
        self._output: Tensor | None = None

    def replay(self, program: Program) -> None:
        """From the next step on; this one has been run."""
        self.program, self._output = program, None
        self.lengths += 1

    def holds_still(self, cache: DecoderCache) -> bool:
        """Whether nothing has moved since the last step of this recording, and one token more has room where it is."""
        return self._layout == cache.layout and self.held == cache.length < self._room

    def run(self, inputs: Tensor, threads: int) -> Tensor:
        """Replays the step; the lengths held are then one token more."""
        rows = inputs.shape[0]
        if self._output is None or len(self._output) != rows:
            self._inputs, self._output = self.inputs[:rows], self.program.output[:rows]
        self._inputs.copy_(inputs)
        self.program.run(rows, threads)
        return self._output

    def hold(self, lengths: Lengths) -> Tensor:
        """The lengths where the calls look for them."""
        held = self.lengths[: lengths.rows]
        return held.fill_(lengths.uniform or 0) if lengths.ragged is None else held.copy_(lengths.ragged)

    def keep(self, cache: DecoderCache, step: StackStep) -> bool:
        """Keeps what the step just made points to; False where it can't be replayed."""
        parts = _parts(cache, step)
        if parts is not None:
            self._parts, self._places = parts, _places(parts)
            self._stays(cache)
        return parts is not None

    def replays(self, cache: DecoderCache, step: StackStep) -> bool:
        """Whether this step is the recorded one over again; its layers' shares are then taken as done."""
        if self._parts is None or len(self.inputs) < cache.rows:
            return False
        parts = _parts(cache, step)
        if parts is None or _places(parts) != self._places:
            return False
        for layer in step.layers:
            layer.mark_written()
        self._stays(cache)
        return True

    def _stays(self, cache: DecoderCache) -> None:
        self._layout, self.held = cache.layout, cache.length + 1
        self._room = min(state.slots for state in cache.states)  # type: ignore[attr-defined]


def _places(parts: Sequence[Tensor]) -> list[tuple[int, torch.Size]]:
    return [(part.data_ptr(), part.shape[1:]) for part in parts]  # there may be fewer rows


def _parts(cache: DecoderCache, step: StackStep) -> list[Tensor] | None:
    """Every tensor outside a step's own outputs that its calls point to; None where a layer isn't for kernels."""
    parts: list[Tensor] = []
    for layer in step.layers:
        mine = layer.in_place()
        if mine is None:
            return None
        parts += mine
    for source in cache.sources:
        parts += (source.k, source.v)
    return parts if cache.source_visible is None else [*parts, cache.source_visible]
