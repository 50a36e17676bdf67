"""One set of sentences and weights, and the two ways of decoding them that need no cache.

`uncached` recomputes the whole prefix through the product's own decoder, in padded batches. `torch` recomputes it
through another implementation with the same weights (a plain `nn.TransformerDecoder`, or a structure's own reference),
each sentence alone and unpadded, so that a fault shared by the cached and the uncached path still shows.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from translator.cache import CacheSpec, DecoderCache
from translator.diagnostics.subject import Subject
from translator.padding import pad

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


class Bench:
    """A subject in one dtype, with what the paths without a cache say of any row.

    Answers are remembered: every check of every cache kind asks for the same rows. `forget_uncached` drops those that
    come from the product's own code.
    """

    def __init__(self, subject: Subject, *, special: SpecialIds, beams: int, longest: int, first_line: int = 1) -> None:
        """`longest` target tokens in the checks that feed given tokens, and at most in the searches.

        `first_line` is the line number of the first sentence, for reports.
        """
        self.subject = subject
        self.special = special
        self.beams = beams
        self.longest = longest
        self.first_line = first_line
        self.paths = PATHS if subject.independent is not None else PATHS[:1]
        self._memories: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
        self._known: dict[str, dict[Hashable, Any]] = {path: {} for path in self.paths}
        # Enough columns for the longest script; the same for every check, so that they share their references.
        generator = torch.Generator().manual_seed(0)
        rows = max(self.sentences, 4) * beams
        self.tokens = torch.randint(subject.vocab_size, (rows, longest + 64), generator=generator)

    @property
    def sentences(self) -> int:
        """How many there are."""
        return len(self.subject.source_lengths)

    def start(self, sentences: Sequence[int], spec: CacheSpec) -> DecoderCache:
        """An empty cache for these sentences, as a padded batch."""
        return self.subject.start(*self._memory(tuple(sentences)), spec)

    def logits(self, path: str, rows: Sequence[Row], since: int) -> Tensor:
        """As `compute`, remembered."""
        return self.once(path, (tuple(rows), since), lambda: self.compute(path, rows, since))

    def compute(self, path: str, rows: Sequence[Row], since: int) -> Tensor:
        """`(rows, longest row - since, V)` by one of `paths`; positions beyond a row's own tokens mean nothing."""
        return self._uncached(rows, since) if path == "uncached" else self._another(rows, since)

    def once(self, path: str, question: Hashable, answer: Callable[[], T_Answer]) -> T_Answer:
        """What `answer` gave when `path` was first asked this question."""
        known = self._known[path]
        if question not in known:
            known[question] = answer()
        return known[question]

    def forget_uncached(self) -> None:
        """Drops what the product's own code answered; the other path's answers stay."""
        self._known["uncached"].clear()

    def _memory(self, sentences: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        if sentences not in self._memories:
            self._memories[sentences] = self.subject.memory(sentences)
        return self._memories[sentences]

    def _targets(self, rows: Sequence[Row]) -> Tensor:
        return pad([tokens for _, tokens in rows], 0).to(self.subject.device)

    def _uncached(self, rows: Sequence[Row], since: int) -> Tensor:
        sentences = tuple(dict.fromkeys(sentence for sentence, _ in rows))
        memory, hidden = self._memory(sentences)
        index = torch.tensor([sentences.index(sentence) for sentence, _ in rows], device=memory.device)
        return self.subject.uncached(self._targets(rows), memory[index], hidden[index], since)

    def _another(self, rows: Sequence[Row], since: int) -> Tensor:
        targets = self._targets(rows)
        answers: list[Tensor | None] = [None] * len(rows)
        for sentence in dict.fromkeys(sentence for sentence, _ in rows):
            own = [index for index, row in enumerate(rows) if row[0] == sentence]
            memory, hidden = self._memory((sentence,))
            memory = memory[:, : int((~hidden).sum())]
            found = self.subject.by_another(targets[own], memory.expand(len(own), -1, -1), since)
            for index, answer in zip(own, found, strict=True):
                answers[index] = answer
        return torch.stack(answers)  # type: ignore[arg-type]
