"""Readers of text corpora, one Passage at a time. The name of a file decides how it is read.

    .jsonl       a row per line: `{id, title, text}`, or as FlashRAG and Search-R1 have them
                 `{id, contents: "\\"Title\\"\\ntext"}`, or KILT's pages `{wikipedia_id, wikipedia_title, text: [..]}`
    wiki_00, ..  what WikiExtractor writes: as .jsonl
    .json        HippoRAG's list of `{title, text, idx?}`; HybridQA's and OTT-QA's `{link: text}` (corpora.linked_tables),
                 of which several files may hold the same passage
    .csv         a row per line; line 1 names the columns `id`, `text` and, if there is one, `title`
    .tsv         DPR's and KILT's passages (corpora.tsv)
    .xml         a Wikipedia dump (corpora.wikipedia)
    a directory  all such files in it and below, by name; of a built knowledge base, its passages

Each may be compressed (.gz, .bz2, .xz, .zst). Other keys of rows are ignored. No row is skipped: one that cannot become a
passage is an error.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import pathlib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from routerl_jax.core.compressed import plain_name
from routerl_jax.core.rows import RowLocation, read_rows
from routerl_jax.core.types import Passage
from routerl_jax.data.formats.tables import read_named_columns
from routerl_jax.knowledge.corpora.ids import DistinctIds
from routerl_jax.knowledge.corpora.linked_tables import linked_passages
from routerl_jax.knowledge.corpora.splitting import Split
from routerl_jax.knowledge.corpora.tsv import read_tsv
from routerl_jax.knowledge.corpora.wikipedia import read_dump
from routerl_jax.knowledge.store import MANIFEST, Store

_EXTRACTED = re.compile(r"wiki_\d+")  # WikiExtractor --json writes AA/wiki_00, AA/wiki_01, ...
_BLOCK = 8192  # passages of a knowledge base that are read at a time
_HINT = (
    "Give .jsonl (a row per line), .json (a list), .csv, .tsv or a Wikipedia dump (.xml), plain or compressed (.gz, .bz2, "
    ".xz, .zst), or a directory of them"
)


def read_corpus(path: str | pathlib.Path, *, split: Split | None = None) -> Iterator[Passage]:
    """Passages of a corpus, in its order, with score 0.

    Args:
      path: a file, a directory whose files together are the corpus, or a knowledge base.
      split: splits every text into passages with ids `id#0`, `id#1`, ... Default: Wikipedia dumps and KILT's pages are split
        into 100 words each, other texts are left whole. Passages of a knowledge base are never split.

    Raises:
      ValueError: at once: the file is missing or has an unknown extension. While reading: a row is not JSON, lacks id or text,
        is empty, or repeats an id, or a file has no rows. The message names file, line, key and the fix.
    """
    path = pathlib.Path(path).expanduser()
    return _stored(path) if _is_built(path) else _passages(path, corpus_files(path), split)


def corpus_files(path: str | pathlib.Path) -> list[pathlib.Path]:
    """The files of a corpus, sorted by path; for a knowledge base, its manifest.

    Raises:
      ValueError: there is nothing, or a file of a kind that can't be read.
    """
    path = pathlib.Path(path).expanduser()
    if not path.exists():
        raise ValueError(f"{path} does not exist. {_HINT}")
    if _is_built(path):
        return [path / MANIFEST]
    if path.is_file():
        files = [path]
    else:
        files = sorted(file for file in path.rglob("*") if file.is_file() and not _hidden(file.relative_to(path)))
        if not files:
            raise ValueError(f"{path} is an empty directory. {_HINT}")
    for file in files:
        if _kind(file) is None:
            raise ValueError(f"{file}: unknown extension. {_HINT}")
    return files


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


def _passages(source: pathlib.Path, files: list[pathlib.Path], split: Split | None) -> Iterator[Passage]:
    ids = DistinctIds()
    linked: dict[str, int] = {}
    for file in files:
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
        raise ValueError(f"{source} holds no passages. Expected rows like {{id, title, text}} or {{id, contents}}")


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
        if location.unit == "item":  # HippoRAG's lists number their passages explicitly or by their order
            row = {"id": row.get("idx", location.number - 1), **row}
        yield location, Passage(id=string_field(row, "id", location), title=title, text=text), False


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
    name = plain_name(path)
    if _EXTRACTED.fullmatch(name):
        return "rows"
    suffix = pathlib.Path(name).suffix
    return {".jsonl": "rows", ".json": "rows", ".csv": "csv", ".tsv": "tsv", ".xml": "xml"}.get(suffix)


def _hidden(path: pathlib.Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _title_and_text(row: dict[str, Any], location: RowLocation) -> tuple[str, str]:
    if "text" in row or "contents" not in row:
        return string_field(row, "title", location, default=""), string_field(row, "text", location)
    return split_contents(string_field(row, "contents", location))


def split_contents(contents: str) -> tuple[str, str]:
    """Title and text of FlashRAG's and Search-R1's `contents`: the title is the first line, in quotation marks or bare."""
    first, newline, rest = contents.partition("\n")
    if not newline:
        return "", contents
    first = first.strip()
    quoted = len(first) >= 2 and first[0] == first[-1] == '"'
    return first[1:-1] if quoted else first, rest
