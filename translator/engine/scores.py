"""`Scores` by the native kernels: each row's best and its normaliser in one call, nothing as large as the logits."""

import torch
from torch import Tensor

from translator.engine.base import MatrixScores
from translator.engine.native.library import Kernels


class NativeScores(MatrixScores):
    """What `MatrixScores` gives, of fp32 logits `(rows, V)` on the CPU; rows may lie apart, their numbers may not.

    Among equal logits the lower id comes first. Results are written where those of the last step were: `renew` says
    that another step has changed the logits. Raises `ValueError` for any other logits.
    """

    __slots__ = ("_kernels", "_known", "_log_z_at", "_normalisers", "_room", "_threads", "_where")

    def __init__(self, kernels: Kernels, logits: Tensor, threads: int = 1, log_z: Tensor | None = None) -> None:
        """`threads` is how many the kernels use; `log_z` is worked out unless given."""
        super().__init__(logits, log_z)
        stride, step = logits.stride()
        if logits.dtype != torch.float32 or step != 1 or not logits.is_cpu:
            found = f"{logits.dtype} of strides {stride, step} on {logits.device}"
            raise ValueError(f"the kernels take rows of float32 on the CPU, its numbers side by side, not {found}")
        self._kernels, self._threads = kernels, threads
        self._where = (logits.data_ptr(), *logits.shape, stride)
        self._normalisers = torch.empty(self.rows, dtype=torch.float64)
        self._log_z_at = self._normalisers.data_ptr()
        self._room: dict[int, tuple[Tensor, Tensor, int, int]] = {}
        self._known = False

    def renew(self) -> "NativeScores":
        """These scores, of what the logits are now."""
        self._known = False
        return self

    def like(self, logits: Tensor, log_z: Tensor) -> "NativeScores":
        """The same kernels on other logits."""
        return NativeScores(self._kernels, logits, self._threads, log_z)

    @property
    def log_z(self) -> Tensor:
        """`(rows,)`, float64: the logarithm of the sum of exponentials."""
        if not self._known:
            self._kernels.log_z(*self._where, self._log_z_at, self._threads)
            self._known = True
        return self._normalisers

    def top(self, k: int, banned: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See `Scores.top`."""
        if k not in self._room:
            self._room[k] = self._made(min(k, self.vocab_size))
        values, ids, values_at, ids_at = self._room[k]
        if banned is None:
            banned_at, spare = None, 0
        else:
            banned = banned.contiguous()
            banned_at, spare = banned.data_ptr(), banned.shape[1]
        self._kernels.top(
            *self._where, ids.shape[1], banned_at, spare, values_at, ids_at, self._log_z_at, self._threads
        )
        self._known = True
        return values, ids

    def _made(self, k: int) -> tuple[Tensor, Tensor, int, int]:
        values = torch.empty(self.rows, k, dtype=torch.float64)
        ids = torch.empty(self.rows, k, dtype=torch.int64)
        return values, ids, values.data_ptr(), ids.data_ptr()
