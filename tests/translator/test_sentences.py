"""Lines to sentences: nothing lost, no text that stops a run, numbers with what they number."""

import sys
import unicodedata

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from translator.pipeline import sentences
from translator.pipeline.sentences import LONGEST_LOOK, marker_text, split_marker, split_sentences

WHITE = [chr(code) for code in range(sys.maxunicode + 1) if chr(code).isspace()]
STOPS = [
    chr(code)
    for code in range(sys.maxunicode + 1)
    if unicodedata.category(chr(code)) == "Po" and "STOP" in unicodedata.name(chr(code), "")
] + list(".!?。！？…‽⁉·؟۔।")
LANGUAGES = ["en", "zh", "de", "fr", "ru", "es", "ja", "ar", "hi", "pl"]


def letters(text: str) -> str:
    return "".join(text.split())


@pytest.mark.parametrize(
    ("language", "line", "expected"),
    [
        ("en", "Where is it? It is there.", ["Where is it?", "It is there."]),
        ("en", "1. Buy milk. 2. Call your mother.", ["1. Buy milk.", "2. Call your mother."]),
        ("en", "1. Buy milk! 2. Call? 10. Go.", ["1. Buy milk!", "2. Call?", "10. Go."]),
        ("en", "1) Buy milk. 2) Call.", ["1) Buy milk.", "2) Call."]),
        ("en", "1.Buy milk. 2.Call.", ["1.Buy milk.", "2.Call."]),
        ("en", "1.2. Scope. 1.3. Terms.", ["1.2. Scope.", "1.3. Terms."]),
        ("en", "i. Buy. ii. Call. iii. Go.", ["i. Buy.", "ii. Call.", "iii. Go."]),
        ("en", "Buy: 1. milk; 2. bread. 3. Eggs.", ["Buy: 1. milk; 2. bread.", "3. Eggs."]),
        ("en", '"Go." 1. Buy. “Now!” 2. Call.', ['"Go."', "1. Buy.", "“Now!”", "2. Call."]),
        ("en", "It costs $3.50. Yes.", ["It costs $3.50.", "Yes."]),
        ("en", "I have 2. You have 3.", ["I have 2.", "You have 3."]),
        ("en", "It was in 1999. Then he left.", ["It was in 1999.", "Then he left."]),
        ("en", "“Why? I don't know.” He left.", ["“Why? I don't know.”", "He left."]),
        ("en", 'She said, "Go. Now." Then she left.', ['She said, "Go. Now."', "Then she left."]),
        ("zh", "1. 买牛奶。2. 给妈妈打电话。", ["1. 买牛奶。", "2. 给妈妈打电话。"]),
        ("zh", "1.买牛奶。2.打电话！3.走吧？", ["1.买牛奶。", "2.打电话！", "3.走吧？"]),
        ("zh", "1、买牛奶。2、打电话。", ["1、买牛奶。", "2、打电话。"]),
        ("zh", "1．买牛奶。2．打电话。", ["1．买牛奶。", "2．打电话。"]),
        ("zh", "（1）买牛奶。（2）打电话。", ["（1）买牛奶。", "（2）打电话。"]),
        ("zh", "圆周率是3.14。好。", ["圆周率是3.14。", "好。"]),
        ("zh", "圆周率是3．14。好。", ["圆周率是3．14。", "好。"]),
        ("zh", "买牛奶。2瓶水。", ["买牛奶。", "2瓶水。"]),
        ("zh", "他说：“走吧。2个都走。”然后走了。", ["他说：“走吧。2个都走。”", "然后走了。"]),
        ("zh", "「走吧。」他说。", ["「走吧。」", "他说。"]),
        ("en", "", []),
        ("en", " \u3000 ", []),
    ],
)
def test_sentences_numbers_decimals_and_quotes(language: str, line: str, expected: list[str]) -> None:
    assert split_sentences(line, language) == expected


@pytest.mark.parametrize("space", WHITE, ids=lambda char: f"U+{ord(char):04X}")
def test_any_white_space_before_any_stop(space: str) -> None:
    """A stop after a wide space made the splitter panic where an abbreviation or a capital came before it."""
    for stop in STOPS:
        for before in ("Plan B", "Dr", "e.g", "he", "第3", "J. K"):
            line = f"{before}{space}{stop} Go on. {before}{stop}{space}Yes."
            for language in ("en", "zh"):
                got = split_sentences(line, language)
                assert letters("".join(got)) == letters(line)
                assert len(got) > 1, (line, language)


pieces = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        [*WHITE, *STOPS, *'“”‘’"「」『』()（）[]:;,', "Dr", "B", "e.g", "1.", "2、", "12", "No", "п", "你好"]
    ),
)


@settings(derandomize=True, max_examples=400, deadline=None, database=None)
@given(st.lists(pieces, max_size=25).map("".join), st.sampled_from(LANGUAGES))
@example("Plan B\u00a0. Go on.", "en")
@example("a\u2028\u3000\x1c.b", "ja")
def test_nothing_is_lost_or_added_and_nothing_is_printed(line: str, language: str) -> None:
    line = line.encode("utf-8", "ignore").decode()
    got = split_sentences(line, language)
    assert letters("".join(got)) == letters(line)
    assert all(sentence and sentence == sentence.strip() for sentence in got)
    for sentence in got:
        marker, text = split_marker(sentence, language)
        assert marker + text == sentence and (text.strip() or not marker)


def test_no_panic_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    """Rust prints a panic on standard error before anyone can catch it: it must not come about."""
    for space in WHITE:
        split_sentences(f"Plan B{space}. Go on. A{space}{space}.", "en")
    assert capfd.readouterr() == ("", "")


class PanicException(BaseException):
    """As Rust's panics arrive: not an `Exception`."""


@pytest.mark.parametrize("failure", [PanicException("slice"), ValueError("no"), RuntimeError("no"), MemoryError()])
def test_a_splitter_that_fails_leaves_the_line_whole(monkeypatch: pytest.MonkeyPatch, failure: BaseException) -> None:
    def fails(language: str, text: str) -> list[str]:
        raise failure

    monkeypatch.setattr(sentences, "segment", fails)
    assert split_sentences(" One. Two. ", "en") == ["One. Two."]


@pytest.mark.parametrize("wish", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_a_wish_to_stop_is_no_failure(monkeypatch: pytest.MonkeyPatch, wish: type[BaseException]) -> None:
    def stops(language: str, text: str) -> list[str]:
        raise wish

    monkeypatch.setattr(sentences, "segment", stops)
    with pytest.raises(wish):
        split_sentences("One. Two.", "en")


def test_a_splitter_that_loses_text_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sentences, "segment", lambda language, text: ["One. "])
    assert split_sentences("One. Two.", "en") == ["One. Two."]


@pytest.mark.parametrize("unit", ["“", "A. b. ", "1. ", " :1.", "“A. b", "。1", "x" * 50 + ". Y ", "\u3000"])
def test_what_the_splitter_sees_is_linear_in_the_line(monkeypatch: pytest.MonkeyPatch, unit: str) -> None:
    seen: list[int] = []
    original = sentences.segment

    def counting(language: str, text: str) -> list[str]:
        seen.append(len(text))
        return original(language, text)

    monkeypatch.setattr(sentences, "segment", counting)
    line = unit * (160_000 // len(unit))
    assert letters("".join(split_sentences(line, "en"))) == letters(line)
    assert max(seen) <= LONGEST_LOOK
    assert sum(seen) <= 3 * len(line)


def test_a_long_line_is_split_as_its_parts_are() -> None:
    parts = ["The cat sat on the mat.", "Where is the station?", "“Why? I don't know.”", "1. Buy milk.", "It is 3.14."]
    assert split_sentences(" ".join(parts * 200), "en") == parts * 200
    assert len(" ".join(parts * 200)) > 4 * LONGEST_LOOK
    sentence = "word " * LONGEST_LOOK + "end."
    assert split_sentences(f"One. {sentence} Two.", "en") == ["One.", sentence, "Two."]


@pytest.mark.parametrize(
    ("language", "sentence", "marker"),
    [
        ("en", "1. Buy milk.", "1. "),
        ("en", "12) Buy milk.", "12) "),
        ("en", "(a) Buy milk.", "(a) "),
        ("en", "iv. Buy milk.", "iv. "),
        ("en", "1.2. Scope.", "1.2. "),
        ("en", "• Buy milk.", "• "),
        ("zh", "3、买牛奶。", "3、"),
        ("zh", "（1）买牛奶。", "（1）"),
        ("zh", "2.打电话。", "2."),
        ("de", "3) Milch kaufen.", "3) "),
        ("de", "3. Mai 2020.", ""),
        ("en", "3.5 dollars.", ""),
        ("en", "1999. It was cold.", ""),
        ("en", "I am here.", ""),
        ("en", "e. g. this.", ""),
        ("en", "c. 1900 it was new.", ""),
        ("en", "-5 degrees.", ""),
        ("en", "2.", ""),
        ("en", "A. Lincoln spoke.", ""),
        ("zh", "3.5元。", ""),
    ],
)
def test_the_number_of_an_item_is_told_from_its_text(language: str, sentence: str, marker: str) -> None:
    assert split_marker(sentence, language) == (marker, sentence.removeprefix(marker))


def test_a_number_is_written_as_its_language_does() -> None:
    assert [marker_text(marker, "en") for marker in ("3、", "（1）", "2.", "1. ", "• ", "")] == [
        "3. ",
        "(1) ",
        "2. ",
        "1. ",
        "• ",
        "",
    ]
    assert [marker_text(marker, "zh") for marker in ("3、", "1. ", "")] == ["3、", "1. ", ""]
