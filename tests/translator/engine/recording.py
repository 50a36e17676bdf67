"""What a CUDA graph does, on any device: operators recorded once and run again on the same tensors, without Python."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "lift_fresh", "_unique2", "equal", "is_nonzero")
"""Operators that bring numbers from or to the host, or whose result's shape hangs on numbers."""


class Recorded(TorchDispatchMode):
    """Keeps every operator with its arguments and results; one that a CUDA graph can't hold raises."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name in WAITING:
            raise AssertionError(f"{name} in a recorded step")
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result

    @torch.no_grad()
    def replay(self) -> None:
        """Runs what was recorded, every result to where it was."""
        for func, args, kwargs, result in self.calls:
            aliases = [returned.alias_info for returned in func._schema.returns]
            if any(alias is not None and not alias.is_write for alias in aliases):
                continue  # a view: there already
            again = func(*args, **kwargs)
            if all(alias is None for alias in aliases):
                for place, value in zip(tensors(result), tensors(again), strict=True):
                    place.copy_(value)

    def signature(self, kept: list[Tensor]) -> list[Any]:
        """Operators with shapes and strides, numbers, and places in `kept`, the tensors that outlive a step."""
        starts = {tensor.untyped_storage().data_ptr() for tensor in kept}

        def told(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return repr(leaf)
            start = leaf.untyped_storage().data_ptr()
            place = (start, leaf.storage_offset()) if start in starts else None
            return tuple(leaf.shape), leaf.stride(), leaf.dtype, place

        return [
            (str(func), [told(leaf) for leaf in tree_leaves((args, kwargs))]) for func, args, kwargs, _ in self.calls
        ]


def recorded(device: torch.device) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """A recorder for `GraphEngine`."""

    def record(work: Callable[[], None]) -> Callable[[], None]:
        with Recorded() as operators:
            work()
        return operators.replay

    return record


def tensors(tree: Any) -> list[Tensor]:
    """Those in nested tuples."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
