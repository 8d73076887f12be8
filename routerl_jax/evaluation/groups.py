"""Groups of questions with results of their own: by data set, kind, type or source type, if the metadata have these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

GROUPS = ("dataset", "kind", "type", "source_type", "print")
_MOST = 24  # values of a key; a key with more does not define groups


def group_fields(metadata: Mapping[str, Any]) -> dict[str, str | list[str]]:
    """The values of `GROUPS` in an example's metadata. A list holds several values, such as the source types of a question that
    needs a chart and a table. For a question without `dataset`, that is verl's `data_source`."""
    fields = {**metadata, "dataset": metadata.get("dataset") or metadata.get("data_source")}
    return {key: value for key in GROUPS if (value := fields.get(key)) and _names(value)}


def by_group(metadata: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[int]]]:
    """Indices of the questions of each group, by key and value. Keys with one value, or with very many, are left out. A
    question with several values belongs to several groups.

    Args:
      metadata: the metadata of each question.
    """
    groups: dict[str, dict[str, list[int]]] = {}
    for number, fields in enumerate(map(group_fields, metadata)):
        for key, values in fields.items():
            for value in dict.fromkeys(_names(values)):
                groups.setdefault(key, {}).setdefault(value, []).append(number)
    return {key: dict(sorted(values.items())) for key in GROUPS if 1 < len(values := groups.get(key, {})) <= _MOST}


def _names(value: Any) -> list[str]:
    """The values of a key as a list; [] for anything but a string or strings."""
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list | tuple) or not all(isinstance(name, str) and name for name in values):
        return []
    return list(values)
