"""Folders of documents as a corpus: text, Markdown, HTML, Word and PDF files, as programs and browsers write them."""

from __future__ import annotations

import gzip
import io
import json
import pathlib
import shutil
import zipfile

import pytest

from routerl_jax.core.types import Passage
from routerl_jax.knowledge.bm25 import Bm25Config, build_bm25
from routerl_jax.knowledge.build import BuildConfig, build_kb
from routerl_jax.knowledge.builds import write_card
from routerl_jax.knowledge.corpus import Split, corpus_sha256, read_corpus
from routerl_jax.knowledge.load import load_kb
from routerl_jax.knowledge.update import read_added
from tests.knowledge.helpers import HashEncoder
from tests.knowledge.late import write_pdf

_W = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
# A German Word: ids of styles are translated, their names are not
_STYLES = f"""<w:styles xmlns:w="{_W}">
<w:style w:type="paragraph" w:styleId="berschrift1"><w:name w:val="heading 1"/></w:style>
<w:style w:type="paragraph" w:styleId="berschrift2"><w:name w:val="heading 2"/></w:style></w:styles>"""


def run(text: str) -> str:
    return f'<w:r><w:t xml:space="preserve">{text}</w:t></w:r>'


def paragraph(inner: str, style: str = "") -> str:
    return f'<w:p><w:pPr><w:pStyle w:val="{style}"/></w:pPr>{inner}</w:p>' if style else f"<w:p>{inner}</w:p>"


def word(path: pathlib.Path, body: str) -> pathlib.Path:
    """A .docx by hand."""
    kinds = "application/vnd.openxmlformats-officedocument.wordprocessingml"
    relations = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
    package = "http://schemas.openxmlformats.org/package/2006"
    parts = {
        "[Content_Types].xml": f'<Types xmlns="{package}/content-types"><Default Extension="rels" ContentType="application/'
        f'vnd.openxmlformats-package.relationships+xml"/><Override PartName="/word/document.xml" ContentType="{kinds}.document'
        f'.main+xml"/><Override PartName="/word/styles.xml" ContentType="{kinds}.styles+xml"/></Types>',
        "_rels/.rels": f'<Relationships xmlns="{package}/relationships"><Relationship Id="r1" '
        f'Type="{relations}/officeDocument" Target="word/document.xml"/></Relationships>',
        "word/_rels/document.xml.rels": f'<Relationships xmlns="{package}/relationships"><Relationship Id="r1" '
        f'Type="{relations}/styles" Target="styles.xml"/></Relationships>',
        "word/document.xml": f'<w:document xmlns:w="{_W}"><w:body>{body}</w:body></w:document>',
        "word/styles.xml": _STYLES,
    }
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name, part in parts.items():
            archive.writestr(name, part)
    path.write_bytes(content.getvalue())
    return path


def shown(passages: list[Passage]) -> list[tuple[str, str, str]]:
    return [(passage.id, passage.title, passage.text) for passage in passages]


def write(path: pathlib.Path, content: str | bytes) -> pathlib.Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"\xef\xbb\xbf" + "Größe".encode(), "Größe"),
        ("Größe der Säle".encode("utf-16"), "Größe der Säle"),
        ("\ufeffGröße".encode("utf-16-be"), "Größe"),
        ("Plain words in UTF-16 without a mark".encode("utf-16-le"), "Plain words in UTF-16 without a mark"),
        ("\ufeffGröße".encode("utf-32-le"), "Größe"),
        ("Größe der Säle: 5 £".encode("latin-1"), "Größe der Säle: 5 £"),
        ("the “quoted” word".encode("cp1252"), "the “quoted” word"),
        ("Добрый день, это длинная проверка".encode("cp1251"), "Добрый день, это длинная проверка"),
        (b"one\r\ntwo\x00\r\n", None),
    ],
)
def test_encodings_of_text_files(tmp_path: pathlib.Path, content: bytes, expected: str | None) -> None:
    path = write(tmp_path / "hall.txt", content)
    if expected is None:
        with pytest.raises(ValueError, match=r"hall\.txt: .*binary"):
            list(read_corpus(path))
    else:
        assert shown(list(read_corpus(path))) == [("hall.txt#0", "hall", expected)]


def test_headings_of_markdown_are_titles(tmp_path: pathlib.Path) -> None:
    text = """Before all headings.

Leave
=====

Thirty *days* a [year](https://a.example).

```sh
# this is a comment, not a heading
```

## Forms

### Form P-17

| who | days |
|-----|------|
| all | 30   |

## Empty
"""
    path = write(tmp_path / "rules.md", text.replace("\n", "\r\n"))
    assert shown(list(read_corpus(path))) == [
        ("rules.md#0", "rules", "Before all headings."),
        ("rules.md#1", "rules > Leave", "Thirty days a year.\n# this is a comment, not a heading"),
        ("rules.md#2", "rules > Leave > Forms > Form P-17", "who | days\nall | 30"),
        ("rules.md#3", "rules > Leave > Empty", "Empty"),
    ]
    write(path, "---\ntitle: 'The rules'\ntags: [a]\n---\nText.")
    assert shown(list(read_corpus(path))) == [("rules.md#0", "The rules", "Text.")]


@pytest.mark.parametrize(
    ("text", "title", "body"),
    [
        ("---\ntitle: A\n...\nBody.", "A", "Body."),
        ("---\n# of the wiki\n\ndate: 2020-01-01\ntitle: >\n  A long\n  one\n---\nBody.", "x", "Body."),
        ('+++\ntitle = "A: B"\n+++\nBody.', "A: B", "Body."),
        ("---\n\nBetween two rules.\n\n---\nBody.", "x", "Between two rules.\nBody."),
        ("---\nTo whom: it concerns\n\n- - -\nBody.", "x", "To whom: it concerns\nBody."),
        ("".join(f"{'  ' * i}- {i}\n" for i in range(15)), "x", "\n".join(map(str, range(15)))),
    ],
)
def test_front_matter_and_lists_of_markdown(tmp_path: pathlib.Path, text: str, title: str, body: str) -> None:
    path = write(tmp_path / "x.MD", text.replace("\n", "\r"))
    assert shown(list(read_corpus(path))) == [("x.MD#0", title, body)]


PAGE = """<!DOCTYPE html>
<!-- saved from url=(0027)https://intranet.example/leave -->
<html><head><meta charset="windows-1252"><title>Leave – Intranet</title><script>var advert = 1</script></head><body>
<nav>Home | About</nav><header>Banner of the site</header><div style="display: none">unseen</div>
<div><h1>Leave</h1><p>Thirty<br>days for <b>all</b>employees.</p>
<table><tr><th>grade</th><th>days</th></tr><tr><td>A</td><td>31</td></tr></table>
<article><header>By the board</header><h2>Parents</h2><p>Twelve months.</p></article></div>
<noscript>Switch scripts on</noscript><footer>© the site</footer></body></html>"""
PAGE_TEXT = [
    ("Leave – Intranet > Leave", "Thirty\ndays for allemployees.\ngrade | days\nA | 31\nBy the board"),
    ("Leave – Intranet > Leave > Parents", "Twelve months."),
]


def test_a_page_that_a_browser_saved(tmp_path: pathlib.Path) -> None:
    """Its scripts, menus and hidden parts are no text, and the folder beside it is no document."""
    write(tmp_path / "Leave.html", PAGE.encode("cp1252"))
    write(tmp_path / "Leave_files" / "frame.html", "<p>An advertisement</p>")
    write(tmp_path / "Leave_files" / "style.css", "p {}")
    left_out: dict[str, str] = {}
    found = list(read_corpus(tmp_path, left_out=left_out))
    assert [(passage.title, passage.text) for passage in found] == PAGE_TEXT
    assert list(left_out) == ["Leave_files/"]
    only_main = "<body><div>Cookies?</div><main><p>The text</p></main><div>More</div>"
    assert [p.text for p in read_corpus(write(tmp_path / "m.htm", only_main))] == ["The text"]
    layout = "<table><tr><td><h2>Left</h2>one</td><td><h2>Right</h2><p>two</p></td></tr></table>"
    assert [(p.title, p.text) for p in read_corpus(write(tmp_path / "l.html", layout))] == [
        ("l > Left", "one"),
        ("l > Right", "two"),
    ]


def test_a_page_in_one_file(tmp_path: pathlib.Path) -> None:
    quoted = PAGE.encode("cp1252").replace(b"=", b"=3D").replace("–".encode("cp1252"), b"=96").replace(b"\xa9", b"=A9")
    head = (
        b'MIME-Version: 1.0\r\nContent-Type: multipart/related; type="text/html"; boundary="xx"\r\n\r\n--xx\r\n'
        b"Content-Type: text/html; charset=windows-1252\r\nContent-Transfer-Encoding: quoted-printable\r\n\r\n"
    )
    tail = b"\r\n--xx\r\nContent-Type: text/css\r\n\r\np {}\r\n--xx--\r\n"
    path = write(tmp_path / "Leave.mhtml", head + quoted.replace(b"\n", b"\r\n") + tail)
    assert [(passage.title, passage.text) for passage in read_corpus(path)] == PAGE_TEXT


def test_pages_are_read_to_their_end(tmp_path: pathlib.Path) -> None:
    """However deep their elements are; a formula is a part of its line."""
    deep = "<div>" * 300 + "deep" + "</div>" * 300 + "<p>so <math><mi>x</mi><mo>=</mo><mn>1</mn></math> holds</p>"
    assert [p.text for p in read_corpus(write(tmp_path / "a.html", deep))] == ["deep\nso x=1 holds"]
    for encoding in ("utf-8", "utf-16"):
        page = '<meta charset="utf-16"><p>Größe ' + "x" * 20
        for end in ("", "x"):  # two bytes to a letter, or not
            path = write(tmp_path / "a.html", (page + end).encode(encoding))
            assert [p.text for p in read_corpus(path)] == ["Größe " + "x" * 20 + end]
    title = '<h2>History<span class="mw-editsection">[edit]</span></h2><p>of it'
    assert [p.title for p in read_corpus(write(tmp_path / "a.html", title))] == ["a > History"]
    write(tmp_path / "a.html", "<div>" * 5000 + "deep" + "</div>" * 5000)
    with pytest.raises(ValueError, match=r"a\.html: .* inside each other"):
        list(read_corpus(tmp_path / "a.html"))


def test_links_in_a_folder(tmp_path: pathlib.Path) -> None:
    """A link to a file is a file. Others are named, and none leads round in circles."""
    write(tmp_path / "docs" / "deep" / "a.txt", "Text.")
    write(tmp_path / "other" / "b.txt", "Text.")
    for name, target in {"to.txt": "other/b.txt", "loop": "docs", "far": "other", "gone.txt": "nowhere"}.items():
        (tmp_path / "docs" / name).symlink_to(tmp_path / target)
    left_out: dict[str, str] = {}
    passages = read_corpus(tmp_path / "docs", left_out=left_out)
    assert [passage.id for passage in passages] == ["deep/a.txt#0", "to.txt#0"]
    assert left_out.keys() == {"loop", "far", "gone.txt"}
    shutil.rmtree(tmp_path / "docs" / "deep")
    (tmp_path / "docs" / "to.txt").unlink()
    with pytest.raises(ValueError, match=r"far: a link to a directory"):
        read_corpus(tmp_path / "docs")


def test_a_text_without_any_space_is_split_too(tmp_path: pathlib.Path) -> None:
    path = write(tmp_path / "encoded.txt", "QUJD" * 50_000)
    passages = [passage.text for passage in read_corpus(path)]
    assert "".join(passages) == "QUJD" * 50_000
    assert max(map(len, passages)) <= 106_000


def test_word_files(tmp_path: pathlib.Path) -> None:
    """Headings by the style's name, tracked insertions but not deletions, content controls, links, tables."""
    pytest.importorskip("mammoth")
    control = f"<w:sdt><w:sdtContent>{paragraph(run('In a control.'))}</w:sdtContent></w:sdt>"
    tracked = f"<w:ins>{run('thirty')}</w:ins><w:del><w:r><w:delText>twenty</w:delText></w:r></w:del>"
    cells = "".join(f"<w:tc>{paragraph(run(text))}</w:tc>" for text in ("grade", "31"))
    body = (
        paragraph(run("Leave"), "berschrift1")
        + paragraph(run("All have ") + tracked + run(" days."))
        + control
        + paragraph(run("Parents"), "berschrift2")
        + f"<w:tbl><w:tr>{cells}</w:tr></w:tbl>"
    )
    assert shown(list(read_corpus(word(tmp_path / "rules.docx", body)))) == [
        ("rules.docx#0", "rules > Leave", "All have thirty days.\nIn a control."),
        ("rules.docx#1", "rules > Leave > Parents", "grade | 31"),
    ]


def test_pdfs_by_pages(tmp_path: pathlib.Path) -> None:
    path = write_pdf(tmp_path / "plan.pdf", ["The first page", "", "The third page"])
    left_out: dict[str, str] = {}
    assert shown(list(read_corpus(path, left_out=left_out))) == [
        ("plan.pdf#1#0", "plan, page 1", "The first page"),
        ("plan.pdf#3#0", "plan, page 3", "The third page"),
    ]
    assert list(left_out) == ["plan.pdf#2"]
    scanned = write_pdf(tmp_path / "scan.pdf", ["", ""])
    with pytest.raises(ValueError, match=r"scan\.pdf: 2 pages without text.*'ocr'"):
        list(read_corpus(scanned))


def test_no_word_is_lost_by_splitting(tmp_path: pathlib.Path) -> None:
    words = [f"w{i}" for i in range(205)]
    path = write(tmp_path / "long.txt", " ".join(words))
    texts = [passage.text for passage in read_corpus(path)]
    assert [len(text.split()) for text in texts] == [100, 105]  # five words are too few for a passage of their own
    assert " ".join(texts).split() == words
    pieces = list(read_corpus(path, split=Split(words=50, least=5)))
    assert [(piece.id, len(piece.text.split())) for piece in pieces] == [
        *((f"long.txt#{i}", 50) for i in range(4)),
        ("long.txt#4", 5),
    ]


def mixed(folder: pathlib.Path) -> pathlib.Path:
    write(folder / "rows.jsonl", json.dumps({"id": "1", "title": "T", "text": "A row."}))
    write(folder / "deep" / "er" / "a.txt", "Deep text.")
    write(folder / ".git" / "config.txt", "hidden")
    write(folder / "~$rules.docx", "what Word has open")
    write(folder / "picture.png", b"\x89PNG")
    write(folder / "blank.md", "\n \n")
    write(folder / "old.docx", b"\xd0\xcf\x11\xe0" + bytes(600))
    write(folder / "torn.docx", b"PK\x03\x04 torn")
    write(folder / "torn.pdf", b"%PDF-1.4 and nothing that follows")
    write_pdf(folder / "locked.pdf", ["x"], locked=True)
    return folder


def test_what_cannot_be_read_is_named(tmp_path: pathlib.Path) -> None:
    """In a folder it is left out, with a reason, in the report and in the knowledge base; alone it is an error."""
    pytest.importorskip("mammoth")
    folder = mixed(tmp_path / "docs")
    reasons = {
        "blank.md": "holds no text",
        "locked.pdf": "password",
        "old.docx": "password",
        "picture.png": "unknown extension",
        "torn.docx": "not a Word document",
        "torn.pdf": "not a PDF",
    }
    for kind in (BuildConfig, Bm25Config):
        place = tmp_path / kind.__name__
        if kind is BuildConfig:
            config = BuildConfig(corpus=str(folder), name="kb")
            report = build_kb(config, place, progress=False, encoder=HashEncoder())
            again = build_kb(config, place, progress=False, encoder=HashEncoder())
        else:
            pytest.importorskip("bm25s")
            report = again = build_bm25(Bm25Config(corpus=str(folder)), place, progress=False)
        assert {name: why for name, why in report.left_out.items() if reasons[name] not in why} == {}
        assert report.left_out.keys() == reasons.keys()
        assert again.left_out == report.left_out
        assert "blank.md: holds no text" in str(report)
        write_card(place)
        assert "| left out of the corpus | 6 files or pages (left_out.json) |" in (place / "README.md").read_text()
    for name in reasons.keys() - {"picture.png"}:
        with pytest.raises(ValueError, match=name):
            list(read_corpus(folder / name))
    for name in ("rows.jsonl", "deep/er/a.txt"):
        (folder / name).unlink()
    with pytest.raises(ValueError, match=r"docs holds no passages.*picture\.png: unknown extension"):
        list(read_corpus(folder))


def test_ids_last_when_other_files_come(tmp_path: pathlib.Path) -> None:
    folder = mixed(tmp_path / "docs")
    before = {passage.id: passage for passage in read_corpus(folder)}
    assert list(before) == ["deep/er/a.txt#0", "1"]
    digest = corpus_sha256(folder)
    write(folder / "another.txt", "More.")
    after = {passage.id: passage for passage in read_corpus(folder)}
    assert after == {**before, "another.txt#0": after["another.txt#0"]}
    assert corpus_sha256(folder) != digest


def test_extensions_in_capitals(tmp_path: pathlib.Path) -> None:
    row = '{"id": "1", "text": "A row."}'
    for name, content in {
        "A.JSONL": row,
        "B.JSON": f"[{row}]",
        "C.CSV": "id,text\n1,A row.",
        "D.JSONL.GZ": gzip.compress(row.encode()),
        "E.TXT.GZ": gzip.compress(b"A row."),
        "F.Html": "<p>A row.",
    }.items():
        path = write(tmp_path / name, content)
        assert [passage.text for passage in read_corpus(path)] == ["A row."]


def test_files_of_data_stay_strict_beside_documents(tmp_path: pathlib.Path) -> None:
    folder = mixed(tmp_path / "docs")
    write(folder / "rows.jsonl", '{"id": "1", "text": "A row."}\n{"id": "2"}')
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 2: key 'text' is missing"):
        list(read_corpus(folder))


def test_documents_can_be_added_to_a_knowledge_base(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("bm25s")
    folder = tmp_path / "docs"
    write(folder / "a.txt", "The first text.")
    build_bm25(Bm25Config(corpus=str(folder)), tmp_path / "kb", progress=False)
    assert [passage.text for passage in load_kb(tmp_path / "kb").search(["first"], k=1)[0]] == ["The first text."]
    write(tmp_path / "new" / "b.md", "# Two\n\nThe second text.")
    assert shown(read_added(tmp_path / "kb", tmp_path / "new")) == [("b.md#0", "b > Two", "The second text.")]
