"""Questions about pages of documents (ViDoSeek, SlideVQA, MMLongBench-Doc) and about tables (HybridQA, Open-WikiTable)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from routerl_jax.core.rows import RowLocation
from routerl_jax.core.types import Example
from routerl_jax.data.formats.format import (
    ANSWER_KEYS,
    QuestionFormat,
    Row,
    answer_key,
    distinct,
    example_id,
    question_of,
    strings,
)
from routerl_jax.data.gold_paths import page_id

SOURCE_TYPES = ("text", "table", "chart", "figure", "layout")  # types of evidence (VRAG-RL, table 1)
_SOURCES = {
    **{name: name for name in SOURCE_TYPES},
    "pure-text (plain-text)": "text",
    "generalized-text (layout)": "layout",
    "2d_layout": "layout",
}
_TYPES = {  # parts of names, in any case and however they are joined
    "multihop": "multi_hop",
    "singlehop": "single_hop",
    "extraction": "extraction",
    "logic": "logic",
}
INFO_KEYS = ("file_name", "reference_page", "source_type")  # of ViDoSeek's `meta_info` that `info_fields` reads
_UNANSWERABLE = "Not answerable"  # the accepted answer of a question that MMLongBench-Doc's document doesn't answer
_ANSWER_FORMATS = ("Str", "Int", "Float", "List", "None")  # of MMLongBench-Doc
_SLIDE = re.compile(r"page_\d+")  # SlideVQA's columns on the hub
_LINK, _KIND = 2, 3  # indices in a node of HybridQA: [text, [row, column], link or null, "table" or "passage"]


def _page_fields(document: Any, pages: Any, location: RowLocation, document_key: str, pages_key: str) -> dict[str, Any]:
    """Metadata: `document`, `pages` (from 1, each once, in the row's order) and `supporting` (ids of the pages,
    `data.gold_paths`).

    Args:
      pages: whole numbers, a list of them, or such a list in a string.

    Raises:
      ValueError: the document has no name, or `pages` has another form; names the key.
    """
    if not isinstance(document, str) or not document.strip():
        raise location.error(f"key {document_key!r} is missing or empty; give the document's name")
    numbers: dict[int, None] = {}
    for text in strings(pages, location, pages_key, listed=True):
        number = int(text) if text.strip().isdecimal() else 0
        if number < 1:
            raise location.error(f"key {pages_key!r} must hold numbers of pages, from 1, found {text[:80]!r}")
        numbers[number] = None
    document = document.strip()
    return {
        "document": document,
        "pages": list(numbers),
        "supporting": [page_id(document, number) for number in numbers],
    }


def _source_types(value: Any, location: RowLocation, key: str) -> dict[str, list[str]]:
    """`{"source_type": [..]}` in the words of `SOURCE_TYPES`; other names are kept unchanged. {} if the row has none.

    Args:
      value: a name, a list of names, or such a list in a string.

    Raises:
      ValueError: the value has another form; names the key.
    """
    named = distinct([_SOURCES.get(name.strip().lower(), name) for name in strings(value, location, key, listed=True)])
    return {"source_type": list(named)} if named else {}


def _query_type(value: Any) -> dict[str, str]:
    """`{"type": ..}`: single_hop, multi_hop, extraction or logic, or else the row's own word. {} if the row has none."""
    if not isinstance(value, str) or not value.strip():
        return {}
    plain = value.lower().replace("-", "").replace("_", "").replace(" ", "")
    return {"type": next((name for part, name in _TYPES.items() if part in plain), value.strip())}


def _document_answers(value: Any, location: RowLocation, key: str, *, whole: bool = False) -> tuple[str, ...]:
    """The accepted answers. With `whole`, a list (or a list in a string) is one answer.

    Raises:
      ValueError: there is none; names the key.
    """
    if whole:
        # `[[..], ..]` and `["..", ..]` are several answers; other lists, and a string, are one.
        several = isinstance(value, list) and all(isinstance(item, str) and item.strip()[:1] == "[" for item in value)
        value = [", ".join(strings(item, location, key, listed=True)) for item in (value if several else [value])]
    answers = distinct([answer.strip() for answer in strings(value, location, key)])
    if not answers:
        raise location.error(f"key {key!r} is missing or empty; give the answer")
    return answers


def without(row: Row, keys: Sequence[str]) -> dict[str, Any]:
    """The other values of a row, without empty ones."""
    return {key: value for key, value in row.items() if key not in keys and value not in (None, "", [], "None")}


class ViDoSeek(QuestionFormat):
    """ViDoSeek (arXiv 2502.18017): `{uid, query, reference_answer, meta_info: {file_name, reference_page: [5], source_type,
    query_type}}`, in a list or in `{"examples": [..]}`. VRAG-RL writes SlideVQA and MMLongBench-Doc in this schema.

    `metadata`: `document`, `pages`, `supporting` (`_page_fields`), `type` (from `query_type`), `source_type` (a list), and the
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
            answers=_document_answers(row.get("reference_answer"), location, "reference_answer"),
            metadata=without(row, ("uid", "id", "query", "reference_answer", "meta_info"))
            | info_fields(info, location, "meta_info"),
        )


def info_fields(info: Mapping[str, Any], location: RowLocation, key: str) -> dict[str, Any]:
    """The `metadata` fields of an object like ViDoSeek's `meta_info`, which the row has under `key`."""
    pages = _page_fields(
        info.get("file_name"), info.get("reference_page"), location, f"{key}.file_name", f"{key}.reference_page"
    )
    sources = _source_types(info.get("source_type"), location, f"{key}.source_type")
    return without(info, INFO_KEYS) | _query_type(info.get("query_type")) | sources | pages


class SlideVQA(QuestionFormat):
    """SlideVQA (nttmdlab-nlp/SlideVQA; arXiv 2301.04883), about decks of twenty slides: `{qa_id, deck_name, deck_url,
    image_urls, question, answer, arithmetic_expression, evidence_pages: [3], reasoning_type, answer_type}`. Rows on the hub
    also hold their slides (`page_1`, ..). These are the corpus, so they are left out here.

    `metadata`: `document` (the deck), `pages`, `supporting` (`_page_fields`), `type` (from `reasoning_type`), `page_urls` (the
    slides' `image_urls`), and the other keys of the row.
    """

    def matches(self, row: Row) -> bool:
        return "deck_name" in row and "evidence_pages" in row

    def example(self, row: Row, location: RowLocation) -> Example | None:
        used_keys = ("qa_id", "id", "question", *ANSWER_KEYS, "deck_name", "evidence_pages", "image_urls")
        other_fields = {key: value for key, value in without(row, used_keys).items() if not _SLIDE.fullmatch(key)}
        key = answer_key(row) or "answer"
        urls = {"page_urls": row["image_urls"]} if row.get("image_urls") else {}
        pages = _page_fields(row.get("deck_name"), row.get("evidence_pages"), location, "deck_name", "evidence_pages")
        return Example(
            id=example_id(row, location, ("qa_id", "id")),
            question=question_of(row, location).strip(),
            answers=_document_answers(row.get(key), location, key),
            metadata=other_fields | _query_type(row.get("reasoning_type")) | urls | pages,
        )


class MMLongBenchDoc(QuestionFormat):
    """MMLongBench-Doc (mayubo2333/MMLongBench-Doc; arXiv 2407.01523), about long documents, some questions without an answer:
    `{doc_id, doc_type, question, answer, evidence_pages: "[3, 5]", evidence_sources: "['Chart']", answer_format}`. The lists
    may also be JSON lists, and a row may have its own `id`, `golden_answers` and `supporting`.

    `metadata`: `document`, `pages`, `supporting` (`_page_fields`; the row's own values have precedence), `source_type` (a list,
    in the words of `SOURCE_TYPES`), `answerable`, `answer_format`, `doc_type`. An answer that is a list is joined to one
    text, in order.
    """

    def matches(self, row: Row) -> bool:
        return "doc_id" in row and "evidence_pages" in row

    def example(self, row: Row, location: RowLocation) -> Example | None:
        key = answer_key(row) or "answer"
        kind = row.get("type")
        form = row.get("answer_format") or (kind if kind in _ANSWER_FORMATS else None)
        answers = _document_answers(row.get(key), location, key, whole=form == "List" or isinstance(row.get(key), str))
        pages = _page_fields(row.get("doc_id"), row.get("evidence_pages"), location, "doc_id", "evidence_pages")
        if named := distinct(strings(row.get("supporting"), location, "supporting", listed=True)):
            pages["supporting"] = list(named)
        kind_fields = _query_type(kind) if kind not in _ANSWER_FORMATS else {}
        used_keys = (
            "id",
            "question",
            *ANSWER_KEYS,
            "doc_id",
            "evidence_pages",
            "evidence_sources",
            "supporting",
            "type",
        )
        sources = row.get("evidence_sources") or (kind if isinstance(kind, list) else None)
        return Example(
            id=example_id(row, location),
            question=question_of(row, location).strip(),
            answers=answers,
            metadata={
                **without(row, used_keys),
                **({"answer_format": form} if form else {}),
                **kind_fields,
                **_source_types(sources, location, "evidence_sources"),
                **pages,
                "answerable": _UNANSWERABLE not in answers,
            },
        )


class HybridQa(QuestionFormat):
    """HybridQA (arXiv 2004.07347) and OTT-QA (arXiv 2010.10439), whose answers are in tables and in what they link to:
    `{question_id, question, table_id, "answer-text", question_postag}` of dev.json, and in dev.traced.json `"answer-node":
    [[text, [row, column], "/wiki/..", "passage"], ..]`, where the answer was found: in a table's cell or in a linked passage.

    `metadata`: `supporting` (the table's id), `supporting_passages` (ids of the passages of the nodes), `type` (`table`,
    `passage` or `passage+table`). Rows without an answer (test.json) are left out.
    """

    def matches(self, row: Row) -> bool:
        return "table_id" in row and "question_id" in row and ("answer-text" in row or "question_postag" in row)

    def example(self, row: Row, location: RowLocation) -> Example | None:
        answers = distinct(strings(row.get("answer-text"), location, "answer-text"))
        if not answers:
            return None
        if not isinstance(row["table_id"], str) or not row["table_id"]:
            raise location.error(f"key 'table_id' must be the id of a table, found {str(row['table_id'])[:80]!r}")
        nodes = [_node(node, location) for node in row.get("answer-node") or ()]
        links = distinct([link for kind, link in nodes if kind == "passage" and link])
        metadata: dict[str, Any] = {"supporting": [row["table_id"]]}
        if nodes:
            metadata |= {"supporting_passages": list(links), "type": "+".join(sorted({kind for kind, _ in nodes}))}
        used_keys = ("question_id", "id", "question", "table_id", "answer-text", "answer-node")
        return Example(
            id=example_id(row, location, ("question_id", "id")),
            question=question_of(row, location).strip(),
            answers=answers,
            metadata={key: value for key, value in row.items() if key not in used_keys} | metadata,
        )


def _node(node: Any, location: RowLocation) -> tuple[str, str | None]:
    if not isinstance(node, list) or len(node) <= _KIND or not isinstance(node[_KIND], str):
        raise location.error(
            f"key 'answer-node' must hold [text, [row, column], link, kind] each, found {str(node)[:80]!r}"
        )
    return node[_KIND], node[_LINK]


class OpenWikiTable(QuestionFormat):
    """Open-WikiTable (arXiv 2305.07288), about all tables, each with its SQL: `{question_id, original_table_id, question, sql,
    answer: [..], hard_positive_idx: [..], positive_idx, negative_idx, dataset}` of train.json, valid.json and test.json, rows
    or pandas' columns.

    Several items of `answer` are joined with commas to one answer. `metadata`: `supporting` (ids of the pieces of
    splitted_tables.json that hold the whole answer, from `hard_positive_idx`), and `original_table_id`, `sql` and `dataset`,
    unchanged.
    """

    def matches(self, row: Row) -> bool:
        return "hard_positive_idx" in row and "original_table_id" in row

    def example(self, row: Row, location: RowLocation) -> Example | None:
        answer = ", ".join(distinct(strings(row.get("answer"), location, "answer")))
        if not answer:
            raise location.error("key 'answer' is missing or empty; give the answer")
        used_keys = (
            "question_id",
            "id",
            "question",
            "answer",
            "hard_positive_idx",
            "positive_idx",
            "negative_idx",
            "index",
        )
        return Example(
            id=example_id(row, location, ("question_id", "id")),
            question=question_of(row, location).strip(),
            answers=(answer,),
            metadata={key: value for key, value in row.items() if key not in used_keys}
            | {"supporting": list(distinct(strings(row.get("hard_positive_idx"), location, "hard_positive_idx")))},
        )
