"""Extractions of a passage, the normal form of phrases, and the reader of given triples.

Files of triples have rows (JSON Lines or a JSON list, plain or gzip), each for the passage with its id:

    {"passage_id": "p7", "entities": ["Paris", ..], "triples": [["Paris", "is the capital of", "France"], ..]}

or they are the JSON object that HippoRAG writes (`openie_results_ner_*.json`), whose rows have the passage's text instead:

    {"docs": [{"idx": .., "passage": "Title\\ntext", "extracted_entities": [..], "extracted_triples": [[..], ..]}, ..]}
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from routerl_jax.core.rows import RowLocation, checked_path, read_rows
from routerl_jax.core.types import Passage

Triple = tuple[str, str, str]

_LONGEST = 500  # most characters of a subject, predicate or object
_NOT_ASCII_WORD = re.compile("[^A-Za-z0-9 ]")
_NOT_WORD = re.compile(r"[^\w ]|_")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Extraction:
    """The extraction of a passage.

    Attributes:
      entities: the named entities as they are written. They are for inspection only; the graph is made of triples.
      triples: (subject, predicate, object) as they are written, each once.
      dropped: number of items that were no triples.
      error: why the extraction failed, if it did.
    """

    entities: tuple[str, ...] = ()
    triples: tuple[Triple, ...] = ()
    dropped: int = 0
    error: str | None = None


def passage_text(passage: Passage) -> str:
    """Title and text in the form for extractors and encoders."""
    return f"{passage.title}\n{passage.text}" if passage.title else passage.text


def normalised(phrase: str) -> str:
    """The normal form of a phrase, which names its node, as in HippoRAG: lower case, with spaces for all but letters and
    digits.

    HippoRAG keeps only ASCII, which would make all phrases of other scripts equal. Here these keep their letters.
    """
    lower = phrase.lower()
    cleaned = _NOT_ASCII_WORD.sub(" ", lower).strip()
    return cleaned or _NOT_WORD.sub(" ", lower).strip()


def checked_triples(items: Iterable[Any]) -> tuple[tuple[Triple, ...], int]:
    """The valid triples among the items of a model or a file, each once, and the number of invalid items.

    A triple is a list of three strings (or numbers) whose first and last have letters or digits, or an object with such values
    under subject, predicate (or relation), object.
    """
    triples: dict[Triple, None] = {}
    dropped = 0
    for item in items:
        triple = _triple(item)
        if triple is None:
            dropped += 1
        else:
            triples[triple] = None
    return tuple(triples), dropped


def checked_entities(items: Iterable[Any]) -> tuple[str, ...]:
    """The non-empty strings (or numbers) among the items, each once."""
    phrases = (_phrase(item) for item in items)
    return tuple(dict.fromkeys(phrase for phrase in phrases if phrase and normalised(phrase)))


class PrecomputedTriples:
    """Triples that were extracted before, looked up by a passage's id or, for HippoRAG's files, by its text.

    Raises:
      ValueError: the file can't be read, a row lacks id or triples, or a passage has two rows; names file and row.
    """

    def __init__(self, path: str | pathlib.Path) -> None:
        self.path = checked_path(path)
        self._by_id: dict[str, Extraction] = {}
        self._by_text: dict[str, Extraction] = {}
        docs = _hipporag(self.path)
        if docs is None:
            for location, row in read_rows(self.path):
                key = _field(row, "passage_id", location)
                _add(self._by_id, str(key), _extraction(row, "entities", "triples", location), location)
        else:
            for number, row in enumerate(docs, 1):
                location = RowLocation(self.path, "item", number)
                if not isinstance(row, dict):
                    raise location.error(f"expected an object, found {type(row).__name__}")
                text = str(_field(row, "passage", location))
                _add(
                    self._by_text, text, _extraction(row, "extracted_entities", "extracted_triples", location), location
                )
        if not self:
            raise ValueError(
                f"{self.path} holds no rows. Expected {{passage_id, triples}} or HippoRAG's {{docs: [..]}}"
            )

    def __len__(self) -> int:
        return len(self._by_id) + len(self._by_text)

    def of(self, passage: Passage) -> Extraction | None:
        """The given extraction of a passage; None if there is none."""
        if passage.id in self._by_id:
            return self._by_id[passage.id]
        return self._by_text.get(passage_text(passage)) or self._by_text.get(passage.text)


def to_row(passage_id: str, extraction: Extraction) -> dict[str, Any]:
    """The row of a file of triples."""
    return {"passage_id": passage_id, "entities": extraction.entities, "triples": extraction.triples}


def _triple(item: Any) -> Triple | None:
    if isinstance(item, Mapping):
        lower = {str(key).lower(): value for key, value in item.items()}
        item = [lower.get("subject"), lower.get("predicate", lower.get("relation")), lower.get("object")]
    if not isinstance(item, list | tuple) or len(item) != 3:
        return None
    subject, predicate, object_ = (_phrase(part) for part in item)
    if subject is None or predicate is None or object_ is None or not normalised(subject) or not normalised(object_):
        return None
    return subject, predicate, object_


def _phrase(value: Any) -> str | None:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    phrase = " ".join(str(value).encode("utf-8", "replace").decode().split())  # half a surrogate pair can't be stored
    return phrase if len(phrase) <= _LONGEST else None


def _hipporag(path: pathlib.Path) -> list[Any] | None:
    if not path.name.removesuffix(".gz").endswith(".json"):
        return None
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content = json.loads(file.read())
    except (ValueError, EOFError, OSError) as error:
        raise ValueError(
            f"{path}: not JSON, or damaged ({error}); copy it again, or let its program write it anew"
        ) from error
    if not isinstance(content, dict):
        return None  # a list of rows
    if not isinstance(content.get("docs"), list):
        raise ValueError(f"{path}: an object without a list under 'docs'. Expected HippoRAG's {{docs: [..]}}, or rows")
    return content["docs"]


def _field(row: Mapping[str, Any], key: str, location: RowLocation) -> Any:
    if row.get(key) is None or isinstance(row[key], bool | list | dict):
        raise location.error(f"key {key!r} is missing or no string (keys: {', '.join(row) or 'none'})")
    return row[key]


def _extraction(row: Mapping[str, Any], entities: str, triples: str, location: RowLocation) -> Extraction:
    for key in (entities, triples):
        if not isinstance(row.get(key, [] if key == entities else None), list):
            raise location.error(f"key {key!r} must hold a list")
    checked, dropped = checked_triples(row[triples])
    return Extraction(entities=checked_entities(row.get(entities, [])), triples=checked, dropped=dropped)


def _add(extractions: dict[str, Extraction], key: str, extraction: Extraction, location: RowLocation) -> None:
    if key in extractions:
        raise location.error(f"a second row for the passage {key[:60]!r}. Join them")
    extractions[key] = extraction
