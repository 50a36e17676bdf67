"""Another machine, pretended: every matrix product and attention rounds a little differently each time it is called.

What a test asserts must not hang on the last bits of a sum, which differ between CPUs, thread counts and shapes. Under
`pytest --shake` the results of the operations that add up are off by a few units in the last place, anew at each call.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

SUMS = (
    "addmm",
    "mm",
    "bmm",
    "baddbmm",
    "linear",
    "mkldnn_linear",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_attention_math",
    "native_layer_norm",
    "_softmax",
    "_log_softmax",
    "logsumexp",
)
UNITS = 2
"""Units in the last place, by which a sum is off at most."""


class Shaken(TorchDispatchMode):
    """Inside the block, results of `SUMS` in fp32 and fp64 are multiplied by a little more or less than one."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See `TorchDispatchMode`."""
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ not in SUMS or func._schema.is_mutable:
            return result
        self.calls += 1
        return tree_map(self._shaken, result)

    def _shaken(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dtype not in (torch.float32, torch.float64) or value.is_meta:
            return value
        noise = torch.rand(value.shape, generator=self.generator, dtype=value.dtype) * 2 - 1
        return value * (1 + UNITS * torch.finfo(value.dtype).eps * noise)
