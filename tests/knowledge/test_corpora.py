"""Corpora as they are published: DPR's and R1-Searcher's tables, Wikipedia dumps, KILT's pages, directories of parts."""

import bz2
import csv
import gzip
import io
import itertools
import json
import lzma
import pathlib
import time
from typing import Any
from xml.sax.saxutils import escape

import pytest

from routerl_jax.core.rows import RowLocation
from routerl_jax.core.types import Passage
from routerl_jax.knowledge.corpora import wikipedia
from routerl_jax.knowledge.corpora.wikipedia import plain_text, read_dump
from routerl_jax.knowledge.corpus import DistinctIds, Split, corpus_sha256, read_corpus

PASSAGES = [
    Passage(id="1", title='The "A" Team', text='He said "no".\tNever.'),
    Passage(id="2", title="Zürich", text="東京 and\nZürich"),
]


def test_dpr_table(tmp_path: pathlib.Path) -> None:
    """Written by Python's csv module as psgs_w100.tsv is: quotes doubled, a tab and a newline inside fields."""
    text = io.StringIO()
    rows = csv.writer(text, delimiter="\t", lineterminator="\n")
    rows.writerows([("id", "text", "title"), *((p.id, p.text, p.title) for p in PASSAGES)])
    (tmp_path / "psgs_w100.tsv").write_text(text.getvalue())
    assert list(read_corpus(tmp_path / "psgs_w100.tsv")) == PASSAGES


def test_tables_without_a_header(tmp_path: pathlib.Path) -> None:
    lines = ['7\tThe "A" Team   He said "no', "8\tTitle: Paris Text: A city. Text: no", "9\ta text\tits title"]
    (tmp_path / "c.tsv").write_text("\ufeff" + "\n".join(lines))  # a byte order mark is no part of the first id
    found = list(read_corpus(tmp_path / "c.tsv"))
    assert [(p.id, p.title, p.text) for p in found] == [
        ("7", 'The "A" Team', 'He said "no'),
        ("8", "Paris", "A city. Text: no"),
        ("9", "its title", "a text"),
    ]


BAD_TABLES = {
    "too few columns": (b"id\ttext\ttitle\n1\ta\tb\n2\tc\n", "line 3: 2 columns, but line 1 names 3"),
    "too many columns": (b"1\ta\tb\tc\n", "line 1: 4 columns; expected id, text, title"),
    "no title": (b"1\ta   b\n2\tc d\n", "line 2: the second column holds neither"),
    "not UTF-8": (b"1\ta   b\n2\tc   \xe9\n", "line 2: not UTF-8"),
    "repeated": (b"1\ta   b\n1\tc   d\n", "line 2: key 'id': '1' was used in line 1"),
    "no text": (b"id\ttext\ttitle\n1\t \tb\n", "line 2: empty passage"),
}


@pytest.mark.parametrize("case", BAD_TABLES)
def test_bad_tables(tmp_path: pathlib.Path, case: str) -> None:
    content, message = BAD_TABLES[case]
    path = tmp_path / "c.tsv"
    path.write_bytes(content)
    with pytest.raises(ValueError) as caught:
        list(read_corpus(path))
    assert str(caught.value).startswith(f"{path}, {message}")


def test_compressed(tmp_path: pathlib.Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    data = b'{"id": "a", "title": "t", "text": "x"}\n' * 1
    wrappers = {
        "gz": gzip.compress,
        "bz2": bz2.compress,
        "xz": lzma.compress,
        "zst": zstandard.ZstdCompressor().compress,
    }
    for suffix, wrap in wrappers.items():
        path = tmp_path / f"c.jsonl.{suffix}"
        path.write_bytes(wrap(data))
        assert [p.id for p in read_corpus(path)] == ["a"]
        path.write_bytes(data)
        with pytest.raises(ValueError, match=rf"c\.jsonl\.{suffix}: damaged or not \w+ after line 0"):
            list(read_corpus(path))


def test_directories(tmp_path: pathlib.Path) -> None:
    """Parts in the order of their names, WikiExtractor's without extension; ids are distinct over all of them."""
    (tmp_path / "AA").mkdir()
    (tmp_path / ".hidden").write_text("x")
    row = {"id": "1", "revid": "2", "url": "u", "title": "A", "text": "of the first file"}
    (tmp_path / "AA" / "wiki_00").write_text(json.dumps(row))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(json.dumps({**row, "id": "3"}).encode()))
    (tmp_path / "c.tsv").write_text("4\tT   text")
    assert [p.id for p in read_corpus(tmp_path)] == ["1", "3", "4"]
    before = corpus_sha256(tmp_path)
    (tmp_path / "c.tsv").write_text("1\tT   text")
    assert corpus_sha256(tmp_path) != before
    with pytest.raises(ValueError, match=r"c\.tsv, line 1: key 'id': '1' was used in .*wiki_00, line 1 already"):
        list(read_corpus(tmp_path))
    (tmp_path / "d.parquet").touch()
    with pytest.raises(ValueError, match=r"d\.parquet: unknown extension"):
        read_corpus(tmp_path)


def test_ids_far_apart() -> None:
    """Beyond the recent ones only hashes are kept; a repetition is still found, and both rows are named."""
    for first, second, recent in itertools.product([0, 7, 95], [96, 99, 230], [4, 10]):
        ids = DistinctIds(recent)
        names = [f"id {i}" for i in range(240)]
        names[second] = names[first]
        with pytest.raises(ValueError, match=rf"c, line {second + 1}: .* 'id {first}' was used in line {first + 1} "):
            _read_all(ids, names)
    ids = DistinctIds(8)
    _read_all(ids, [str(number) for number in range(1000)])
    assert len(ids) == 1000


def _read_all(ids: DistinctIds, names: list[str]) -> None:
    for number, name in enumerate(names, 1):
        ids.add(name, RowLocation(pathlib.Path("c"), "line", number))
    ids.finish()


def test_splitting() -> None:
    text = " \n".join(str(i) for i in range(207))
    pieces = list(Split().pieces(text))
    assert [len(piece.split()) for piece in pieces] == [100, 100, 7]
    assert " ".join(pieces).split() == text.split()
    assert [len(p.split()) for p in Split().pieces(" ".join("x" * 206))] == [100, 100]
    assert list(Split().pieces("one two")) == ["one two"]
    with pytest.raises(ValueError, match="1 <= least <= words"):
        Split(words=5, least=6)


@pytest.mark.parametrize(
    "text",
    [
        "北京市，是中华人民共和国的首都。\n又称 iPhone 15 之城（笑）",
        "ความรักเป็นสิ่งที่ดี ประเทศไทย ",
        "東京は日本の首都です。",
    ],
)
def test_text_without_spaces_is_split_by_characters(text: str) -> None:
    """A passage of it is as long as others, in their characters; punctuation marks stay with what they end."""
    whole = text * 40
    pieces = list(Split(words=100, least=7).pieces(whole))
    assert all(60 < len(piece) < 250 for piece in pieces[:-1])
    assert len(pieces) >= 4
    assert "".join("".join(pieces).split()) == "".join(whole.split())
    assert not any(piece[0] in "，。）" for piece in pieces)
    kept = list(Split(words=100, least=7).whole_pieces(whole))
    assert "".join("".join(kept).split()) == "".join(whole.split())
    assert [len(piece.split()) for piece in Split().pieces("Tōkyō (東京都) is the capital " * 40)] == [100, 100]


def test_kilt_pages(shared_data, tmp_path: pathlib.Path) -> None:
    """A page of KILT's knowledge source, laid out as R1-Searcher's script reads it; and the real sample, split."""
    page = {
        "_id": "290",
        "wikipedia_id": "290",
        "wikipedia_title": "A",
        "text": ["A\n", "Section::::History.\n", "x " * 150],
    }
    (tmp_path / "k.jsonl").write_text(json.dumps(page))
    found = list(read_corpus(tmp_path / "k.jsonl"))
    assert [(p.id, p.title, len(p.text.split())) for p in found] == [("290#0", "A", 100), ("290#1", "A", 52)]
    assert found[0].text.startswith("A History. x x")
    path = shared_data("kilt_wiki_sample/corpus.jsonl.gz")
    whole = list(read_corpus(path))
    pieces = list(read_corpus(path, split=Split(words=100, least=1)))
    words = [word for p in whole for word in p.text.split()]
    assert [word for p in pieces for word in p.text.split()] == words
    assert max(len(p.text.split()) for p in pieces) == 100
    assert len({p.id for p in pieces}) == len(pieces)


MARKUP = """{{Short description|x}}{{Infobox city
| name = Paris | population = {{formatnum:2000000}} }}
'''Paris''' is the [[capital city|capital]] of [[France]].<ref name="a">A [[book]].</ref> It has [[Louvre]]s.
[[File:Eiffel.jpg|thumb|The [[Eiffel Tower]] at night]]
{| class="wikitable"
! A !! B
|-
| 1 || 2
|}
== History ==
It is ''old''. See [https://x.org this page].<!-- a note --> &nbsp;Ends&mdash;here.
== See also ==
* [[Lyon]]
[[Category:Cities]]"""
PLAIN = "Paris is the capital of France. It has Louvres.\nHistory\nIt is old. See this page. Ends—here."


def dump(pages: list[tuple[str, int, str, str]], path: pathlib.Path) -> pathlib.Path:
    """A dump as MediaWiki exports it: title, namespace, redirect, text."""
    parts = [
        f"<page><title>{title}</title><ns>{space}</ns><id>{number}</id>{redirect}<revision><id>{number}9</id>"
        f"<timestamp>2024-10-20T00:00:00Z</timestamp><model>wikitext</model><format>text/x-wiki</format>"
        f'<text bytes="1" xml:space="preserve">{escape(text)}</text></revision></page>'
        for number, (title, space, redirect, text) in enumerate(pages, 10)
    ]
    head = (
        '<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/" version="0.11" xml:lang="en"><siteinfo>'
        '<sitename>Wikipedia</sitename><dbname>enwiki</dbname><namespaces><namespace key="0" case="first-letter"/>'
        '<namespace key="10" case="first-letter">Template</namespace></namespaces></siteinfo>'
    )
    data = (head + "\n".join(parts) + "</mediawiki>").encode()
    path.write_bytes(bz2.compress(data) if path.suffix == ".bz2" else data)
    return path


def test_wikipedia_dump(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("mwxml", reason="mwxml is not installed (the extra corpora)")
    pages = [
        ("Paris", 0, "", MARKUP),
        ("Lutetia", 0, '<redirect title="Paris"/>', "#REDIRECT [[Paris]]"),
        ("Template:X", 10, "", "text"),
        ("List of cities", 0, "", "text"),
        ("Mercury", 0, "", "Mercury may be: {{disambiguation}}"),
        ("Only pictures", 0, "", "[[File:x.jpg]]"),
        ("Long", 0, "", "word " * 250),
    ]
    for name in ("enwiki-20241020-pages-articles.xml.bz2", "d.xml"):
        path = dump(pages, tmp_path / name)
        found = list(read_corpus(path))
        assert [(p.id, p.title, len(p.text.split())) for p in found] == [
            ("10#0", "Paris", len(PLAIN.split())),
            ("16#0", "Long", 100),
            ("16#1", "Long", 100),
            ("16#2", "Long", 50),
        ]
        assert found[0].text == " ".join(PLAIN.split())
    assert plain_text(MARKUP) == PLAIN
    assert list(read_dump(path, workers=2)) == list(read_dump(path, workers=1))


def test_a_dump_is_not_read_far_ahead(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever stops reading ends the processes, too; whoever reads slowly does not have the dump in memory."""
    pytest.importorskip("mwxml", reason="mwxml is not installed (the extra corpora)")
    path = dump([(f"Page {i}", 0, "", f"text {i}") for i in range(100)], tmp_path / "d.xml")
    read, sources = [], wikipedia._sources

    def counted(path: pathlib.Path):
        for item in sources(path):
            read.append(item)
            yield item

    monkeypatch.setattr(wikipedia, "_sources", counted)
    monkeypatch.setattr(wikipedia, "_CHUNK", 2)
    pages: Any = read_dump(path, workers=2)
    first = next(pages)[1]
    time.sleep(0.3)
    assert first.text == "text 0"
    assert 1 <= len(read) <= 17
    pages.close()
    assert len(read) <= 18
    assert [page.text for _, page in read_dump(path, workers=2)] == [f"text {i}" for i in range(100)]


@pytest.mark.parametrize(("cut", "where"), [(lambda data: data[:-60], "page 2"), (lambda _: b"hello", "page 0")])
def test_damaged_dump(tmp_path: pathlib.Path, cut, where: str) -> None:
    pytest.importorskip("mwxml", reason="mwxml is not installed (the extra corpora)")
    path = dump([("A", 0, "", "a text"), ("B", 0, "", "b text")], tmp_path / "d.xml")
    path.write_bytes(cut(path.read_bytes()))
    with pytest.raises(ValueError, match=r"d\.xml, page \d: not a MediaWiki XML dump, or a damaged one"):
        list(read_corpus(path))
