"""What is put to the test: a decoder and what stands around it, a `TranslationModel`'s or one's own.

`embed(ids, positions)`, both `(rows, T)`, gives the decoder's input `(rows, T, D)`; `project(hidden)` gives logits
`(…, V)`. Rows come first in both, whatever the decoder's own layout.
"""

import copy
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from translator.attention import CachedMultiheadAttention, Structure
from translator.cache import CacheSpec, DecoderCache
from translator.decoder import CachedDecoder
from translator.decoder_layer import CachedDecoderLayer
from translator.errors import UserError
from translator.model import TranslationModel
from translator.padding import pad, padding

Embed = Callable[[Tensor, Tensor], Tensor]
Project = Callable[[Tensor], Tensor]


class Subject:
    """A decoder in one type, its sentences, and the ways of running it that a check compares."""

    def __init__(
        self, decoder: CachedDecoder, embed: Embed, project: Project, *, vocab_size: int, max_positions: int
    ) -> None:
        self.decoder = decoder
        self.embed = embed
        self.project = project
        self.vocab_size = vocab_size
        self.max_positions = max_positions
        self.independent = independent_decoder(decoder)
        """Another implementation with the same weights, `(x, memory) -> hidden`; None where there is none."""

    @property
    def device(self) -> torch.device:
        """Where the decoder is."""
        return next(self.decoder.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """What the decoder computes in."""
        return next(self.decoder.parameters()).dtype

    @property
    def source_lengths(self) -> list[int]:
        """Source tokens of each sentence."""
        raise NotImplementedError

    def memory(self, sentences: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Encoder output `(B, S, D)` of these sentences as one padded batch, and `(B, S)` True = padding."""
        raise NotImplementedError

    def in_dtype(self, dtype: torch.dtype) -> "Subject":
        """A copy in another type, in eval mode; the original is left alone."""
        raise NotImplementedError

    # -- ways of running it -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def start(self, memory: Tensor, hidden: Tensor | None, spec: CacheSpec) -> DecoderCache:
        """An empty cache for `memory` `(B, S, D)`."""
        return self.decoder.start(self._layout(memory), hidden, spec)

    @torch.no_grad()
    def cached(self, ids: Tensor, cache: DecoderCache) -> Tensor:
        """Logits `(rows, T, V)` of the next ids `(rows, T)`, by a step with the cache."""
        x = self.embed(ids, cache.positions(ids.shape[1]))
        return self.project(self._layout(self.decoder(self._layout(x), cache)))

    @torch.no_grad()
    def uncached(self, ids: Tensor, memory: Tensor, hidden: Tensor | None, since: int = 0) -> Tensor:
        """Logits `(rows, T - since, V)` of whole targets `(rows, T)`, row by row with `memory` `(rows, S, D)`."""
        x = self._layout(self._embed_whole(ids))
        output = self.decoder(x, self._layout(memory), memory_key_padding_mask=hidden, tgt_is_causal=True)
        return self.project(self._layout(output)[:, since:])

    @torch.no_grad()
    def by_another(self, ids: Tensor, memory: Tensor, since: int = 0) -> Tensor:
        """As `uncached`, by `independent` and without padding."""
        assert self.independent is not None
        return self.project(self.independent(self._embed_whole(ids), memory)[:, since:])

    def _embed_whole(self, ids: Tensor) -> Tensor:
        return self.embed(ids, torch.arange(ids.shape[1], device=ids.device).expand_as(ids))

    def _layout(self, x: Tensor) -> Tensor:
        return x if self.decoder.batch_first else x.transpose(0, 1)


class ModelSubject(Subject):
    """A `TranslationModel`, with sources given as ids; it is encoded anew for every batch of sentences."""

    def __init__(self, model: TranslationModel, sources: Sequence[Sequence[int]], pad_id: int = 0) -> None:
        config = model.config
        super().__init__(
            model.decoder,
            self._embed_plainly,
            model.logits,
            vocab_size=config.vocab_size,
            max_positions=config.max_positions,
        )
        self.model = model
        self.sources = sources
        self.pad_id = pad_id

    @property
    def source_lengths(self) -> list[int]:
        """Source tokens of each sentence."""
        return [len(source) for source in self.sources]

    @torch.no_grad()
    def memory(self, sentences: Sequence[int]) -> tuple[Tensor, Tensor]:
        """See `Subject.memory`."""
        ids = [self.sources[sentence] for sentence in sentences]
        hidden = padding([len(row) for row in ids]).to(self.device)
        return self.model.encode(pad(ids, self.pad_id).to(self.device), hidden), hidden

    def in_dtype(self, dtype: torch.dtype) -> "ModelSubject":
        """See `Subject.in_dtype`."""
        return ModelSubject(copy.deepcopy(self.model).to(dtype).eval(), self.sources, self.pad_id)

    @torch.no_grad()
    def start(self, memory: Tensor, hidden: Tensor | None, spec: CacheSpec) -> DecoderCache:
        """By the model's own `start`."""
        return self.model.start(memory, hidden, spec)

    def cached(self, ids: Tensor, cache: DecoderCache) -> Tensor:
        """By the model's own `decode`."""
        with torch.no_grad():
            return self.model.logits(self.model.decode(ids, cache))

    def uncached(self, ids: Tensor, memory: Tensor, hidden: Tensor | None, since: int = 0) -> Tensor:
        """By the model's own `decode`."""
        with torch.no_grad():
            return self.model.logits(self.model.decode(ids, memory, hidden)[:, since:])

    def _embed_plainly(self, ids: Tensor, positions: Tensor) -> Tensor:
        # Written out: the model's own embedding is part of what is tested.
        scaled = F.embedding(ids, self.model.embedding.weight) * math.sqrt(self.model.config.d_model)
        return scaled + self.model.target_positions(positions)


class DecoderSubject(Subject):
    """One's own decoder, with the encoder output of a few sentences."""

    def __init__(
        self,
        decoder: nn.Module,
        embed: Embed,
        project: Project,
        memory: Tensor,
        memory_key_padding_mask: Tensor | None = None,
        *,
        max_positions: int,
        most: int | None = None,
    ) -> None:
        """`decoder` is an `nn.TransformerDecoder` or a `CachedDecoder`; `memory` `(B, S, D)`, or `(S, B, D)` where it
        isn't `batch_first`, of whose sentences the first `most` are used. Raises `UserError` for shapes that don't fit
        together.
        """
        cached = decoder if isinstance(decoder, CachedDecoder) else CachedDecoder.from_torch(decoder)  # type: ignore[call-overload]
        if memory.dim() != 3:
            raise UserError(f"memory must be (B, S, D) or (S, B, D), not {tuple(memory.shape)}")
        self.whole = (memory if cached.batch_first else memory.transpose(0, 1))[:most]
        memory_key_padding_mask = None if memory_key_padding_mask is None else memory_key_padding_mask[:most]
        B, S = self.whole.shape[:2]
        self.hidden = (
            torch.zeros(B, S, dtype=torch.bool, device=memory.device)
            if memory_key_padding_mask is None
            else memory_key_padding_mask
        )
        if tuple(self.hidden.shape) != (B, S) or self.hidden.dtype != torch.bool:
            raise UserError(f"memory_key_padding_mask must be bool {(B, S)}, not {self.hidden.dtype} "
                            f"{tuple(self.hidden.shape)}")  # fmt: skip
        self.whole = self.whole.masked_fill(self.hidden.unsqueeze(2), 0)
        lengths = (~self.hidden).sum(dim=1)
        if bool((self.hidden != (torch.arange(S, device=memory.device) >= lengths.unsqueeze(1))).any()):
            raise UserError("memory_key_padding_mask must hide the end of a source and nothing else")
        self.lengths = [int(length) for length in lengths]
        ids = torch.zeros((1, 1), dtype=torch.int64, device=memory.device)
        with torch.no_grad():
            x = embed(ids, ids)
            if tuple(x.shape) != (1, 1, self.whole.shape[2]):
                raise UserError(f"embed of one id gives {tuple(x.shape)}; (1, 1, {self.whole.shape[2]}) is needed")
            V = project(x).shape[-1]
        super().__init__(cached, embed, project, vocab_size=V, max_positions=max_positions)

    @property
    def source_lengths(self) -> list[int]:
        """Source tokens of each sentence."""
        return self.lengths

    def memory(self, sentences: Sequence[int]) -> tuple[Tensor, Tensor]:
        """See `Subject.memory`."""
        longest = max(max(self.lengths[sentence] for sentence in sentences), 1)
        index = torch.tensor(list(sentences), device=self.whole.device)
        return self.whole[index, :longest], self.hidden[index, :longest]

    def in_dtype(self, dtype: torch.dtype) -> "DecoderSubject":
        """See `Subject.in_dtype`; raises `UserError` where embed and project can't follow (see `converts`)."""
        parts: dict[str, Any] = {"decoder": self.decoder, "embed": self.embed, "project": self.project}
        if dtype != self.dtype:
            if not self.converts:
                raise UserError("embed and project must be modules to be checked in another type than the decoder's")
            parts = {name: part.to(dtype) for name, part in copy.deepcopy(parts).items()}
        memory = self.whole if self.decoder.batch_first else self.whole.transpose(0, 1)
        parts["decoder"] = copy.deepcopy(parts["decoder"]).eval()
        return DecoderSubject(**parts, memory=memory.to(dtype), memory_key_padding_mask=self.hidden,
                              max_positions=self.max_positions)  # fmt: skip

    @property
    def converts(self) -> bool:
        """Whether embed and project are modules, which can be copied into another type."""
        return isinstance(self.embed, nn.Module) and isinstance(self.project, nn.Module)


def independent_decoder(decoder: CachedDecoder) -> Callable[[Tensor, Tensor], Tensor] | None:
    """Another implementation with the same weights: PyTorch's, or each structure's own reference; None without one.

    Takes `x` `(rows, T, D)` and an unpadded memory `(rows, S, D)`, gives hidden states `(rows, T, D)`.
    """
    if all(type(layer.self_attn) is CachedMultiheadAttention for layer in decoder.stack):
        return _batch_first(torch_decoder(decoder))
    if not all(map(_has_reference, decoder.structures)):
        return None
    return lambda x, memory: _written_out(decoder, x, memory)


def _has_reference(structure: Structure) -> bool:
    made, base = type(structure), Structure
    return made.reference is not base.reference or made.reference_among is not base.reference_among


def torch_decoder(decoder: CachedDecoder) -> nn.TransformerDecoder:
    """PyTorch's own decoder with the weights of `decoder`, loaded strict, in eval mode."""
    first = decoder.stack[0]
    weight = first.linear1.weight
    layer = nn.TransformerDecoderLayer(
        first.multihead_attn.embed_dim,
        first.multihead_attn.num_heads,
        first.linear1.out_features,
        dropout=0.0,
        activation=first.activation,
        layer_norm_eps=first.norm1.eps,
        batch_first=decoder.batch_first,
        norm_first=first.norm_first,
        bias=first.linear1.bias is not None,
        device=weight.device,
        dtype=weight.dtype,
    )
    twin = nn.TransformerDecoder(layer, len(decoder.layers), copy.deepcopy(decoder.norm))
    for mine in twin.layers:
        mine.activation = first.activation  # copying a layer makes PyTorch forget an activation module
    twin.load_state_dict(decoder.state_dict(), strict=True)
    return twin.eval()


def _batch_first(twin: nn.TransformerDecoder) -> Callable[[Tensor, Tensor], Tensor]:
    batch_first = twin.layers[0].self_attn.batch_first

    def run(x: Tensor, memory: Tensor) -> Tensor:
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        if batch_first:
            return twin(x, memory, tgt_mask=hidden)
        return twin(x.transpose(0, 1), memory.transpose(0, 1), tgt_mask=hidden).transpose(0, 1)

    return run


def _written_out(decoder: CachedDecoder, x: Tensor, memory: Tensor) -> Tensor:
    """The stack layer by layer around each structure's own `reference`."""
    inputs: list[Tensor] = []
    for layer in decoder.stack:
        cross = layer.multihead_attn
        for norm, compute in (
            (layer.norm1, partial(_self_attention, layer.self_attn, inputs)),
            (layer.norm2, partial(_cross, cross, memory)),
            (layer.norm3, partial(_feed_forward, layer)),
        ):
            x = x + compute(norm(x)) if layer.norm_first else norm(x + compute(x))
    return x if decoder.norm is None else decoder.norm(x)


def _self_attention(structure: Structure, inputs: list[Tensor], x: Tensor) -> Tensor:
    inputs.append(x)
    return structure.reference_among(inputs)


def _feed_forward(layer: CachedDecoderLayer, x: Tensor) -> Tensor:
    return layer.linear2(layer.activation(layer.linear1(x)))


def _cross(attention: CachedMultiheadAttention, memory: Tensor, x: Tensor) -> Tensor:
    return F.multi_head_attention_forward(
        x.transpose(0, 1), memory.transpose(0, 1), memory.transpose(0, 1), attention.embed_dim, attention.num_heads,
        attention.in_proj_weight, attention.in_proj_bias, None, None, False, 0.0, attention.out_proj.weight,
        attention.out_proj.bias, training=False, need_weights=False,
    )[0].transpose(0, 1)  # fmt: skip


def layer_sizes(decoder: CachedDecoder) -> dict[str, int]:
    """Sizes of a decoder by the names of `ModelConfig`."""
    first: CachedDecoderLayer = decoder.stack[0]
    return {
        "d_model": first.multihead_attn.embed_dim,
        "nhead": first.multihead_attn.num_heads,
        "dim_feedforward": first.linear1.out_features,
        "num_decoder_layers": len(decoder.layers),
    }
