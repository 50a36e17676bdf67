"""Which source token each target token read: a model's own cross-attention weights, layer by layer."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import torch
from matplotlib import font_manager
from matplotlib.figure import Figure
from rich.cells import cell_len, set_cell_size
from torch import Tensor, nn

from translator.checkpoint import Checkpoint
from translator.model import EagerModel, TranslationModel
from translator.operations import EagerOperations
from translator.typed.sides import Sides

_FONTS = ("Noto Sans CJK SC", "Noto Sans SC", "Source Han Sans SC", "WenQuanYi Zen Hei", "WenQuanYi Micro Hei",
          "Droid Sans Fallback", "SimHei", "Microsoft YaHei", "PingFang SC", "Arial Unicode MS")  # fmt: skip
_WIDEST = 12  # cells of a token's name in the terminal
_SHADES = " ░▒▓█"


@dataclass(frozen=True)
class Reading:
    """Tokens of a sentence pair, and the weights `(L, H, T, S)` with which each of T target tokens read S source ones.

    Row t is what the decoder read to write token t; both sides end with their end token.
    """

    source: list[str]
    target: list[str]
    weights: Tensor

    def shown(self, layer: int | None = None, head: int | None = None) -> Tensor:
        """`(T, S)`: of one layer and head, counted from 1, or their mean; rows add up to 1.

        Raises:
            ValueError: there is no such layer or head.
        """
        chosen = self.weights
        for axis, (name, number) in enumerate((("layer", layer), ("head", head))):
            count = chosen.shape[axis]
            if number is None:
                continue
            if not 1 <= number <= count:
                raise ValueError(f"{name} {number}: the model has {name}s 1 to {count}")
            chosen = chosen.narrow(axis, number - 1, 1)
        return chosen.mean(dim=(0, 1))


@torch.no_grad()
def cross_attention(model: TranslationModel, source: Sequence[int], target: Sequence[int]) -> Tensor:
    """Weights `(L, H, T, S)` of a teacher-forced pass: ids of the source, end token included, and of the target, start
    token first. Computed by the layers' own products, the softmax in fp32 or better."""
    watched = _Watched(model)
    ids = torch.tensor([list(source)], device=model.embedding.weight.device)
    memory = model.encode(ids)
    model.decode(torch.tensor([list(target)], device=ids.device), memory, operations=watched)
    return torch.cat(watched.seen)


def read_pair(checkpoint: Checkpoint, source: str, target: str) -> Reading:
    """How `checkpoint` reads `source` while it writes `target`; both as one sentence."""
    tokenizer, model = checkpoint.tokenizer, checkpoint.model.eval()
    sides = Sides(tokenizer, checkpoint.config.source_language, checkpoint.config.target_language)
    typed = sides.source(source)
    source_ids = [*tokenizer.encode(typed.text), tokenizer.eos_id]
    target_ids = [*tokenizer.encode(sides.forced(target, typed)), tokenizer.eos_id]
    for name, ids in (("source", source_ids), ("target", target_ids)):
        model.check_length(name, len(ids))
    weights = cross_attention(model, source_ids, [tokenizer.bos_id, *target_ids[:-1]])

    def names(ids: Iterable[int]) -> list[str]:
        pieces = tokenizer.pieces(list(ids))
        return [typed.spans.get(piece.strip("▁"), piece.replace("▁", " ").strip() or "␣") for piece in pieces]

    return Reading(names(source_ids), names(target_ids), weights)


def in_terminal(reading: Reading, weights: Tensor) -> list[str]:
    """A line a target token: its name, a shade for each source token, and those it read most."""
    label = min(_WIDEST, max(map(cell_len, reading.target)))
    lines = []
    for name, row in zip(reading.target, weights.tolist(), strict=True):
        shades = "".join(_SHADES[min(len(_SHADES) - 1, int(share * len(_SHADES)))] * 2 for share in row)
        best = sorted(range(len(row)), key=row.__getitem__, reverse=True)[:2]
        most = ", ".join(f"{reading.source[place]} {row[place]:.0%}" for place in best if row[place] >= 0.1)
        lines.append(f"{set_cell_size(name, label)} │{shades}│ {most}")
    return lines


def picture(reading: Reading, weights: Tensor, format: str) -> tuple[bytes, list[str]]:
    """The weights as an image, and what names in it mean where no font here can write them."""
    font = _font([*reading.source, *reading.target])
    legend: list[str] = []

    def label(names: list[str], letter: str) -> list[str]:
        if font is not None or all(name.isascii() for name in names):
            return names
        legend.extend(f"{letter}{place} {name}" for place, name in enumerate(names, 1))
        return [f"{letter}{place}" for place in range(1, len(names) + 1)]

    T, S = weights.shape
    figure = Figure(figsize=(2.2 + 0.42 * S, 1.8 + 0.36 * T), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(weights.cpu(), cmap="Blues", vmin=0, vmax=max(0.5, float(weights.max())), aspect="auto")
    options: dict[str, Any] = {} if font is None else {"fontfamily": font}
    axes.set_xticks(range(S), label(reading.source, "s"), rotation=60, ha="right", rotation_mode="anchor", **options)
    axes.set_yticks(range(T), label(reading.target, "t"), **options)
    axes.set(xlabel="source token that was read", ylabel="target token that was written")
    figure.colorbar(image, ax=axes, label="share of the attention")
    out = BytesIO()
    figure.savefig(out, format=format, dpi=110)
    return out.getvalue(), legend


def _font(names: list[str]) -> str | None:
    """A font of this machine that has all of the names' characters; None where it needs none, or has none."""
    if all(ord(character) < 0x2E80 for name in names for character in name):
        return None
    there = {font.name for font in font_manager.fontManager.ttflist}
    return next((font for font in _FONTS if font in there), None)


class _Watched(EagerModel):
    """The plain operations, which keep what cross-attention weighs."""

    def __init__(self, model: TranslationModel) -> None:
        super().__init__(model)
        self.seen: list[Tensor] = []
        self.decoder.layers = [_WatchedLayer(layer, self.seen) for layer in model.decoder.layers]  # type: ignore[misc]


class _WatchedLayer(EagerOperations):
    __slots__ = ("seen",)

    def __init__(self, layer: nn.Module, seen: list[Tensor], part: nn.Module | None = None) -> None:
        super().__init__(layer, part)
        self.seen = seen

    def of(self, part: str) -> EagerOperations:
        """See `Operations.of`."""
        if part != "multihead_attn":
            return super().of(part)
        operations = _Weighing(self.layer, self.layer.get_submodule(part))
        operations.seen = self.seen
        return operations


class _Weighing(EagerOperations):
    """`translator.attention.kernels.attend` step by step, with its weights kept."""

    __slots__ = ("seen",)

    seen: list[Tensor]

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool = False, dropout: float = 0.0
    ) -> Tensor:
        """See `Operations.attention`."""
        scores = (q @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
        weights = scores.to(torch.promote_types(scores.dtype, torch.float32)).softmax(dim=-1)
        self.seen.append(weights)
        return weights.to(v.dtype) @ v
