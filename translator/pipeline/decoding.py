"""From sentences to hypotheses: batches, the model, a search, and as many different texts as were asked for."""

import dataclasses
from collections.abc import Callable, Iterator

from translator.cache import CacheSpec
from translator.config import DecodeConfig
from translator.engine import Engine
from translator.errors import UserError
from translator.pipeline.batching import batches
from translator.pipeline.text import Piece, one_line
from translator.search import Driver, Hypothesis, Sentence, Start, rows_per_sentence, search, starter
from translator.tokenizer import Tokenizer

Decoded = Callable[[list[Piece]], None]
"""Called with the pieces of each finished batch."""


@dataclasses.dataclass(frozen=True, slots=True)
class PieceDecoder:
    """Decodes pieces with one engine. `batch_tokens` bounds rows times the longest source; `cache` is a kind."""

    engine: Engine
    tokenizer: Tokenizer
    batch_tokens: int
    cache: str

    def decode(
        self, pieces: list[Piece], config: DecodeConfig, first_line: int, decoded: Decoded | None = None
    ) -> None:
        """Puts into each piece's `found` its best hypotheses, at most `config.n_best`, no two of the same text.

        Where several token sequences spell one text, the best of them stays and a search of twice the size looks for
        others below the best; there may be fewer in the end. Raises `UserError` for a prefix too long for the model.
        """
        if config.n_best == 1:
            self._search(pieces, config, first_line, decoded)
            return
        # A beam finds more hypotheses than are asked for; among them may be other texts.
        whole = config if config.sampling else dataclasses.replace(config, n_best=config.beam_size)
        self._search(pieces, whole, first_line, decoded)
        lacking = []
        for piece in pieces:
            piece.found = self._different(piece.found)[: config.n_best]
            if len(piece.found) < config.n_best:
                lacking.append(piece)
        rows = min(2 * rows_per_sentence(config), self.tokenizer.vocab_size)
        if lacking and rows > rows_per_sentence(config):
            # Copies: what is missing is added to what was found, which stays.
            again = [dataclasses.replace(piece, found=[]) for piece in lacking]
            self._search(again, dataclasses.replace(config, beam_size=rows, n_best=rows), first_line)
            for piece, more in zip(lacking, again, strict=True):
                below = [hypothesis for hypothesis in more.found if _rank(hypothesis) >= _rank(piece.found[0])]
                piece.found = self._different(sorted([*piece.found, *below], key=_rank))[: config.n_best]

    def stream(self, piece: Piece, config: DecodeConfig) -> Iterator[str]:
        """The text of a piece's best hypothesis, in parts as they come; of a greedy search, token by token."""
        if config.search_name != "greedy":
            self.decode([piece], config, 1)
            yield one_line(self.tokenizer, piece.found[0].tokens)
            return
        shown, ids = "", list[int]()
        driver = Driver(config, self._start(1))
        driver.add(self._sentences([piece], config, 1)[0], piece.ids)
        while driver.busy:
            (event,) = driver.step()
            ids += [row.token for row in event.rows if row]
            text = one_line(self.tokenizer, event.ended[0].tokens if event.ended else ids)
            # A character may be spelled by several byte tokens: until it is whole, it shows as U+FFFD. Should it prove
            # to be white space, the space before it is no longer in the middle of the text.
            if not event.ended:
                text = text.rstrip("\ufffd").rstrip()
            if text.startswith(shown):
                yield text[len(shown) :]
                shown = text

    def _search(
        self, pieces: list[Piece], config: DecodeConfig, first_line: int, decoded: Decoded | None = None
    ) -> None:
        rows = rows_per_sentence(config)
        for batch in batches([len(piece.ids) * rows for piece in pieces], self.batch_tokens):
            members = [pieces[index] for index in batch]
            sentences = self._sentences(members, config, first_line)
            decoding = self._start(rows)([piece.ids for piece in members], None)
            for piece, found in zip(members, search(decoding, sentences, config), strict=True):
                piece.found = found
            if decoded:
                decoded(members)

    def _start(self, rows: int) -> Start:
        return starter(self.engine, CacheSpec.for_targets(self.cache, self.engine.max_positions, beams=rows))

    def _sentences(self, pieces: list[Piece], config: DecodeConfig, first_line: int) -> list[Sentence]:
        limit = self.engine.max_positions
        for piece in pieces:
            if len(piece.prefix) >= limit:
                raise UserError(
                    f"line {first_line + piece.line}: the target prefix has {len(piece.prefix)} tokens; "
                    f"this model's targets end at {limit}"
                )
        tokenizer = self.tokenizer
        return [
            Sentence(
                max_length=min(config.max_length(len(piece.ids)), limit),
                start_id=tokenizer.bos_id,
                end_id=tokenizer.eos_id,
                suppressed=(tokenizer.pad_id, tokenizer.bos_id),
                prefix=piece.prefix,
                key=(first_line + piece.line, piece.place),
            )
            for piece in pieces
        ]

    def _different(self, found: list[Hypothesis]) -> list[Hypothesis]:
        """The first hypothesis of each text."""
        by_text: dict[str, Hypothesis] = {}
        for hypothesis in found:
            by_text.setdefault(one_line(self.tokenizer, hypothesis.tokens), hypothesis)
        return list(by_text.values())


def _rank(hypothesis: Hypothesis) -> tuple[bool, float]:
    """Complete ones first, then by score, as searches order what they find."""
    return not hypothesis.finished, -hypothesis.score
