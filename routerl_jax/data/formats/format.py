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
from routerl_jax.data.pictures import check_picture, picture_beside

Row = Mapping[str, Any]

ANSWER_KEYS = ("golden_answers", "answers", "answer")  # what rows call their accepted answers
URL_KEYS = ("image_urls", "image_url")  # what rows call the addresses of their pictures
SEARCH_KINDS = ("search_free", "search_required")  # whether a question takes a search: FVQA's labels


class QuestionFormat(abc.ABC):
    """How one data set writes a question, its answers and the passages that come with it.

    What `example` puts into `metadata`, where a data set says it: `type`, `level`, `supporting` (ids of the gold passages in
    the corpus that `launch.make_corpus` makes of the file), `supporting_passages` (`{id, title, text}` each),
    `supporting_facts` (`[title, sentence]`, sentences from 0), `decomposition` (`{question, answer, support}` each, `support`
    an id), `evidence_triples`, `kind` (one of `SEARCH_KINDS`), `options` and `correct_option` (the choices of a multiple-choice
    question, which is asked openly), `golden_query` (what a search for the answer should ask), `image_urls`. What else a row
    holds is kept under its own key, distractors excepted.

    `image_urls` (a list of strings) is where the pictures of the question stand on the web, in the row's order: what an image
    search that wants an address is asked with. A URL is never fetched, so a row that has URLs alone is an example without
    `images`; `FILE[pictures]` leaves it out and counts it, as it does rows whose picture is missing or can't be read. Without
    `[pictures]` a missing or unreadable picture is an error.
    """

    def parts(self, row: Row, place: Place) -> Sequence[Row]:
        """The row as rows of one question each; most data sets have one question to a row."""
        return (row,)

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


def json_strings(value: Any, place: Place, key: str, *, single: bool = False) -> list[str]:
    """A list of strings that may be written as JSON in a string (PopQA); ValueError where it is neither. With `single` a string
    that does not begin as a list is one of one item."""
    if isinstance(value, str) and not (single and value.strip()[:1] != "["):
        try:
            value = json.loads(value) if value.strip() else []
        except json.JSONDecodeError as error:
            raise place.error(
                f"key {key!r} should hold a JSON list of strings ({error.msg}), found {value!r}"
            ) from error
        if isinstance(value, str):
            raise place.error(f"key {key!r} should hold a JSON list of strings, found the string {value!r}")
    return strings(value, place, key)


def texts(value: Any, place: Place, key: str) -> list[str]:
    """A string, a number, or lists of these as strings; None is left out, in lists too. ValueError for anything else."""
    if isinstance(value, list):
        return [text for item in value for text in texts(item, place, key)]
    if value is None:
        return []
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise place.error(f"key {key!r} must be a string, a number or a list of these, found {str(value)[:80]!r}")
    return [str(value)]


def images_of(row: Row, place: Place, key: str = "", folders: Sequence[str] = ("images",)) -> tuple[Any, ...]:
    """The pictures under `key`: paths that were found, `data:` URIs, bytes. URLs are left alone (`image_urls`).

    Args:
      key: ""; `images` (a list) or else `image` (one).
      folders: beside the file, in which paths are looked for.

    Raises:
      ValueError: something else is there.
      MissingPictureError: a file that is not to be found, bytes or a URI that are no picture.
    """
    key = key or ("images" if row.get("images") else "image")
    found: list[Any] = []
    for item in _pictures(row, key, place):
        name = (item.get("bytes") or item.get("path")) if isinstance(item, Mapping) else item
        if isinstance(name, bytes) or (isinstance(name, str) and name.startswith("data:")):
            check_picture(name, place, key)
            found.append(name)
        elif not isinstance(name, str) or not name:
            raise place.error(f"key {key!r} must be a path or a list of paths, found {str(item)[:80]!r}")
        elif not _is_url(name):
            instead = f"take {key!r} out of the row, or leave out such rows: {place.path}[pictures]"
            found.append(picture_beside(name, place, key, instead, folders))
    return tuple(found)


def image_urls(row: Row, place: Place, keys: Sequence[str] = URL_KEYS) -> dict[str, Any]:
    """`{"image_urls": [..]}` of a row: what is under `keys`, else URLs where pictures stand; {} where there are none.

    Raises:
      ValueError: something else than URLs is under `keys`.
    """
    found: list[str] = []
    for key in keys:
        urls = json_strings(row.get(key), place, key, single=True)
        if wrong := next((url for url in urls if url and not _is_url(url)), None):
            raise place.error(f"key {key!r} must hold URLs, found {wrong[:80]!r}; put paths under 'image' or 'images'")
        found += urls
    for key in ("images", "image"):
        for item in _pictures(row, key, place):
            name = item.get("path") if isinstance(item, Mapping) and not item.get("bytes") else item
            if isinstance(name, str) and _is_url(name):
                found.append(name)
    urls = list(distinct(found))
    return {"image_urls": urls} if urls else {}


def _is_url(name: str) -> bool:
    return "://" in name and not name.startswith("data:")


def _pictures(row: Row, key: str, place: Place) -> list[Any]:
    """What stands where pictures do, as a list."""
    given = row.get(key)
    items = [given] if isinstance(given, str | bytes | Mapping) else given or []
    if not isinstance(items, list):
        raise place.error(f"key {key!r} must be a path or a list of paths")
    # The hub's column type is there without a picture too.
    return [item for item in items if not isinstance(item, Mapping) or item.get("bytes") or item.get("path")]


def search_kind(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata in which a `category` that says whether a question takes a search is called `kind`, in `SEARCH_KINDS`' words."""
    label = str(metadata.get("category", "")).strip().lower().replace("-", "_").replace(" ", "_")
    if label not in SEARCH_KINDS:
        return dict(metadata)
    return {**{key: value for key, value in metadata.items() if key != "category"}, "kind": label}


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
