"""Text goes in and comes back as it was."""

import itertools
import logging
import math
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import sentencepiece

from tests.helpers import CHINESE, ENGLISH, VOCABULARY, tiny_tokenizer
from translator.errors import UserError
from translator.lattice import Lattice
from translator.tokenizer import Tokenizer

EMOJI = "ok 😀 👨‍👩‍👧 é 你"


@pytest.mark.parametrize(
    "text",
    [
        "价格：１２３％，好！",
        EMOJI,
        "ŉ ︰ ﬁ ½ ㍿ Ａ ａ «»",
        "e\u0301 \u00e9",
        "a </s> b <s> <pad> <unk> <0x41> <0xF0><0x9F>",
        "</s>",
        "[a_b](c) %s {name} _File %1$d \\n",
        "\ufeffa\u200bb\u00adc",
        "\x00\x01\x7f",
        "𠮷 \U0010ffff",
        "",
    ],
)
def test_text_comes_back_as_it_was(text):
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not {tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, 1} & set(ids)
    assert tokenizer.ids(tokenizer.pieces(ids)) == ids


def test_sentences_it_was_trained_on_come_back():
    for text in ENGLISH + CHINESE:
        assert tiny_tokenizer().decode(tiny_tokenizer().encode(text)) == text


def test_white_space_of_any_kind_is_one_space():
    tokenizer = tiny_tokenizer()
    assert tokenizer.decode(tokenizer.encode(" \ta\u3000\u3000b\r\nc\u2028d\u0085 ")) == "a b c d"
    for blank in ("", " ", "\u3000\t", "\n"):
        assert tokenizer.encode(blank) == []


def test_special_ids_are_the_first_and_give_no_text():
    tokenizer = tiny_tokenizer()
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id) == (0, 2, 3)
    ids = tokenizer.encode("The cat")
    assert tokenizer.decode([2, *ids, 3, 0, 0]) == "The cat"
    assert tokenizer.decode([]) == ""


def test_ids_cut_inside_a_character_give_no_byte_names():
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode(EMOJI)
    for start, end in itertools.combinations(range(len(ids) + 1), 2):
        text = tokenizer.decode(ids[start:end])
        assert "<0x" not in text
        assert text.replace("\ufffd", "") in EMOJI
    whole = [tokenizer.decode(ids[:end]) for end in range(len(ids) + 1)]
    assert EMOJI in whole and any(text.endswith("\ufffd") for text in whole)


def test_sampled_segmentations_spell_the_text_and_repeat_with_the_seed():
    tokenizer = tiny_tokenizer()
    texts = [ENGLISH[0], CHINESE[3], "", EMOJI]
    first = tokenizer.sample(texts, 0.1, 7)
    assert [tokenizer.decode(ids) for ids in first] == texts
    assert tokenizer.sample(texts, 0.1, 7) == first
    others = [tokenizer.sample(texts, 0.1, seed) for seed in range(8, 12)]
    assert any(other != first for other in others)
    assert first[0] != tokenizer.encode(texts[0]) or any(other[0] != first[0] for other in others)
    tokenizer.sample(texts, 0.1, 2**40 + 1)


def test_the_draw_is_the_same_in_another_process():
    texts = [*ENGLISH, *CHINESE, EMOJI]
    script = (
        "from tests.helpers import *; from tests.translator.test_tokenizer import EMOJI;"
        "print(tiny_tokenizer().sample([*ENGLISH, *CHINESE, EMOJI], 0.3, 5))"
    )
    root = Path(__file__).parents[2]
    other = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=True).stdout
    tiny_tokenizer().sample(texts, 0.3, 4)  # what was drawn before leaves no trace
    assert other == f"{tiny_tokenizer().sample(texts, 0.3, 5)}\n"


def test_a_segmentation_is_drawn_as_often_as_its_pieces_weigh():
    """Against all segmentations of a short text, spelt out."""
    scores = {"a": -1.0, "b": -2.0, "ab": -1.5, "ba": -2.5, "aba": -2.0}
    text, alpha, unknown, count = "abacb", 0.7, -4.0, 20_000

    def spelt(rest: str) -> list[tuple[str, ...]]:
        if not rest:
            return [()]
        ends = [end for end in range(1, len(rest) + 1) if rest[:end] in scores or end == 1]
        return [(rest[:end], *others) for end in ends for others in spelt(rest[end:])]

    weights = {pieces: math.exp(alpha * sum(scores.get(piece, unknown) for piece in pieces)) for pieces in spelt(text)}
    lattice, draw = Lattice(scores, unknown, alpha), random.Random(1).random
    drawn = Counter(tuple(lattice.draw(text, draw)) for _ in range(count))
    assert set(drawn) == set(weights)
    for pieces, weight in weights.items():
        share = weight / sum(weights.values())
        assert drawn[pieces] == pytest.approx(count * share, abs=5 * math.sqrt(count * share))


@pytest.mark.parametrize("alpha", [0.1, 1.0])
def test_a_very_long_text_is_drawn_too(alpha):
    text = " ".join(ENGLISH * 50) + "𠮷" * 300
    tokenizer = tiny_tokenizer()
    ids = tokenizer.sample([text], alpha, 1)[0]
    assert tokenizer.decode(ids) == text
    # As finely at the end as at the beginning: a sum that ran out of range would leave single characters.
    words = tokenizer.sample([" ".join(ENGLISH * 50)], alpha, 1)[0]
    halves = words[: len(words) // 2], words[len(words) // 2 :]
    lengths = [len(tokenizer.decode(half)) for half in halves]
    assert lengths[0] == pytest.approx(lengths[1], rel=0.1)


@pytest.mark.parametrize("text", ["a ▁ b", "▁", "x▁y ▁▁z", "▁ \U0010ffff ▁ \U0010fffe", "▁▁", "▅ ▁"])
def test_the_mark_for_a_space_comes_back_when_it_was_typed(text):
    tokenizer = tiny_tokenizer()
    for ids in (tokenizer.encode(text), *tokenizer.sample([text] * 3, 0.2, 1)):
        assert tokenizer.decode(ids) == text
        assert tokenizer.ids(tokenizer.pieces(ids)) == ids


def test_white_space_in_training_text_is_what_it_is_in_translation():
    plain = [*ENGLISH, *CHINESE]
    marks = itertools.cycle(["\t", "\u3000", "\r", "  ", "\u00a0", "\u2028", " ▁ "])
    odd = [f"\t{next(marks).join(line.split())}\u3000" for line in plain]
    assert Tokenizer.train(odd, 420, threads=1).model == Tokenizer.train(plain, 420, threads=1).model


def test_lines_that_sentencepiece_would_leave_out_in_silence_are_counted(caplog):
    lines = [*ENGLISH, "x " * 40_000, "a ▅ b", "字" * 21_845]
    with caplog.at_level(logging.WARNING, "translator"):
        Tokenizer.train(lines, threads=1)
    assert "without 2 of 13 lines: they are longer than 65,536 bytes or hold ▅" in caplog.text
    with pytest.raises(UserError, match="no text"):
        Tokenizer.train(["x " * 40_000], threads=1)


@pytest.mark.parametrize(
    "lines", [["a"], ["你好"], ENGLISH[:1], ENGLISH, CHINESE, ENGLISH + CHINESE, [chr(0x4E00 + n) for n in range(3000)]]
)
def test_the_size_fits_any_text_unless_one_is_asked_for(lines):
    tokenizer = Tokenizer.train(lines, threads=1)
    assert 261 <= tokenizer.vocab_size <= 32_000
    for line in lines[:50]:
        assert tokenizer.decode(tokenizer.encode(line)) == line


def test_the_size_grows_with_the_root_of_the_text():
    draw = random.Random(1)
    words = ["".join(draw.choices("abcdefghij", k=draw.randint(2, 9))) for _ in range(20_000)]
    sizes = [
        Tokenizer.train([" ".join(draw.choices(words, k=8)) for _ in range(count)]).vocab_size for count in (400, 6400)
    ]
    assert sizes[1] == pytest.approx(4 * sizes[0], rel=0.05)


def range_named(error: UserError) -> tuple[int, int]:
    assert "\n" not in str(error) and "INTERNAL" not in str(error)
    found = re.search(r"which can have from (\d+) to (\d+); leave it out", str(error))
    assert found, error
    return int(found[1]), int(found[2])


@pytest.mark.parametrize(("size", "wrong"), [(8000, "large"), (270, "small")])
def test_a_vocabulary_that_the_text_cannot_have_names_the_whole_range(size, wrong):
    with pytest.raises(UserError, match=rf"vocab_size = {size} is too {wrong} for this text") as caught:
        Tokenizer.train(ENGLISH, size, threads=1)
    least, most = range_named(caught.value)
    for end in (least, most):
        assert Tokenizer.train(ENGLISH, end, threads=1).vocab_size == end
    for beyond in (least - 1, most + 1):
        with pytest.raises(UserError) as caught:
            Tokenizer.train(ENGLISH, beyond, threads=1)
        assert range_named(caught.value) == (least, most)


@pytest.mark.parametrize("sentences", [[], ["", ""]], ids=str)
def test_no_text_to_train_on_is_said_so(sentences):
    with pytest.raises(UserError, match="no text"):
        Tokenizer.train(sentences, 300, threads=1)


def test_files_that_are_no_tokenizer_are_refused_by_name(tmp_path):
    path = tmp_path / "tokenizer.model"
    with pytest.raises(UserError, match=r"tokenizer\.model: no such file"):
        Tokenizer.load(path)
    for content in (b"", b"junk" * 100, tiny_tokenizer().model[: len(tiny_tokenizer().model) // 2], b"\x80\x04N."):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"tokenizer\.model: ") as caught:
            Tokenizer.load(path)
        assert "\n" not in str(caught.value)
    path.write_bytes(tiny_tokenizer().model)
    assert Tokenizer.load(path).vocab_size == VOCABULARY


def test_a_tokenizer_with_a_piece_that_is_not_utf8_is_refused(tmp_path):
    model = tiny_tokenizer().model
    piece = "的".encode() if "的".encode() in model else "猫".encode()
    path = tmp_path / "tokenizer.model"
    path.write_bytes(model.replace(piece, b"\xff\xfe\xfd", 1))
    with pytest.raises(UserError, match=r"tokenizer\.model: the tokenizer has a piece that is not UTF-8"):
        Tokenizer.load(path)


def test_a_tokenizer_without_padding_is_refused(tmp_path):
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(ENGLISH), model_prefix=str(tmp_path / "m"), vocab_size=50, minloglevel=2, num_threads=1
    )
    with pytest.raises(UserError, match="lacks a padding"):
        Tokenizer.load(tmp_path / "m.model")


def test_pieces_that_are_not_in_the_vocabulary_are_refused():
    with pytest.raises(UserError, match="'nonesuch' is not in the vocabulary"):
        tiny_tokenizer().ids(["</s>", "nonesuch"])
    assert tiny_tokenizer().ids(["<pad>", "<unk>", "<s>", "</s>", "<0x41>"]) == [0, 1, 2, 3, 4 + 0x41]
