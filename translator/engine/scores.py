"""`Scores` by the native kernels: one pass over the logits for `log_z`, one for `top`, nothing as large as they are."""

import torch
from torch import Tensor

from translator.engine.base import MatrixScores
from translator.engine.native.library import Kernels


class NativeScores(MatrixScores):
    """What `MatrixScores` gives, of fp32 logits `(rows, V)` on the CPU; rows may lie apart, their numbers may not.

    Among equal logits the lower id comes first. Raises `ValueError` for any other logits.
    """

    __slots__ = ("_kernels", "_threads", "_where")

    def __init__(self, kernels: Kernels, logits: Tensor, threads: int = 1, log_z: Tensor | None = None) -> None:
        """`threads` is how many the kernels use; `log_z` is worked out unless given."""
        super().__init__(logits, log_z)
        stride, step = logits.stride()
        if logits.dtype != torch.float32 or step != 1 or not logits.is_cpu:
            found = f"{logits.dtype} of strides {stride, step} on {logits.device}"
            raise ValueError(f"the kernels take rows of float32 on the CPU, its numbers side by side, not {found}")
        self._kernels, self._threads = kernels, threads
        self._where = (logits.data_ptr(), *logits.shape, stride)

    def like(self, logits: Tensor, log_z: Tensor) -> "NativeScores":
        """The same kernels on other logits."""
        return NativeScores(self._kernels, logits, self._threads, log_z)

    @property
    def log_z(self) -> Tensor:
        """`(rows,)`, float64: the logarithm of the sum of exponentials."""
        if self._log_z is None:
            self._log_z = torch.empty(self.rows, dtype=torch.float64)
            self._kernels.log_z(*self._where, self._log_z.data_ptr(), self._threads)
        return self._log_z

    def top(self, k: int, banned: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See `Scores.top`."""
        _, rows, vocab_size, _ = self._where
        k = min(k, vocab_size)
        values, ids = torch.empty(rows, k), torch.empty(rows, k, dtype=torch.int64)
        if banned is not None:
            banned = banned.contiguous()
        of_banned = (None, 0) if banned is None else (banned.data_ptr(), banned.shape[1])
        self._kernels.top(*self._where, k, *of_banned, values.data_ptr(), ids.data_ptr(), self._threads)
        return values - self.log_z.unsqueeze(1), ids  # fp64, as log_z
