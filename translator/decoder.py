"""`CachedDecoder`: the stack of layers, `nn.TransformerDecoder`'s `state_dict` and training, and steps with a cache."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from translator.attention import DEFAULT_KERNEL, AttentionStep, Structure
from translator.attention.masks import merge_masks, padding_visible
from translator.cache import CacheSpec, DecoderCache, SourceState
from translator.decoder_layer import CachedDecoderLayer, as_batch, as_given, batched_padding, full_pass
from translator.operations import EagerStack, KernelChoice, StackOperations
from translator.plain import check_plain

if TYPE_CHECKING:
    from translator.engine.packed import PackedDecoder


class CachedDecoder(KernelChoice, nn.Module):
    """A stack of `CachedDecoderLayer`s: `nn.TransformerDecoder`'s `state_dict` and training, and steps with a cache.

    >>> decoder = CachedDecoder.from_torch(trained)                       # an nn.TransformerDecoder, parameters shared
    >>> cache = decoder.start(memory, memory_key_padding_mask=padding)    # cross-attention K and V, once
    >>> hidden = decoder(embed(tokens, cache.positions(1)), cache)        # one step, of one token or of several
    """

    def __init__(self, layers: Iterable[CachedDecoderLayer], norm: nn.Module | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.norm = norm
        if not len(self.layers):
            raise ValueError("a decoder needs at least one layer")
        structures = self.structures
        for index, structure in enumerate(structures):
            structure.connect(structures[:index])
        first = self.stack[0]
        self.batch_first = first.batch_first  # whether inputs are (B, T, D); else (T, B, D)
        self.num_heads = first.multihead_attn.num_heads

    @overload
    @classmethod
    def from_torch(cls, module: nn.TransformerDecoder, *, attention_kernel: str = ...) -> "CachedDecoder": ...
    @overload
    @classmethod
    def from_torch(
        cls, module: nn.Transformer, *, attention_kernel: str = ...
    ) -> "tuple[nn.Module, CachedDecoder]": ...
    @classmethod
    def from_torch(
        cls, module: nn.Module, *, attention_kernel: str = DEFAULT_KERNEL
    ) -> "CachedDecoder | tuple[nn.Module, CachedDecoder]":
        """A cached decoder around the parameters of `module`, shared, not copied; nothing is converted or retrained.

        `nn.TransformerDecoder` gives a `CachedDecoder`; `nn.Transformer` gives its own encoder and the cached decoder.
        Modes aren't shared: `train()` and `eval()` of one leave the other alone. `attention_kernel` is one of
        `translator.attention.KERNELS`. Raises `TypeError`, naming the part, for a class it doesn't know, and for hooks,
        parametrised, pruned or replaced parts; `UserError` for a kernel that is unknown or can't run here.
        """
        check_plain(module, "from_torch", (nn.TransformerDecoder, nn.Transformer))
        if isinstance(module, nn.Transformer):
            return module.encoder, cls.from_torch(module.decoder, attention_kernel=attention_kernel)
        assert isinstance(module, nn.TransformerDecoder)
        decoder = cls([CachedDecoderLayer.from_torch(layer) for layer in module.layers], module.norm)
        decoder.training = module.training
        decoder.attention_kernel = attention_kernel
        return decoder

    def packed(self, compute_type: str = "auto", *, threads: int | None = None) -> "PackedDecoder":
        """The same decoder for steps with a cache, its weights packed for the CPU: several times faster.

        `compute_type` is `float32`, `float16`, `bfloat16`, `int8`, or `auto`, which changes no weight; `threads` are by
        default PyTorch's. The packed weights are a copy: when these parameters change, the packed decoder says so.
        Raises `ValueError` for a decoder that isn't fp32 on the CPU, and `UserError` for weights that aren't finite.
        """
        from translator.engine.packed import PackedDecoder  # an engine is built on decoders, not they on it

        return PackedDecoder(self, compute_type, threads=threads)

    def operations(self) -> StackOperations:
        """The plain operations, on the parameters as they are: training, and the reference."""
        return EagerStack(self, self.layers, self.chosen_kernel)

    @property
    def stack(self) -> list[CachedDecoderLayer]:
        """`layers`, with their type."""
        return cast(list[CachedDecoderLayer], list(self.layers))

    @property
    def structures(self) -> list[Structure]:
        """Each layer's self-attention."""
        return [layer.self_attn for layer in self.stack]

    @torch.no_grad()
    def start(
        self,
        memory: Tensor,
        memory_key_padding_mask: Tensor | None = None,
        spec: CacheSpec | None = None,
        *,
        operations: StackOperations | None = None,
        **options: Any,
    ) -> DecoderCache:
        """An empty cache for the sentences of `memory` `(B, S, D)` (`(S, B, D)` unless `batch_first`).

        `memory_key_padding_mask` `(B, S)`, True = padding, holds for every step. A `CacheSpec`, or its fields by name,
        say how to keep what is decoded: `kind="dynamic"` grows, `kind="static"` has `capacity` tokens a row, allocated
        now (`CacheFullError` beyond); `beams` rows are kept for each sentence, row `b * beams + k`, and K and V of the
        source stay one a sentence. `operations` are an engine's. Raises `ValueError` for shapes that don't fit, an
        unknown kind or a missing capacity, and `RuntimeError` when the module this decoder was made from has got other
        parts since.
        """
        self._check_shared()
        source = as_batch(memory, self.batch_first)
        layers = self.stack
        width = layers[0].multihead_attn.embed_dim
        if source.shape[-1] != width:
            raise ValueError(f"memory is {source.shape[-1]} wide and the decoder {width}")
        if memory.dim() == 2 and memory_key_padding_mask is not None and memory_key_padding_mask.dim() == 1:
            memory_key_padding_mask = memory_key_padding_mask.unsqueeze(0)
        visible = padding_visible(memory_key_padding_mask, source.shape[0], source.shape[1])
        if visible is not None:  # an encoder may leave NaN at padding, and a mask alone doesn't stop it
            source = source.masked_fill(~visible.unsqueeze(-1), 0)
        if spec is not None and options:
            raise TypeError(f"start() got a spec and {', '.join(options)} beside it; one of the two says it all")
        spec = spec or CacheSpec(**options)
        if spec.dtype is None and torch.is_autocast_enabled(source.device.type):
            spec = replace(spec, dtype=torch.get_autocast_dtype(source.device.type))
        operations = operations or self.operations()
        B, S = source.shape[:2]
        slots = spec.sentences or B
        sources = []
        for layer, ops in zip(layers, operations.layers, strict=True):
            k, v = layer.multihead_attn.source_kv(source, ops.of("multihead_attn"))
            if spec.dtype is not None:
                k, v = k.to(spec.dtype), v.to(spec.dtype)
            if B > 1:  # pays in attention after a few steps; for one sentence it would delay the first token
                k, v = k.contiguous(), v.contiguous()
            sources.append(SourceState(k, v, sentences=spec.sentences, capacity=spec.source_capacity))
        opened = spec.opened(source.device)
        states = [layer.self_attn.new_state(opened, slots * spec.beams) for layer in layers]
        if slots > B:  # empty slots have no source to see
            known = source.new_ones((B, S), dtype=torch.bool) if visible is None else visible
            visible = F.pad(known, (0, 0, 0, slots - B))
        return DecoderCache(
            states, sources, spec, batch_size=slots, source_visible=visible, computed_in=self._dtype_now(source.device)
        )

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor | DecoderCache,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
    ) -> Tensor:
        """With a tensor for `memory`, as `nn.TransformerDecoder.forward`. With a cache: the next T tokens of each row.

        With a cache, `tgt` is `(rows, T, D)`, causality and source padding come from the cache, and a caller's own
        `tgt_mask` `(T, past + T)` or `tgt_key_padding_mask` `(rows, past + T)` hides more. No gradients flow through a
        cached step. Returns the shape of `tgt`. Raises `ValueError` for masks or rows that don't fit, `RuntimeError`
        under active dropout or when decoder and cache differ in type or device, and `CacheFullError`; the cache is then
        as it was.
        """
        x = as_batch(tgt, self.batch_first)
        if isinstance(memory, DecoderCache):
            if memory_mask is not None or memory_key_padding_mask is not None:
                raise ValueError("with a cache, source masks are given once, to start()")
            hidden = self.step(x, memory, self.operations(), tgt_mask, tgt_key_padding_mask)
            return as_given(hidden, tgt, self.batch_first)
        self._check_shared()
        source = as_batch(memory, self.batch_first)
        whole = full_pass(
            self.num_heads,
            x,
            source,
            (tgt_mask, tgt_key_padding_mask, bool(tgt_is_causal)),
            (memory_mask, memory_key_padding_mask, memory_is_causal),
        )
        return as_given(self.run(x, [whole] * len(self.layers), self.operations()), tgt, self.batch_first)

    def run(self, x: Tensor, steps: Sequence[AttentionStep], operations: StackOperations) -> Tensor:
        """The stack itself, batch first: each layer on its own step, all on an engine's operations."""
        for layer, step, ops in zip(self.stack, steps, operations.layers, strict=True):
            x = layer.run(x, step, ops)
        return operations.norm(x)

    @torch.no_grad()
    def step(
        self,
        x: Tensor,
        cache: DecoderCache,
        operations: StackOperations,
        tgt_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
    ) -> Tensor:
        """The cached step of `forward`, batch first, on an engine's operations."""
        self.check_step(x, cache)
        past, T = cache.length, x.shape[1]
        shape = (x.shape[0], self.num_heads, T, past + T)
        given, _ = merge_masks(tgt_mask, batched_padding(tgt_key_padding_mask), shape, x.dtype, past=past)
        step = cache.begin(T, given)
        x = self.run(x, step.layers, operations)
        cache.commit(step)
        return x

    def check_step(self, x: Tensor, cache: DecoderCache) -> None:
        """Raises the errors of a cached step of `x` `(rows, T, D)` that `forward` names, before anything is written."""
        if x.shape[0] != cache.rows or len(cache.states) != len(self.layers):
            raise ValueError(
                f"the step has {x.shape[0]} rows and {len(self.layers)} layers; the cache holds "
                f"{cache.rows} rows ({cache.batch_size} sentences of {cache.beams}) and {len(cache.states)} layers"
            )
        self._check_shared()
        self._check_repeatable()
        self._check_same_dtype_now(cache)

    def _check_shared(self) -> None:
        for index, layer in enumerate(cast(list[CachedDecoderLayer], self.layers)):
            part = layer.parted_from_original()
            if part is not None:
                raise RuntimeError(
                    f"layers.{index}.{part}: the module this decoder was made from has another one since "
                    "(load_state_dict with assign=True, or an assignment): call CachedDecoder.from_torch again"
                )

    def _check_repeatable(self) -> None:
        for index, layer in enumerate(cast(list[CachedDecoderLayer], self.layers)):
            if layer.dropout_is_active():
                raise RuntimeError(
                    f"layers.{index}: a step with a cache under active dropout would keep K and V that no other pass "
                    "gives again: call eval() on the cached decoder first (it has a mode of its own)"
                )

    def _check_same_dtype_now(self, cache: DecoderCache) -> None:
        device = self.stack[0].linear1.weight.device
        dtype = self._dtype_now(device)
        if (cache.computed_in, cache.device) != (dtype, device):
            raise RuntimeError(
                f"cache holds {_short(cache.computed_in)} on {cache.device}, "
                f"the decoder is now {_short(dtype)} on {device}: "
                "call start() again, or move the cache with cache.to(…)"
            )

    def _dtype_now(self, device: torch.device) -> torch.dtype:
        """What the decoder computes in now."""
        if torch.is_autocast_enabled(device.type):
            return torch.get_autocast_dtype(device.type)
        return self.stack[0].linear1.weight.dtype


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
