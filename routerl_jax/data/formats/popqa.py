"""PopQA (popQA.tsv, the hub's rows, HippoRAG's popqa.json): aliases are JSON inside of strings."""

from __future__ import annotations

from routerl_jax.core.rows import RowLocation
from routerl_jax.core.types import Example, Passage
from routerl_jax.data.formats.format import (
    FORMATS,
    QuestionFormat,
    Row,
    distinct,
    example_id,
    gold_fields,
    question_of,
    strings,
)
from routerl_jax.data.formats.hipporag import paragraphs

_ALIAS_KEYS = ("possible_answers", "s_aliases", "o_aliases")


class PopQA(QuestionFormat):
    """`{id, question, subj, prop, obj, possible_answers, s_aliases, o_aliases, s_pop, o_pop, ..}`.

    The accepted answers are `possible_answers`, parsed. HippoRAG's and RouteRAG's readers don't parse them, so there no alias
    ever matches. `type` is the relation.
    """

    def matches(self, row: Row) -> bool:
        return "possible_answers" in row

    def example(self, row: Row, location: RowLocation) -> Example | None:
        question = question_of(row, location)
        aliases = {key: strings(row[key], location, key, listed=True) for key in _ALIAS_KEYS if key in row}
        answers = distinct(aliases.get("possible_answers", ()))
        if not answers:
            raise location.error("key 'possible_answers' holds no answer")
        used_keys = ("id", "_id", "question", "paragraphs", *_ALIAS_KEYS)
        metadata = {key: value for key, value in row.items() if key not in used_keys}
        metadata |= {key: names for key, names in aliases.items() if key != "possible_answers"}
        if "prop" in row:
            metadata.setdefault("type", row["prop"])
        by_number = paragraphs(row, location)
        if by_number:
            metadata |= gold_fields([item for item, gold in by_number.values() if gold is not False])
        return Example(id=example_id(row, location), question=question, answers=answers, metadata=metadata)

    def passages(self, row: Row, location: RowLocation) -> list[Passage]:
        return [item for item, _ in paragraphs(row, location).values()]


FORMATS.register("popqa")(PopQA())
