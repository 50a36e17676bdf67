"""What an attention structure is: it owns its weights and its state, and names its products.

A structure is what a layer's `self_attn` is. It runs on a *step*, which is either one layer's share of a cached step
(`translator.cache.LayerStep`) or a pass over whole sequences (`FullPass`): same code, and what differs is where K and V
come from. Shape letters: `B` sentences, `rows` hypotheses, `T` new target tokens, `S` source tokens, `H` query heads,
`H_kv` key heads, `D` model width, `D_head` head width.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from translator.attention.band import Band
from translator.attention.kernels import Kernel

Product = tuple[Tensor, Tensor | None]
"""Weight `(out, in)` and bias `(out,)` of a matrix product."""


class Products(Protocol):
    """What a structure computes with: the part of `translator.operations.Operations` that it sees."""

    @property
    def attention(self) -> Kernel:
        """See `translator.attention.kernels.attend`."""

    def product(
        self,
        name: str,
        x: Tensor,
        *,
        norm: str | None = None,
        dropout: str | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """`residual + dropout(norm(x) Wᵀ + b)`, each part where it is asked for."""


class StateSpec(Protocol):
    """How state is to be kept: the part of `translator.cache.CacheSpec` that a structure sees."""

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
        """An empty container of the kind asked for; values are as wide as keys, or `value_width`."""

    def window_state(
        self, rows: int, heads: int, width: int, *, band: Band, dtype: torch.dtype, device: torch.device
    ) -> Any:
        """K and V of as many tokens as the next one may see by `band`, of a fixed size."""

    def empty_state(self) -> Any:
        """The state of a layer that keeps nothing."""

    def shared_state(self, owner: int) -> Any:
        """The state of a layer that keeps nothing and reads that of the layer with the number `owner`."""

    def named_state(
        self, rows: int, shapes: dict[str, tuple[int, ...]], *, dtype: torch.dtype, device: torch.device
    ) -> Any:
        """Tensors of a fixed size, zero at first; `shapes` are those of one row."""

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
        """An entry of `width` numbers for every `rate` tokens, and tensors of a fixed size beside them."""


class AttentionStep(Protocol):
    """What a structure sees of the sequence: positions, attention under the right mask, its state between steps."""

    @property
    def positions(self) -> Tensor:
        """Positions of the T tokens, `(rows, T)` or `(1, T)`, int64."""

    @property
    def state(self) -> Any:
        """What `new_state` made, under the lifecycle of the cache; None in a pass over whole sequences."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, kernel: Kernel, dropout: float = 0.0) -> Tensor:
        """`(rows, H, T, D_head)`: q over all of K and V, the new `k`, `v` `(rows, H_kv, T, D_head)` included."""

    def attend_again(self, q: Tensor, kernel: Kernel, dropout: float = 0.0) -> Tensor:
        """`(rows, H, T, D_head)`: q over the K and V of an earlier layer; see `SharedAttention`."""

    def apart(self, x: Tensor) -> Tensor:
        """`x` `(rows, T, …)` with each sequence in a row of its own, whatever stands behind its end; for structures
        that mix tokens themselves.

        Raises `ValueError` where tokens see others than all those before them: such structures know no mask.
        """

    def together(self, x: Tensor) -> Tensor:
        """The reverse of `apart`."""

    def source(self, project: Callable[[Tensor], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor | None]:
        """K, V `(B, H_kv, S, D_head)` and mask of the source: kept by a cache, else `project(memory)`."""

    def attend_source(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, kernel: Kernel, dropout: float = 0.0
    ) -> Tensor:
        """`(B, H, queries, D_head)`: q over what `source` gave, each sentence's queries over its own."""


class Structure(nn.Module, ABC):
    """A self-attention structure.

    Subclasses take what `nn.MultiheadAttention` takes: `embed_dim`, `num_heads`, and by name `dropout`, `bias`,
    `batch_first`, `device`, `dtype`; and `options` where they have some.
    """

    options: ClassVar[type | None] = None
    """A frozen dataclass of pydantic's with what else can be chosen, each with a default: a layer's table in
    `ModelConfig.decoder_layers`. An instance comes to the constructor by name."""

    dropout: float = 0.0
    """The probability with which attention weights are dropped in training."""

    batch_first: bool = True

    steps_alike: ClassVar[bool] = False
    """Whether a step of one token calls the same products and attention whatever came before it, so that an engine may
    record one and replay it. A class says so of its own `attend`: it isn't inherited."""

    shareable: ClassVar[bool | None] = False
    """Whether another layer's queries may read what it gives `step.attend` as K and V; None where it gives nothing."""

    def connect(self, earlier: Sequence["Structure"]) -> None:
        """Told once of the structures of the `earlier` layers of its stack, for those that hang on another layer."""

    @abstractmethod
    def products(self) -> dict[str, Product]:
        """The structure's matrix products by the names it calls them by, for engines to prepare."""

    @abstractmethod
    def new_state(self, spec: StateSpec, rows: int) -> Any:
        """Empty state, a `translator.cache.LayerState`, for `rows` hypotheses.

        Sizes, device and type come from the structure, never from a tensor.
        """

    def reference(self, x: Tensor) -> Tensor:
        """The same attention over whole causal sequences `(rows, T, D)`, computed in another way, for proofs.

        Optional: without one, a structure is judged by its own pass over whole sequences alone.
        """
        raise NotImplementedError(f"{type(self).__name__} has no reference of its own")

    def reference_among(self, inputs: Sequence[Tensor]) -> Tensor:
        """`reference` of the last of `inputs`, those of the self-attentions up to this one in a stack."""
        return self.reference(inputs[-1])

    @abstractmethod
    def attend(
        self,
        x: Tensor,
        step: AttentionStep,
        ops: Products,
        *,
        norm: str | None = None,
        dropout: str | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """`x` `(rows, T, D)` → `(rows, T, D)`.

        The layer's `norm` belongs to the products on `x`, its `dropout` and `residual` to the last product.
        """
