"""`Translator`: N lines in, N out, in order, whatever they hold and however they are batched."""

import dataclasses
import logging
import math
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers import CHINESE, ENGLISH, tiny_checkpoint, tiny_model64, tiny_tokenizer, tiny_translator
from translator.config import DecodeConfig
from translator.device import usable_device
from translator.engine import MatrixScores
from translator.errors import UserError
from translator.padding import pad, padding
from translator.pipeline import Candidate, Translator
from translator.pipeline.batching import batches
from translator.pipeline.decoding import TaskDecoder
from translator.pipeline.text import Task
from translator.search import Hypothesis
from translator.search.sampling import Draws, draw_seed, drawn

GREEDY = DecodeConfig(beam_size=1)
BEAM = DecodeConfig(beam_size=4, n_best=4)
SAMPLING = DecodeConfig(sampling=True, n_best=2)
SHORT = DecodeConfig(beam_size=1, max_length_factor=0, max_length_extra=4)
every_search = pytest.mark.parametrize("config", [GREEDY, BEAM, SAMPLING], ids=["greedy", "beam", "sampling"])

WORDS = " ".join(ENGLISH).split()
LONG = " ".join(ENGLISH)
# Sources of 1 to 90 tokens, shuffled.
SIZES = [7, 1, 30, 2, 16, 3, 24, 12, 5, 1, 20, 2]
RAGGED = [" ".join(WORDS[i : i + n]) for i, n in enumerate(SIZES)]


def translator64(**options: Any) -> Translator:
    """A `Translator` whose texts don't hang on rounding: in fp32, another batch may choose between two near equals."""
    return tiny_translator(model=tiny_model64(), **options)


def texts(found: list[list[Candidate]]) -> list[list[str]]:
    return [[candidate.text for candidate in candidates] for candidates in found]


def assert_same(found: list[list[Candidate]], expected: list[list[Candidate]]) -> None:
    assert texts(found) == texts(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert [c.tokens for c in mine] == [c.tokens for c in theirs]
        assert [c.sources for c in mine] == [c.sources for c in theirs]
        assert [c.log_prob for c in mine] == pytest.approx([c.log_prob for c in theirs], abs=1e-8)
        assert [c.score for c in mine] == pytest.approx([c.score for c in theirs], abs=1e-8)


# -- lines in, lines out ----------------------------------------------------------------------------------------------

BLANK = ["", " ", "   ", "\u3000", "\u3000 \t", "\t", "\r", "\u2028", "\u0085", "\x0b\x0c", "\n"]
NASTY = [
    "A tab\tin the middle.",
    "A lone\rcarriage return. And more.",
    "A line\u2028separator. And more.",
    "A next\u0085line. And more.",
    "A paragraph\u2029separator, a form\x0cfeed, a vertical\x0btab.",
    "\ufeffA byte order mark.",
    "\ufeff",
    "\u200b",
    "...",
    "?!",
    "\x00\x01",
    "价格：１２３％，好！",
    "ok 😀 👨‍👩‍👧 é 你",
    "</s> <s> <pad> <unk> <0xF0> ▁",
    "A\nB",
    "word" * 30,
]


@every_search
def test_as_many_lines_out_as_in_each_without_a_line_end(config):
    lines = ["", *NASTY, *BLANK, "The last but one.", "", LONG, ""]
    got = translator64().translate(lines, config)
    assert len(got) == len(lines)
    assert not any("\n" in text or "\r" in text for text in got)
    for line, text in zip(lines, got, strict=True):
        assert bool(text) <= bool(line.strip()), "blank lines give empty ones"


def test_blank_lines_give_one_empty_candidate():
    for candidates in translator64().candidates(BLANK, BEAM, prefixes=["猫"] * len(BLANK)):
        assert candidates == [Candidate("", 0.0, 0.0, [], [])]


def test_no_lines_give_no_lines():
    assert translator64().translate([]) == []
    assert list(translator64().stream("")) == []


def test_a_line_end_spelled_by_bytes_stays_inside_its_line(monkeypatch):
    script(monkeypatch, [tiny_tokenizer().ids(["猫", "<0x0A>", "<0x0D>", "狗", "<0x0A>", "</s>"])])
    assert translator64().translate(["One."], GREEDY) == ["猫  狗"]


def test_results_are_in_the_order_given_among_blank_lines():
    """1,300 numbered lines, every fourth blank."""
    lines = ["" if number % 4 == 0 else f"{number} {WORDS[number % 7]} {number}" for number in range(1300)]
    config = dataclasses.replace(SHORT, max_length_extra=2)
    translator = translator64()
    found = translator.candidates(lines, config)
    assert [" ".join(candidates[0].sources) for candidates in found] == lines
    assert texts(translator.candidates(lines[::-1], config)) == texts(found)[::-1]
    assert [texts(translator.candidates([lines[i]], config)) for i in (1, 3, 333, 1299)] == [
        [texts(found)[i]] for i in (1, 3, 333, 1299)
    ]


def test_a_sentence_longer_than_the_positions_is_cut_and_its_line_named(caplog):
    lines = [*ENGLISH[:4], "word " * 5000, *ENGLISH[4:9]]
    translator = translator64()
    with caplog.at_level(logging.WARNING, "translator"):
        found = translator.candidates(lines, GREEDY, first_line=1001)
    (record,) = caplog.records
    assert record.getMessage().startswith("line 1005: ") and "cut" in record.getMessage()
    assert str(translator.config.model.max_positions) in record.getMessage()
    assert len(found) == 10 and found[4][0].text
    assert_same(found[:4] + found[5:], translator.candidates(lines[:4] + lines[5:], GREEDY))


@pytest.mark.parametrize(
    "line", ["word " * 5000, "字😀" * 200, "a" + "😀" * 200, "字" * 300], ids=lambda text: text[:2]
)
def test_what_is_kept_of_a_cut_sentence_is_what_its_score_is_about(line, caplog):
    translator = translator64()
    for config in (GREEDY, BEAM):
        (candidates,) = translator.candidates([line], config)
        limit = translator.config.model.max_positions
        (kept,) = candidates[0].sources
        assert line.startswith(kept) and "\ufffd" not in kept
        assert limit - 8 < len(translator.tokenizer.encode(kept)) + 1 <= limit
        scores = translator.score([kept] * len(candidates), [candidate.tokens[0] for candidate in candidates])
        assert [score for score, _ in scores] == pytest.approx([c.log_prob for c in candidates], abs=1e-4)


def test_a_sentence_that_just_fits_is_not_cut(caplog):
    translator = translator64()
    limit = translator.config.model.max_positions
    fits = "a" * 5000
    while len(translator.tokenizer.encode(fits)) > limit - 1:
        fits = fits[:-1]
    assert len(translator.tokenizer.encode(fits)) == limit - 1
    assert translator.candidates([fits], SHORT)[0][0].sources == [fits]
    assert not caplog.records


def test_a_long_line_of_many_sentences_is_translated_whole(caplog):
    line = " ".join(ENGLISH * 20)
    ((found,),) = translator64().candidates([line], GREEDY)
    assert not caplog.records
    assert len(found.sources) > 200 and "".join(found.sources).replace(" ", "") == line.replace(" ", "")
    alone = translator64().translate(found.sources, GREEDY)
    assert found.text == "".join(alone)


def test_text_that_is_no_unicode_is_refused_by_line():
    translator = translator64()
    for call in (
        lambda: translator.translate(["Fine.", "half a \ud83d pair"], first_line=8),
        lambda: translator.translate(["Fine.", "Fine."], prefixes=["", "\udcff"], first_line=8),
        lambda: translator.score(["Fine."] * 9, [""] * 8 + ["\udcff"]),
    ):
        with pytest.raises(UserError, match="line 9 is not valid UTF-8"):
            call()


# -- batches ----------------------------------------------------------------------------------------------------------


@pytest.mark.numeric
@pytest.mark.parametrize("config", [GREEDY, BEAM], ids=["greedy", "beam"])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_batches_of_any_size_give_the_same(config, kind):
    """Padding, batch mates and the cache's kind change neither text nor scores."""
    expected = translator64(batch_tokens=1).candidates(RAGGED, config)
    assert len({len(candidates[0].tokens[0]) for candidates in expected}) > 5, "they should end at different steps"
    for batch_tokens in (100, 700, 1 << 20):
        assert_same(translator64(batch_tokens=batch_tokens, cache=kind).candidates(RAGGED, config), expected)


@pytest.mark.numeric
@pytest.mark.parametrize(
    "config",
    [SAMPLING, dataclasses.replace(SAMPLING, temperature=2.0, top_k=40, top_p=0.95, seed=7)],
    ids=["plain", "truncated"],
)
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_batches_of_any_size_draw_the_same_but_for_near_ties(config, kind):
    translator = tiny_translator(batch_tokens=1)
    expected = translator.candidates(RAGGED, config)
    differences = 0
    for batch_tokens in (100, 700, 1 << 20):
        found = tiny_translator(batch_tokens=batch_tokens, cache=kind).candidates(RAGGED, config)
        for number, (mine, theirs) in enumerate(zip(found, expected, strict=True), 1):
            assert len(mine) == len(theirs)
            by_tokens = {str(candidate.tokens): candidate for candidate in theirs}
            for candidate in mine:
                other = by_tokens.get(str(candidate.tokens))
                if other is None:
                    differences += 1
                    assert any(is_near_tie(translator, config, number, candidate, other) for other in theirs)
                else:
                    assert candidate.log_prob == pytest.approx(other.log_prob, rel=1e-5, abs=1e-3)
    assert differences <= 1, "of 72 samples, some 20 tokens each"


def is_near_tie(translator: Translator, config: DecodeConfig, line: int, one: Candidate, other: Candidate) -> bool:
    """Whether changes to the log-probabilities as small as rounding's make the sampler choose either's token."""
    ids, others = (translator.tokenizer.ids(candidate.tokens[0]) for candidate in (one, other))
    t = next(place for place, (a, b) in enumerate(zip(ids, others, strict=False)) if a != b)
    source = torch.tensor([[*translator.tokenizer.encode(one.sources[0]), translator.tokenizer.eos_id]])
    target = torch.tensor([[translator.tokenizer.bos_id, *ids[:t]]])
    log_probs = translator.engine.model(source, target)[0, -1].log_softmax(-1)
    trials, K = 64, config.n_best
    shaken = log_probs + 1e-4 * (2 * torch.rand(trials, len(log_probs)) - 1)
    rows = shaken.repeat_interleave(K, dim=0)
    banned = torch.tensor([[translator.tokenizer.pad_id, translator.tokenizer.bos_id]]).expand(trials * K, 2)
    draws = Draws(
        torch.tensor([draw_seed(config.seed, (line, 0), row) for row in range(K)]).repeat(trials),
        torch.full((trials * K,), t),
        torch.full((trials * K, 1), config.temperature, dtype=torch.float64),
        torch.full((trials * K, 1), config.top_k),
        torch.full((trials * K, 1), config.top_p, dtype=torch.float64),
    )
    chosen = drawn(MatrixScores(rows), banned, draws).view(trials, K)
    return any({ids[t], others[t]} <= set(beam.tolist()) for beam in chosen.T)


def test_a_batch_keeps_to_its_budget_and_goes_from_long_to_short():
    generator = random.Random(0)
    for budget in (1, 10, 64, 1000):
        widths = [generator.randint(1, 80) for _ in range(100)]
        got = list(batches(widths, budget))
        assert sorted(index for batch in got for index in batch) == list(range(100))
        order = [widths[index] for batch in got for index in batch]
        assert order == sorted(widths, reverse=True)
        for batch in got:
            assert len(batch) == 1 or max(widths[index] for index in batch) * len(batch) <= budget
    assert list(batches([], 10)) == []


@pytest.mark.numeric
def test_ids_in_padding_change_nothing():
    model, tokenizer = tiny_model64(), tiny_tokenizer()
    sources = [[*tokenizer.encode(line), tokenizer.eos_id] for line in RAGGED[:6]]
    hidden = padding([len(source) for source in sources])
    clean = pad(sources, tokenizer.pad_id)
    garbage = clean.clone()
    garbage[hidden] = torch.randint(4, 400, (int(hidden.sum()),), generator=torch.Generator().manual_seed(0))
    targets = torch.randint(4, 400, (6, 12), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(model(clean, targets, hidden), model(garbage, targets, hidden), rtol=0, atol=1e-10)
    assert not torch.allclose(model(clean, targets), model(garbage, targets)), "a vain test"


def test_an_id_that_equals_padding_is_still_a_token():
    assert padding([2, 4]).tolist() == [[False, False, True, True], [False] * 4]
    assert pad([[0, 7], [5, 0, 0, 9]], 0).tolist() == [[0, 7, 0, 0], [5, 0, 0, 9]]


@every_search
def test_a_line_is_translated_the_same_in_another_window(config):
    translator = translator64()
    whole = translator.candidates(ENGLISH, config)
    windows = translator.candidates(ENGLISH[:4], config) + translator.candidates(ENGLISH[4:], config, first_line=5)
    assert_same(windows, whole)


# -- lines of several sentences ---------------------------------------------------------------------------------------


def test_sentences_are_translated_alone_and_joined():
    translator = translator64()
    line = "The cat sat on the mat. Where is the station? We were waiting!"
    parts = ["The cat sat on the mat.", "Where is the station?", "We were waiting!"]
    ((found,),) = translator.candidates([line], GREEDY)
    alone = [candidates[0] for candidates in translator.candidates(parts, GREEDY)]
    assert found.sources == parts
    assert found.text == "".join(candidate.text for candidate in alone)
    assert found.tokens == [candidate.tokens[0] for candidate in alone]
    assert found.log_prob == pytest.approx(sum(candidate.log_prob for candidate in alone), abs=1e-4)
    assert found.score == pytest.approx(sum(candidate.score for candidate in alone), abs=1e-4)


def test_sentences_of_a_language_with_spaces_are_joined_by_one():
    checkpoint = tiny_checkpoint()
    checkpoint.config = dataclasses.replace(checkpoint.config, source_language="zh-CN", target_language="en")
    translator = Translator(checkpoint)
    alone = translator.translate(["猫坐在垫子上。", "车站在哪里？"], GREEDY)
    assert all(alone)
    assert translator.translate(["猫坐在垫子上。车站在哪里？"], GREEDY) == [" ".join(alone)]
    assert "".join(translator.stream("猫坐在垫子上。车站在哪里？", GREEDY)) == " ".join(alone)


def test_without_splitting_a_line_is_one_sentence():
    line = "The cat sat. The dog sat."
    ((found,),) = translator64().candidates([line], GREEDY, split=False)
    assert found.sources == [line] and len(found.tokens) == 1


def test_equal_sentences_of_a_line_are_sampled_apart():
    config = DecodeConfig(sampling=True, temperature=2.0)
    ((found,),) = translator64().candidates(["I would like a cup. I would like a cup."], config)
    assert found.sources[0] == found.sources[1] and found.tokens[0] != found.tokens[1]


# -- choices ----------------------------------------------------------------------------------------------------------


def test_n_best_is_sorted_and_distinct():
    for candidates in translator64().candidates(ENGLISH[:5], DecodeConfig(beam_size=6, n_best=6), split=False):
        assert len(candidates) == 6 == len({str(candidate.tokens) for candidate in candidates})
        ends = [candidate.tokens[0][-1] == "</s>" for candidate in candidates]
        assert ends == sorted(ends, reverse=True)
        for complete in (True, False):
            scores = [c.score for c, end in zip(candidates, ends, strict=True) if end == complete]
            assert scores == sorted(scores, reverse=True)


class Unmoved:
    """A `Decoding` with logits of the step alone: `steps[t]` gives those of some pieces, the rest is hopeless."""

    def __init__(self, steps: list[dict[str, float]], batch_size: int, beams: int) -> None:
        self.steps, self.batch_size, self.beams, self.t = steps, batch_size, beams, 0

    def step(self, tokens: Tensor) -> MatrixScores:
        logits = torch.full((tiny_tokenizer().vocab_size,), -30.0)
        for piece, value in self.steps[min(self.t, len(self.steps) - 1)].items():
            logits[tiny_tokenizer().ids([piece])] = value
        self.t += 1
        return MatrixScores(logits.expand(len(tokens), -1))

    def reorder(self, beam: Tensor) -> None: ...

    def compact(self, keep: Tensor) -> None:
        self.batch_size = len(keep)


def spelling(monkeypatch: pytest.MonkeyPatch, *steps: dict[str, float]) -> list[int]:
    """Makes every model say `steps`; returns the rows of each search made."""
    rows_seen: list[int] = []

    def start(self: object, rows: int, longest: int) -> Any:
        rows_seen.append(rows)
        return lambda sources, slots: Unmoved(list(steps), len(sources), rows)

    monkeypatch.setattr(TaskDecoder, "_start", start)
    return rows_seen


END = {"</s>": 9.0}


def test_token_sequences_that_spell_the_same_text_are_one_alternative(monkeypatch):
    rows = spelling(monkeypatch, {"o": 5.0, "<0x6F>": 4.0, "猫": 3.0, "狗": 2.0}, END)
    (found,) = tiny_translator().candidates(["Yes."], DecodeConfig(beam_size=2, n_best=2))
    assert [candidate.text for candidate in found] == ["o", "猫"]
    assert [candidate.tokens for candidate in found] == [[["o", "</s>"]], [["猫", "</s>"]]]
    assert rows == [2, 4]
    (found,) = tiny_translator().candidates(["Yes."], DecodeConfig(beam_size=4, n_best=3))
    assert [candidate.text for candidate in found] == ["o", "猫", "狗"]
    assert rows == [2, 4, 4], "the beam held a third text already"


def test_alternatives_from_a_wider_search_stay_below_the_best(monkeypatch):
    """How many alternatives are asked for must not change which translation is the best."""

    def ids(*pieces: str) -> list[int]:
        return tiny_tokenizer().ids([*pieces, "</s>"])

    def search(decoder: object, tasks: list[Task], config: DecodeConfig, stopped: object) -> None:
        narrow = [Hypothesis(ids("o"), -1.0, -1.0, True), Hypothesis(ids("<0x6F>"), -2.0, -2.0, True)]
        wide = [Hypothesis(ids("狗"), -0.5, -0.5, True), *narrow, Hypothesis(ids("猫"), -3.0, -3.0, True)]
        tasks[0].found = narrow if config.beam_size == 2 else wide

    monkeypatch.setattr(TaskDecoder, "_search", search)
    (found,) = tiny_translator().candidates(["Yes."], DecodeConfig(beam_size=2, n_best=2))
    assert [candidate.text for candidate in found] == ["o", "猫"]


def test_there_may_be_fewer_alternatives_than_asked_for(monkeypatch):
    spelling(monkeypatch, {"o": 5.0, "<0x6F>": 4.0}, END)
    (found,) = tiny_translator().candidates(["Yes."], DecodeConfig(beam_size=2, n_best=2, max_length_extra=1))
    assert found[0].text == "o" and len({candidate.text for candidate in found}) == len(found)


def test_samples_are_different_texts_too(monkeypatch):
    spelling(monkeypatch, {"o": 5.0, "<0x6F>": 5.0, "猫": 3.0}, END)
    for seed in range(5):
        config = DecodeConfig(sampling=True, n_best=3, seed=seed)
        for found in tiny_translator().candidates(["Yes.", "No. Good."], config):
            assert len({candidate.text for candidate in found}) == len(found) <= 3


def test_one_translation_is_searched_for_once(monkeypatch):
    rows = spelling(monkeypatch, {"o": 5.0, "<0x6F>": 4.0}, END)
    assert tiny_translator().translate(["Yes."], DecodeConfig(beam_size=3)) == ["o"]
    assert rows == [3]


def test_the_numbers_of_a_list_are_copied(monkeypatch):
    rows = spelling(monkeypatch, {"猫": 5.0}, END)
    lines = ["1. Yes. 2) No.", "Yes. (a) No.", "3. Yes.", "12."]
    assert tiny_translator().translate(lines, GREEDY) == ["1. 猫2) 猫", "猫(a) 猫", "3. 猫", "猫"]
    assert ["".join(tiny_translator().stream(line, GREEDY)) for line in lines] == [
        "1. 猫2) 猫",
        "猫(a) 猫",
        "3. 猫",
        "猫",
    ]
    ((found,),) = tiny_translator().candidates(["1. Yes. 2) No."], GREEDY)
    assert found.sources == ["Yes.", "No."] and found.tokens == [["猫", "</s>"]] * 2
    ((whole,),) = tiny_translator().candidates(["1. Yes."], GREEDY, split=False)
    assert (whole.text, whole.sources) == ("猫", ["1. Yes."])
    assert rows


def test_a_forced_beginning_comes_before_the_number_of_a_list():
    (text,) = tiny_translator().translate(["1. The cat sat. 2. The dog sat."], GREEDY, prefixes=["价格"])
    assert text.startswith("价格") and "2. " in text and "1. " not in text


def test_progress_counts_whole_lines():
    calls: list[tuple[int, int]] = []
    lines = ["", *ENGLISH[:4], "One. Two. Three.", ""]
    translator = tiny_translator(batch_tokens=30)
    translator.translate(lines, GREEDY, progress=lambda done, total: calls.append((done, total)))
    assert [total for _, total in calls] == [7] * len(calls) and len(calls) > 3
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert calls[0][0] < 7 and calls[-1] == (7, 7)


def test_a_line_of_several_sentences_has_n_best_too():
    (candidates,) = translator64().candidates(["The cat sat on the mat. Yes."], BEAM)
    assert len(candidates) == 4
    assert len({candidate.text for candidate in candidates}) > 1


@every_search
def test_a_translation_begins_with_its_prefix(config):
    prefixes = ["猫坐在", "", "请给我一杯茶", "好！"]
    translator = translator64()
    found = translator.candidates(ENGLISH[:4], config, prefixes=prefixes, split=False)
    for prefix, candidates in zip(prefixes, found, strict=True):
        for candidate in candidates:
            assert candidate.text.startswith(prefix)
    assert_same(found[1:2], translator.candidates(ENGLISH[:4], config, split=False)[1:2])


def test_the_prefix_of_a_line_begins_its_first_sentence_only():
    ((found,),) = translator64().candidates(["The cat sat. The dog sat."], GREEDY, prefixes=["价格"])
    assert found.text.startswith("价格")
    ((plain,),) = translator64().candidates(["The cat sat. The dog sat."], GREEDY)
    assert found.tokens[0] != plain.tokens[0] and found.tokens[1] == plain.tokens[1]


def test_the_longest_target_follows_from_the_source_and_the_positions():
    translator = translator64()
    for factor, extra in ((0.0, 1), (0.5, 2), (100.0, 1)):
        config = DecodeConfig(beam_size=1, max_length_factor=factor, max_length_extra=extra)
        for line, (candidate,) in zip(RAGGED, translator.candidates(RAGGED, config, split=False), strict=True):
            source = len(translator.tokenizer.encode(line)) + 1
            longest = min(int(factor * source) + extra, translator.config.model.max_positions)
            length = len(candidate.tokens[0])
            assert length <= longest and (length == longest or candidate.tokens[0][-1] == "</s>")


# -- scores -----------------------------------------------------------------------------------------------------------


@pytest.mark.numeric
@pytest.mark.parametrize(
    "config",
    [
        GREEDY,
        BEAM,
        SAMPLING,
        DecodeConfig(beam_size=4, n_best=2, max_length_factor=100),
        DecodeConfig(beam_size=4, n_best=3, no_repeat_ngram_size=2),
        DecodeConfig(sampling=True, temperature=2.0, top_k=20, top_p=0.9),
    ],
    ids=["greedy", "beam", "sampling", "to the last position", "no repeats", "hot sampling"],
)
@pytest.mark.parametrize("prefix", ["", "猫坐在"])
def test_scores_found_are_the_teacher_forced_ones(config, prefix):
    """Cut targets and complete ones."""
    translator = translator64()
    found = translator.candidates(RAGGED, config, prefixes=[prefix] * len(RAGGED), split=False)
    flat = [candidate for candidates in found for candidate in candidates]
    scores = translator.score([c.sources[0] for c in flat], [c.tokens[0] for c in flat])
    assert [tokens for _, tokens in scores] == [len(c.tokens[0]) for c in flat]
    assert [score for score, _ in scores] == pytest.approx([c.log_prob for c in flat], rel=1e-5, abs=1e-3)
    complete = {c.tokens[0][-1] == "</s>" for c in flat}
    assert True in complete and (prefix or complete == {True, False})


@pytest.mark.numeric
def test_the_score_of_text_counts_the_end_token_and_not_the_batch():
    translator = translator64()
    scores = translator.score(ENGLISH, CHINESE)
    for source, target, (score, tokens) in zip(ENGLISH, CHINESE, scores, strict=True):
        ids = [*translator.tokenizer.encode(target), translator.tokenizer.eos_id]
        assert tokens == len(ids)
        source_ids = torch.tensor([[*translator.tokenizer.encode(source), translator.tokenizer.eos_id]])
        logits = translator.engine.model(source_ids, torch.tensor([[translator.tokenizer.bos_id, *ids[:-1]]]))
        assert score == pytest.approx(float(logits.log_softmax(-1)[0, range(len(ids)), ids].sum()), abs=1e-4)
    assert translator.score(["Yes."], [""])[0][1] == 1
    assert translator.score([], []) == []


@pytest.mark.numeric
def test_scores_in_batches_of_any_size_are_the_same():
    targets = [CHINESE[i % 10] for i in range(len(RAGGED))]
    expected = translator64(batch_tokens=1).score(RAGGED, targets)
    for batch_tokens in (100, 1 << 20):
        got = translator64(batch_tokens=batch_tokens).score(RAGGED, targets)
        assert [tokens for _, tokens in got] == [tokens for _, tokens in expected]
        assert [score for score, _ in got] == pytest.approx([score for score, _ in expected], abs=1e-4)


# -- streaming --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [GREEDY, BEAM, DecodeConfig(sampling=True, temperature=2.0, seed=4)],
    ids=["greedy", "beam", "sampling"],
)
def test_the_stream_is_the_translation(config):
    translator = translator64()
    for text in [*NASTY, *BLANK, *RAGGED[:6], *CHINESE[:3], " ".join(ENGLISH[:4])]:
        parts = list(translator.stream(text, config))
        assert all(parts)
        assert ["".join(parts)] == translator.translate([text], config)


def test_greedy_streams_while_it_decodes(monkeypatch):
    steps = script(monkeypatch, [tiny_tokenizer().ids(["猫", "在", "狗", "</s>"])])
    seen = [(len(steps), part) for part in translator64().stream("Yes.", GREEDY)]
    assert seen == [(1, "猫"), (2, "在"), (3, "狗")]


def test_sentences_stream_one_by_one_from_a_beam():
    translator = translator64()
    parts = list(translator.stream("The cat sat on the mat. Where is the station?", BEAM))
    assert parts == translator.translate(["The cat sat on the mat.", "Where is the station?"], BEAM)


def bytes_of(text: str) -> list[str]:
    return [f"<0x{byte:02X}>" for byte in text.encode()]


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        (["▁", "o", *bytes_of("😀"), "o", *bytes_of("👨‍👩"), "</s>"], "o😀o👨‍👩"),
        (["o", *bytes_of("😀")[:3], "</s>"], "o\ufffd\ufffd\ufffd"),
        ([*bytes_of("é")[:1], "o", "</s>"], "\ufffdo"),
        (["o", "▁", *bytes_of("\u3000"), "</s>"], "o"),
        (["o", "▁", *bytes_of("\u3000"), "o", "</s>"], "o \u3000o"),
        (["o", "▁", "▁", *bytes_of("\u2029\n"), *bytes_of("é"), "</s>"], "o  \u2029 é"),
        ([*bytes_of("\u3000\n"), "o", "</s>"], "o"),
        ([*bytes_of("\ufffd"), *bytes_of("\ufffd"), "</s>"], "\ufffd\ufffd"),
        (["</s>"], ""),
    ],
    ids=str,
)
def test_characters_spelled_by_bytes_stream_whole(monkeypatch, pieces, expected):
    script(monkeypatch, [tiny_tokenizer().ids(pieces)])
    translator = translator64()
    parts = list(translator.stream("Yes.", GREEDY))
    assert translator.translate(["Yes."], GREEDY) == [expected]
    assert "".join(parts) == expected
    assert all(parts)
    assert "\ufffd" not in "".join(parts[:-1]) or "\ufffd" in expected


@pytest.mark.parametrize("seed", range(3))
def test_whatever_the_tokens_the_stream_is_the_translation(monkeypatch, seed):
    """Pieces of characters, of white space and of neither, in any order."""
    generator = random.Random(seed)
    tokenizer, translator = tiny_tokenizer(), translator64()
    whole = [bytes_of(text) for text in ("😀", "\u3000", "\n", "\r", "\u0085", "é", "\ufffd")]
    choices = [["▁"], ["o"], ["猫"], *whole, *[[piece] for pieces in whole for piece in pieces]]
    for _ in range(60):
        pieces = [piece for part in generator.choices(choices, k=generator.randint(0, 12)) for piece in part]
        script(monkeypatch, [tokenizer.ids([*pieces, "</s>"])])
        assert "".join(translator.stream("Yes.", GREEDY)) == translator.translate(["Yes."], GREEDY)[0], pieces


def script(monkeypatch: pytest.MonkeyPatch, outputs: list[list[int]]) -> list[int]:
    """Makes every model say `outputs`, one to a sentence of a batch; returns a list that grows with every step."""
    steps: list[int] = []

    class Scripted:
        beams = 1

        def __init__(self, model: object, cache: object) -> None:
            steps.clear()
            self.left = [list(output) for output in outputs]
            self.batch_size = len(outputs)

        def step(self, tokens: Tensor) -> MatrixScores:
            steps.append(1)
            logits = torch.zeros(len(self.left), tiny_tokenizer().vocab_size)
            for row, output in enumerate(self.left):
                logits[row, output.pop(0)] = 9.0
            return MatrixScores(logits)

        def compact(self, keep: Tensor) -> None:
            self.left = [self.left[index] for index in keep.tolist()]

    monkeypatch.setattr("translator.engine.eager.EagerDecoding", Scripted)
    return steps


# -- mistakes ---------------------------------------------------------------------------------------------------------


def test_a_beam_larger_than_the_vocabulary_is_refused():
    translator = translator64()
    most = translator.tokenizer.vocab_size
    for call in (
        lambda: translator.translate(["Yes."], DecodeConfig(beam_size=most + 1)),
        lambda: list(translator.stream("Yes.", DecodeConfig(beam_size=most + 1))),
    ):
        with pytest.raises(UserError, match=f"beam_size {most + 1} .* {most} tokens"):
            call()
    assert len(translator.candidates(["Yes."], DecodeConfig(beam_size=most, n_best=most, max_length_extra=1))[0]) > 1


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda t: t.translate("How are you?"), "lines"),
        (lambda t: t.candidates("How are you?"), "lines"),
        (lambda t: t.translate(b"How are you?"), "lines"),
        (lambda t: t.translate(["Yes.", 7]), "lines.* number 2 is a int"),
        (lambda t: t.translate(["Yes."], prefixes="猫"), "prefixes"),
        (lambda t: t.score("ab", ["a", "b"]), "sources"),
        (lambda t: t.score(["a", "b"], "ab"), "targets"),
        (lambda t: list(t.stream(["Yes."])), "text"),
    ],
    ids=range(8),
)
def test_one_string_is_no_list_of_lines(call, name):
    with pytest.raises(TypeError, match=name):
        call(tiny_translator())


def test_any_iterable_of_lines_will_do():
    translator = tiny_translator()
    assert translator.translate(line for line in ("Yes.", "No.")) == translator.translate(["Yes.", "No."])


def test_a_cache_kind_that_is_none_is_refused_with_those_that_are():
    with pytest.raises(UserError, match="unknown cache kind 'elastic'; known: dynamic, indirect, "):
        tiny_translator(cache="elastic")


def test_prefixes_that_do_not_fit_are_refused():
    translator = translator64()
    for prefixes in ([], ["猫"], ["猫"] * 3):
        with pytest.raises(UserError, match=f"2 lines need as many target prefixes, not {len(prefixes)}"):
            translator.translate(["Yes.", "No."], prefixes=prefixes)
    limit = translator.config.model.max_positions
    with pytest.raises(UserError, match=f"line 12: the target prefix has .* tokens.* {limit}"):
        translator.translate(["Yes.", "No."], prefixes=["猫", "猫" * limit], first_line=11)
    longest = "猫" * (limit - 2)
    (text,) = translator.translate(["Yes."], GREEDY, prefixes=[longest])
    assert text.startswith(longest)


def test_pairs_that_cannot_be_scored_are_refused():
    translator = translator64()
    limit = translator.config.model.max_positions
    with pytest.raises(UserError, match="2 sources and 1 targets"):
        translator.score(["Yes.", "No."], ["是"])
    with pytest.raises(UserError, match=f"line 2: the source has .* {limit}"):
        translator.score(["Yes.", "word " * 500], ["猫", "猫"])
    with pytest.raises(UserError, match=f"line 2: the target has .* {limit}"):
        translator.score(["Yes.", "No."], ["猫", "猫" * limit])
    with pytest.raises(UserError, match="line 1: there are no tokens"):
        translator.score(["Yes."], [[]])
    with pytest.raises(UserError, match="'nonesuch' is not in the vocabulary"):
        translator.score(["Yes."], [["nonesuch", "</s>"]])


@pytest.mark.parametrize("name", ["cuda:99", "tpu", "", "meta", "hpu", "cpu:-1"])
def test_a_device_that_is_not_there_is_refused_with_those_that_are(name):
    with pytest.raises(UserError, match=r"is not there; this machine has cpu") as caught:
        usable_device(name)
    assert repr(name) in str(caught.value) and "\n" not in str(caught.value)
    assert usable_device("cpu") == torch.device("cpu")


def test_translating_leaves_no_trace_between_calls():
    translator = translator64()
    first = translator.candidates(RAGGED[:5], BEAM)
    translator.candidates(RAGGED[5:], GREEDY)
    assert_same(translator.candidates(RAGGED[:5], BEAM), first)
    assert not translator.engine.model.training
    assert all(math.isfinite(candidate.log_prob) for candidates in first for candidate in candidates)


def test_settings_may_be_given_by_name_and_are_checked():
    translator = translator64()
    lines = ["One.", "Two."]
    assert translator.translate(lines, beam_size=1) == translator.translate(lines, GREEDY)
    with pytest.raises(UserError, match=r"beam_sise.*beam_size"):
        translator.translate(lines, beam_sise=3)
    with pytest.raises(UserError, match="n_best 3 is more than beam_size 2"):
        list(translator.stream("One.", beam_size=2, n_best=3))


# -- threads ----------------------------------------------------------------------------------------------------------


def test_one_translator_serves_several_threads_at_once():
    """Each thread gets what it would get alone, whatever the others ask for."""
    translator = translator64()
    asked = [(RAGGED[:6], GREEDY), (ENGLISH[:5], BEAM), (RAGGED[4:9], SAMPLING), (ENGLISH[4:8], SHORT)] * 3
    expected = [translator.candidates(lines, config) for lines, config in asked]
    start = threading.Barrier(4)

    def ask(lines: list[str], config: DecodeConfig) -> list[list[Candidate]]:
        start.wait(timeout=60)
        return translator.candidates(lines, config)

    with ThreadPoolExecutor(max_workers=4) as pool:
        found = list(pool.map(ask, *zip(*asked, strict=True)))
    for mine, theirs in zip(found, expected, strict=True):
        assert_same(mine, theirs)
