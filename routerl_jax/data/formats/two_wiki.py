"""2WikiMultihopQA's json (train.json, dev.json), with the aliases of its answers from id_aliases.json."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Mapping
from typing import Any

from routerl_jax.core.rows import RowLocation, read_rows
from routerl_jax.core.types import Example
from routerl_jax.data.formats.format import FORMATS, Row, distinct, strings, with_metadata
from routerl_jax.data.formats.hotpotqa import HotpotQA, from_json

_ALIASES = "id_aliases.json"
_COLUMNS = ("fact", "relation", "entity")  # of a triple, on the hub and under FlashRAG's metadata


class TwoWiki(HotpotQA):
    """HotpotQA's keys, `evidences` (`[subject, relation, object]` triples, on the hub and in FlashRAG `{fact, relation,
    entity}` of lists), and `answer_id`, a Wikidata id.

    If the data set's id_aliases.json is beside the file (one row per line: `{Q_id, aliases, demonyms}`), the answer's aliases
    and demonyms are accepted answers too. The data set's own scorer accepts them.
    """

    def matches(self, row: Row) -> bool:
        fields = with_metadata(row)
        return "evidences" in fields and "supporting_facts" in fields

    def example(self, row: Row, location: RowLocation) -> Example | None:
        example = super().example(row, location)
        if example is None:
            return None
        metadata = dict(example.metadata)
        if "evidences" in metadata:
            metadata["evidence_triples"] = _triples(metadata.pop("evidences"), location)
        aliases = _aliases(location.path.parent / _ALIASES).get(str(metadata.get("answer_id")), ())
        return dataclasses.replace(example, answers=distinct(example.answers, aliases), metadata=metadata)


@functools.lru_cache(maxsize=4)
def _aliases(path: pathlib.Path) -> dict[str, tuple[str, ...]]:
    """Other names by Wikidata id; empty if there is no such file."""
    if not path.is_file():
        return {}
    aliases = {}
    for location, row in read_rows(path, lines=True):  # JSON lines, although its name ends in .json
        if "Q_id" not in row:
            raise location.error("key 'Q_id' is missing; expected {Q_id, aliases, demonyms}")
        names = (strings(row.get(key), location, key) for key in ("aliases", "demonyms"))
        aliases[str(row["Q_id"])] = distinct(*names)
    return aliases


def _triples(value: Any, location: RowLocation) -> list[list[str]]:
    value = from_json(value, "evidences", location)
    try:
        rows = zip(*(value[key] for key in _COLUMNS), strict=True) if isinstance(value, Mapping) else value
        triples = [[row[key] for key in _COLUMNS] if isinstance(row, Mapping) else list(row) for row in rows]
        is_valid = all(len(triple) == 3 and all(isinstance(part, str) for part in triple) for triple in triples)
    except (KeyError, TypeError, ValueError):
        is_valid, triples = False, []
    if not is_valid:
        raise location.error(
            f"key 'evidences' must be a list of [subject, relation, object], or have the keys {_COLUMNS}"
        )
    return triples


FORMATS.register("2wikimultihopqa")(TwoWiki())
