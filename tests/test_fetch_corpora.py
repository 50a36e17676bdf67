"""Parallel text out of packages: what is taken, what is left out, what is said where there is no apt."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import polib
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

from corpora import fetch as fetching  # noqa: E402
from corpora.clean import cleaned  # noqa: E402
from corpora.extract import catalogues, help_pages, same_pages  # noqa: E402
from corpora.packages import Source  # noqa: E402

from translator.errors import UserError  # noqa: E402


def catalogue(path: Path) -> None:
    path.parent.mkdir(parents=True)
    made = polib.POFile()
    made.metadata = {"Content-Type": "text/plain; charset=UTF-8", "Plural-Forms": "nplurals=1; plural=0;"}
    made.append(polib.POEntry(msgid="_Open", msgstr="打开(_O)", msgctxt="menu"))
    made.append(polib.POEntry(msgid="%d file", msgid_plural="%d files", msgstr_plural={0: "%d 個檔案"}))
    made.append(polib.POEntry(msgid="First line.\nSecond line.", msgstr="第一行。\n第二行。"))
    made.append(polib.POEntry(msgid="One\nTwo", msgstr="一二"))
    made.append(polib.POEntry(msgid="Copy", msgstr="Copy"))
    made.append(polib.POEntry(msgid="%s is gone", msgstr="不见了"))
    made.append(polib.POEntry(msgid="Page 3", msgstr="第 4 页"))
    made.save_as_mofile(str(path))


def test_catalogues_give_usable_lines_in_simplified_characters(tmp_path: Path) -> None:
    catalogue(tmp_path / "locale" / "zh" / "a.mo")
    assert sorted(cleaned(catalogues("locale/zh/*.mo")(tmp_path))) == [
        ("%d file", "%d 个档案"),
        ("First line.", "第一行。"),
        ("Second line.", "第二行。"),
        ("_Open", "打开(_O)"),
    ]


def test_pages_are_matched_by_id_and_by_structure(tmp_path: Path) -> None:
    for code, texts in (("en", ("Save <em>the</em> file", "Only here")), ("zh", ("保存文件", ""))):
        (tmp_path / code).mkdir()
        second = f'<p id="par_2">{texts[1]}</p>' if texts[1] else ""
        (tmp_path / code / "a.html").write_text(f'<h1 id="hd_1">{texts[0]}</h1>{second}<p id="x">no</p>')
    assert list(help_pages("en", "zh")(tmp_path)) == [("Save the file", "保存文件")]
    page = '<html><body><a id="s1"></a><h2>{}</h2><p>{}</p><a id="s2"></a><p>{}</p>{}</body></html>'
    (tmp_path / "ch1.en.html").write_text(page.format("Title", "Text", "Other", "<p>More</p>"))
    (tmp_path / "ch1.zh-cn.html").write_text(page.format("标题", "正文", "其他", ""))
    assert list(same_pages("*.en.html", "zh-cn")(tmp_path)) == [("Title", "标题"), ("Text", "正文")]


def fake_apt(folder: Path, package: Path) -> str:
    """A PATH on which `apt-get download` copies one package, and finds no other."""
    tools = folder / "bin"
    tools.mkdir()
    name = package.name.split("_")[0]
    script = f'#!/bin/sh\n[ "$2" = {name} ] && cp {package} . && exit 0\necho "E: no $2" >&2\nexit 100\n'
    (tools / "apt-get").write_text(script)
    (tools / "apt-get").chmod(0o755)
    return f"{tools}{os.pathsep}{os.environ['PATH']}"


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="there is no dpkg-deb here")
def test_packages_become_tables_and_what_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = tmp_path / "content"
    catalogue(content / "locale" / "a.mo")
    (content / "DEBIAN").mkdir()
    control = "Package: some-data\nVersion: 1\nArchitecture: all\nMaintainer: nobody\nDescription: text\n"
    (content / "DEBIAN" / "control").write_text(control)
    package = tmp_path / "some-data_1_all.deb"
    subprocess.run(["dpkg-deb", "--build", content, package], check=True, capture_output=True)
    monkeypatch.setenv("PATH", fake_apt(tmp_path, package))
    good = Source("some", ("some-data",), catalogues("locale/*.mo"), "MIT")
    missing = Source("other", ("other-data",), catalogues("*.mo"), "MIT")
    with pytest.raises(UserError, match=r"other: apt-get download other-data: E: no other-data"):
        fetching.fetch(tmp_path / "out", [missing, good])
    lines = (tmp_path / "out" / "some.tsv").read_text(encoding="utf-8").splitlines()
    assert lines[0] == "en\tzh" and "_Open\t打开(_O)" in lines and len(lines) == 5
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["some.tsv"]
    monkeypatch.setenv("PATH", "")
    fetching.fetch(tmp_path / "out", [good])  # there already: nothing is needed


def test_without_apt_it_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "corpora" / "fetch.py"), str(tmp_path / "out")]
    environment = {**os.environ, "PATH": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("fetch_corpora: apt-get is not there") and done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()
