"""Text goes in and comes back as it was."""

import itertools

import pytest
import sentencepiece

from tests.helpers import CHINESE, ENGLISH, VOCABULARY, tiny_tokenizer
from translator.errors import UserError
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


def limit_named(error: UserError) -> int:
    assert "\n" not in str(error) and "INTERNAL" not in str(error)
    return int(str(error).split()[-1])


def test_a_vocabulary_too_large_names_the_largest():
    with pytest.raises(UserError, match=r"vocab_size = 8000 is too large for this text; at most \d+") as caught:
        Tokenizer.train(ENGLISH, 8000, threads=1)
    most = limit_named(caught.value)
    assert Tokenizer.train(ENGLISH, most, threads=1).vocab_size == most
    with pytest.raises(UserError, match="too large"):
        Tokenizer.train(ENGLISH, most + 1, threads=1)


def test_a_vocabulary_too_small_names_the_smallest():
    with pytest.raises(UserError, match=r"vocab_size = 100 is too small for this text; at least \d+") as caught:
        Tokenizer.train(ENGLISH, 100, threads=1)
    least = limit_named(caught.value)
    assert Tokenizer.train(ENGLISH, least, threads=1).vocab_size == least
    with pytest.raises(UserError, match="too small"):
        Tokenizer.train(ENGLISH, least - 1, threads=1)


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
