"""BLEU and chrF: sacreBLEU's own figures, with the tokenizer the language needs."""

import pytest
from sacrebleu.metrics import BLEU, CHRF

from tests.helpers import CHINESE, ENGLISH
from translator.errors import UserError
from translator.metrics import bleu_tokenizer, corpus_scores


@pytest.mark.parametrize(
    ("language", "lines", "tokenizer"),
    [("zh", CHINESE, "zh"), ("zh-CN", CHINESE, "zh"), ("en", ENGLISH, "13a"), ("de", ENGLISH, "13a")],
)
def test_identical_lines_score_100_with_the_languages_tokenizer(language, lines, tokenizer):
    scores = corpus_scores(lines, [[line] for line in lines], language)
    assert scores["bleu"].value == pytest.approx(100) and scores["chrf"].value == pytest.approx(100)
    assert f"|tok:{tokenizer}|" in scores["bleu"].signature and "nrefs:1" in scores["bleu"].signature
    assert "nrefs:1" in scores["chrf"].signature and "version:" in scores["chrf"].signature


def test_a_chinese_line_is_more_than_one_word():
    hypothesis, reference = ["猫坐在垫子上看着那只狗。"], [["猫坐在垫子上看着一只狗。"]]
    assert corpus_scores(hypothesis, reference, "zh")["bleu"].value > 50
    assert corpus_scores(hypothesis, reference, "en")["bleu"].value < 5, "as one word, it would not match at all"


@pytest.mark.parametrize(
    ("language", "tokenizer"),
    [
        ("zh", "zh"),
        ("ZH_Hans", "zh"),
        ("ja", "char"),
        ("th", "char"),
        ("en", "13a"),
        ("pt-BR", "13a"),
        ("zho_Hans", "zh"),
    ],
)
def test_the_tokenizer_follows_the_language(language, tokenizer):
    assert bleu_tokenizer(language) == tokenizer


def test_as_many_references_a_sentence_as_there_are():
    """One, three and two: the figures of sacreBLEU, which takes None for a reference that isn't there."""
    hypotheses = ["我们去散步", "请给我一杯茶", "车站在那边"]
    references = [["我们走吧"], ["给我茶", "请给我一杯茶", "来杯茶"], ["车站在哪里", "车站就在那边"]]
    streams = [["我们走吧", "给我茶", "车站在哪里"], [None, "请给我一杯茶", "车站就在那边"], [None, "来杯茶", None]]
    scores = corpus_scores(hypotheses, references, "zh")
    assert scores["bleu"].value == pytest.approx(BLEU(tokenize="zh").corpus_score(hypotheses, streams).score)
    assert scores["chrf"].value == pytest.approx(CHRF().corpus_score(hypotheses, streams).score)
    first_only = corpus_scores(hypotheses, [versions[:1] for versions in references], "zh")
    assert scores["bleu"].value > first_only["bleu"].value and scores["chrf"].value > first_only["chrf"].value
    assert "nrefs:var" in scores["bleu"].signature


def test_unequal_counts_and_nothing_to_score_are_refused():
    with pytest.raises(UserError, match="2 hypotheses and 1 references"):
        corpus_scores(["a", "b"], [["a"]], "en")
    with pytest.raises(UserError, match="nothing to score"):
        corpus_scores([], [], "en")
    with pytest.raises(UserError, match="sentence 2 has no reference"):
        corpus_scores(["a", "b"], [["a"], []], "en")


def test_empty_hypotheses_score_nothing():
    scores = corpus_scores(["", ""], [["a b c d"], ["e f g h"]], "en")
    assert scores["bleu"].value == 0 and scores["chrf"].value == 0


@pytest.mark.parametrize(
    ("hypotheses", "references", "name"),
    [
        (["It is here."], ["It is here."], "references of sentence 1 must be a list of texts, not one str"),
        ("a", [["a"]], "hypotheses must be a list"),
        (["a"], "a", "references must be a list"),
        (["a"], [[1]], "references of sentence 1 must be texts; number 1 is a int"),
    ],
)
def test_a_string_is_no_list_of_references(hypotheses, references, name):
    with pytest.raises(TypeError, match=name):
        corpus_scores(hypotheses, references, "en")
