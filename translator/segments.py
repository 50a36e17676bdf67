"""Long text to sentences and back."""

from sentencex import segment

# Written without spaces between sentences.
_UNSPACED = {"zh", "ja", "th", "lo", "km", "my", "yue"}


def split_sentences(text: str, language: str) -> list[str]:
    """The sentences of `text`, stripped, none blank; rules of `language` (an ISO code such as `en` or `zh-CN`)."""
    sentences = (sentence.strip() for sentence in segment(_primary(language), text))
    return [sentence for sentence in sentences if sentence]


def join_sentences(sentences: list[str], language: str) -> str:
    """Sentences as running text of `language`."""
    return ("" if _primary(language) in _UNSPACED else " ").join(sentence for sentence in sentences if sentence)


def _primary(language: str) -> str:
    return language.replace("_", "-").split("-")[0].lower()
