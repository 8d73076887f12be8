"""Questions in text: plain rows (FlashRAG's), and the multi-hop data sets whose rows hold their passages."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Mapping
from typing import Any

from routerl_jax.core.rows import RowLocation, read_rows
from routerl_jax.core.types import Example, Passage
from routerl_jax.data.formats.format import (
    ANSWER_KEYS,
    URL_KEYS,
    QuestionFormat,
    Row,
    answer_key,
    distinct,
    example_id,
    gold_fields,
    image_urls,
    images_of,
    passage,
    question_of,
    search_kind,
    strings,
    unpacked,
    with_metadata,
)
from routerl_jax.data.pictures import picture_called

_EVERY_ANSWER_KEY = (*ANSWER_KEYS, "gold_ans", "reference")  # HippoRAG's files keep each data set's own key
_ALIASES_FILE = "id_aliases.json"  # of 2WikiMultihopQA, beside the file of questions
_COLUMNS = ("fact", "relation", "entity")  # of 2WikiMultihopQA's triples, on the hub and under FlashRAG's metadata
_POPQA_ALIASES = ("possible_answers", "s_aliases", "o_aliases")


class FlashRag(QuestionFormat):
    """Plain rows, as FlashRAG, NQ-open (`{question, answer: [..]}`) and this project's files have.

    Keys: `question`; `golden_answers` (or `answers`, `answer`; a string or a list); optionally `id` (or `_id`),
    `answer_aliases`, and `image` or `images`.

    Pictures are paths (beside the file, or in `images` beside it), `data:` URIs or URLs. URLs go to `metadata["image_urls"]`,
    like those under `image_urls` or `image_url`. If a row has an `image_id` and no picture, its picture is
    `images/IMAGE_ID.jpg` (.png, ..) beside the file, if there is one (InfoSeek, WebQA).

    A row without answers is left out if it has `supporting` (gold passages to retrieve); otherwise it is an error. All other
    keys go to `metadata` unchanged, and so do the values under `metadata`. An exception is `format.search_kind`.
    """

    def matches(self, row: Row) -> bool:
        return True

    def example(self, row: Row, location: RowLocation) -> Example | None:
        question = question_of(row, location)
        key = answer_key(row)
        if key is None and row.get("supporting"):
            return None
        if key is None:
            raise location.error("no answers; give them under 'golden_answers'")
        aliases = row.get("answer_aliases")
        answers = distinct(strings(row[key], location, key))
        if not answers:
            raise location.error(f"key {key!r} holds no answer but blanks")
        images = images_of(row, location)
        if not images and row.get("image_id") and (path := picture_called(str(row["image_id"]), location)):
            images = (path,)
        urls = image_urls(row, location)
        used_keys = (
            "id",
            "_id",
            "question",
            "answer_aliases",
            key,
            *URL_KEYS,
            *(("image", "images") if images else ()),
        )
        other_fields = {name: value for name, value in row.items() if name not in used_keys}
        return Example(
            id=example_id(row, location),
            question=question,
            answers=distinct(answers, strings(aliases, location, "answer_aliases")),
            images=images,
            metadata=_checked_gold(search_kind(with_metadata(other_fields)), location) | urls,
        )


# Keys of gold passages in other formats, with what a row needs beside them to be of that format.
_OF_OTHER_FORMATS = {
    "evidence_pages": "'doc_id' (mmlongbench_doc) or 'deck_name' (slidevqa)",
    "reference_page": "'meta_info' with 'file_name' around it, and 'query' (vidoseek)",
    "hard_positive_idx": "'original_table_id' (open_wikitable)",
    "answer-node": "'table_id' and 'question_id' (hybridqa)",
}
_LISTS = ("supporting_passages", "supporting_facts", "decomposition", "evidence_triples")


def _checked_gold(metadata: dict[str, Any], location: RowLocation) -> dict[str, Any]:
    """The metadata, with the names of gold passages as lists. Raises ValueError for what no score would understand."""
    for key, needed in _OF_OTHER_FORMATS.items():
        if metadata.get(key):
            raise location.error(
                f"key {key!r} names gold passages, but is not read without {needed}; add that, or give the ids of the "
                "passages under 'supporting'"
            )
    for key in ("supporting", "supporting_titles"):
        if metadata.get(key):
            metadata[key] = strings(metadata[key], location, key, listed=True)
    if isinstance(facts := metadata.get("supporting_facts"), dict | str):  # as on the hub
        metadata["supporting_facts"] = _facts(facts, location)
    for key in _LISTS:
        if metadata.get(key) and not isinstance(metadata[key], list):
            raise location.error(f"key {key!r} must be a list, found {str(metadata[key])[:80]!r}")
    return metadata


class HotpotQA(QuestionFormat):
    """HotpotQA (hotpot_dev_distractor_v1.json and its like): `{_id, question, answer, supporting_facts: [[title, number], ..],
    context: [[title, [sentence, ..]], ..], type, level}`.

    `supporting_facts` and `context` may also be dicts of lists (`{title, sent_id}`, `{title, sentences}`), as on the hub and
    under FlashRAG's `metadata`. A row without an answer (the test set) is left out.
    """

    def matches(self, row: Row) -> bool:
        fields = with_metadata(row)
        of_test_set = "_id" in fields and not any(key in fields for key in ANSWER_KEYS)
        return "context" in fields and "evidences" not in fields and ("supporting_facts" in fields or of_test_set)

    def example(self, row: Row, location: RowLocation) -> Example | None:
        fields = with_metadata(row)
        question = question_of(fields, location)
        answers = distinct(*(strings(fields.get(key), location, key) for key in ANSWER_KEYS))
        if not answers:
            return None
        used_keys = (*ANSWER_KEYS, "id", "_id", "question", "context", "metadata", "supporting_facts")
        metadata = {key: value for key, value in fields.items() if key not in used_keys}
        facts = _facts(fields.get("supporting_facts"), location)
        if facts is not None:
            metadata["supporting_facts"] = facts
        if facts is not None and "context" in fields:
            titles = {title for title, _ in facts}
            gold = [item for item in self.passages(row, location) if item.title in titles]
            metadata |= gold_fields(gold)
        return Example(id=example_id(fields, location), question=question, answers=answers, metadata=metadata)

    def passages(self, row: Row, location: RowLocation) -> list[Passage]:
        return [
            passage(title, _joined(sentences))
            for title, sentences in _context(with_metadata(row).get("context"), location)
        ]


def _joined(sentences: list[str]) -> str:
    """Sentences joined to a text. HotpotQA's sentences begin with a blank, 2WikiMultihopQA's don't."""
    text = ""
    for sentence in sentences:
        text += sentence if not text or sentence[:1].isspace() or text[-1:].isspace() else f" {sentence}"
    return text.strip()


def _context(value: Any, location: RowLocation) -> list[tuple[str, list[str]]]:
    """(title, sentences) of each paragraph."""
    value = _from_json(value, "context", location)
    if value is None:
        return []
    if isinstance(value, Mapping):
        key = next((key for key in ("sentences", "content") if key in value), "sentences")
        value = _pairs(value, ("title", key), "context", location)
    if not isinstance(value, list) or not all(
        _is_pair(item) and isinstance(item[1], list) and all(isinstance(text, str) for text in item[1])
        for item in value
    ):
        raise location.error("key 'context' must be a list of [title, [sentence, ..]]")
    return [(title, sentences) for title, sentences in value]


def _facts(value: Any, location: RowLocation) -> list[list[Any]] | None:
    """[title, sentence number] of each supporting sentence; None if the row doesn't have them."""
    value = _from_json(value, "supporting_facts", location)
    if value is None:
        return None
    if isinstance(value, Mapping):
        value = _pairs(value, ("title", "sent_id"), "supporting_facts", location)
    if not isinstance(value, list) or not all(_is_pair(item) and type(item[1]) is int for item in value):
        raise location.error("key 'supporting_facts' must be a list of [title, number of the sentence]")
    return [list(item) for item in value]


def _from_json(value: Any, key: str, location: RowLocation) -> Any:
    """The list or object in a string (`format.unpacked`). A value that is no string is returned unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return unpacked(value)
    except ValueError as error:
        raise location.error(f"key {key!r} is a string that is not JSON, nor a list of Python ({error})") from error


def _pairs(value: Mapping[str, Any], keys: tuple[str, str], key: str, location: RowLocation) -> list[list[Any]]:
    columns = [value.get(name) for name in keys]
    if not all(isinstance(column, list) for column in columns) or len(columns[0] or []) != len(columns[1] or []):
        raise location.error(f"key {key!r} must hold two lists of one length, {keys[0]!r} and {keys[1]!r}")
    return [list(pair) for pair in zip(columns[0] or [], columns[1] or [])]


def _is_pair(item: Any) -> bool:
    return isinstance(item, list | tuple) and len(item) == 2 and isinstance(item[0], str)


class TwoWiki(HotpotQA):
    """2WikiMultihopQA (train.json, dev.json): HotpotQA's keys, `evidences` (`[subject, relation, object]` triples,
    on the hub and in FlashRAG `{fact, relation, entity}` of lists), and `answer_id`, a Wikidata id.

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
        aliases = _aliases(location.path.parent / _ALIASES_FILE).get(str(metadata.get("answer_id")), ())
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
    value = _from_json(value, "evidences", location)
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


class HippoRag(QuestionFormat):
    """`{id?, question, answer, paragraphs: [{title, text, is_supporting?, idx?}]}`; in nq_rear.json the answers are called
    `reference` and the paragraphs `contexts`. A paragraph that does not say `is_supporting` is a gold one, as in HippoRAG."""

    def matches(self, row: Row) -> bool:
        lists = [row.get(key) for key in ("paragraphs", "contexts")]
        return any(isinstance(items, list) and items and isinstance(items[0], dict) for items in lists)

    def example(self, row: Row, location: RowLocation) -> Example | None:
        question = question_of(row, location)
        answers = distinct(*(strings(row.get(key), location, key) for key in (*_EVERY_ANSWER_KEY, "answer_aliases")))
        if not answers:
            raise location.error("no answers; give them under 'answer'")
        used_keys = (*_EVERY_ANSWER_KEY, "answer_aliases", "id", "_id", "question", "paragraphs", "contexts")
        metadata: dict[str, Any] = {key: value for key, value in row.items() if key not in used_keys}
        metadata |= self._gold(_paragraphs(row, location))
        return Example(id=example_id(row, location), question=question, answers=answers, metadata=metadata)

    def passages(self, row: Row, location: RowLocation) -> list[Passage]:
        return [item for item, _ in _paragraphs(row, location).values()]

    @staticmethod
    def _gold(paragraphs: Mapping[int, tuple[Passage, bool | None]]) -> dict[str, Any]:
        """The `metadata` fields of the gold paragraphs; {} if there are no paragraphs."""
        return gold_fields([item for item, gold in paragraphs.values() if gold is not False]) if paragraphs else {}


def _paragraphs(row: Row, location: RowLocation) -> dict[int, tuple[Passage, bool | None]]:
    """Paragraphs by number (`idx`, or the index in the list), each with whether it is gold (None: unknown)."""
    key = "paragraphs" if row.get("paragraphs") is not None else "contexts"
    value = row.get(key)
    if value is None:
        return {}
    if not isinstance(value, list):
        raise location.error(f"key {key!r} must be a list of {{title, text, is_supporting}}")
    by_number: dict[int, tuple[Passage, bool | None]] = {}
    for number, item in enumerate(value):
        if not isinstance(item, dict):
            raise location.error(f"key {key!r}, item {number + 1}: expected {{title, text, is_supporting}}")
        text = next((item[name] for name in ("paragraph_text", "text") if isinstance(item.get(name), str)), None)
        title = item.get("title") or ""
        if text is None or not isinstance(title, str):
            raise location.error(f"key {key!r}, item {number + 1}: 'title' and 'text' must be strings")
        gold = item.get("is_supporting")
        name = number if item.get("idx") is None else item["idx"]
        if name in by_number:
            raise location.error(f"key {key!r}, item {number + 1}: idx {name!r} is that of another item too")
        by_number[name] = (passage(title, text), None if gold is None else bool(gold))
    return by_number


class Musique(HippoRag):
    """MuSiQue (musique_ans_v1.0_train.jsonl and its like): `{id, question, answer, answer_aliases, answerable,
    paragraphs: [{idx, title, paragraph_text, is_supporting}], question_decomposition:
    [{id, question, answer, paragraph_support_idx}]}`.

    Rows with `answerable` false (of MuSiQue-Full, where each repeats an answerable question without its evidence) and rows
    without an answer (the test set) are left out.
    """

    def matches(self, row: Row) -> bool:
        items = row.get("paragraphs")
        is_own_form = isinstance(items, list) and items and isinstance(items[0], dict) and "paragraph_text" in items[0]
        of_test_set = bool(is_own_form) and not any(key in row for key in _EVERY_ANSWER_KEY)
        return "question_decomposition" in row or of_test_set

    def example(self, row: Row, location: RowLocation) -> Example | None:
        question = question_of(row, location)
        answers = distinct(*(strings(row.get(key), location, key) for key in ANSWER_KEYS))
        if row.get("answerable") is False or not answers:
            return None
        answers = distinct(answers, strings(row.get("answer_aliases"), location, "answer_aliases"))
        used_keys = (
            *ANSWER_KEYS,
            "answer_aliases",
            "id",
            "_id",
            "question",
            "paragraphs",
            "question_decomposition",
            "answerable",
        )
        metadata: dict[str, Any] = {key: value for key, value in row.items() if key not in used_keys}
        name = example_id(row, location)
        if "__" in name:  # 2hop, 3hop1, 4hop3, ...
            metadata.setdefault("type", name.split("__")[0])
        by_number = _paragraphs(row, location)
        metadata |= self._gold(by_number)
        if "question_decomposition" in row:
            metadata["decomposition"] = _decomposition(row["question_decomposition"], by_number, location)
        return Example(id=name, question=question, answers=answers, metadata=metadata)


def _decomposition(
    steps: Any, paragraphs: dict[int, tuple[Passage, bool | None]], location: RowLocation
) -> list[dict[str, Any]]:
    """Sub-questions with their answers, each with the id of the paragraph that holds the answer."""
    steps = _from_json(steps, "question_decomposition", location)
    if not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps):
        raise location.error("key 'question_decomposition' must be a list of {question, answer, paragraph_support_idx}")
    result = []
    for step in steps:
        number = step.get("paragraph_support_idx")
        if number is not None and paragraphs and number not in paragraphs:
            raise location.error(f"key 'question_decomposition': there is no paragraph with idx {number!r}")
        support = paragraphs[number][0].id if number is not None and paragraphs else None
        result.append({"question": step.get("question"), "answer": step.get("answer"), "support": support})
    return result


class PopQA(HippoRag):
    """PopQA (popQA.tsv, the hub's rows, HippoRAG's popqa.json): `{id, question, subj, prop, obj, possible_answers,
    s_aliases, o_aliases, s_pop, o_pop, ..}`.

    The accepted answers are `possible_answers`, parsed. HippoRAG's and RouteRAG's readers don't parse them, so there no alias
    ever matches. `type` is the relation.
    """

    def matches(self, row: Row) -> bool:
        return "possible_answers" in row

    def example(self, row: Row, location: RowLocation) -> Example | None:
        question = question_of(row, location)
        aliases = {key: strings(row[key], location, key, listed=True) for key in _POPQA_ALIASES if key in row}
        answers = distinct(aliases.get("possible_answers", ()))
        if not answers:
            raise location.error("key 'possible_answers' holds no answer")
        used_keys = ("id", "_id", "question", "paragraphs", *_POPQA_ALIASES)
        metadata = {key: value for key, value in row.items() if key not in used_keys}
        metadata |= {key: names for key, names in aliases.items() if key != "possible_answers"}
        if "prop" in row:
            metadata.setdefault("type", row["prop"])
        metadata |= self._gold(_paragraphs(row, location))
        return Example(id=example_id(row, location), question=question, answers=answers, metadata=metadata)


class R1Searcher(QuestionFormat):
    """R1-Searcher (stage_1.jsonl, stage_2.jsonl, hotpotqa_500.jsonl): `{idx, question, answer, pred_anses}`: ten earlier
    predictions with each question of stage 1, kept in `metadata`."""

    def matches(self, row: Row) -> bool:
        # earlier attempts, and a field for the next one
        return "idx" in row and ("pred_anses" in row or "gen_text_store" in row)

    def example(self, row: Row, location: RowLocation) -> Example | None:
        question = question_of(row, location)
        answers = distinct(strings(row.get("answer"), location, "answer"))
        if not answers:
            raise location.error("key 'answer' is missing or empty")
        used_keys = ("idx", "question", "answer", "gen_text_store")
        metadata = {key: value for key, value in row.items() if key not in used_keys}
        return Example(id=example_id(row, location, ("idx",)), question=question, answers=answers, metadata=metadata)


class Bamboogle(QuestionFormat):
    """Bamboogle as its authors give it: `{Question, Answer}`, of a .csv file or as JSON."""

    def matches(self, row: Row) -> bool:
        return "Question" in row and "Answer" in row

    def example(self, row: Row, location: RowLocation) -> Example | None:
        question = question_of(row, location, "Question")
        answers = distinct(strings(row.get("Answer"), location, "Answer"))
        if not answers:
            raise location.error("key 'Answer' is missing or empty")
        metadata = {key: value for key, value in row.items() if key and key not in ("id", "Question", "Answer")}
        return Example(id=example_id(row, location), question=question.strip(), answers=answers, metadata=metadata)
