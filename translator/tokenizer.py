"""Text to token ids and back: SentencePiece (Kudo and Richardson 2018), one vocabulary for both languages."""

import io
import logging
import math
import random
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

import sentencepiece

from translator.errors import UserError
from translator.lattice import Lattice
from translator.textio import read_limited
from translator.typed.slots import SLOTS

log = logging.getLogger("translator")

LARGEST_MODEL = 64 << 20  # bytes; a million pieces take about 20 MiB
# SentencePiece writes spaces as this character and takes one that a user typed for a space; and it leaves out of
# training, without a word, lines with its mark for the unknown or longer than it is told.
_SPACE, _UNKNOWN_MARK, _LONGEST_LINE = "\u2581", "\u2585", 1 << 16
# Characters that Unicode promises never to assign: one that the text lacks stands in for a typed `_SPACE`.
_STAND_INS = tuple(chr(plane * 0x10000 + 0xFFFE + low) for plane in range(16, 0, -1) for low in (1, 0))
_BYTE = -20.0  # nats: SentencePiece gives bytes no score
_MOST_WORDS = 1 << 16  # whose likelihood is remembered
_SMALLEST = 261  # 256 bytes, 4 special tokens, 1 piece


def one_space(text: str) -> str:
    """`text` as the model sees it, in training as in translation: any run of white space is one space, none outside."""
    return " ".join(text.split())


class Tokenizer:
    """A SentencePiece model whose ids 0 to 3 are padding, unknown, start and end.

    Text isn't normalised beyond white space: full-width punctuation, emoji and rare characters come back as they went
    in (bytes stand in for characters outside the vocabulary). `</s>` typed by a user is text.
    """

    def __init__(self, model: bytes) -> None:
        """`model` is a serialised SentencePiece model; raises `UserError` when it isn't one or lacks a special id."""
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError:
            raise UserError("the tokenizer is not a SentencePiece model") from None
        self.model = model
        self.pad_id: int = self._processor.pad_id()
        self.bos_id: int = self._processor.bos_id()
        self.eos_id: int = self._processor.eos_id()
        self.unk_id: int = self._processor.unk_id()
        if min(self.pad_id, self.bos_id, self.eos_id) < 0:
            raise UserError("the tokenizer lacks a padding, start or end token; train it with all three")
        try:
            self._processor.id_to_piece(list(range(self.vocab_size)))
        except UnicodeDecodeError as error:
            raise UserError(f"the tokenizer has a piece that is not UTF-8 ({error.object[:40]!r})") from None
        byte = self._processor.piece_to_id("<0xE2>")
        self._has_bytes: bool = self._processor.is_byte(byte)
        self._likelihoods: dict[str, float] = {}
        # What was given to its training, and not found by it, has a score of exactly 0.
        self.has_slots: bool = all(
            one != self.unk_id and self._processor.get_score(one) == 0.0
            for one in self._processor.piece_to_id(list(SLOTS))
        )

    @classmethod
    def load(cls, path: Path) -> "Tokenizer":
        """From a file; raises `UserError` when it is missing or broken."""
        model = read_limited(path, LARGEST_MODEL)
        try:
            return cls(model)
        except UserError as error:
            raise UserError(f"{path}: {error}") from None

    @classmethod
    def train(
        cls, sentences: Iterable[str], vocab_size: int | None = None, threads: int = 2, slots: bool = False
    ) -> "Tokenizer":
        """A unigram model with byte fallback, of `vocab_size` pieces or, by default, of as many as suit the text.

        With `slots`, pieces of their own stand for spans that are cut out of the text (`translator.typed.spans`).

        Lines that SentencePiece can't take are left out with a warning that counts them. Raises `UserError` when there
        is no text, or when it can't fill `vocab_size` or needs more; the message gives the range that it can.
        """
        lines = [one_space(sentence.replace(_SPACE, " ")) for sentence in sentences]
        usable = [line for line in lines if _UNKNOWN_MARK not in line and len(line.encode()) <= _LONGEST_LINE]
        if len(usable) < len(lines):
            log.warning(
                f"the tokenizer is trained without {len(lines) - len(usable):,} of {len(lines):,} lines: "
                f"they are longer than {_LONGEST_LINE:,} bytes or hold {_UNKNOWN_MARK}"
            )
        if not any(usable):
            raise UserError("the tokenizer could not be trained: there is no text")
        if vocab_size is None:
            return cls(_train_to_fit(usable, threads, slots))
        try:
            return cls(_train(usable, vocab_size, threads, slots))
        except RuntimeError as error:
            raise UserError(_explain(str(error), usable, vocab_size, threads, slots)) from None

    @property
    def vocab_size(self) -> int:
        """V."""
        return self._processor.vocab_size()

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without start or end token; white space of any kind and length is one space."""
        text, stand_in = self._escaped(one_space(text))
        return self._unescaped(self._processor.encode(text), stand_in)

    def sample(self, texts: Sequence[str], alpha: float, seed: int) -> list[list[int]]:
        """A random segmentation of each text (Kudo 2018, smoothing `alpha`), the same for the same seed everywhere."""
        kinds = self._processor.is_control, self._processor.is_unknown, self._processor.is_byte
        ids = {
            self._processor.id_to_piece(piece): piece
            for piece in range(self.vocab_size)
            if not any(is_kind(piece) for is_kind in kinds)
        }
        scores = {piece: self._processor.get_score(identity) for piece, identity in ids.items()}
        # As far below the rarest piece as SentencePiece puts it.
        lattice = Lattice(scores, min(scores.values(), default=0.0) - 10, alpha)
        draw = random.Random(seed).random
        drawn = []
        for text in texts:
            text, stand_in = self._escaped(one_space(text))
            pieces = lattice.draw(self._processor.normalize(text), draw)
            drawn.append(self._unescaped([one for piece in pieces for one in self._of_piece(piece, ids)], stand_in))
        return drawn

    def _of_piece(self, piece: str, ids: dict[str, int]) -> list[int]:
        """A piece's id, or those of its bytes."""
        if piece in ids:
            return [ids[piece]]
        return self._bytes(piece) or [self.unk_id]

    def _bytes(self, text: str) -> list[int]:
        """The ids that spell `text` in bytes; none where the vocabulary has no bytes."""
        if not self._has_bytes:
            return []
        return self._processor.piece_to_id([f"<0x{byte:02X}>" for byte in text.encode()])

    def _escaped(self, text: str) -> tuple[str, str | None]:
        """`text` with a stand-in for each `_SPACE` that was typed, and the stand-in; None where there was none."""
        if _SPACE not in text or not self._has_bytes:
            return text, None
        stand_in = next((one for one in _STAND_INS if one not in text), None)
        return (text.replace(_SPACE, stand_in), stand_in) if stand_in else (text, None)

    def _unescaped(self, ids: list[int], stand_in: str | None) -> list[int]:
        """`ids` with the bytes of a typed `_SPACE` where those of its stand-in are."""
        if stand_in is None:
            return ids
        before, after = self._bytes(stand_in), self._bytes(_SPACE)
        plain: list[int] = []
        for one in ids:
            plain.append(one)
            if plain[-len(before) :] == before:
                plain[-len(before) :] = after
        return plain

    @cached_property
    def characters(self) -> frozenset[str]:
        """All characters that take no bytes, the space among them."""
        kinds = self._processor.is_control, self._processor.is_unknown, self._processor.is_byte
        ids = [one for one in range(self.vocab_size) if not any(is_kind(one) for is_kind in kinds)]
        return frozenset(" ".join(self._processor.id_to_piece(ids)).replace(_SPACE, " "))

    def likelihood(self, word: str) -> float:
        """The log-probability of a word under the unigram model: that of its best segmentation."""
        if (found := self._likelihoods.get(word)) is None:
            score, is_byte = self._processor.get_score, self._processor.is_byte
            found = sum(_BYTE if is_byte(one) else score(one) for one in self._processor.encode(word))
            if len(self._likelihoods) < _MOST_WORDS:
                self._likelihoods[word] = found
        return found

    def decode(self, ids: list[int]) -> str:
        """Text of token ids; padding, start and end give nothing, a cut-off byte sequence gives U+FFFD."""
        return self._processor.decode(ids)

    def pieces(self, ids: list[int]) -> list[str]:
        """The vocabulary's names of these ids."""
        return self._processor.id_to_piece(ids)

    def ids(self, pieces: list[str]) -> list[int]:
        """Ids of pieces as `pieces` gives them; raises `UserError` for a name the vocabulary lacks."""
        ids = self._processor.piece_to_id(pieces)
        for piece, identity in zip(pieces, ids, strict=True):
            if identity == self.unk_id and piece != self._processor.id_to_piece(identity):
                raise UserError(f"token {piece!r} is not in the vocabulary")
        return ids


def _train(lines: Sequence[str], vocab_size: int, threads: int, slots: bool = False, exactly: bool = True) -> bytes:
    """A serialised model of `vocab_size` pieces, or of at most as many; `RuntimeError` when the text doesn't fit."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        vocab_size=vocab_size,
        hard_vocab_limit=exactly,
        model_type="unigram",
        normalization_rule_name="identity",
        character_coverage=0.9995,
        byte_fallback=True,
        split_digits=True,
        max_sentence_length=_LONGEST_LINE,
        user_defined_symbols=list(SLOTS) if slots else [],
        pad_id=0,
        unk_id=1,
        bos_id=2,
        eos_id=3,
        num_threads=threads,
        minloglevel=2,
    )
    return model.getvalue()


def _train_to_fit(lines: Sequence[str], threads: int, slots: bool) -> bytes:
    """A serialised model of a size that suits the text.

    It grows with the root of the text: 8,000 pieces for 4 MB (60,000 short pairs), 2,000 for 250 kB, 32,000 at most;
    but all frequent characters have room.
    """
    size = min(32_000, max(_SMALLEST, round(4 * math.sqrt(sum(len(line.encode()) for line in lines)))))
    try:
        return _train(lines, size, threads, slots, exactly=False)
    except RuntimeError as error:
        least = _least(str(error))
        if least is None:
            raise UserError(_reason(str(error))) from None
    return _train(lines, least + least // 8, threads, slots, exactly=False)


def _least(message: str) -> int | None:
    found = re.search(r"smaller than required_chars\D*\d+ vs (\d+)", message)
    return int(found[1]) if found else None


def _most(message: str) -> int | None:
    found = re.search(r"too high.*<= (\d+)", message)
    return int(found[1]) if found else None


def _explain(message: str, lines: Sequence[str], vocab_size: int, threads: int, slots: bool) -> str:
    """Why the text can't have just `vocab_size` pieces, with the whole range that it can have."""
    least, most = _least(message), _most(message)
    if least is None and most is None:
        return _reason(message)
    wrong = "large" if least is None else "small"
    for size in (_SMALLEST, 1_000_000):  # too small, and too large, for nearly every text: the messages name the ends
        try:
            _train(lines, size, threads, slots)
        except RuntimeError as error:
            least, most = least or _least(str(error)), most or _most(str(error))
    remedy = 'leave it out, or write "auto", for a size that fits'
    least = least or _SMALLEST
    if most is not None and most < least:
        return f"tokenizer.vocab_size = {vocab_size} is too {wrong} for this text, and so is every other size; {remedy}"
    span = f"from {least} to {most}" if most else f"at least {least}"
    return f"tokenizer.vocab_size = {vocab_size} is too {wrong} for this text, which can have {span}; {remedy}"


def _reason(message: str) -> str:
    return f"the tokenizer could not be trained: {message.splitlines()[-1] if message else 'no reason given'}"
