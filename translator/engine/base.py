"""What a search needs of whatever computes: `Engine`, `Decoding`, `Scores`. Shapes as in `translator.attention`."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from translator.cache import CacheSpec

NEVER = float("-inf")


class Scores(Protocol):
    """Log-probabilities of every row's next token, on the device where they were computed; valid until the next step.

    Nothing here copies, sorts or normalises a whole `(rows, V)` matrix unless `logits` is asked for.
    """

    @property
    def rows(self) -> int:
        """Rows of the grid."""

    @property
    def vocab_size(self) -> int:
        """V."""

    @property
    def device(self) -> torch.device:
        """Where they are."""

    @property
    def log_z(self) -> Tensor:
        """What to take from a row's logits to get log-probabilities, `(rows,)`, float64."""

    def top(self, k: int, banned: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The k best next tokens of each row: log-probabilities `(rows, k)`, descending, and ids `(rows, k)`.

        `banned` `(rows, n)` are ids that may not be chosen (-1 for none): with fewer than k left, the rest is -inf.
        """

    def at(self, tokens: Tensor) -> Tensor:
        """Log-probabilities of the ids `(rows, n)`, `(rows, n)`."""

    def logits(self) -> Tensor:
        """`(rows, V)`; not to be written into."""


class Decoding(Protocol):
    """A decoder between two steps, over a grid of `batch_size` sentences by `beams` rows; rows are neighbours.

    A cached model is one; a model that recomputes the whole prefix at every step is another, and any search must give
    the same with both.
    """

    @property
    def batch_size(self) -> int:
        """Sentences in the grid, B."""

    @property
    def beams(self) -> int:
        """Rows a sentence, K."""

    def step(self, tokens: Tensor) -> Scores:
        """Appends `tokens` `(rows,)` to the rows and gives scores of what follows."""

    def reorder(self, beam: Tensor) -> None:
        """Row `(b, k)` continues from row `(b, beam[b, k])`; `beam` `(B, K)`."""

    def compact(self, keep: Tensor) -> None:
        """Goes on with the sentences `keep` `(B',)` only."""

    def admit(self, slots: Sequence[int], newcomers: Any) -> None:
        """Sentences `slots` become those of another decoding of the same engine, with whatever they have decoded.

        Slots of the grid that no sentence came for (`CacheSpec.sentences`) are filled so before the next step.
        """


class Engine(Protocol):
    """Runs a model: immutable, shared by threads. `encode` gives whatever its own `start` takes."""

    @property
    def device(self) -> torch.device:
        """Where ids have to be."""

    @property
    def vocab_size(self) -> int:
        """V."""

    @property
    def max_positions(self) -> int:
        """The longest source and the longest target, in tokens."""

    @property
    def cache_kind(self) -> str:
        """The container it decodes fastest with."""

    def encode(self, source: Tensor, key_padding_mask: Tensor | None = None) -> Any:
        """Memory of ids `(B, S)`; `key_padding_mask` `(B, S)`, True = padding."""

    def log_probs(self, source: Tensor, target: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """Log-probabilities `(B, T, V)` of what follows each of the target ids `(B, T)`, given source ids `(B, S)`."""

    def start(self, memory: Any, key_padding_mask: Tensor | None, spec: CacheSpec) -> Decoding:
        """A decoding of the sentences of `memory`, `spec.beams` rows each, nothing decoded yet."""


class MatrixScores:
    """`Scores` from a matrix of logits `(rows, V)`; `log_z` is worked out unless given."""

    __slots__ = ("_log_z", "_matrix")

    def __init__(self, logits: Tensor, log_z: Tensor | None = None) -> None:
        self._matrix = logits
        self._log_z = log_z

    @property
    def rows(self) -> int:
        """Rows of the grid."""
        return self._matrix.shape[0]

    @property
    def vocab_size(self) -> int:
        """V."""
        return self._matrix.shape[1]

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self._matrix.device

    @property
    def log_z(self) -> Tensor:
        """`(rows,)`, float64: the logarithm of the sum of exponentials."""
        if self._log_z is None:
            # The two parts are added up in fp64: their sum in fp32 would round away more than the exponentials do.
            most = self._matrix.amax(dim=1, keepdim=True)  # (rows, 1)
            above = (_wide(self._matrix) - most).exp_().sum(dim=1)  # (rows,)
            self._log_z = most.squeeze(1).double() + above.double().log()
        return self._log_z

    def top(self, k: int, banned: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See `Scores.top`."""
        if k == 1 and self._matrix.device.type == "cpu":  # one pass, where a top-k takes longer
            values, ids = self._matrix.max(dim=1, keepdim=True)
            if banned is None or not bool((ids == banned).any()):
                return values.double() - self.log_z.unsqueeze(1), ids
        spare = 0 if banned is None else banned.shape[1]
        values, ids = self._best(min(k + spare, self.vocab_size))  # (rows, k + n)
        values = values.double() - self.log_z.unsqueeze(1)
        if banned is not None:
            hidden = (ids.unsqueeze(2) == banned.unsqueeze(1)).any(dim=2)  # (rows, k + n)
            # Stable, so that what is left keeps its order.
            values, order = values.masked_fill(hidden, NEVER).sort(dim=1, descending=True, stable=True)
            values, ids = values[:, :k], ids.gather(1, order)[:, :k]
        return values, ids

    def at(self, tokens: Tensor) -> Tensor:
        """See `Scores.at`."""
        return self._matrix.gather(1, tokens).double() - self.log_z.unsqueeze(1)

    def logits(self) -> Tensor:
        """`(rows, V)`."""
        return self._matrix

    def _best(self, n: int) -> tuple[Tensor, Tensor]:
        """The n largest logits of each row `(rows, n)`, descending, and their ids."""
        return self._matrix.topk(n, dim=1)


def parameter_versions(module: nn.Module) -> list[tuple[int, int]]:
    """What changes when a parameter of `module` does; one made in inference mode never does."""
    return [(id(parameter), 0 if parameter.is_inference() else parameter._version) for parameter in module.parameters()]


def normalised(logits: Tensor) -> Tensor:
    """Log-probabilities from logits `(…, V)`, in fp32 at least."""
    return _wide(logits).log_softmax(dim=-1)


def _wide(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()
