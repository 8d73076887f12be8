"""The interface of formats of question files, and the fields that several formats share."""

from __future__ import annotations

import abc
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from routerl_jax.core.registry import Registry
from routerl_jax.core.rows import RowLocation
from routerl_jax.core.types import Example, Passage
from routerl_jax.data.pictures import check_picture, picture_beside

Row = Mapping[str, Any]

ANSWER_KEYS = ("golden_answers", "answers", "answer")  # a row's possible keys of its accepted answers
URL_KEYS = ("image_urls", "image_url")  # a row's possible keys of the URLs of its pictures
SEARCH_KINDS = ("search_free", "search_required")  # FVQA's labels: whether a question needs a search


class QuestionFormat(abc.ABC):
    """The form in which one data set writes a question, its answers and the passages that come with it.

    `example` puts these keys into `metadata`, if the data set has them:

      `type`, `level`: as in the data set.
      `supporting`: ids of the gold passages, in the corpus that `launch.make_corpus` makes of the file.
      `supporting_passages`: a list of `{id, title, text}`.
      `supporting_facts`: a list of `[title, sentence]`; sentences are counted from 0.
      `decomposition`: a list of `{question, answer, support}`; `support` is an id.
      `evidence_triples`.
      `kind`: one of `SEARCH_KINDS`.
      `options`, `correct_option`: the choices of a multiple-choice question. They are not shown to the policy.
      `golden_query`: the query of a search that finds the answer.
      `image_urls`: a list of strings, the URLs of the question's pictures, in the row's order. Image searches that need a URL
        use them.

    All other keys of a row are kept under their own names, except for distractors.

    A URL is never fetched. So a row with only URLs gives an example without `images`. `FILE[pictures]` leaves such rows out, as
    well as rows whose picture is missing or can't be read, and counts them. Without `[pictures]` a missing or unreadable
    picture is an error.
    """

    def parts(self, row: Row, location: RowLocation) -> Sequence[Row]:
        """The row, split into rows of one question each. Most data sets have one question per row."""
        return (row,)

    @abc.abstractmethod
    def matches(self, row: Row) -> bool:
        """True if a row has the keys that distinguish this format from others."""

    @abc.abstractmethod
    def example(self, row: Row, location: RowLocation) -> Example | None:
        """The question; None for a row that is left out because it has no answer.

        Raises:
          ValueError: names file, row and key.
        """

    def passages(self, row: Row, location: RowLocation) -> list[Passage]:
        """The passages of the row, gold passages and distractors, with ids of `passage_id`."""
        return []


FORMATS: Registry[QuestionFormat] = Registry("question format")


def passage_id(title: str, text: str) -> str:
    """The id of a passage without an id: a digest of title and text. So equal passages have the same id."""
    return hashlib.blake2b(f"{title}\n{text}".encode(), digest_size=8).hexdigest()


def passage(title: str, text: str) -> Passage:
    """A passage whose id is a digest of its content."""
    return Passage(id=passage_id(title, text), title=title, text=text)


def with_metadata(row: Row) -> dict[str, Any]:
    """The row, joined with the values that FlashRAG keeps under `metadata`. The row's own keys have precedence."""
    inner = row.get("metadata")
    outer = {key: value for key, value in row.items() if key != "metadata"}
    return {**inner, **outer} if isinstance(inner, Mapping) else dict(row)


def question_of(row: Row, location: RowLocation, key: str = "question") -> str:
    """The question; ValueError if there is none."""
    question = row.get(key)
    if not isinstance(question, str) or not question.strip():
        raise location.error(f"key {key!r} is missing or empty (keys: {', '.join(map(str, row)) or 'none'})")
    return question


def strings(value: Any, location: RowLocation, key: str) -> list[str]:
    """A string or a list of strings as a list; None is an empty one. ValueError for anything else."""
    if value is None:
        return []
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(item, str) for item in values):
        raise location.error(f"key {key!r} must be a string or a list of strings")
    return values


def json_strings(value: Any, location: RowLocation, key: str, *, single: bool = False) -> list[str]:
    """A list of strings, given as a list or as a string with JSON (PopQA). ValueError for anything else. With `single`, a
    string that doesn't begin like a list is a list of one item."""
    if isinstance(value, str) and not (single and value.strip()[:1] != "["):
        try:
            value = json.loads(value) if value.strip() else []
        except json.JSONDecodeError as error:
            raise location.error(
                f"key {key!r} should hold a JSON list of strings ({error.msg}), found {value!r}"
            ) from error
        if isinstance(value, str):
            raise location.error(f"key {key!r} should hold a JSON list of strings, found the string {value!r}")
    return strings(value, location, key)


def texts(value: Any, location: RowLocation, key: str) -> list[str]:
    """A string, a number, or lists of these, as a list of strings. None is left out. ValueError for anything else."""
    if isinstance(value, list):
        return [text for item in value for text in texts(item, location, key)]
    if value is None:
        return []
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise location.error(f"key {key!r} must be a string, a number or a list of these, found {str(value)[:80]!r}")
    return [str(value)]


def images_of(row: Row, location: RowLocation, key: str = "", folders: Sequence[str] = ("images",)) -> tuple[Any, ...]:
    """The pictures under `key`: paths of existing files, `data:` URIs, bytes. URLs are ignored (see `image_urls`).

    Args:
      key: the row's key; "": `images` (a list) or `image` (one).
      folders: directories beside the file that are searched for paths.

    Raises:
      ValueError: the value is something else.
      MissingPictureError: a file does not exist, or bytes or a URI are no picture.
    """
    key = key or ("images" if row.get("images") else "image")
    images: list[Any] = []
    for item in _pictures(row, key, location):
        name = (item.get("bytes") or item.get("path")) if isinstance(item, Mapping) else item
        if isinstance(name, bytes) or (isinstance(name, str) and name.startswith("data:")):
            check_picture(name, location, key)
            images.append(name)
        elif not isinstance(name, str) or not name:
            raise location.error(f"key {key!r} must be a path or a list of paths, found {str(item)[:80]!r}")
        elif not _is_url(name):
            instead = f"take {key!r} out of the row, or leave out such rows: {location.path}[pictures]"
            images.append(picture_beside(name, location, key, instead, folders))
    return tuple(images)


def image_urls(row: Row, location: RowLocation, keys: Sequence[str] = URL_KEYS) -> dict[str, Any]:
    """`{"image_urls": [..]}` of a row: the values under `keys`, or else the URLs among its pictures. {} if there are none.

    Raises:
      ValueError: a value under `keys` is no URL.
    """
    all_urls: list[str] = []
    for key in keys:
        urls = json_strings(row.get(key), location, key, single=True)
        if wrong := next((url for url in urls if url and not _is_url(url)), None):
            raise location.error(
                f"key {key!r} must hold URLs, found {wrong[:80]!r}; put paths under 'image' or 'images'"
            )
        all_urls += urls
    for key in ("images", "image"):
        for item in _pictures(row, key, location):
            name = item.get("path") if isinstance(item, Mapping) and not item.get("bytes") else item
            if isinstance(name, str) and _is_url(name):
                all_urls.append(name)
    urls = list(distinct(all_urls))
    return {"image_urls": urls} if urls else {}


def _is_url(name: str) -> bool:
    return "://" in name and not name.startswith("data:")


def _pictures(row: Row, key: str, location: RowLocation) -> list[Any]:
    """The values under a key for pictures, as a list."""
    value = row.get(key)
    items = [value] if isinstance(value, str | bytes | Mapping) else value or []
    if not isinstance(items, list):
        raise location.error(f"key {key!r} must be a path or a list of paths")
    # A column of the hub has its struct even in rows without a picture.
    return [item for item in items if not isinstance(item, Mapping) or item.get("bytes") or item.get("path")]


def search_kind(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata, with `category` renamed to `kind` if it says whether the question needs a search (`SEARCH_KINDS`)."""
    label = str(metadata.get("category", "")).strip().lower().replace("-", "_").replace(" ", "_")
    if label not in SEARCH_KINDS:
        return dict(metadata)
    return {**{key: value for key, value in metadata.items() if key != "category"}, "kind": label}


def distinct(*parts: Sequence[str]) -> tuple[str, ...]:
    """All strings in order, each once, without blank ones."""
    return tuple(dict.fromkeys(text for part in parts for text in part if text.strip()))


def example_id(row: Row, location: RowLocation, keys: Sequence[str] = ("id", "_id")) -> str:
    """The value of the first of these keys that the row has, or else the row's number in its file."""
    return str(next((row[key] for key in keys if row.get(key) is not None), location.number))


def gold_fields(passages: Sequence[Passage]) -> dict[str, Any]:
    """The `metadata` fields of gold passages."""
    return {
        "supporting": [item.id for item in passages],
        "supporting_passages": [{"id": item.id, "title": item.title, "text": item.text} for item in passages],
    }
