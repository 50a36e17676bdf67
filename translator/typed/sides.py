"""Both sides of a translation as the model sees them, and the way back: training and translation share this."""

import random
import zlib
from dataclasses import dataclass

from translator.languages import language
from translator.tokenizer import Tokenizer
from translator.typed.accelerators import given_back, taken
from translator.typed.casing import restored as recased
from translator.typed.plain import plain
from translator.typed.protect import SLOTS, holds_all, protected, restored
from translator.typed.visible import visible


@dataclass(frozen=True, slots=True)
class Source:
    """A sentence as a model takes it, and what its translation is to get back."""

    text: str
    spans: tuple[str, ...] = ()
    accelerator: tuple[str, str] | None = None


class Sides:
    """What one checkpoint's text goes through: nothing but `visible` where its vocabulary has no slots."""

    def __init__(self, tokenizer: Tokenizer, source_language: str, target_language: str) -> None:
        self.tokenizer = tokenizer
        self.source_language, self.target_language = source_language, target_language
        self.slots = tokenizer.has_slots
        self.chinese = language(source_language).primary == "zh"
        self.cased = not self.chinese

    def source(self, text: str) -> Source:
        """A sentence that somebody typed."""
        text = visible(text)
        if not self.slots:
            return Source(text)
        text, accelerator = taken(plain(text, self.source_language))
        masked, spans = protected(text, self.chinese, self.tokenizer.knows)
        return Source(self._recased(masked), tuple(spans), accelerator)

    def target(self, text: str, source: Source) -> str:
        """A translation of `source` with everything back in its place; a span it lost stands at its end."""
        if not self.slots:
            return text
        text = restored(text, source.spans)
        return given_back(text, source.accelerator, self.target_language)

    def is_whole(self, text: str, source: Source) -> bool:
        """Whether a translation, as the model wrote it, has every span of `source` once."""
        return not self.slots or holds_all(text, source.spans)

    def forced(self, text: str, source: Source) -> str:
        """A given target, or the beginning of one, as the model would write it."""
        text = visible(text)
        for slot, span in zip(SLOTS, source.spans, strict=False):
            text = text.replace(span, slot, 1)
        return text

    def pair(self, source: str, target: str) -> tuple[str, str]:
        """A pair of the training text. Spans that both sides hold share a slot; what has no partner stays as it is.

        Which slot is drawn by the text, so that a model gets to know all of them.
        """
        source, target = visible(source), visible(target)
        if not self.slots:
            return source, target
        source, accelerator = taken(plain(source, self.source_language))
        if accelerator is not None:
            target, _ = taken(target)
        source = self._recased(source)
        masked, spans = protected(source, self.chinese, self.tokenizer.knows)
        if not spans:
            return source, target
        order = list(SLOTS)
        random.Random(zlib.crc32(source.encode())).shuffle(order)
        shared: dict[str, str] = {}
        for slot, span in zip(order, spans, strict=False):
            place = _find(target, span)
            if place >= 0:
                target = target[:place] + slot + target[place + len(span) :]
                shared[SLOTS[len(shared)]] = slot
            else:
                shared[SLOTS[len(shared)]] = span
        return "".join(shared.get(character, character) for character in masked), target

    def _recased(self, text: str) -> str:
        return recased(text, self.tokenizer.likelihood) if self.cased else text


def _find(target: str, span: str) -> int:
    """Where `span` stands in `target` on its own, not within a longer number or word; -1 where it doesn't."""
    start = target.find(span)
    while start >= 0:
        end = start + len(span)
        before, after = target[start - 1 : start], target[end : end + 1]
        if not (_joins(before, span[0]) or _joins(after, span[-1])):
            return start
        start = target.find(span, start + 1)
    return -1


def _joins(neighbour: str, edge: str) -> bool:
    if edge.isdigit():
        return neighbour.isdigit()
    return neighbour.isascii() and neighbour.isalnum() and edge.isalnum()
