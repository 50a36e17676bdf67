"""English and Chinese text out of an unpacked package: gettext catalogues, and pages that correspond."""

import gettext
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import lxml.html

Text = tuple[str, str]
"""English and Chinese."""

Reader = Callable[[Path], Iterator[Text]]
"""From the folder a package was unpacked into to its text, uncleaned."""

_CONTEXT = "\x04"
_BLOCKS = "h1", "h2", "h3", "h4", "p", "td", "th", "dt", "title"


def catalogues(*places: str) -> Reader:
    """Every entry of the `.mo` files that match one of `places`, patterns under the package's root."""

    def read(root: Path) -> Iterator[Text]:
        for path in sorted(path for place in places for path in root.glob(place)):
            with path.open("rb") as file:
                entries = gettext.GNUTranslations(file)._catalog  # type: ignore[attr-defined]
            for key, translation in entries.items():
                # A plural's key is a pair of text and number; Chinese has one form for all of them.
                english = key[0] if isinstance(key, tuple) else key
                if not isinstance(key, tuple) or key[1] == 0:
                    yield english.rpartition(_CONTEXT)[2], translation

    return read


def help_pages(english: str, chinese: str) -> Reader:
    """Paragraphs and headings of two trees of HTML that carry the same `id`."""

    def read(root: Path) -> Iterator[Text]:
        for path in sorted((root / english).rglob("*.html")):
            other = root / chinese / path.relative_to(root / english)
            if not other.exists():
                continue
            ours, theirs = _by_id(path), _by_id(other)
            yield from ((text, theirs[place]) for place, text in ours.items() if place in theirs)

    return read


def same_pages(english: str, chinese: str) -> Reader:
    """Blocks of pages (`*.en.html` beside `*.zh-cn.html`) of one structure, in order."""

    def read(root: Path) -> Iterator[Text]:
        for path in sorted(root.glob(english)):
            other = path.with_name(path.name.replace(".en.", f".{chinese}."))
            if not other.exists():
                continue
            ours, theirs = _sections(path), _sections(other)
            for place, blocks in ours.items():
                if len(blocks) == len(theirs.get(place, [])):
                    yield from zip(blocks, theirs[place], strict=True)

    return read


def _by_id(path: Path) -> dict[str, str]:
    page = lxml.html.parse(str(path), parser=lxml.html.HTMLParser(encoding="utf-8")).getroot()
    return {
        place: _text(element) for element in page.iter() if re.match(r"(par|hd)_", place := element.get("id") or "")
    }


def _sections(path: Path) -> dict[str, list[str]]:
    """The blocks of a page under the anchor of the section that they stand in."""
    page = lxml.html.parse(str(path), parser=lxml.html.HTMLParser(encoding="utf-8")).getroot()
    found: dict[str, list[str]] = {}
    section = ""
    for element in page.iter():
        if element.tag == "a" and (element.get("id") or element.get("name")):
            section = element.get("id") or element.get("name")
        elif element.tag in _BLOCKS and not any(child.tag in _BLOCKS for child in element.iterdescendants()):
            found.setdefault(section, []).append(_text(element))
    return found


def _text(element: "lxml.html.HtmlElement") -> str:
    return str(element.text_content())
