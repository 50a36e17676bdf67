"""Text to token ids and back: SentencePiece (Kudo and Richardson 2018), one vocabulary for both languages."""

import io
import re
from collections.abc import Iterable
from pathlib import Path

import sentencepiece

from translator.errors import UserError
from translator.textio import read_limited

LARGEST_MODEL = 64 << 20  # bytes; a million pieces take about 20 MiB


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
        if min(self.pad_id, self.bos_id, self.eos_id) < 0:
            raise UserError("the tokenizer lacks a padding, start or end token; train it with all three")

    @classmethod
    def load(cls, path: Path) -> "Tokenizer":
        """From a file; raises `UserError` when it is missing or broken."""
        model = read_limited(path, LARGEST_MODEL)
        try:
            return cls(model)
        except UserError as error:
            raise UserError(f"{path}: {error}") from None

    @classmethod
    def train(cls, sentences: Iterable[str], vocab_size: int, threads: int = 2) -> "Tokenizer":
        """A unigram model of `vocab_size` pieces with byte fallback; raises `UserError` when the text can't fill it."""
        model = io.BytesIO()
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(sentences),
                model_writer=model,
                vocab_size=vocab_size,
                model_type="unigram",
                normalization_rule_name="identity",
                character_coverage=0.9995,
                byte_fallback=True,
                split_digits=True,
                max_sentence_length=1 << 16,
                pad_id=0,
                unk_id=1,
                bos_id=2,
                eos_id=3,
                num_threads=threads,
                minloglevel=2,
            )
        except RuntimeError as error:
            raise UserError(_explain(str(error), vocab_size)) from None
        return cls(model.getvalue())

    @property
    def vocab_size(self) -> int:
        """V."""
        return self._processor.vocab_size()

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without start or end token; white space of any kind and length is one space."""
        return self._processor.encode(" ".join(text.split()))

    def sample(self, texts: list[str], alpha: float, seed: int) -> list[list[int]]:
        """A random segmentation of each text (Kudo 2018, smoothing `alpha`), the same for the same seed."""
        sentencepiece.set_random_generator_seed(seed & 0xFFFFFFFF)
        return [
            self._processor.encode(" ".join(text.split()), enable_sampling=True, alpha=alpha, nbest_size=-1)
            for text in texts
        ]

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
            if identity == self._processor.unk_id() and piece != self._processor.id_to_piece(identity):
                raise UserError(f"token {piece!r} is not in the vocabulary")
        return ids


def _explain(message: str, vocab_size: int) -> str:
    limit = re.search(r"<= (\d+)", message)
    if "too high" in message and limit:
        return f"tokenizer.vocab_size = {vocab_size} is too large for this text; at most {limit.group(1)}"
    needed = re.search(r"smaller than required_chars\D*\d+ vs (\d+)", message)
    if needed:
        return f"tokenizer.vocab_size = {vocab_size} is too small for this text; at least {needed.group(1)}"
    if "sentences_.empty()" in message:
        return "the tokenizer could not be trained: there is no text"
    return f"the tokenizer could not be trained: {message.splitlines()[-1] if message else 'no reason given'}"
