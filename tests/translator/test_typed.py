"""Input as people type it: what is cleared away, written in one way, kept whole and put back."""

import functools
import runpy
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from translator.pipeline.sentences import split_marker, split_sentences
from translator.tokenizer import Tokenizer
from translator.typed.accelerators import put_accelerator, strip_accelerator
from translator.typed.casing import sentence_case
from translator.typed.plain import full_stops, narrow, plain
from translator.typed.sides import Sides
from translator.typed.slots import NUMBERS, OTHERS, SLOTS
from translator.typed.spans import find, protect, restore, same_slots
from translator.typed.visible import visible

from ..helpers import CHINESE, ENGLISH, tiny_tokenizer

typed_lines = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "check_typed.py"))["typed_lines"]


@functools.lru_cache
def slotted() -> Tokenizer:
    """`tiny_tokenizer` with slots."""
    return Tokenizer.train(ENGLISH + CHINESE, 440, threads=1, slots=True)


def spans(text: str) -> list[str]:
    return [span.text for span in find(text)]


# -- what is seen ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("so\u00adft", "soft"),
        ("\ufeffa\u200bb\u2060c\u202dd\u200ee\u2066f", "abcdef"),
        ("a\ufe0fb 5\ufe0f", "ab 5"),
        ("a\x00b\x07c\x7fd\x9f", "abcd"),
        ("a\tb\nc\u3000d\u00a0e\x85f", "a\tb\nc\u3000d\u00a0e\x85f"),
        ("Lat\u200cin a\u200db", "Latin ab"),
        ("葛\U000e0100城", "葛城"),
    ],
)
def test_what_nobody_sees_goes(text, seen):
    assert visible(text) == seen


@pytest.mark.parametrize(
    "text",
    ["👩\u200d💻", "👍🏽", "1\ufe0f\u20e3", "❤\ufe0f", "🏴\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f",
     "🏳\ufe0f\u200d🌈", "🇨🇳", "می\u200cخواهم", "क\u094d\u200dष", "a b", "café"],
)  # fmt: skip
def test_what_makes_an_emoji_or_a_letter_stays(text):
    assert visible(text) == text
    assert visible(f"x\u200b{text}\u00ad") == f"x{text}"


@given(
    st.text(
        st.sampled_from("aé中 ᠠ\u180b\u00ad\u200b\u200c\u200d\ufe0f\u20e3👩💻🏽5یक\u094d\U000e0067\U000e007f🇨\x00\n")
    )
)
def test_what_is_seen_is_seen_again(text):
    assert visible(visible(text)) == visible(text)


# -- one form --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "form"),
    [
        ("“It’s ‘here’”", "\"It's 'here'\""),
        ("„so“ «so»", '"so" "so"'),
        ("Wait… What.... So . . .", "Wait... What... So..."),
        ("yes — no -- no – no", "yes - no - no - no"),
        ("yes—no", "yes - no"),
        ("Hello , world !", "Hello, world!"),
        ("Ｈｉ！ ７", "Hi! 7"),
        ("Hi\u00a0\u202fthere", "Hi there"),
        ("Hi :) it's me", "Hi :) it's me"),
    ],
)
def test_english_has_one_form(typed, form):
    assert plain(narrow(typed, "en"), "en") == form


@pytest.mark.parametrize(
    ("typed", "form"),
    [
        ("你好,世界!", "你好，世界！"),
        ("他来了.", "他来了。"),
        ("真的吗 ？", "真的吗？"),
        ("“好”「好」", '"好""好"'),
        ("我有３个ＣＤ。", "我有3个CD。"),
        ("是……的…", "是...的..."),
        ("时间７：４５，％", "时间7:45，％"),
    ],
)
def test_chinese_has_one_form(typed, form):
    assert plain(narrow(typed, "zh"), "zh") == form


def test_a_plain_stop_between_chinese_sentences_splits_them():
    assert full_stops("他来了.我走了. 3.5元a.b", "zh") == "他来了。我走了. 3.5元a.b"
    assert full_stops("「好.」他想.", "zh") == "「好.」他想."
    assert full_stops("他来了.我走了", "ja-Latn") == "他来了.我走了"


def test_french_keeps_its_space_before_a_mark():
    assert plain("Quoi ?", "fr") == "Quoi ?"


# -- case ------------------------------------------------------------------------------------------------------------

KNOWN = {"where": -7, "Where": -6.8, "is": -5, "Is": -8, "the": -3, "The": -4.5, "station": -9, "Station": -11,
         "i": -9, "I": -5, "paris": -20, "Paris": -9, "new": -7, "New": -6.5, "york": -20, "York": -9, "city": -9,
         "City": -9.5, "NASA": -25, "nasa": -24, "Nasa": -24, "help": -8, "Help": -9, "HELP": -20}  # fmt: skip


def score(word: str) -> float:
    return KNOWN.get(word, -30.0)


@pytest.mark.parametrize(
    ("typed", "form"),
    [
        ("WHERE IS THE STATION?", "Where is the station?"),
        ("where is the station", "Where is the station"),
        ("Where Is The Station?", "Where is the station?"),
        ("is i in paris", "Is I in Paris"),
        ("HELP!", "Help!"),
        ("NASA", "NASA"),
        ("Where is NASA?", "Where is NASA?"),
        ("New York City", "New York City"),
        ("The Station", "The Station"),
        ("", ""),
        ("车站", "车站"),
        ("the 3rd station", "The 3rd station"),
        ("\ue000th station", "\ue000th station"),
        ("\ue00athe station\ue00b", "\ue00aThe station\ue00b"),
        ("\ue00a is the station", "\ue00a is the station"),
        ("Where Is The NASA Station", "Where is the NASA station"),
        ("The Paris Station Is New", "The Paris station is new"),
        ("TTB-RTL", "TTB-RTL"),
    ],
)
def test_case_that_says_nothing_is_restored(typed, form):
    assert sentence_case(typed, score) == form


# -- spans -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("It is 7:45.", ["7:45"]),
        ("$3.50, €20, ¥100, 50% of 1,234.", ["$3.50", "€20", "¥100", "50%", "1,234"]),
        ("on 2024-03-05 or 3/4, 1987.", ["2024-03-05", "3/4", "1987"]),
        ("Call +1-555-0100!", ["+1-555-0100"]),
        ("Ring +86 10 1234 5678 or (555) 010-0199.", ["+86 10 1234 5678", "(555) 010-0199"]),
        ("1e-5 and 6.02×10^23", ["1e-5", "6.02×10^23"]),
        (
            "<0>x</0> \\1 %@ @name@ **bold** C++ ~/.bashrc $HOME/bin",
            ["<0>", "</0>", "\\1", "%@", "@name@", "**", "**", "C++", "~/.bashrc", "$HOME/bin"],
        ),
        ("y < 3 and a - b, 5 * 3 * 2, x > 1", ["3", "5", "3", "2", "1"]),
        ("the 3rd, 1990s, 10km, 5PM", ["3", "1990", "10", "5"]),
        ("v2.0 MP3 COVID-19 4K. A7:B10.", ["v2.0", "MP3", "COVID-19", "4K", "A7:B10"]),
        ("Press Ctrl+Alt+F2.", ["Ctrl+Alt+F2"]),
        ("打开报告.pdf，调用foo()", [".pdf", "foo()"]),
        ("See https://example.com/a?b=1, or mail bob@example.com.", ["https://example.com/a?b=1", "bob@example.com"]),
        (
            '"http://a.example/b"<http://c.example> (http://d.example).',
            ["http://a.example/b", "<http://c.example>", "http://d.example"],
        ),
        ("（http://example.com）。", ["http://example.com"]),
        ("report.pdf /usr/share C:\\Users\\me", ["report.pdf", "/usr/share", "C:\\Users\\me"]),
        (
            "%s %(name)s {0} {name} ${x} %{x} $HOME %1$d",
            ["%s", "%(name)s", "{0}", "{name}", "${x}", "%{x}", "$HOME", "%1$d"],
        ),
        ("50% done", ["50%"]),
        ('<b>Hi</b> &amp; <a href="x">', ["<b>", "</b>", "&amp;", '<a href="x">']),
        ("one\\ntwo\\t", ["\\n", "\\t"]),
        ("Run `rm -rf` now", ["`rm -rf`"]),
        ("Hi 😂😂 👩\u200d💻!", ["😂😂", "👩\u200d💻"]),
        ("@bob #travel", ["@bob", "#travel"]),
        ("and/or he/she, R&D. Hello.World", []),
        ("3月5日，3万人，1万", ["5"]),
        ("2024年12月", ["2024"]),
    ],
)
def test_what_must_come_through_is_found(text, found):
    assert spans(text) == found


@given(st.text(st.sampled_from("a 7:.$%{}<>/@_中月\ue000\ue00f\ue020😂é&;sd")), st.booleans())
def test_spans_come_back_where_they_were(text, unknown):
    masked, kept = protect(text, frozenset("a :.中月") if unknown else None)
    typed = "".join(char for char in text if char not in SLOTS)
    back = restore(masked, kept)
    # More than there are slots: those that were typed themselves go.
    assert back in (text, typed) or "".join(char for char in back if char not in SLOTS) == typed
    assert protect(text) == protect(text)


def test_numbers_and_others_have_slots_of_their_own_and_equal_ones_share():
    masked, kept = protect("1 %s 2 1 %s")
    assert masked == f"{NUMBERS[0]} {OTHERS[0]} {NUMBERS[1]} {NUMBERS[0]} {OTHERS[0]}"
    assert kept == {NUMBERS[0]: "1", OTHERS[0]: "%s", NUMBERS[1]: "2"}


def test_more_spans_than_slots_stay_as_they_are():
    numbers = [str(number) for number in range(1, 15)]
    masked, kept = protect(" ".join(numbers))
    assert masked == " ".join([*NUMBERS, *numbers[10:]])
    assert len(kept) == 10


@pytest.mark.parametrize(
    "part", ["1-", "a@", "a_", "1.", "<a", "a/", "x.", "ab", "a1", "`", "%", "{{", "+1", "a\u00ad", "http://"]
)
def test_time_grows_with_the_text_alone(part):
    def took(size: int) -> float:
        text = part * (size // len(part)) + "月é"
        began = time.process_time()
        visible(text)
        protect(narrow(text, "en"), frozenset("a"))
        plain(text, "en")
        return time.process_time() - began

    took(1000)
    # Ten times the text: about ten times as long, and not a hundred.
    assert min(took(50_000) for _ in range(2)) < 40 * max(min(took(5000) for _ in range(3)), 1e-3)


def test_a_word_with_an_unknown_character_is_one_span():
    known = frozenset("abcdefghijklmnopqrstuvwxyz .")
    assert [span.text for span in find("go naïve on при вет now.", known)] == ["naïve", "при вет"]


# -- accelerators ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "bare", "chinese", "english"),
    [
        ("_Open", "Open", "打开(_O)...", "_Open it..."),
        ("&Tune...", "Tune...", "打开(&T)...", "Open i&t..."),
        ("E_xit", "Exit", "打开(_X)...", "_Open it..."),
        ("~Open", "Open", "打开(~O)...", "~Open it..."),
        ("打开(_O)...", "打开...", "打开(_O)...", "_Open it..."),
    ],
)
def test_an_accelerator_goes_and_comes_back(text, bare, chinese, english):
    stripped, accelerator = strip_accelerator(text)
    assert stripped == bare
    assert put_accelerator("打开...", accelerator, "zh") == chinese
    assert put_accelerator("Open it...", accelerator, "en") == english


@pytest.mark.parametrize("text", ["a_b", "R&D", "AT&T", "~5", "&amp;", "_a_", "a & b", "~/x", "snake_case_name", "Tom"])
def test_other_marks_are_no_accelerators(text):
    assert strip_accelerator(text) == (text, None)


# -- both sides ------------------------------------------------------------------------------------------------------


def test_what_both_sides_hold_shares_a_placeholder():
    source, target = Sides(slotted(), "en", "zh").pair("The price is 12 of 7.", "价格：１２，好！")
    slot = next(char for char in source if char in SLOTS)
    assert slot in NUMBERS
    assert source == f"The price is {slot} of 7."
    assert target == f"价格：{slot}，好！"


def test_what_one_side_holds_more_often_stays_as_it_is():
    assert Sides(slotted(), "en", "zh").pair("The price is 7 of 7.", "价格：7") == ("The price is 7 of 7.", "价格：7")


def test_all_placeholders_are_trained():
    sides = Sides(slotted(), "en", "zh")
    drawn = set()
    for number in range(200):
        for span in (str(number), f"%{number % 9 + 1}$s"):
            source, _ = sides.pair(f"The cat {number} {span}", f"猫 {number} {span}")
            drawn |= set(source) & set(SLOTS)
    assert drawn == set(SLOTS)


def test_without_slots_only_the_unseen_goes():
    sides = Sides(tiny_tokenizer(), "en", "zh")
    assert sides.pair("“SO\u00ad” 7", "“七\u200b” 7") == ("“SO” 7", "“七” 7")
    assert sides.source("“SO\u00ad” 7").text == "“SO” 7"
    assert sides.target("a \ue000", sides.source("x")) == "a \ue000"


def test_a_translation_gets_everything_back():
    sides = Sides(slotted(), "en", "zh")
    source = sides.source("The price is $3.50.")
    assert source.text == f"The price is {NUMBERS[0]}."
    assert same_slots(f"价格：{NUMBERS[0]}。", source.text)
    assert sides.target(f"价格：{NUMBERS[0]}。", source) == "价格：$3.50。"
    assert not same_slots("价格。", source.text)
    assert sides.target(f"价格{NUMBERS[3]}。", source) == "价格。 $3.50"


def test_a_vocabulary_has_slots_only_where_it_was_asked_to():
    assert slotted().has_slots and not tiny_tokenizer().has_slots
    typed = Tokenizer.train([*ENGLISH * 3, " ".join(SLOTS * 9)], threads=1)
    assert not typed.has_slots


def test_placeholders_are_pieces_of_their_own():
    tokenizer = slotted()
    ids = tokenizer.encode(f"猫{SLOTS[0]}a{SLOTS[15]}.")
    assert {SLOTS[0], SLOTS[15]} <= set(tokenizer.pieces(ids))
    assert tokenizer.decode(ids) == f"猫{SLOTS[0]}a{SLOTS[15]}."


def test_pairs_are_prepared_in_microseconds():
    sides = Sides(slotted(), "en", "zh")
    pairs = [(f"The price is {n} percent higher, “Tom”.", f"价格：比去年高了{n}％，好！") for n in range(2000)]
    began = time.process_time()
    for pair in pairs:
        sides.pair(*pair)
    assert (time.process_time() - began) / len(pairs) < 500e-6


# -- lines as people type them ---------------------------------------------------------------------------------------


def forms(sides: Sides, line: str, code: str) -> tuple[list[str], list[str]]:
    """The sentences of a line as the model sees them, and everything that comes through."""
    texts, kept = [], []
    for sentence in split_sentences(visible(line), code):
        marker, rest = split_marker(sentence, code)
        source = sides.source(rest)
        texts.append(marker + source.text)
        kept += [marker.strip(), *source.spans.values()]
        if source.accelerator:
            kept += [source.accelerator.mark, f"({source.accelerator.mark}{source.accelerator.key})"]
    return texts, kept


@pytest.mark.parametrize("direction", ["en-zh", "zh-en"])
def test_the_lines_of_the_set_have_their_form_and_keep_their_spans(direction):
    rows = typed_lines(direction)
    assert len(rows) > 190
    source, target = direction.split("-")
    # Of all words it lists, so that each has its case; the letters of the lines but for those that are to be unknown.
    plain_lines = [
        plain for kind, _, plain, _ in rows if kind not in ("unknown", "path", "code", "tag", "url", "email")
    ]
    tokenizer = Tokenizer.train(plain_lines * 3 + ENGLISH * 3, threads=1, slots=True)
    sides = Sides(tokenizer, source, target)
    for kind, typed, plain_line, wanted in rows:
        texts, kept = forms(sides, typed, source)
        if wanted and kind != "list":
            assert set(wanted) <= set(kept), (kind, typed)
        elif not wanted and kind not in ("caps", "lower", "title", "word"):  # too few words to know their case
            others, _ = forms(sides, plain_line, source)
            if kind == "no_mark":
                others[-1] = others[-1][:-1]
            assert texts == others, kind
