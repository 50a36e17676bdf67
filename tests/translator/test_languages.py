"""One table says what a language code means, however it is written."""

import pytest
from langcodes.language_lists import CLDR_LANGUAGES

from translator.errors import UserError
from translator.languages import language
from translator.metrics import bleu_tokenizer
from translator.pipeline.sentences import join_sentences, split_sentences


@pytest.mark.parametrize(
    "code",
    ["zh", "ZH", "zho", "chi", "cmn", "zh_CN", "zho_Hans", "ZHO-HANS", "zh_Hans_CN", "cmn_Hans", "zh-SG"],
)
def test_every_spelling_of_chinese_is_chinese_everywhere(code: str) -> None:
    found = language(code)
    assert (found.primary, found.script, found.scripts, found.spaced) == ("zh", "Hans", ("Han",), False)
    assert bleu_tokenizer(code) == "zh"
    assert split_sentences("我来了。你好！", code) == ["我来了。", "你好！"]
    assert join_sentences(["我来了。", "你好！"], code) == "我来了。你好！"


@pytest.mark.parametrize(
    ("code", "primary", "script", "scripts", "spaced", "tokenizer"),
    [
        ("zh-TW", "zh", "Hant", ("Han",), False, "zh"),
        ("zho_Hant", "zh", "Hant", ("Han",), False, "zh"),
        ("yue", "yue", "Hant", ("Han",), False, "zh"),
        ("zh-Latn", "zh", "Latn", ("Latin",), True, "13a"),
        ("jpn", "ja", "Jpan", ("Han", "Hiragana", "Katakana"), False, "char"),
        ("kor_Hang", "ko", "Hang", ("Hangul",), True, "char"),
        ("tha", "th", "Thai", ("Thai",), False, "char"),
        ("arb", "ar", "Arab", ("Arabic",), True, "13a"),
        ("sr", "sr", "Cyrl", ("Cyrillic", "Latin"), True, "13a"),
        ("srp_Latn", "sr", "Latn", ("Latin",), True, "13a"),
        ("iw", "he", "Hebr", ("Hebrew",), True, "13a"),
        ("pt_br", "pt", "Latn", ("Latin",), True, "13a"),
        ("en-x-simple", "en", "Latn", ("Latin",), True, "13a"),
    ],
)
def test_what_a_language_needs_follows_from_how_it_is_written(
    code: str, primary: str, script: str, scripts: tuple[str, ...], spaced: bool, tokenizer: str
) -> None:
    found = language(code)
    assert (found.primary, found.script, found.scripts, found.spaced) == (primary, script, scripts, spaced)
    assert found.bleu_tokenizer == tokenizer


@pytest.mark.parametrize(
    ("code", "near"),
    [
        ("english", r"'english'; did you mean 'en' \(English\)\?"),
        ("englsh", r"'en' \(English\)"),
        ("Deutsch", r"'de' \(German\)"),
        ("中文", r"'zh' \(Chinese\)"),
        ("zht", r"'zh' \(Chinese\)"),
        ("eng1", r"'en' \(English\)"),
        ("zh_CN.UTF-8", r"'zh' \(Chinese\)"),
        ("jp", r"'ja' \(Japanese\)"),
        ("cn", r"'zh' \(Chinese\)"),
        ("xx", "write e.g. en, zh"),
        ("und", "write e.g. en, zh"),
        ("mul", "unknown language code"),
        ("", "write e.g. en, zh"),
        ("\x00", "write e.g. en, zh"),
        ("x" * 100_000, "write e.g. en, zh"),
    ],
)
def test_an_unknown_code_is_refused_with_near_ones(code: str, near: str) -> None:
    with pytest.raises(UserError, match=near) as caught:
        language(code)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 200


def test_every_language_of_the_table_can_be_used() -> None:
    for code in CLDR_LANGUAGES - {"und"}:
        assert language(code).scripts, code
