"""The fast engine: weights packed once, a step recorded as native calls and replayed in one.

    engine = PackedEngine(model, "float16")                     # a TranslationModel
    packed = CachedDecoder.from_torch(decoder).packed("int8")   # anyone's decoder

The layers' own code runs on the operations of `translator.engine.native`; nothing of a structure is written twice.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from translator.attention import Product
from translator.cache import CacheSpec, DecoderCache
from translator.decoder import CachedDecoder
from translator.decoder_layer import as_batch, as_given
from translator.engine.base import Scores, parameter_versions
from translator.engine.native.library import available, load
from translator.engine.native.operations import Native, NativeStack, embedded, product
from translator.engine.native.steps import Steps
from translator.engine.native.weights import AUTO, PackedProduct, PackedWeights, chosen_type
from translator.engine.prepacked import PrepackedStack, forms, say_once
from translator.engine.scores import NativeScores
from translator.model import TranslationModel
from translator.operations import StackOperations


class PackedModel:
    """`ModelOperations` of a model whose products are packed; embeddings, norms and positions are the model's."""

    def __init__(
        self, native: Native, model: TranslationModel, weights: PackedWeights, table: Tensor, positions: Tensor
    ) -> None:
        """`table` `(V, D)` are the embeddings, in any float type; `positions` `(max_positions, D)` the target's."""
        self.native = native
        self.model = model
        self.weights = weights
        self.table = table
        self.positions = positions
        self.scale = math.sqrt(model.config.d_model)
        self.encoder = _stack(native, model.encoder, model.encoder.stack, weights, "encoder.layers")
        self.decoder = _stack(native, model.decoder, model.decoder.stack, weights, "decoder.layers")

    def embed_next(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """`(rows, 1, D)` of each row's next token, ids `(rows, 1)`, in one call; `lengths` `(rows,)` int32."""
        return embedded(self.native, ids, lengths, self.table, self.positions, self.scale)

    def embed_source(self, ids: Tensor, positions: Tensor) -> Tensor:
        """See `ModelOperations.embed_source`."""
        return F.embedding(ids, self.table).float() * self.scale + self.model.source_positions(positions)

    def embed_target(self, ids: Tensor, positions: Tensor) -> Tensor:
        """See `ModelOperations.embed_target`."""
        return F.embedding(ids, self.table).float() * self.scale + F.embedding(positions, self.positions)

    def logits(self, hidden: Tensor) -> Tensor:
        """See `ModelOperations.logits`."""
        return product(self.native, self.weights.products["logits"], hidden, None, 0, None)

    def on(self, native: Native) -> "PackedModel":
        """The same on other threads, or for the steps of one cache."""
        return PackedModel(native, self.model, self.weights, self.table, self.positions)


class PackedEngine:
    """See `Engine`.

    With `release` the model's own matrices are let go, so that the packed ones are the only ones in memory. Without it
    the model stays whole; once its weights have changed, the engine raises `RuntimeError`. Raises `UserError` for an
    unknown compute type and for weights that aren't finite in it.
    """

    def __init__(
        self,
        model: TranslationModel,
        compute_type: str = AUTO,
        *,
        threads: int | None = None,
        release: bool = False,
    ) -> None:
        products = model.products()
        table = model.embedding.weight.detach()
        if release:
            table = table.clone()
        weights = PackedWeights.pack(load(), products, chosen_type(compute_type, products), spent=release)
        if release:
            _release(model, products)
        self._assemble(model, weights, table, threads)

    @classmethod
    def of_packed(
        cls, model: TranslationModel, weights: PackedWeights, table: Tensor, *, threads: int | None = None
    ) -> "PackedEngine":
        """Around what was packed before; of `model` only norms and positions are needed, `table` `(V, D)` are its
        embeddings.
        """
        engine = cls.__new__(cls)
        engine._assemble(model, weights, table, threads)
        return engine

    def _assemble(self, model: TranslationModel, weights: PackedWeights, table: Tensor, threads: int | None) -> None:
        self.model = model
        self.compute_type = weights.compute_type
        with torch.no_grad():
            positions = model.target_positions(torch.arange(self.max_positions)).float().contiguous()
        self._versions = parameter_versions(model)
        self.operations = PackedModel(Native(load(), threads), model, weights, table, positions)

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.model.config.vocab_size

    @property
    def max_positions(self) -> int:
        """The model's."""
        return self.model.config.max_positions

    @property
    def cache_kind(self) -> str:
        """See `Engine.cache_kind`: its kernels follow the table, so that beams are never copied."""
        return "indirect"

    @torch.no_grad()
    def encode(self, source: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """Memory `(B, S, D)` of ids `(B, S)`."""
        if parameter_versions(self.model) != self._versions:
            raise RuntimeError("the model's weights have changed since they were packed: make a new engine of it")
        return self.model.encode(source, key_padding_mask, self.operations)

    @torch.no_grad()
    def log_probs(self, source: Tensor, target: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """See `Engine.log_probs`."""
        memory = self.encode(source, key_padding_mask)
        hidden = self.model.decode(target, memory, key_padding_mask, self.operations)
        logits = self.operations.logits(hidden)
        scores = NativeScores(
            self.operations.native.library, logits.view(-1, self.vocab_size), self.operations.native.threads
        )
        # Written over the logits, which nobody else has: the largest tensor there is.
        return torch.sub(logits, scores.log_z.view(*logits.shape[:2], 1), out=logits)

    @torch.no_grad()
    def start(self, memory: Tensor, key_padding_mask: Tensor | None, spec: CacheSpec) -> "PackedDecoding":
        """See `Engine.start`. K and V are kept in fp32."""
        spec = replace(spec, dtype=torch.float32)
        return PackedDecoding(self, self.model.start(memory, key_padding_mask, spec, operations=self.operations))


class PackedDecoding:
    """A `PackedEngine` with its cache; see `Decoding`."""

    def __init__(self, engine: PackedEngine, cache: DecoderCache) -> None:
        self.engine = engine
        self.cache = cache
        self._steps = Steps(engine.operations.native, self._run, engine.model.decoder.structures)
        self._logits: Tensor | None = None
        self._scores: NativeScores | None = None

    @property
    def batch_size(self) -> int:
        """Sentences in the grid."""
        return self.cache.batch_size

    @property
    def beams(self) -> int:
        """Rows a sentence."""
        return self.cache.beams

    def step(self, tokens: Tensor) -> Scores:
        """See `Decoding.step`."""
        if self.cache.length >= self.engine.max_positions:
            raise ValueError(f"the targets have reached the model's {self.engine.max_positions} positions")
        native = self.engine.operations.native
        logits = self._steps.step(self.cache, tokens.unsqueeze(1))
        if self._scores is None or logits is not self._logits:
            self._logits = logits
            self._scores = NativeScores(native.library, logits[:, -1], native.threads)
        return self._scores.renew()

    def reorder(self, beam: Tensor) -> None:
        """See `Decoding.reorder`."""
        self.cache.reorder(beam)

    def compact(self, keep: Tensor) -> None:
        """See `Decoding.compact`."""
        self.cache.compact(keep)

    def admit(self, slots: Sequence[int], newcomers: "PackedDecoding") -> None:
        """See `Decoding.admit`."""
        self.cache.admit(slots, newcomers.cache)

    def _run(self, native: Native, ids: Tensor, lengths: Tensor, steps: Sequence[Any]) -> Tensor:
        operations = self.engine.operations.on(native)
        x = operations.embed_next(ids, lengths)
        return operations.logits(self.engine.model.decoder.run(x, steps, operations.decoder))


class PackedDecoder:
    """A `CachedDecoder` whose steps with a cache run on packed weights; what `CachedDecoder.packed` gives.

    `start` and calling with a cache are the decoder's own. Training goes on with the decoder itself: once its weights
    have changed, a call raises `RuntimeError`, and `packed` is called again.
    """

    def __init__(self, decoder: CachedDecoder, compute_type: str = "auto", *, threads: int | None = None) -> None:
        for name, parameter in decoder.named_parameters():
            if parameter.dtype != torch.float32 or parameter.device.type != "cpu":
                kind = str(parameter.dtype).removeprefix("torch.")
                raise ValueError(f"packed: {name} is {kind} on {parameter.device}; it must be float32 on the CPU")
        self.decoder = decoder
        products = {
            f"{index}.{name}": made
            for index, layer in enumerate(decoder.stack)
            for name, made in layer.products().items()
        }
        self.compute_type = chosen_type(compute_type, products)
        self._native: Native | None = None
        self._prepacked: PrepackedStack | None = None
        if available():
            self._native = Native(load(), threads)
            self._weights = PackedWeights.pack(self._native.library, products, self.compute_type)
        else:
            say_once()
            self._prepacked = PrepackedStack(decoder, decoder.layers, forms(products, self.compute_type))
        self._versions = parameter_versions(decoder)
        self._steps: WeakKeyDictionary[DecoderCache, Steps] = WeakKeyDictionary()

    @property
    def batch_first(self) -> bool:
        """The decoder's."""
        return self.decoder.batch_first

    def start(
        self,
        memory: Tensor,
        memory_key_padding_mask: Tensor | None = None,
        spec: CacheSpec | None = None,
        **options: Any,
    ) -> DecoderCache:
        """See `CachedDecoder.start`; K and V are kept in fp32, by default in an `indirect` cache."""
        self._check_current()
        if spec is None:
            spec, options = CacheSpec(**{"kind": "indirect", **options}), {}
        spec = replace(spec, dtype=torch.float32)
        operations = self._operations()
        return self.decoder.start(memory.float(), memory_key_padding_mask, spec, operations=operations, **options)

    @torch.no_grad()
    def __call__(self, tgt: Tensor, cache: DecoderCache) -> Tensor:
        """The next T tokens of each row, as `CachedDecoder.forward` with a cache."""
        self._check_current()
        x = as_batch(tgt, self.batch_first).float()
        if self._native is None:
            return as_given(self.decoder.step(x, cache, self._operations()), tgt, self.batch_first)
        self.decoder.check_step(x, cache)
        steps = self._steps.get(cache)
        if steps is None:
            steps = self._steps[cache] = Steps(self._native, self._run, self.decoder.structures)
        return as_given(steps.step(cache, x).clone(), tgt, self.batch_first)

    def _run(self, native: Native, x: Tensor, lengths: Tensor, steps: Sequence[Any]) -> Tensor:
        return self.decoder.run(x, steps, _stack(native, self.decoder, self.decoder.stack, self._weights, ""))

    def _operations(self) -> StackOperations:
        """What a step computes with that isn't recorded."""
        if self._native is None:
            assert self._prepacked is not None
            return self._prepacked
        return _stack(self._native, self.decoder, self.decoder.stack, self._weights, "")

    def _check_current(self) -> None:
        if parameter_versions(self.decoder) != self._versions:
            raise RuntimeError("the decoder's weights have changed since they were packed: call packed() again")


def _stack(
    native: Native, stack: nn.Module, layers: Sequence[nn.Module], weights: PackedWeights, prefix: str
) -> NativeStack:
    by_layer: list[dict[str, PackedProduct]] = [{} for _ in layers]
    start = f"{prefix}." if prefix else ""
    for name, made in weights.products.items():
        if name.startswith(start):
            index, _, own = name.removeprefix(start).partition(".")
            if index.isdigit():
                by_layer[int(index)][own] = made
    return NativeStack(native, stack, layers, by_layer)


def _release(model: TranslationModel, products: Mapping[str, Product]) -> None:
    """Leaves of the matrices in `products` their shapes."""
    packed = {weight.untyped_storage().data_ptr() for weight, _ in products.values()}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.untyped_storage().data_ptr() in packed and parameter.dim() > 1:
                module._parameters[name] = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
