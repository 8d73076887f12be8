"""Groups of questions that results are told for apart: by data set, kind or type, where their metadata says it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

GROUPS = ("dataset", "kind", "type")
_MOST = 24  # values of a key; one with more is an attribute of single questions


def group_fields(metadata: Mapping[str, Any]) -> dict[str, str]:
    """What an example's metadata says of `GROUPS`. The data set of a question that is not of joined ones is verl's
    `data_source`."""
    fields = {**metadata, "dataset": metadata.get("dataset") or metadata.get("data_source")}
    return {key: value for key in GROUPS if isinstance(value := fields.get(key), str) and value}


def by_group(metadata: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[int]]]:
    """Numbers of the questions of each group, by key and value; keys of one value, or of very many, tell nothing apart.

    Args:
      metadata: of each question.
    """
    groups: dict[str, dict[str, list[int]]] = {}
    for number, fields in enumerate(map(group_fields, metadata)):
        for key, value in fields.items():
            groups.setdefault(key, {}).setdefault(value, []).append(number)
    return {key: dict(sorted(values.items())) for key in GROUPS if 1 < len(values := groups.get(key, {})) <= _MOST}
