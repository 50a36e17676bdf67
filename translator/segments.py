"""Long text to sentences and back."""

from sentencex import segment

from translator.languages import primary_language

# Written without spaces between sentences.
_UNSPACED = {"zh", "ja", "th", "lo", "km", "my", "yue"}


def split_sentences(text: str, language: str) -> list[str]:
    """The sentences of `text`, stripped, none blank; rules of `language` (an ISO code such as `en` or `zh-CN`)."""
    sentences = (sentence.strip() for sentence in segment(primary_language(language), text))
    return [sentence for sentence in sentences if sentence]


def join_sentences(sentences: list[str], language: str) -> str:
    """Sentences as running text of `language`."""
    return sentence_gap(language).join(sentence for sentence in sentences if sentence)


def sentence_gap(language: str) -> str:
    """What stands between two sentences of running text."""
    return "" if primary_language(language) in _UNSPACED else " "
