"""The packages: which files they need, how their text is read, and what it is."""

from dataclasses import dataclass

from corpora.extract import Reader, catalogues, help_pages, same_pages


@dataclass(frozen=True)
class Source:
    """One table of pairs: its name, the Debian packages it is made from, its reader and the text's licence."""

    name: str
    packages: tuple[str, ...]
    read: Reader
    licence: str


SOURCES = (
    Source(
        "cataclysm",
        ("cataclysm-dda-data",),
        catalogues("usr/share/locale/zh_CN/LC_MESSAGES/cataclysm-dda.mo"),
        "CC BY-SA 3.0 (Cataclysm: Dark Days Ahead contributors)",
    ),
    Source(
        "libreoffice-help",
        ("libreoffice-help-en-us", "libreoffice-help-zh-cn"),
        help_pages("usr/share/libreoffice/help/en-US/text", "usr/share/libreoffice/help/zh-CN/text"),
        "MPL-2.0 (The Document Foundation)",
    ),
    Source(
        "libreoffice",
        ("libreoffice-l10n-zh-cn",),
        catalogues("usr/lib/libreoffice/program/resource/zh_CN/LC_MESSAGES/*.mo"),
        "MPL-2.0 (The Document Foundation)",
    ),
    Source(
        "blender",
        ("blender-data",),
        catalogues("usr/share/locale/zh_CN/LC_MESSAGES/*.mo", "usr/share/blender/**/zh_*/**/*.mo"),
        "GPL-2.0-or-later (Blender Foundation and translators)",
    ),
    Source("gimp", ("gimp-data",), catalogues("usr/share/locale/zh_CN/LC_MESSAGES/*.mo"), "GPL-3.0-or-later"),
    Source("gnucash", ("gnucash-common",), catalogues("usr/share/locale/zh_CN/LC_MESSAGES/*.mo"), "GPL-2.0-or-later"),
    Source(
        "wesnoth",
        ("wesnoth-1.16-data",),
        catalogues("usr/share/games/wesnoth/1.16/locale/zh_CN/LC_MESSAGES/*.mo"),
        "GPL-2.0-or-later (Battle for Wesnoth contributors)",
    ),
    Source(
        "debian-reference",
        ("debian-reference-en", "debian-reference-zh-cn"),
        same_pages("usr/share/debian-reference/*.en.html", "zh-cn"),
        "GPL-2.0-or-later",
    ),
)
