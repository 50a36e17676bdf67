"""Both sides of a translation as the model sees them, and the way back: training and translation share this."""

import random
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from translator.languages import language
from translator.tokenizer import Tokenizer, one_space
from translator.typed.accelerators import Accelerator, put_accelerator, strip_accelerator, without_key
from translator.typed.casing import sentence_case
from translator.typed.plain import REWRITTEN, full_stops, narrow, plain
from translator.typed.slots import NUMBERS, OTHERS
from translator.typed.spans import Span, assign, find, mask, restore
from translator.typed.visible import visible


@dataclass(frozen=True, slots=True)
class Source:
    """A sentence as a model takes it, and what its translation is to get back.

    `spans` has the text that each placeholder in `text` stands for.
    """

    text: str
    spans: Mapping[str, str] = field(default_factory=dict)
    accelerator: Accelerator | None = None

    def cut(self, text: str) -> "Source":
        """What is left of it when only `text` is."""
        return Source(text, {slot: own for slot, own in self.spans.items() if slot in text}, self.accelerator)


class Sides:
    """What one checkpoint's text goes through: nothing but `visible` where its vocabulary has no slots."""

    def __init__(self, tokenizer: Tokenizer, source_language: str, target_language: str) -> None:
        self.source_language, self.target_language = source_language, target_language
        self.slots = tokenizer.has_slots
        self._known, self._score = tokenizer.characters | REWRITTEN, tokenizer.likelihood
        self._cased = language(source_language).spaced  # a Chinese sentence's case is that of the names in it

    def line(self, text: str) -> str:
        """A line that somebody typed, as it is to be split into sentences."""
        text = visible(text)
        return full_stops(text, self.source_language) if self.slots else text

    def source(self, text: str) -> Source:
        """A sentence that somebody typed."""
        text = visible(text)
        if not self.slots:
            return Source(text)
        text = full_stops(one_space(text), self.source_language)
        text, accelerator = strip_accelerator(narrow(text, self.source_language))
        spans = find(text, self._known)
        slots = assign(spans)
        return Source(self._plain(mask(text, spans, slots)), {slot: own for own, slot in slots.items()}, accelerator)

    def target(self, text: str, source: Source) -> str:
        """A translation of `source` as it is to be read; a span that it lost stands at its end."""
        if not self.slots:
            return text
        lost = " ".join(slot for slot in source.spans if slot not in text)
        text += " " * bool(text and lost) + lost
        marked = restore(put_accelerator(text, source.accelerator, self.target_language), source.spans)
        if source.accelerator and text and not any(map(str.isalpha, text)) and marked[0].isalpha():
            marked = source.accelerator.mark + marked  # a word that was copied
        return marked

    def typed(self, source: Source) -> str:
        """`source` as somebody may have typed it."""
        return restore(source.text, source.spans) if self.slots else source.text

    def is_copied(self, source: Source) -> bool:
        """Whether nothing in `source` can be translated: no letter is left beside its spans."""
        return self.slots and bool(source.spans) and not any(map(str.isalpha, source.text))

    def forced(self, text: str, source: Source) -> str:
        """A given target of `source`, or the beginning of one, as the model would write it."""
        text = visible(text)
        if not self.slots:
            return text
        if source.accelerator:
            text, _ = strip_accelerator(text)
        slots = {own: slot for slot, own in source.spans.items()}
        return mask(text, find(narrow(text, "en"), self._known), slots)

    def pair(self, source: str, target: str) -> tuple[str, str]:
        """A pair of the training text. Spans that both sides have equally often get placeholders, the others stay.

        Which ones is drawn by the text, so that a model gets to know them all.
        """
        source, target = visible(source), visible(target)
        if not self.slots:
            return source, target
        source = full_stops(one_space(source), self.source_language)
        source, accelerator = strip_accelerator(narrow(source, self.source_language))
        target = strip_accelerator(target)[0] if accelerator else without_key(target)
        mine = find(source, self._known)
        # Every character is still one, so that what was found in the narrow text can be cut out of the other.
        theirs = find(narrow(target, "en"), self._known)
        slots = _shared(mine, theirs, source)
        return self._plain(mask(source, mine, slots)), mask(target, theirs, slots)

    def _plain(self, text: str) -> str:
        text = plain(text, self.source_language)
        return sentence_case(text, self._score) if self._cased else text


def _shared(mine: list[Span], theirs: list[Span], text: str) -> dict[str, str]:
    """Placeholders, drawn at random, for the texts that both sides have equally often."""
    if not mine or not theirs:
        return {}
    counts: dict[str, int] = {}
    for spans, sign in ((mine, 1), (theirs, -1)):
        for span in spans:
            counts[span.text] = counts.get(span.text, 0) + sign
    both = {span.text for span in theirs}
    draw = random.Random(zlib.crc32(text.encode()))
    numbers, others = draw.sample(NUMBERS, len(NUMBERS)), draw.sample(OTHERS, len(OTHERS))
    return assign([span for span in mine if span.text in both and not counts[span.text]], numbers, others)
