r"""Readers of text corpora, one Passage at a time. The name of a file decides how it is read.

    .jsonl       a row per line: `{id, title, text}`, or as FlashRAG and Search-R1 have them
                 `{id, contents: "\"Title\"\ntext"}`, or KILT's pages `{wikipedia_id, wikipedia_title, text: [..]}`
    wiki_00, ..  what WikiExtractor writes: as .jsonl
    .json        HippoRAG's list of `{title, text, idx?}`; HybridQA's and OTT-QA's `{link: text}` (corpora.wikipedia),
                 of which several files may hold the same passage
    .csv         a row per line; line 1 names the columns `id`, `text` and, if there is one, `title`
    .tsv         DPR's and KILT's `id, text, title`, R1-Searcher's `number, title   text`
    .xml         a Wikipedia dump (corpora.wikipedia)
    .txt, .md, .html, .docx, .pdf
                 documents (corpora.documents), by headings and then by words
    a directory  all such files in it and below, by name; of a built knowledge base, its passages

Each, but .docx and .pdf, may be compressed (.gz, .bz2, .xz, .zst). In .jsonl and .json, an id may be called `_id` or `docid`,
and a title may stand in `metadata`. A row's `title` is not looked for in its `contents`, and its `text` and `contents` must
agree. Other keys are ignored. No row is skipped: one that cannot become a passage is an error. In a directory with documents,
what can't be read is left out and named (`read_corpus`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import pathlib
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from absl import logging

from routerl_jax.core.rows import RowLocation, open_bytes, plain_name, plain_suffix, read_rows
from routerl_jax.core.text import split
from routerl_jax.core.types import Passage
from routerl_jax.data.formats.tables import read_named_columns
from routerl_jax.knowledge.corpora import documents
from routerl_jax.knowledge.corpora.wikipedia import linked_passages, read_dump
from routerl_jax.knowledge.store import MANIFEST, Store

WORDS = 100  # words of a passage: DPR (Karpukhin et al. 2020, section 4.1)
_LONGEST = 1000  # characters of a word of a document; a longer one (encoded data) counts as several


@dataclasses.dataclass(frozen=True, kw_only=True)
class Split:
    """How pages become passages: `words` words each, without overlap. A last piece of fewer than `least` words is dropped.

    A page's only piece is always kept. Words stand between white space; in a text of a script without spaces between words
    (Chinese, Japanese, Thai), each character is one.
    """

    words: int = WORDS
    least: int = 7  # R1-Router (section 1.4 of its paper): passages have at least seven words

    def __post_init__(self) -> None:
        if not 0 < self.least <= self.words:
            raise ValueError(f"a passage of {self.words} words with at least {self.least}: give 1 <= least <= words")

    def pieces(self, text: str) -> Iterator[str]:
        """The passages of a text, with single spaces for white space."""
        characters = _characters(text)
        words = characters or text.split()
        for start in range(0, len(words), self.words):
            piece = words[start : start + self.words]
            if not start or len(piece) >= self.least:
                yield " ".join("".join(piece).split() if characters else piece)

    def whole_pieces(self, text: str) -> Iterator[str]:
        """Like `pieces`, with the white space inside a passage as it is, and no word is dropped: a last piece of fewer than
        `least` words belongs to the one before."""
        words = _characters(text) or re.findall(rf"\S{{1,{_LONGEST}}}\s*", text)
        starts = list(range(0, len(words), self.words))
        if len(starts) > 1 and len(words) - starts[-1] < self.least:
            starts.pop()
        for start, stop in zip(starts, [*starts[1:], None]):
            yield "".join(words[start:stop]).rstrip()


def _characters(text: str) -> list[str]:
    """The words of a text that has few spaces, each with the white space and the punctuation marks after it; else []."""
    parts = split(text)
    if len(parts) <= 2 * len(text.split()):  # a foreign name in another text moves no border
        return []
    words: list[str] = []
    end = 0
    for part in parts:
        start = text.index(part, end)
        if words:
            words[-1] += text[end:start]
        if words and not any(map(str.isalnum, part)):
            words[-1] += part
        else:
            words.append(part)
        end = start + len(part)
    return words


_RECENT = 2**20  # number of latest ids that are kept as text; older ones become 64-bit hashes


class DistinctIds:
    """Refuses an id that was used before.

    An id is compared with the latest million ids at once. Older ids are kept as 64-bit hashes; each further million is compared
    with them when it is full, and the last ids in `finish`. So an error may come later than its row, but names the row. Two
    different ids collide in one of 13,000 corpora of 52 million passages.
    """

    def __init__(self, recent: int = _RECENT) -> None:
        self._most = recent
        self._recent: dict[str, RowLocation] = {}
        self._runs: list[tuple[np.ndarray, np.ndarray]] = []  # sorted hashes, and the rows they came from
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, row_id: str, location: RowLocation) -> str:
        """Returns the id. Raises ValueError if it is empty or was used before."""
        if not row_id.strip():
            raise location.error("key 'id' is empty. Give every row an id of its own")
        if row_id in self._recent:
            raise self._repeated(row_id, location, self._recent[row_id])
        self._recent[row_id] = location
        self._count += 1
        if len(self._recent) == self._most:
            self.finish()
        return row_id

    def finish(self) -> None:
        """Compares the last ids with all before them."""
        if not self._recent:
            return
        ids = list(self._recent)
        digests = (hashlib.blake2b(row_id.encode(), digest_size=8).digest() for row_id in ids)
        hashes = np.array([int.from_bytes(digest, "little") for digest in digests], np.uint64)
        for before, numbers in self._runs:
            positions = np.minimum(np.searchsorted(before, hashes), len(before) - 1)
            hits = np.flatnonzero(before[positions] == hashes)
            if len(hits):
                second = self._recent[ids[hits[0]]]
                raise self._repeated(ids[hits[0]], second, second._replace(number=int(numbers[positions[hits[0]]])))
        order = np.argsort(hashes)
        rows = np.array([self._recent[ids[i]].number for i in order], np.uint32)
        self._runs.append((hashes[order], rows))
        self._recent = {}
        # merges the last runs while they have about the same size, so that there are few
        while len(self._runs) > 1 and len(self._runs[-1][0]) >= len(self._runs[-2][0]):
            (hashes, rows), (other_hashes, other_rows) = self._runs.pop(), self._runs.pop()
            joined = np.concatenate([hashes, other_hashes])
            order = np.argsort(joined, kind="stable")
            self._runs.append((joined[order], np.concatenate([rows, other_rows])[order]))

    def _repeated(self, row_id: str, location: RowLocation, first: RowLocation) -> ValueError:
        file = "" if first.path == location.path else f"{first.path}, "
        return location.error(
            f"key 'id': {row_id!r} was used in {file}{first.unit} {first.number} already. Make ids distinct"
        )


READING = 2  # version of the rules by which a corpus becomes passages; raise it with them
IDS = ("id", "_id", "docid")  # keys of a row's id
_HOTPOT = re.compile(r"\s*Title:\s*(?P<title>.*?)\s*Text:\s*(?P<text>.*)", re.DOTALL)  # R1-Searcher's
_EXTRACTED = re.compile(r"wiki_\d+")  # WikiExtractor --json writes AA/wiki_00, AA/wiki_01, ...
_HINT = (
    "Give .jsonl (a row per line), .json (a list), .csv, .tsv or a Wikipedia dump (.xml), plain or compressed (.gz, .bz2, "
    ".xz, .zst), documents (.txt, .md, .html, .docx, .pdf), or a directory of them"
)


def read_corpus(
    path: str | pathlib.Path, *, split: Split | None = None, left_out: dict[str, str] | None = None
) -> Iterator[Passage]:
    """Passages of a corpus, in its order, with score 0.

    A document's passages have ids `PATH#number`, with its path below the corpus (of a PDF `PATH#page#number`), and its title
    with the headings above them. No word of it is dropped. A directory with documents may hold anything: a document that is
    damaged, locked or without text, a file of another type, and the folder that a browser saved beside a page are left out,
    each with a warning. A document that is the whole corpus must be readable.

    Args:
      path: a file, a directory whose files together are the corpus, or a knowledge base.
      split: splits every text into passages with ids `id#0`, `id#1`, ... Default: documents, Wikipedia dumps and KILT's pages
        are split into 100 words each, other texts are left whole. Passages of a knowledge base are never split.
      left_out: is filled while reading: why a file or page is left out, by its path below the corpus.

    Raises:
      ValueError: at once: the file is missing or has an unknown extension. While reading: a row is not JSON, lacks id or text,
        is empty, or repeats an id, or a file has no rows. The message names file, line, key and the fix.
    """
    path = pathlib.Path(path).expanduser()
    if _is_built(path):
        return _stored(path)
    left_out = {} if left_out is None else left_out
    return _passages(path, _listed(path, left_out), split, left_out)


def corpus_files(path: str | pathlib.Path) -> list[pathlib.Path]:
    """The files of a corpus, sorted by path; for a knowledge base, its manifest. Hidden files are none, and in a directory with
    documents only those are that can be read.

    Raises:
      ValueError: there is nothing, or a file of a kind that can't be read in a file or a directory without documents.
    """
    path = pathlib.Path(path).expanduser()
    return [path / MANIFEST] if _is_built(path) else _listed(path, {})


def _listed(path: pathlib.Path, left_out: dict[str, str]) -> list[pathlib.Path]:
    if not path.exists():
        raise ValueError(f"{path} does not exist. {_HINT}")
    if path.is_file():
        files = [path]
    else:
        hidden = (".", "~$")  # ~$ is what Word has open
        found = sorted(
            file
            for file in path.rglob("*")
            if not any(part.startswith(hidden) for part in file.relative_to(path).parts)
        )
        files = [file for file in found if file.is_file()]
        for link in (file for file in found if file.is_symlink() and not file.is_file()):
            left_out[link.relative_to(path).as_posix()] = (
                "a link to a directory, which is not followed" if link.is_dir() else "a link to nothing"
            )
        if not files:
            links = "".join(f"; {name}: {why}" for name, why in left_out.items())
            raise ValueError(f"{path} is an empty directory{links}. {_HINT}")
    has_documents = path.is_dir() and any(map(documents.is_document, files))
    folders: dict[pathlib.Path, pathlib.Path | None] = {}  # of pages that a browser saved
    kept = []
    for file in files:
        name = file.relative_to(path).as_posix()
        for folder in file.relative_to(path).parents[-2::-1] if has_documents else ():
            if folder not in folders:
                folders[folder] = documents.saved_with(path / folder)
            if (page := folders[folder]) is not None:
                left_out[f"{folder.as_posix()}/"] = f"what a browser saved with {page.name}"
                break
        else:
            if _kind(file) is not None:
                kept.append(file)
            elif has_documents:
                left_out[name] = f"unknown extension {file.suffix!r}"
            else:
                raise ValueError(f"{file}: unknown extension. {_HINT}")
    return kept


def corpus_sha256(path: str | pathlib.Path) -> str:
    """SHA-256 of a file's bytes, of the names and bytes of a directory's files, or of a knowledge base's passages, in hex."""
    path = pathlib.Path(path).expanduser()
    if path.is_file():
        return file_sha256(path)
    if _is_built(path):
        return passages_sha256(_stored(path))
    digest = hashlib.sha256()
    for file in corpus_files(path):
        digest.update(json.dumps([str(file.relative_to(path)), file_sha256(file)]).encode())
    return digest.hexdigest()


def file_sha256(path: pathlib.Path) -> str:
    """Hex digest of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def passages_sha256(passages: Iterable[Passage]) -> str:
    """Hex digest of passages in memory: ids, titles, texts and pictures, in their order."""
    digest = hashlib.sha256()
    for passage in passages:
        parts = [passage.id, passage.title, passage.text, passage.image]
        digest.update(json.dumps(parts if passage.image else parts[:3]).encode())
    return digest.hexdigest()


def checked_passages(passages: Sequence[Passage]) -> Iterator[Passage]:
    """The passages one by one. Raises ValueError if there are none, one is empty, or an id repeats."""
    if not passages:
        raise ValueError("no passages to build a knowledge base from")
    seen_ids: set[str] = set()
    for i, passage in enumerate(passages):
        if not passage.text.strip():
            raise ValueError(f"passage {i} ({passage.id!r}) is empty")
        if passage.id in seen_ids:
            raise ValueError(f"passage {i}: id {passage.id!r} occurs twice; ids must be distinct")
        seen_ids.add(passage.id)
        yield passage


def passage_text(passage: Passage) -> str:
    """Title and text in the form for encoders, and for models that read passages."""
    return f"{passage.title}\n{passage.text}" if passage.title else passage.text


def string_field(row: dict[str, Any], key: str, location: RowLocation, *, default: str | None = None) -> str:
    """`row[key]` as a string (numbers are spelled out, null counts as absent)."""
    value = row.get(key)
    if value is None:
        if default is None:
            raise location.error(f"key {key!r} is missing (keys: {', '.join(row) or 'none'}). Every row needs it")
        return default
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise location.error(f"key {key!r} holds {type(value).__name__}, expected a string")
    if isinstance(value, float) and not math.isfinite(value):
        raise location.error(f"key {key!r} holds {value}, which is no text. Write null where there is no value")
    return str(value)


def _passages(
    source: pathlib.Path, files: list[pathlib.Path], split: Split | None, left_out: dict[str, str]
) -> Iterator[Passage]:
    ids = DistinctIds()
    linked: dict[str, int] = {}
    for name, why in left_out.items():
        logging.warning("%s is left out: %s", source / name, why)
    for file in files:
        if documents.is_document(file):
            yield from _of_document(file, source, split or Split(), ids, left_out)
            continue
        if (linked_rows := linked_passages(file)) is not None:
            yield from _linked(linked_rows, linked, ids)
            continue
        for location, passage, page in _READERS[_kind(file) or ""](file):
            if not passage.text.strip():
                raise location.error("empty passage: there is no text. Remove the row or fill it in")
            cut = split or (Split() if page else None)
            if cut is None:
                ids.add(passage.id, location)
                yield passage
                continue
            for number, text in enumerate(cut.pieces(passage.text)):
                yield dataclasses.replace(passage, id=ids.add(f"{passage.id}#{number}", location), text=text)
    ids.finish()
    if not len(ids):
        raise ValueError(
            f"{source} holds no passages. Expected rows like {{id, title, text}} or {{id, contents}}, or documents with text"
            + "".join(f"; {name}: {why}" for name, why in list(left_out.items())[:3])
        )


def _of_document(
    file: pathlib.Path, source: pathlib.Path, split: Split, ids: DistinctIds, left_out: dict[str, str]
) -> Iterator[Passage]:
    # one name, whether the file system composes letters (Linux, Windows) or not (macOS)
    name = unicodedata.normalize("NFC", file.name if file == source else file.relative_to(source).as_posix())
    count = 0
    try:
        for section in documents.sections_of(file):
            if not section.text:
                left_out[f"{name}#{section.page}"] = documents.without_text(section)
                logging.warning("%s: %s", file, documents.without_text(section))
            for passage_id, text in zip(
                section.ids(name, 0 if section.page else count), split.whole_pieces(section.text)
            ):
                ids.add(passage_id, RowLocation(file, "passage", count + 1))
                yield Passage(id=passage_id, title=section.title, text=text)
                count += 1
    except documents.Unreadable as error:
        if file == source:
            raise ValueError(f"{file}: {error}") from error
        left_out[name] = str(error)
        logging.warning("%s is left out: %s", file, error)


def _linked(
    passages: Iterator[tuple[RowLocation, Passage]], digests: dict[str, int], ids: DistinctIds
) -> Iterator[Passage]:
    """Each passage once, even if several tables link to it. `digests`: hashes of texts by id."""
    for location, passage in passages:
        if not passage.text.strip():
            raise location.error(f"empty passage: {passage.id!r} has no text. Remove it or fill it in")
        digest = hash(passage.text)
        if digests.setdefault(passage.id, digest) != digest:
            raise location.error(f"{passage.id!r} has another text than in a file before. Make them equal")
        if len(ids) < len(digests):
            yield dataclasses.replace(passage, id=ids.add(passage.id, location))


def _is_built(path: pathlib.Path) -> bool:
    return (path / MANIFEST).is_file()


def _stored(directory: pathlib.Path) -> Iterator[Passage]:
    store = Store(directory, memory_limit=0)
    if not store.manifest.stored:
        raise ValueError(
            f"{directory} ({store.manifest.kind}) holds no passages of its own. Give a knowledge base that does"
        )
    yield from (passage for _, passage in store.live())


# its position, the passage, and whether it is a whole page to be split
_Read = Iterator[tuple[RowLocation, Passage, bool]]


def _from_rows(path: pathlib.Path) -> _Read:
    for location, row in read_rows(path):
        if "wikipedia_title" in row and isinstance(row.get("text"), list):
            yield location, _kilt_page(row, location), True
            continue
        title = string_field(row, "title", location, default="")
        if not title.strip() and isinstance(row.get("metadata"), dict):
            title = string_field(row["metadata"], "title", location, default="")
        text, contents = (
            None if row.get(key) is None else string_field(row, key, location) for key in ("text", "contents")
        )
        if text is None and contents is None:
            text = string_field(row, "text", location)  # which raises
        try:
            title, text = title_and_text(title, text, contents)
        except ValueError as error:
            raise location.error(str(error)) from error
        if not text.strip():
            key = "text" if "text" in row else "contents"
            raise location.error(f"empty passage: key {key!r} holds no text. Remove the row or fill it in")
        ids = {key: string_field(row, key, location) for key in IDS if row.get(key) is not None}
        if location.unit == "item" and not ids:  # HippoRAG's lists number their passages explicitly or by their order
            row = {**row, "id": row.get("idx", location.number - 1)}
        if len(set(ids.values())) > 1:
            raise location.error(
                f"keys {' and '.join(ids)} hold different ids: {', '.join(ids.values())}. Keep one of them"
            )
        id = next(iter(ids.values())) if ids else string_field(row, "id", location)
        yield location, Passage(id=id, title=title, text=text), False


def _kilt_page(row: dict[str, Any], location: RowLocation) -> Passage:
    """KILT's knowledge source: a page as a list of paragraphs, headings and list items marked with colons."""
    paragraphs = [string_field({"text": part}, "text", location) for part in row["text"]]
    text = re.sub(r"(Section|BULLET)::::", "", "".join(paragraphs))
    key = "wikipedia_id" if "wikipedia_id" in row else "_id"
    title = string_field(row, "wikipedia_title", location)
    return Passage(id=string_field(row, key, location), title=title, text=text)


def _from_csv(path: pathlib.Path) -> _Read:
    for location, row in read_named_columns(path):
        if "text" not in row:
            raise location._replace(number=1).error(
                f"no column is called 'text' (columns: {', '.join(row)}). Name it so, or build a knowledge base of kind "
                "dense_table, which makes a passage of every row"
            )
        title = string_field(row, "title", location, default="")
        yield location, Passage(id=string_field(row, "id", location), title=title, text=row["text"]), False


def _from_tsv(path: pathlib.Path) -> _Read:
    """The first line may name the columns id, text and title, in any order (psgs_w100.tsv). Fields may then be quoted as in
    CSV. Without such a line, each line is `id<TAB>text<TAB>title`, or R1-Searcher's `id<TAB>title   text` (three spaces) or
    `id<TAB>Title: .. Text: ..`, and quotes are ordinary characters.

    Raises:
      ValueError: while reading: a line has another number of columns or is not UTF-8.
    """
    location = RowLocation(path, "line", 0)
    with open_bytes(path, lambda: f" after line {location.number}") as file:
        for line in file:
            location = location._replace(number=location.number + 1)
            try:
                text = line.decode().rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise location.error(f"not UTF-8 text ({error.reason}). Convert the file to UTF-8") from error
            if location.number == 1:
                text = text.removeprefix("\ufeff")
                if sorted(text.strip().split("\t")) in (["id", "text", "title"], ["id", "text"]):
                    break  # the names of the columns
            if text.strip():
                yield location, _without_header(text, location), False
        else:
            return
    for location, row in read_named_columns(path):
        yield location, Passage(id=row["id"], title=row.get("title", ""), text=row["text"]), False


def _without_header(line: str, location: RowLocation) -> Passage:
    columns = line.split("\t")
    if len(columns) == 3:
        return Passage(id=columns[0], title=columns[2], text=columns[1])
    if len(columns) != 2:
        raise location.error(f"{len(columns)} columns; expected id, text, title, or a number and `title   text`")
    marked = _HOTPOT.fullmatch(columns[1])
    if marked:
        return Passage(id=columns[0], title=marked["title"], text=marked["text"])
    title, gap, text = columns[1].partition("   ")
    if not gap:
        raise location.error(
            "the second column holds neither `title   text` (three blanks between) nor `Title: .. Text: ..`"
        )
    return Passage(id=columns[0], title=title.strip(), text=text)


def _from_dump(path: pathlib.Path) -> _Read:
    for location, page in read_dump(path):
        yield location, Passage(id=page.id, title=page.title, text=page.text), True


_READERS = {"rows": _from_rows, "csv": _from_csv, "tsv": _from_tsv, "xml": _from_dump}


def _kind(path: pathlib.Path) -> str | None:
    if documents.is_document(path):
        return "document"
    if _EXTRACTED.fullmatch(plain_name(path)):
        return "rows"
    return {".jsonl": "rows", ".json": "rows", ".csv": "csv", ".tsv": "tsv", ".xml": "xml"}.get(plain_suffix(path))


def title_and_text(title: str, text: str | None, contents: str | None) -> tuple[str, str]:
    """Title and text of a row by its keys, of which `text` or `contents` is not None. A blank title counts as none.

    A title of its own is only taken off `contents` that begin with it as a line. Without one, it is the first line
    (`split_contents`).

    Raises:
      ValueError: `contents` do not end with `text`.
    """
    if contents is None:
        return title, text or ""
    first, rest = split_contents(contents)
    if text is None:
        if not title.strip():
            return first, rest
        return title, rest if rest.strip() and first.split() == title.split() else contents
    if not " ".join(contents.split()).endswith(" ".join(text.split())):
        raise ValueError("keys 'text' and 'contents' hold different texts. Keep one of them")
    return title if title.strip() or rest.split() != text.split() else first, text


def split_contents(contents: str) -> tuple[str, str]:
    """Title and text of FlashRAG's and Search-R1's `contents`: the title is the first line, in quotation marks or bare."""
    first, newline, rest = contents.partition("\n")
    if not newline:
        return "", contents
    first = first.strip()
    quoted = len(first) >= 2 and first[0] == first[-1] == '"'
    return first[1:-1] if quoted else first, rest
