"""`Operations` by native kernels: one call for a product with its norm, activation and residual, one for attention."""

from collections.abc import Iterable, Mapping, Sequence
from ctypes import addressof, byref
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from translator.attention.kernels import attend
from translator.engine.native.library import (
    GELU,
    NO_ACTIVATION,
    RELU,
    Cached,
    Call,
    Dense,
    Embed,
    Kernels,
    Norm,
    Product,
)
from translator.engine.native.program import Tape
from translator.engine.native.weights import SOURCES, TYPES, PackedProduct
from translator.operations import Activation, Operations


class Native:
    """The library and how many threads its calls take; while a step is recorded, its tape."""

    __slots__ = ("_threads", "library", "rows", "tape")

    def __init__(
        self, library: Kernels, threads: int | None = None, rows: int | None = None, tape: Tape | None = None
    ) -> None:
        """`threads` are by default PyTorch's of the calling thread; `rows` those of the grid whose steps are run."""
        self.library = library
        self._threads = threads
        self.rows = rows
        self.tape = tape

    @property
    def threads(self) -> int:
        """How many the next call takes."""
        return self._threads or torch.get_num_threads()

    def for_steps(self, rows: int, tape: Tape | None = None) -> "Native":
        """The same for the steps of a grid of `rows`; a replay of the tape may have fewer."""
        return Native(self.library, self._threads, rows, tape)

    def run(self, call: Any, rows: int, reads: Sequence[str], output: Tensor) -> None:
        """Makes the call on `rows` rows, and keeps it if a step is being recorded."""
        if self.tape is not None:
            self.tape.add(call, reads, output)
        self.library.run(byref(Call(addressof(call), call.kind)), 1, rows, self.threads)

    def grid(self, count: int) -> tuple[int, int]:
        """`count` rows of a product as (rows, T): by the grid's rows where they are known."""
        if self.rows and not count % self.rows:
            return self.rows, count // self.rows
        return count, 1


class NativeOperations:
    """See `Operations`. What no kernel does (another activation, another kind of norm) is left to PyTorch."""

    __slots__ = ("layer", "native", "prefix", "products")

    def __init__(
        self, native: Native, layer: nn.Module, products: Mapping[str, PackedProduct], prefix: str = ""
    ) -> None:
        self.native = native
        self.layer = layer
        self.products = products
        self.prefix = prefix

    @property
    def attention(self) -> "NativeAttention":
        """See `Operations.attention`."""
        return NativeAttention(self.native)

    def of(self, part: str) -> "NativeOperations":
        """See `Operations.of`."""
        return NativeOperations(self.native, self.layer, self.products, f"{part}.")

    def product(
        self,
        name: str,
        x: Tensor,
        *,
        norm: str | None = None,
        activation: Activation | None = None,
        dropout: str | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """See `Operations.product`; dropout is training's, and not done here."""
        code = activation_code(activation)
        module = None if norm is None else self.layer._modules[norm]
        if module is not None and not plain_norm(module):
            x, module = module(x), None
        if code is None:
            y = activation(self.product(name, x, norm=norm if module is not None else None))  # type: ignore[misc]
            return y if residual is None else residual + y
        packed = self.products[self.prefix + name]
        return product(self.native, packed, x, module, code, residual)  # type: ignore[arg-type]

    def norm(self, name: str, x: Tensor) -> Tensor:
        """See `Operations.norm`."""
        return normed(self.native, self.layer._modules[name], x)  # type: ignore[arg-type]


class NativeStack:
    """See `StackOperations`; `products` by the layers' numbers and their own names."""

    def __init__(
        self,
        native: Native,
        stack: nn.Module,
        layers: Iterable[nn.Module],
        products: Sequence[Mapping[str, PackedProduct]],
    ) -> None:
        self.native = native
        self.stack = stack
        self.layers: Sequence[Operations] = [
            NativeOperations(native, layer, mine) for layer, mine in zip(layers, products, strict=True)
        ]

    def norm(self, x: Tensor) -> Tensor:
        """See `StackOperations.norm`."""
        norm = self.stack.norm
        return x if norm is None else normed(self.native, norm, x)  # type: ignore[arg-type]


class NativeAttention:
    """A kernel as `translator.attention.kernels.attend`, and one that reads a cache's buffers where they lie."""

    __slots__ = ("native",)

    def __init__(self, native: Native) -> None:
        self.native = native

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool = False, dropout: float = 0.0
    ) -> Tensor:
        """See `attend`; masks that say more than which keys of a sentence are seen are left to PyTorch."""
        B, H, T, D_head = q.shape
        S = k.shape[2]
        only_padding = mask is None or (mask.dtype == torch.bool and tuple(mask.shape) == (B, 1, 1, S))
        if dropout or not only_padding or not all(map(_native_tensor, (q, k, v))) or v.shape[3] != D_head:
            return attend(q, k, v, mask, is_causal, dropout)
        q = _token_rows(q)
        rows = self.native.rows or B
        beams = rows // B if B and not rows % B and not T % (rows // B) and not is_causal else 1
        rows = B * beams
        y = torch.empty(B, T, H * D_head)
        visible = None if mask is None else mask.contiguous()
        call = Dense(
            q=q.data_ptr(), k=k.data_ptr(), v=v.data_ptr(), y=y.data_ptr(),
            visible=None if visible is None else visible.data_ptr(),
            ldq=_ld(q), ldy=H * D_head,
            k_sentence=k.stride(0), k_head=k.stride(1), k_key=k.stride(2),
            v_sentence=v.stride(0), v_head=v.stride(1), v_key=v.stride(2),
            H=H, H_kv=k.shape[1], D_head=D_head, T=T // beams, S=S, beams=beams, causal=is_causal,
            scale=D_head**-0.5,
        )  # fmt: skip
        self.native.run(call, rows, ("q", "k", "v"), y)
        return y.view(B, T, H, D_head).transpose(1, 2)

    def in_place(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lengths: Tensor,
        keys: Tensor,
        values: Tensor,
        origin: Tensor | None = None,
        home: Tensor | None = None,
    ) -> Tensor:
        """Writes `k, v` `(rows, H_kv, T, D_head)` into `keys, values` `(…, H_kv, slots, D_head)`, and attends.

        `lengths` `(rows,)` int32 are the tokens held before; `origin` and `home` an `Ancestry`'s.
        """
        rows, H, T, D_head = q.shape
        q, k, v = _token_rows(q), _token_rows(k), _token_rows(v)
        y = torch.empty(rows, T, H * D_head)
        call = Cached(
            q=q.data_ptr(), k=k.data_ptr(), v=v.data_ptr(), y=y.data_ptr(),
            keys=keys.data_ptr(), values=values.data_ptr(), lengths=lengths.data_ptr(),
            origin=None if origin is None else origin.data_ptr(), home=None if home is None else home.data_ptr(),
            ldq=_ld(q), ldk=_ld(k), ldv=_ld(v), ldy=H * D_head,
            ld_origin=0 if origin is None else origin.stride(0), slots=keys.shape[2],
            H=H, H_kv=k.shape[1], D_head=D_head, T=T, scale=D_head**-0.5,
        )  # fmt: skip
        self.native.run(call, rows, ("q", "k", "v"), y)
        return y.view(rows, T, H, D_head).transpose(1, 2)

    def reads(self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> bool:
        """Whether `in_place` can work on these."""
        dense = keys.is_contiguous() and values.is_contiguous() and keys.shape == values.shape
        return dense and v.shape == k.shape and all(map(_native_tensor, (q, k, v, keys, values)))


def product(
    native: Native,
    packed: PackedProduct,
    x: Tensor,
    norm: nn.LayerNorm | None,
    activation: int,
    residual: Tensor | None,
) -> Tensor:
    """`residual + activation(norm(x) Wᵀ + b)` of `x` `(…, K)`."""
    x, ldx = rows_of(x)
    y = torch.empty((*x.shape[:-1], packed.N))
    ldr = 0
    if residual is not None:
        residual, ldr = rows_of(residual)
        if residual.shape != y.shape:
            raise ValueError(f"a residual of {tuple(residual.shape)} for a product of {tuple(y.shape)}")
    if x.shape[-1] != packed.K:
        raise ValueError(f"a product of {packed.K} inputs got {x.shape[-1]}")
    rows, T = native.grid(x.numel() // packed.K)
    call = Product(
        weights=packed.address, x=x.data_ptr(), y=y.data_ptr(), ldx=ldx, ldy=packed.N, ldr=ldr,
        gamma=None if norm is None else address(norm.weight, packed.K),
        beta=None if norm is None or norm.bias is None else address(norm.bias, packed.K),
        residual=None if residual is None else residual.data_ptr(),
        type=packed.type, activation=activation, N=packed.N, K=packed.K, T=T, eps=0.0 if norm is None else norm.eps,
    )  # fmt: skip
    native.run(call, rows, ("x", "residual"), y)
    return y


def normed(native: Native, norm: nn.Module, x: Tensor) -> Tensor:
    """`norm(x)` of `x` `(…, D)`."""
    if not isinstance(norm, nn.LayerNorm) or len(norm.normalized_shape) != 1 or not _native_tensor(x):
        return norm(x)
    x, ldx = rows_of(x)
    y, width = torch.empty(x.shape), x.shape[-1]
    rows, T = native.grid(x.numel() // width)
    call = Norm(
        x=x.data_ptr(), y=y.data_ptr(), ldx=ldx, ldy=width, width=width, T=T, eps=norm.eps,
        gamma=None if norm.weight is None else address(norm.weight, width),
        beta=None if norm.bias is None else address(norm.bias, width),
    )  # fmt: skip
    native.run(call, rows, ("x",), y)
    return y


def embedded(native: Native, ids: Tensor, lengths: Tensor, table: Tensor, positions: Tensor, scale: float) -> Tensor:
    """`table[id] * scale + positions[length]` `(rows, 1, D)` of each row's next token, `ids` `(rows, 1)` int64.

    `lengths` `(rows,)` int32; `table` `(V, D)` in a float type, `positions` `(any, D)` in fp32.
    """
    rows, width = ids.shape[0], table.shape[1]
    y = torch.empty(rows, 1, width)
    call = Embed(
        ids=ids.data_ptr(), table=table.data_ptr(), positions=positions.data_ptr(), lengths=lengths.data_ptr(),
        y=y.data_ptr(), type=TYPES[SOURCES[table.dtype]], width=width, scale=scale,
    )  # fmt: skip
    native.run(call, rows, (), y)
    return y


def plain_norm(norm: nn.Module) -> bool:
    """Whether a product's kernel can do this norm."""
    return isinstance(norm, nn.LayerNorm) and len(norm.normalized_shape) == 1 and norm.weight is not None


def activation_code(activation: Activation | None) -> int | None:
    """The kernels' code; None for one that PyTorch has to do."""
    if activation is None:
        return NO_ACTIVATION
    if activation in (F.relu, torch.relu) or isinstance(activation, nn.ReLU):
        return RELU
    if activation is F.gelu or (isinstance(activation, nn.GELU) and activation.approximate == "none"):
        return GELU
    return None


def rows_of(x: Tensor) -> tuple[Tensor, int]:
    """`x` `(…, K)` as fp32 rows an equal distance apart, and that distance in elements."""
    if x.dtype != torch.float32:
        x = x.float()
    if x.dim() == 3 and x.stride(2) == 1:
        if x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1):
            return x, x.stride(1)
        if x.shape[1] == 1:
            return x, x.stride(0)
    x = x.contiguous()
    return x, x.shape[-1]


def address(parameter: Tensor, width: int) -> int:
    """Where a norm's fp32 parameter `(width,)` lies."""
    if parameter.dtype != torch.float32 or parameter.shape != (width,) or not parameter.is_contiguous():
        raise ValueError(f"a norm of {tuple(parameter.shape)} in {parameter.dtype} for {width} fp32 inputs")
    return parameter.data_ptr()


def _native_tensor(x: Tensor) -> bool:
    return x.dtype == torch.float32 and x.device.type == "cpu" and x.stride(-1) == 1


def _token_rows(x: Tensor) -> Tensor:
    """`(B, H, T, D_head)` whose tokens are rows an equal distance apart, heads side by side."""
    B, _, T, D_head = x.shape
    ld = _ld(x)
    if x.stride(1) == D_head and (T == 1 or x.stride(2) == ld) and (B == 1 or x.stride(0) == T * ld):
        return x
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _ld(x: Tensor) -> int:
    return x.stride(2) if x.shape[2] > 1 else x.stride(0)
