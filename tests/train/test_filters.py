"""What each filter drops, in which order, and the account it gives."""

from dataclasses import replace

import pytest

from train.filters import FilterConfig, account_lines, filter_pairs, length_in_words
from train.sources import Pair
from translator.config import parse
from translator.errors import UserError

OFF = FilterConfig(
    max_characters=10**9,
    max_length_ratio=10**9,
    target_script="any",
    drop_duplicates=False,
    drop_copies=False,
)


def kept(
    sides: list[tuple[str, str]],
    config: FilterConfig = OFF,
    held_out: list[tuple[str, str]] | None = None,
    languages: tuple[str, str] = ("en", "zh"),
) -> list[tuple[str, str]]:
    pairs, held = ([Pair(*both, "x") for both in some] for some in (sides, held_out or []))
    result, account = filter_pairs(pairs, held, config, *languages)
    assert len(result) + sum(count for _, count in account) == len(sides)
    return [(pair.source, pair.target) for pair in result]


def test_blank_sides_go_and_blanks_around_text_go() -> None:
    assert kept([("a", ""), (" \u3000", "一"), (" a\t", "\u3000一，２ ")]) == [("a", "一，２")]


def test_nothing_inside_the_text_changes() -> None:
    sides = [("“Ａ”  b\u2028c", "价格：１２３％，好！")]
    assert kept(sides, FilterConfig()) == sides


def test_the_longer_side_may_have_max_characters_and_no_more() -> None:
    config = replace(OFF, max_characters=3)
    assert kept([("abc", "一"), ("abcd", "一"), ("a", "一二三四")], config) == [("abc", "一")]


def test_the_length_ratio_is_judged_from_eleven_words() -> None:
    config = replace(OFF, max_length_ratio=4.0)
    ten, eleven, twelve = ("字" * count for count in (10, 11, 12))
    assert kept([("a", ten), ("a b", eleven), ("a b c", twelve)], config) == [("a", ten), ("a b c", twelve)]
    assert kept([(" ".join("abcdefghijk"), "不")], config) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("It's a well-known fact, isn't it?", 6),
        ("好，我来！", 3),
        ("我用 Python 3 写", 5),
        ("カタカナ です", 6),
        ("안녕하세요 여러분", 2),
        ("สวัสดีครับ", 3),
        ("... — !", 0),
    ],
)
def test_words_are_counted_in_every_script(text: str, words: int) -> None:
    assert length_in_words(text) == words


@pytest.mark.parametrize(
    ("language", "good", "bad"),
    [
        ("zh", "汉语 ok", "ok then 汉"),
        ("zh-TW", "漢語", "hanyu"),
        ("ja", "コーヒー です", "kohi"),
        ("ja", "えーーー", "eee"),
        ("ko", "안녕", "你好"),
        ("ru", "привет", "privet"),
        ("uk", "привіт", "hello"),
        ("ar", "مرحبا", "hello"),
        ("el", "γεια", "geia"),
        ("he", "שלום", "shalom"),
        ("hi", "नमस्ते", "namaste"),
        ("de", "Grüße", "привет"),
    ],
)
def test_the_script_follows_the_target_language(language: str, good: str, bad: str) -> None:
    config = replace(OFF, target_script="auto")
    assert kept([("x", good), ("y", bad), ("z", "12 + 3 = 15。")], config, languages=("en", language)) == [
        ("x", good),
        ("z", "12 + 3 = 15。"),
    ]


def test_the_script_can_be_named() -> None:
    sides = [("x", "привет"), ("y", "hello"), ("z", "你好")]
    assert kept(sides, replace(OFF, target_script="Cyrillic Latin")) == sides[:2]
    assert kept(sides, OFF) == sides


def test_copies_go_unless_the_languages_are_the_same() -> None:
    config = replace(OFF, drop_copies=True)
    sides = [("Linux", " linux "), ("a", "b")]
    assert kept(sides, config) == [("a", "b")]
    assert kept(sides, config, languages=("en", "en-GB")) == [("Linux", "linux"), ("a", "b")]


def test_the_first_of_equal_pairs_stays() -> None:
    sides = [("a", "b"), ("a", "c"), ("a ", "b"), ("A", "b")]
    assert kept(sides, replace(OFF, drop_duplicates=True)) == [("a", "b"), ("a", "c"), ("A", "b")]
    assert kept(sides[:2] + sides[:1]) == sides[:2] + sides[:1]


def test_a_sentence_of_dev_or_test_on_either_side_goes() -> None:
    sides = [("Hello. ", "嗨"), ("hi", "你好"), ("你好", "hello."), ("free", "自由")]
    assert kept(sides, held_out=[("hello.", " 你好")]) == [("你好", "hello."), ("free", "自由")]


def test_what_nobody_sees_hides_no_held_out_sentence() -> None:
    sides = [("Hel\u00adlo.", "嗨"), ("hi", "\u200b你好"), ("free", "自由")]
    assert kept(sides, held_out=[("hello.", "你好")]) == [("free", "自由")]


def test_the_account_adds_up_in_a_fixed_order() -> None:
    sides = [
        ("", "一"),
        ("x" * 500, "一"),
        ("a", "一" * 20),
        ("b", "latin"),
        ("漢", "漢"),
        ("held", "一"),
        ("c", "三"),
        ("c", "三"),
    ]
    pairs = [Pair(*both, "x") for both in sides]
    result, account = filter_pairs(pairs, [Pair("held", "二", "x")], FilterConfig(), "en", "zh")
    assert [count for _, count in account] == [1] * 7
    assert account_lines(account, len(result)) == [
        "pairs read                    8",
        "- a side is blank             1",
        "- longer than 400 characters  1",
        "- length ratio above 4        1",
        "- target not in Han script    1",
        "- target copies source        1",
        "- sentence is in dev or test  1",
        "- duplicate                   1",
        "pairs kept                    1",
    ]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_characters": 0}, "max_characters = 0"),
        ({"max_length_ratio": 0.5}, "max_length_ratio = 0.5"),
        ({"max_length_ratio": float("nan")}, "max_length_ratio = nan"),
        (
            {"target_script": "Hann"},
            "target_script = 'Hann': no such script; valid: 'auto', 'any' or Unicode",
        ),
        ({"target_script": ""}, "target_script = '': no such script"),
        ({"drop_duplicate": True}, "unknown key 'drop_duplicate'; did you mean 'drop_duplicates'"),
    ],
)
def test_a_bad_setting_is_named(values: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse(FilterConfig, values, where="filters")
