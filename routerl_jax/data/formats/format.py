"""What a format of question files is, and the fields that several of them share."""

from __future__ import annotations

import abc
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from routerl_jax.core.registry import Registry
from routerl_jax.core.rows import Place
from routerl_jax.core.types import Example, Passage
from routerl_jax.data.pictures import picture_beside

Row = Mapping[str, Any]

ANSWER_KEYS = ("golden_answers", "answers", "answer")  # what rows call their accepted answers


class QuestionFormat(abc.ABC):
    """How one data set writes a question, its answers and the passages that come with it.

    What `example` puts into `metadata`, where a data set says it: `type`, `level`, `supporting` (ids of the gold passages in
    the corpus that `launch.make_corpus` makes of the file), `supporting_passages` (`{id, title, text}` each),
    `supporting_facts` (`[title, sentence]`, sentences from 0), `decomposition` (`{question, answer, support}` each, `support`
    an id), `evidence_triples`. What else a row holds is kept under its own key, distractors excepted.
    """

    @abc.abstractmethod
    def holds(self, row: Row) -> bool:
        """True if a row has the keys that tell this format from others."""

    @abc.abstractmethod
    def example(self, row: Row, place: Place) -> Example | None:
        """The question; None for a row that is left out, as it has no answer.

        Raises:
          ValueError: names file, row and key.
        """

    def passages(self, row: Row, place: Place) -> list[Passage]:
        """Passages that the row brings along, gold ones and distractors, with `passage_id`s."""
        return []


FORMATS: Registry[QuestionFormat] = Registry("question format")


def passage_id(title: str, text: str) -> str:
    """The id of a passage that has none of its own: a digest of title and text, so that equal passages are one."""
    return hashlib.blake2b(f"{title}\n{text}".encode(), digest_size=8).hexdigest()


def passage(title: str, text: str) -> Passage:
    """A passage that is known by its content."""
    return Passage(id=passage_id(title, text), title=title, text=text)


def with_metadata(row: Row) -> dict[str, Any]:
    """The row, with what FlashRAG keeps under `metadata` beside its other keys, which go before."""
    inner = row.get("metadata")
    own = {key: value for key, value in row.items() if key != "metadata"}
    return {**inner, **own} if isinstance(inner, Mapping) else dict(row)


def question_of(row: Row, place: Place, key: str = "question") -> str:
    """The question; ValueError if there is none."""
    question = row.get(key)
    if not isinstance(question, str) or not question.strip():
        raise place.error(f"key {key!r} is missing or empty")
    return question


def strings(value: Any, place: Place, key: str) -> list[str]:
    """A string or a list of strings as a list; None is an empty one. ValueError for anything else."""
    if value is None:
        return []
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(item, str) for item in values):
        raise place.error(f"key {key!r} must be a string or a list of strings")
    return values


def json_strings(value: Any, place: Place, key: str) -> list[str]:
    """A list of strings that may be written as JSON in a string (PopQA); ValueError where it is neither."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else []
        except json.JSONDecodeError as error:
            raise place.error(
                f"key {key!r} should hold a JSON list of strings ({error.msg}), found {value!r}"
            ) from error
        if isinstance(value, str):
            raise place.error(f"key {key!r} should hold a JSON list of strings, found the string {value!r}")
    return strings(value, place, key)


def images_of(row: Row, place: Place) -> tuple[Any, ...]:
    """The pictures under `images` (a list) or `image` (one): paths that were found, `data:` URIs, bytes. URLs are left alone.

    Raises:
      ValueError: something else is there, or a file that is not to be found.
    """
    key = "images" if row.get("images") else "image"
    given = row.get(key)
    if isinstance(given, Mapping):  # the hub's column type
        given = [given]
    names = [given] if isinstance(given, str) else given or []
    if not isinstance(names, list):
        raise place.error(f"key {key!r} must be a path or a list of paths")
    found: list[Any] = []
    for item in names:
        name = (item.get("bytes") or item.get("path")) if isinstance(item, Mapping) else item
        if isinstance(name, bytes):
            found.append(name)
        elif not isinstance(name, str) or not name:
            raise place.error(f"key {key!r} must be a path or a list of paths, found {str(item)[:80]!r}")
        elif name.startswith("data:"):
            found.append(name)
        elif "://" not in name:
            instead = f"take {key!r} out of the row, or leave out such rows: {place.path}[pictures]"
            found.append(picture_beside(name, place, instead))
    return tuple(found)


def distinct(*parts: Sequence[str]) -> tuple[str, ...]:
    """All strings in their order, each once, blank ones left out."""
    return tuple(dict.fromkeys(text for part in parts for text in part if text.strip()))


def example_id(row: Row, place: Place, keys: Sequence[str] = ("id", "_id")) -> str:
    """The first of these keys that is there, or else the row's number in its file."""
    return str(next((row[key] for key in keys if row.get(key) is not None), place.number))


def gold_fields(passages: Sequence[Passage]) -> dict[str, Any]:
    """Gold passages as `metadata` has them."""
    return {
        "supporting": [item.id for item in passages],
        "supporting_passages": [{"id": item.id, "title": item.title, "text": item.text} for item in passages],
    }
