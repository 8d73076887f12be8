"""2WikiMultihopQA's json (train.json, dev.json), with the aliases of its answers from id_aliases.json."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from typing import Any

from routerl_jax.core.rows import Place, read_rows
from routerl_jax.core.types import Example
from routerl_jax.data.formats.format import FORMATS, Row, distinct, strings, with_metadata
from routerl_jax.data.formats.hotpotqa import HotpotQA, from_json

_ALIASES = "id_aliases.json"


class TwoWiki(HotpotQA):
    """HotpotQA's keys, `evidences` (`[subject, relation, object]` triples), and `answer_id`, a Wikidata id.

    Where id_aliases.json of the data set lies beside the file (a row a line: `{Q_id, aliases, demonyms}`), the answer's
    aliases and demonyms are accepted answers too, as the data set's own scorer accepts them.
    """

    def holds(self, row: Row) -> bool:
        fields = with_metadata(row)
        return "evidences" in fields and "supporting_facts" in fields

    def example(self, row: Row, place: Place) -> Example | None:
        example = super().example(row, place)
        if example is None:
            return None
        metadata = dict(example.metadata)
        if "evidences" in metadata:
            metadata["evidence_triples"] = _triples(metadata.pop("evidences"), place)
        aliases = _aliases(place.path.parent / _ALIASES).get(str(metadata.get("answer_id")), ())
        return dataclasses.replace(example, answers=distinct(example.answers, aliases), metadata=metadata)


@functools.lru_cache(maxsize=4)
def _aliases(path: pathlib.Path) -> dict[str, tuple[str, ...]]:
    """Other names by Wikidata id; empty where there is no such file."""
    if not path.is_file():
        return {}
    found = {}
    for place, row in read_rows(path, lines=True):  # in spite of its name
        if "Q_id" not in row:
            raise place.error("key 'Q_id' is missing; expected {Q_id, aliases, demonyms}")
        names = (strings(row.get(key), place, key) for key in ("aliases", "demonyms"))
        found[str(row["Q_id"])] = distinct(*names)
    return found


def _triples(value: Any, place: Place) -> list[list[str]]:
    value = from_json(value, "evidences", place)
    if not isinstance(value, list) or not all(isinstance(item, list) and len(item) == 3 for item in value):
        raise place.error("key 'evidences' must be a list of [subject, relation, object]")
    return value


FORMATS.register("2wikimultihopqa")(TwoWiki())
