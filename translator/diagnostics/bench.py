"""One set of sentences and weights, and the two ways of decoding them that need no cache.

`uncached` recomputes the whole prefix through the product's own decoder, in padded batches. `torch` recomputes it
through a plain `nn.TransformerDecoder`, each sentence alone and unpadded, with embeddings, masks and output projection
written out here, so that a fault shared by the cached and the uncached path still shows.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from translator.cache import DecoderCache
from translator.model import TranslationModel
from translator.padding import pad, padding

Row = tuple[int, tuple[int, ...]]
"""What a row of the grid holds: the index of its sentence and the tokens fed so far."""

T_Answer = TypeVar("T_Answer")

PATHS = ("uncached", "torch")


@dataclass(frozen=True, slots=True)
class SpecialIds:
    """The ids a search must know; the defaults are the tokenizer's."""

    pad: int = 0
    bos: int = 2
    eos: int = 3


def torch_decoder(model: TranslationModel) -> nn.TransformerDecoder:
    """PyTorch's own decoder with the weights of `model.decoder`, loaded strict, in eval mode."""
    config, weight = model.config, model.embedding.weight
    factory = {"device": weight.device, "dtype": weight.dtype}
    layer = nn.TransformerDecoderLayer(
        config.d_model,
        config.nhead,
        config.dim_feedforward,
        dropout=0.0,
        activation=config.activation,
        layer_norm_eps=config.layer_norm_eps,
        batch_first=True,
        norm_first=True,
        **factory,  # type: ignore[arg-type]
    )
    norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps, **factory)  # type: ignore[arg-type]
    decoder = nn.TransformerDecoder(layer, config.num_decoder_layers, norm)
    decoder.load_state_dict(model.decoder.state_dict(), strict=True)
    return decoder.eval()


class Bench:
    """A model in one dtype and a few sentences as ids, with what both paths without a cache say of any row.

    Answers are remembered: every check of every cache kind asks for the same rows. `forget_uncached` drops those that
    come from the product's own code.
    """

    def __init__(
        self,
        model: TranslationModel,
        sources: Sequence[Sequence[int]],
        *,
        special: SpecialIds,
        beams: int,
        longest: int,
        first_line: int = 1,
    ) -> None:
        """`longest` target tokens in the checks that feed given tokens, and at most in the searches.

        `first_line` is the line number of the first sentence, for reports.
        """
        self.model = model
        self.sources = sources
        self.special = special
        self.beams = beams
        self.longest = longest
        self.first_line = first_line
        self.device = model.embedding.weight.device
        self._decoder = torch_decoder(model)
        self._memories: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
        self._known: dict[str, dict[Hashable, Any]] = {path: {} for path in PATHS}
        # Enough columns for the longest script; the same for every check, so that they share their references.
        generator = torch.Generator().manual_seed(0)
        rows = max(len(sources), 4) * beams
        self.tokens = torch.randint(model.config.vocab_size, (rows, longest + 64), generator=generator)

    def start(self, sentences: Sequence[int], kind: str, beams: int, capacity: int | None) -> DecoderCache:
        """An empty cache for these sentences, as a padded batch."""
        memory, hidden = self._encoded(tuple(sentences))
        return self.model.start(memory, hidden, kind=kind, capacity=capacity, beams=beams)

    def logits(self, path: str, rows: Sequence[Row], since: int) -> Tensor:
        """As `compute`, remembered."""
        return self.once(path, (tuple(rows), since), lambda: self.compute(path, rows, since))

    def compute(self, path: str, rows: Sequence[Row], since: int) -> Tensor:
        """`(rows, longest row - since, V)` by one of `PATHS`; positions beyond a row's own tokens mean nothing."""
        return self._uncached(rows, since) if path == "uncached" else self._torch(rows, since)

    def once(self, path: str, question: Hashable, answer: Callable[[], T_Answer]) -> T_Answer:
        """What `answer` gave when `path` was first asked this question."""
        known = self._known[path]
        if question not in known:
            known[question] = answer()
        return known[question]

    def forget_uncached(self) -> None:
        """Drops what the product's own code answered; PyTorch's answers stay."""
        self._known["uncached"].clear()

    @torch.no_grad()
    def _encoded(self, sentences: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        if sentences not in self._memories:
            ids = [self.sources[sentence] for sentence in sentences]
            hidden = padding([len(row) for row in ids]).to(self.device)
            memory = self.model.encode(pad(ids, self.special.pad).to(self.device), hidden)
            self._memories[sentences] = (memory, hidden)
        return self._memories[sentences]

    def _targets(self, rows: Sequence[Row]) -> Tensor:
        return pad([tokens for _, tokens in rows], 0).to(self.device)

    @torch.no_grad()
    def _uncached(self, rows: Sequence[Row], since: int) -> Tensor:
        sentences = tuple(dict.fromkeys(sentence for sentence, _ in rows))
        memory, hidden = self._encoded(sentences)
        index = torch.tensor([sentences.index(sentence) for sentence, _ in rows], device=self.device)
        states = self.model.decode(self._targets(rows), memory[index], hidden[index])
        return self.model.logits(states[:, since:])

    @torch.no_grad()
    def _torch(self, rows: Sequence[Row], since: int) -> Tensor:
        weight, targets = self.model.embedding.weight, self._targets(rows)
        T = targets.shape[1]
        x = F.embedding(targets, weight) * math.sqrt(self.model.config.d_model)
        x = x + self.model.target_positions.weight[:T]
        hidden = torch.ones(T, T, dtype=torch.bool, device=self.device).triu(1)
        states = torch.empty_like(x)
        for sentence in dict.fromkeys(sentence for sentence, _ in rows):
            own = [index for index, row in enumerate(rows) if row[0] == sentence]
            memory, _ = self._encoded((sentence,))
            states[own] = self._decoder(x[own], memory.expand(len(own), -1, -1), tgt_mask=hidden)
        return states[:, since:] @ weight.T
