"""Steps recorded as CUDA graphs over memory that stays where it is: what a GPU needs, since a small model's step is
hundreds of kernels of a few microseconds each, and starting them from Python takes longer than running them."""

import copy
import threading
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from translator.cache import CacheSpec, DecoderCache
from translator.cache.dense import whole_blocks
from translator.engine.arena import Arena, Recorder, Room, Work, power_of_two, to_device
from translator.engine.base import MatrixScores, normalised, parameter_versions
from translator.model import TranslationModel

BLOCK = 64
KEPT = 4
_RECORDING = threading.Lock()


def as_it_is(device: torch.device) -> Recorder:
    """Records nothing: every step runs the same Python again, on any device."""
    return lambda work: work


def cuda_graphs(device: torch.device) -> Recorder:
    """Records CUDA graphs, all in one pool of memory: of one arena, only one runs at a time."""
    pool, aside = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)

    def record(work: Work) -> Work:
        with torch.cuda.device(device):
            # Once on a stream of its own: what libraries set up at a first call must not be recorded.
            here = torch.cuda.current_stream()
            aside.wait_stream(here)
            with torch.cuda.stream(aside):
                work()
            here.wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            # One at a time in a process, says PyTorch; other threads may allocate meanwhile.
            with _RECORDING, torch.cuda.graph(graph, pool=pool, stream=aside, capture_error_mode="thread_local"):
                work()
        return graph.replay

    return record


class GraphEngine:
    """See `Engine`: a `TranslationModel` whose decoder steps are recorded, one for each bucket of sizes, when met.

    Weights are the model's own in memory, or a copy where `dtype` is another, which then holds throughout. They are
    converted rather than autocast: half the bytes are read, with no casts between, while norms, softmax and the sums of
    products are fp32 inside their kernels all the same, and log-sum-exp and ranking are of fp32 logits. A token is
    shown `block` slots more at a time. What a spec says of `kind` doesn't matter: state is static.
    """

    def __init__(
        self,
        model: TranslationModel,
        dtype: torch.dtype | None = None,
        *,
        block: int = BLOCK,
        recorder: Callable[[torch.device], Recorder] | None = None,
    ) -> None:
        """`recorder` is `cuda_graphs` on a CUDA device, elsewhere `as_it_is`: the same steps, run anew each time."""
        self._made_from = weakref.ref(model), parameter_versions(model)
        # Modules and parameters of its own, since a recorded step reads addresses: what the model is moved or converted
        # to later leaves these where they are.
        own = {id(weight): nn.Parameter(weight.detach(), requires_grad=False) for weight in model.parameters()}
        self.model = copy.deepcopy(model, own).to(dtype=dtype).eval()
        self.operations = self.model.operations()
        self.block = block
        self.recorder = recorder or (cuda_graphs if self.device.type == "cuda" else as_it_is)
        self._free: list[Arena] = []
        self._lock = threading.RLock()  # the garbage collector may give an arena back while one is being looked for

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.model.embedding.weight.device

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.model.config.vocab_size

    @property
    def max_positions(self) -> int:
        """The model's."""
        return self.model.config.max_positions

    @torch.no_grad()
    def encode(self, source: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """Memory `(B, S, D)` of ids `(B, S)`. Raises `RuntimeError` when the model was trained on meanwhile."""
        model, versions = self._made_from[0](), self._made_from[1]
        if model is not None and parameter_versions(model) != versions:
            raise RuntimeError("the model's weights have changed since the engine was made: make a new engine of it")
        return self.model.encode(source, key_padding_mask, self.operations)

    @property
    def cache_kind(self) -> str:
        """See `Engine.cache_kind`; it has no other."""
        return "static"

    @torch.no_grad()
    def log_probs(self, source: Tensor, target: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """See `Engine.log_probs`."""
        return normalised(self.model(source, target, key_padding_mask))

    @torch.no_grad()
    def start(self, memory: Tensor, key_padding_mask: Tensor | None, spec: CacheSpec) -> "GraphDecoding":
        """See `Engine.start`."""
        brief = CacheSpec(kind="static", capacity=1, beams=spec.beams, dtype=spec.dtype, sentences=spec.sentences)
        started = self.model.start(memory, key_padding_mask, brief, operations=self.operations)
        arena = self._arena(started.batch_size, spec)
        return GraphDecoding(self, arena, arena.begin(started))

    def _arena(self, sentences: int, spec: CacheSpec) -> Arena:
        """The smallest free one with room, or a new one."""
        room = Room(
            sentences=power_of_two(sentences),
            beams=spec.beams,
            capacity=spec.capacity or self.max_positions,
            source=whole_blocks(spec.source_capacity or self.max_positions, self.block),
            block=self.block,
            dtype=spec.dtype,
        )
        with self._lock:
            fitting = [arena for arena in self._free if arena.room.holds(room)]
            if fitting:
                arena = min(fitting, key=lambda arena: arena.room.sentences)
                self._free.remove(arena)
                return arena
        return Arena(self.model, room, self.recorder(self.device))

    def give_back(self, arena: Arena) -> None:
        """The decoding that ran in `arena` is over; the few used last are kept for others."""
        with self._lock:
            self._free = [*self._free, arena][-KEPT:]


class GraphDecoding:
    """A `GraphEngine` with an arena to itself while it lives; see `Decoding`."""

    def __init__(self, engine: GraphEngine, arena: Arena, cache: DecoderCache) -> None:
        self.engine = engine
        self.arena = arena
        self.cache = cache  # of this decoding's own rows, in the arena's memory
        self._changed = True  # whether the arena has yet to be told of lengths and sources
        weakref.finalize(self, engine.give_back, arena)

    @property
    def batch_size(self) -> int:
        """Sentences in the grid."""
        return self.cache.batch_size

    @property
    def beams(self) -> int:
        """Rows a sentence."""
        return self.cache.beams

    @torch.no_grad()
    def step(self, tokens: Tensor) -> "GraphScores":
        """See `Decoding.step`. Raises `ValueError` for other than one token a row or past the model's positions."""
        arena, cache, rows = self.arena, self.cache, self.cache.rows
        if tokens.shape != (rows,):
            raise ValueError(f"a step of {rows} rows needs as many tokens, not {tuple(tokens.shape)}")
        self.engine.model.check_length("target", cache.length + 1)
        cache.check_room(1)
        if self._changed:
            arena.load(cache)
            self._changed = False
        to_device(tokens, arena.tokens[:rows])
        arena.step(cache)
        cache.advance(1)
        return GraphScores(self)

    @torch.no_grad()
    def reorder(self, beam: Tensor) -> None:
        """See `Decoding.reorder`: recorded too. All rows of a sentence are equally long."""
        parents = self.cache.beam_rows(beam)
        if parents is not None:
            self.arena.move(self.cache, parents)

    @torch.no_grad()
    def compact(self, keep: Tensor) -> None:
        """See `Decoding.compact`."""
        self.cache.compact(keep)
        self._changed = True

    @torch.no_grad()
    def admit(self, slots: Sequence[int], newcomers: "GraphDecoding") -> None:
        """See `Decoding.admit`. Raises `ValueError` for a source longer than there is room for."""
        longest, room = newcomers.cache.sources[0].length, self.arena.room.source
        if longest > room:
            raise ValueError(f"a source of {longest} tokens doesn't fit a grid with room for {room}")
        self.cache.admit(slots, newcomers.cache)
        self.arena.used(self.cache.length)
        self._changed = True


class GraphScores(MatrixScores):
    """Scores in the arena of a decoding, which they keep from being given back; the best are there already."""

    __slots__ = ("_decoding",)

    def __init__(self, decoding: GraphDecoding) -> None:
        arena, rows = decoding.arena, decoding.cache.rows
        super().__init__(arena.logits[:rows], arena.log_z[:rows])
        self._decoding = decoding

    def _best(self, n: int) -> tuple[Tensor, Tensor]:
        arena, rows = self._decoding.arena, self.rows
        if n > arena.best.shape[1]:
            return super()._best(n)
        return arena.best[:rows, :n], arena.best_ids[:rows, :n]
