"""ViDoSeek (arXiv 2502.18017). VRAG-RL writes SlideVQA and MMLongBench-Doc in its schema, and converts such rows to verl's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from routerl_jax.core.rows import RowLocation
from routerl_jax.core.types import Example
from routerl_jax.data.formats.format import FORMATS, QuestionFormat, Row, example_id, question_of
from routerl_jax.data.formats.paged import document_answers, page_fields, query_type, source_types, without
from routerl_jax.data.formats.verl import Verl

_READ = ("file_name", "reference_page", "source_type")


class ViDoSeek(QuestionFormat):
    """`{uid, query, reference_answer, meta_info: {file_name, reference_page: [5], source_type, query_type}}`, in a list or in
    `{"examples": [..]}`.

    `metadata`: `document`, `pages`, `supporting` (formats.paged), `type` (from `query_type`), `source_type` (a list), and the
    other keys of `meta_info`.
    """

    def matches(self, row: Row) -> bool:
        return "meta_info" in row and "query" in row

    def example(self, row: Row, location: RowLocation) -> Example | None:
        info = row.get("meta_info")
        if not isinstance(info, Mapping):
            raise location.error(
                "key 'meta_info' must be an object {file_name, reference_page, ..}, found "
                f"{str(info)[:80]!r}; or name another format"
            )
        return Example(
            id=example_id(row, location, ("uid", "id")),
            question=question_of(row, location, "query").strip(),
            answers=document_answers(row.get("reference_answer"), location, "reference_answer"),
            metadata=without(row, ("uid", "id", "query", "reference_answer", "meta_info")) | _metadata(info, location),
        )


class VragRows(Verl):
    """The rows that VRAG-RL's converter makes of these: verl's rows with `extra_info: {file_name, reference_page, content_type,
    reason_type}`. `content_type` holds the source types, joined by `####`; "Nan" means none."""

    def matches(self, row: Row) -> bool:
        info = row.get("extra_info")
        return "reward_model" in row and isinstance(info, Mapping) and "reference_page" in info

    def example(self, row: Row, location: RowLocation) -> Example | None:
        info = {key: value for key, value in row["extra_info"].items() if value != "Nan"}
        content, reason = (info.pop(f"{name}_type", None) for name in ("content", "reason"))
        example = super().example({**row, "extra_info": info}, location)
        if example is None:
            return None
        fields: dict[str, Any] = {key: value for key, value in info.items() if key in _READ}
        if isinstance(content, str) and not content.endswith("Span"):  # otherwise it is the form of the answer
            fields["source_type"] = content.split("####")
        kind = "doc_type" if example.metadata.get("data_source") == "mmlongdoc" else "query_type"
        metadata = without(example.metadata, (*_READ, "answer", "ability"))
        return dataclasses.replace(
            example, metadata=metadata | _metadata({**fields, kind: reason}, location, "extra_info")
        )


def _metadata(info: Mapping[str, Any], location: RowLocation, key: str = "meta_info") -> dict[str, Any]:
    pages = page_fields(
        info.get("file_name"), info.get("reference_page"), location, f"{key}.file_name", f"{key}.reference_page"
    )
    sources = source_types(info.get("source_type"), location, f"{key}.source_type")
    return without(info, _READ) | query_type(info.get("query_type")) | sources | pages


FORMATS.register("vidoseek")(ViDoSeek())
FORMATS.register("vrag")(VragRows())
