"""Readers of text corpora, one Passage at a time. The name of a file decides how it is read.

    .jsonl       a row per line: `{id, title, text}`, or as FlashRAG and Search-R1 have them
                 `{id, contents: "\\"Title\\"\\ntext"}`, or KILT's pages `{wikipedia_id, wikipedia_title, text: [..]}`
    wiki_00, ..  what WikiExtractor writes: as .jsonl
    .json        HippoRAG's list of `{title, text, idx?}`; HybridQA's and OTT-QA's `{link: text}` (corpora.linked_tables),
                 of which several files may hold the same passage
    .csv         a row per line; line 1 names the columns `id`, `text` and, if there is one, `title`
    .tsv         DPR's and KILT's passages (corpora.tsv)
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

from absl import logging

from routerl_jax.core.rows import RowLocation, plain_name, plain_suffix, read_rows
from routerl_jax.core.types import Passage
from routerl_jax.data.formats.tables import read_named_columns
from routerl_jax.knowledge.corpora import documents
from routerl_jax.knowledge.corpora.ids import DistinctIds
from routerl_jax.knowledge.corpora.linked_tables import linked_passages
from routerl_jax.knowledge.corpora.splitting import Split
from routerl_jax.knowledge.corpora.tsv import read_tsv
from routerl_jax.knowledge.corpora.wikipedia import read_dump
from routerl_jax.knowledge.store import MANIFEST, Store

READING = 2  # version of the rules by which a corpus becomes passages; raise it with them
IDS = ("id", "_id", "docid")  # keys of a row's id
_EXTRACTED = re.compile(r"wiki_\d+")  # WikiExtractor --json writes AA/wiki_00, AA/wiki_01, ...
_BLOCK = 8192  # passages of a knowledge base that are read at a time
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
        found = sorted(file for file in path.rglob("*") if not _hidden(file.relative_to(path)))
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


def new_id(row_id: str, location: RowLocation, used_ids: dict[str, int]) -> str:
    """Returns `row_id` and adds it to `used_ids`. Raises ValueError if it is empty or was used before."""
    if not row_id.strip():
        raise location.error("key 'id' is empty. Give every row an id of its own")
    if row_id in used_ids:
        raise location.error(
            f"key 'id': {row_id!r} was used in {location.unit} {used_ids[row_id]} already. Make ids distinct"
        )
    used_ids[row_id] = location.number
    return row_id


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
            pieces = [passage] if cut is None else list(_pieces(passage, cut))
            for piece in pieces:
                ids.add(piece.id, location)
                yield piece
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
    for start in range(0, len(store.passages), _BLOCK):
        yield from (passage for _, passage in store.live(start, min(start + _BLOCK, len(store.passages))))


def _pieces(page: Passage, split: Split) -> Iterator[Passage]:
    for number, text in enumerate(split.pieces(page.text)):
        yield dataclasses.replace(page, id=f"{page.id}#{number}", text=text)


_Read = Iterator[
    tuple[RowLocation, Passage, bool]
]  # its position, the passage, and whether it is a whole page to be split


def _from_rows(path: pathlib.Path) -> _Read:
    for location, row in read_rows(path):
        if "wikipedia_title" in row and isinstance(row.get("text"), list):
            yield location, _kilt_page(row, location), True
            continue
        title, text = _title_and_text(row, location)
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
    yield from ((location, passage, False) for location, passage in read_tsv(path))


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


def _hidden(path: pathlib.Path) -> bool:
    return any(part.startswith((".", "~$")) for part in path.parts)  # ~$ is what Word has open


def _title_and_text(row: dict[str, Any], location: RowLocation) -> tuple[str, str]:
    title = string_field(row, "title", location, default="")
    if not title.strip() and isinstance(row.get("metadata"), dict):
        title = string_field(row["metadata"], "title", location, default="")
    text, contents = (
        None if row.get(key) is None else string_field(row, key, location) for key in ("text", "contents")
    )
    if text is None and contents is None:
        text = string_field(row, "text", location)  # which raises
    try:
        return title_and_text(title, text, contents)
    except ValueError as error:
        raise location.error(str(error)) from error


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
