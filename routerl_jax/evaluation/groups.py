"""Groups of questions that results are told for apart: by data set, kind, type or source type, where their metadata says it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

GROUPS = ("dataset", "kind", "type", "source_type")
_MOST = 24  # values of a key; one with more is an attribute of single questions


def group_fields(metadata: Mapping[str, Any]) -> dict[str, str | list[str]]:
    """What an example's metadata says of `GROUPS`: a value, or several in a list, such as the source types of a question that
    takes a chart and a table. The data set of a question that is not of joined ones is verl's `data_source`."""
    fields = {**metadata, "dataset": metadata.get("dataset") or metadata.get("data_source")}
    return {key: value for key in GROUPS if (value := fields.get(key)) and _names(value)}


def by_group(metadata: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[int]]]:
    """Numbers of the questions of each group, by key and value; keys of one value, or of very many, tell nothing apart. A
    question of several values is in the group of each.

    Args:
      metadata: of each question.
    """
    groups: dict[str, dict[str, list[int]]] = {}
    for number, fields in enumerate(map(group_fields, metadata)):
        for key, values in fields.items():
            for value in dict.fromkeys(_names(values)):
                groups.setdefault(key, {}).setdefault(value, []).append(number)
    return {key: dict(sorted(values.items())) for key in GROUPS if 1 < len(values := groups.get(key, {})) <= _MOST}


def _names(value: Any) -> list[str]:
    """The values of a group's key; [] for anything but a string or strings."""
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list | tuple) or not all(isinstance(name, str) and name for name in values):
        return []
    return list(values)
