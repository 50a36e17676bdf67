"""Typed input through the whole pipeline, with a random model: what it writes is nonsense, what it must keep is not."""

import pytest

from translator.checkpoint import Checkpoint, CheckpointConfig
from translator.config import DecodeConfig
from translator.pipeline import Translator
from translator.pipeline.text import goes_on_and_on
from translator.search import Hypothesis
from translator.typed.slots import NUMBERS, OTHERS, SLOTS

from ..helpers import tiny_model
from .test_typed import slotted

LINES = [
    "The price is $3.50.",
    "WHERE IS THE STATION? It is at 7:45, see https://example.com/a.",
    "_Open...",
    "1. Tom has 12 dogs. 2. She has %s.",
    "7:45",
    "😂 100%!",
    " ".join(str(number) for number in range(100, 130)) + " cats",
    "a \ue000\ue005 b \uf8ff naïve",
    "so\u00adft cat",
    "",
]


def made(target: str = "zh") -> Translator:
    tokenizer = slotted()
    model = tiny_model(vocab_size=tokenizer.vocab_size)
    config = CheckpointConfig(source_language="en", target_language=target, model=model.config, decode=DecodeConfig())
    return Translator(Checkpoint(model, tokenizer, config))


@pytest.fixture(scope="module")
def translator() -> Translator:
    return made()


@pytest.mark.parametrize("settings", [{}, {"beam_size": 1}, {"n_best": 3}, {"search": "sampling", "n_best": 2}])
def test_no_placeholder_is_left_and_nothing_is_lost(translator, settings):
    for line, candidates in zip(LINES, translator.candidates(LINES, **settings), strict=True):
        for candidate in candidates:
            assert not (set(candidate.text) | set("".join(candidate.sources))) & (set(SLOTS) - set(line))
    for line, kept in ((0, ["$3.50"]), (1, ["7:45", "https://example.com/a"]), (3, ["12", "%s"]), (7, ["naïve"])):
        for candidate in translator.candidates([LINES[line]], **settings)[0]:
            assert all(span in candidate.text for span in kept), candidate.text


def test_no_placeholder_is_made_up(translator):
    words = ["cat", "dog", "tea", "book", "rain", "walk", "price", "station", "week", "morning"]
    lines = [f"The {one} is {number} of the {other}." for number, one in enumerate(words) for other in words]
    for candidates in translator.candidates(lines, search="sampling", n_best=3):
        for candidate in candidates:
            (tokens,) = candidate.tokens
            assert {token for token in tokens if token in SLOTS} <= {NUMBERS[0]}
            assert tokens.count(NUMBERS[0]) == 1 or tokens[-1] != "</s>"


def test_what_holds_no_letter_is_copied(translator):
    assert translator.translate(["7:45", "😂 100%!", "%s: %d", "https://a.example/b?c=1"]) == [
        "7:45", "😂 100%!", "%s: %d", "https://a.example/b?c=1"
    ]  # fmt: skip


@pytest.mark.parametrize("settings", [{}, {"beam_size": 1}])
@pytest.mark.parametrize("line", LINES)
def test_what_is_streamed_is_what_is_translated(translator, line, settings):
    assert "".join(translator.stream(line, **settings)) == translator.translate([line], **settings)[0]


def test_an_accelerator_stands_where_the_target_has_it():
    (chinese,), (german,) = (made(target).translate(["_Open..."]) for target in ("zh", "de"))
    assert "(_O)" in chinese
    assert german.count("_") == 1 and not german.endswith("_")


@pytest.mark.parametrize(
    "typed",
    [
        "The pri\u00adce is \u200b$3.50.",
        "\u200eThe price is $3.50\u2060.",
        "\ufeffThe price is $3.50.",
        "The price is\u00a0$3.50 .",
    ],
)
def test_what_nobody_sees_changes_nothing(translator, typed):
    assert translator.translate([typed]) == translator.translate([LINES[0]])


def test_a_forced_beginning_may_hold_a_span(translator):
    assert translator.translate([LINES[0]], prefixes=["猫$3.50"])[0].startswith("猫$3.50")
    assert translator.translate([LINES[0]], prefixes=["猫$3.50"])[0].count("$3.50") == 1


def test_the_best_hypothesis_with_every_placeholder_is_taken(translator, monkeypatch):
    tokenizer = translator.tokenizer

    def found(text: str, score: float, finished: bool = True) -> Hypothesis:
        return Hypothesis(tokens=tokenizer.encode(text), log_prob=score, score=score, finished=finished)

    slot, other = NUMBERS[0], OTHERS[0]

    def search(self, tasks, config, stopped):
        assert config.n_best == config.beam_size
        for task in tasks:
            task.found = [found("猫。", -1), found(f"{slot}{slot}", -2), found(f"狗{other}{slot}", -3),
                          found(f"茶{slot}", -4), found(f"书{slot}", -5), found(f"雨{slot}", -0.5, False)]  # fmt: skip

    monkeypatch.setattr(type(translator._decoder), "_search", search)
    assert translator.translate([LINES[0]]) == ["茶$3.50"]


def test_translations_score_as_they_were_found(translator):
    for line in LINES[:4]:
        (found,) = translator.candidates([line])[0]
        parts = translator.score(found.sources, found.tokens)
        assert sum(total for total, _ in parts) == pytest.approx(found.log_prob, abs=1e-3)


def test_text_is_scored_with_its_spans_as_placeholders(translator):
    (total, count), *_ = translator.score([LINES[0]], ["价格：$3.50"])
    slotted_ids = translator.tokenizer.encode(f"价格：{NUMBERS[0]}")
    assert count == len(slotted_ids) + 1
    (pieces, _), *_ = translator.score([LINES[0]], [[*translator.tokenizer.pieces(slotted_ids), "</s>"]])
    assert total == pytest.approx(pieces)


def test_sentences_that_differ_in_a_number_are_searched_for_once(translator):
    seen = []
    windows = translator.windows(
        [["The price is 12.", "The price is 77."]], report=lambda totals: seen.append(totals.searched)
    )
    ((_, found),) = list(windows)
    assert seen[-1] == 1
    assert "12" in found[0][0].text and "77" in found[1][0].text


@pytest.mark.parametrize(
    ("text", "on_and_on"),
    [("学学学学生", True), ("学学学生", False), ("very very very very good", True), ("很好很好很好很好", True),
     ("a b c d a b c d a b c d a b c d", True), ("very very very good", False), ("......", False), ("TTTT", True)],
)  # fmt: skip
def test_four_in_a_row_is_on_and_on(text, on_and_on):
    assert goes_on_and_on(text, 3) is on_and_on


def test_a_hypothesis_that_goes_on_and_on_is_not_taken_unless_the_source_does(translator, monkeypatch):
    tokenizer = translator.tokenizer

    def search(self, tasks, config, stopped):
        for task in tasks:
            task.found = [
                Hypothesis(tokenizer.encode(text), score, score, True)
                for text, score in (("猫猫猫猫", -1), (f"茶{NUMBERS[0]}", -2), ("狗", -3))
            ]

    monkeypatch.setattr(type(translator._decoder), "_search", search)
    assert translator.translate(["the cat"]) == ["猫猫猫猫"]
    assert translator.translate(["the cat"], max_in_a_row=3) == ["狗"]
    assert translator.translate(["the the the the the cat"], max_in_a_row=3) == ["猫猫猫猫"]
