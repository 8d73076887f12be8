"""HybridQA (Chen et al. 2020, arXiv 2004.07347) and OTT-QA (arXiv 2010.10439): answers in tables and in what they link to."""

from __future__ import annotations

from typing import Any

from routerl_jax.core.rows import RowLocation
from routerl_jax.core.types import Example
from routerl_jax.data.formats.format import FORMATS, QuestionFormat, Row, distinct, example_id, question_of, strings

_READ = ("question_id", "id", "question", "table_id", "answer-text", "answer-node")
_LINK, _KIND = 2, 3  # indices in a node: [text, [row, column], link or null, "table" or "passage"]


class HybridQa(QuestionFormat):
    """`{question_id, question, table_id, "answer-text", question_postag}` of dev.json, and in dev.traced.json `"answer-node":
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
        return Example(
            id=example_id(row, location, ("question_id", "id")),
            question=question_of(row, location).strip(),
            answers=answers,
            metadata={key: value for key, value in row.items() if key not in _READ} | metadata,
        )


def _node(node: Any, location: RowLocation) -> tuple[str, str | None]:
    if not isinstance(node, list) or len(node) <= _KIND or not isinstance(node[_KIND], str):
        raise location.error(
            f"key 'answer-node' must hold [text, [row, column], link, kind] each, found {str(node)[:80]!r}"
        )
    return node[_KIND], node[_LINK]


FORMATS.register("hybridqa")(HybridQa())
