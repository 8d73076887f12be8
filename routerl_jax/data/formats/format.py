"""The interface of formats of question files, and the fields that several formats share."""

from __future__ import annotations

import abc
import ast
import contextlib
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from routerl_jax.core.registry import Registry
from routerl_jax.core.rows import RowLocation
from routerl_jax.core.types import Example, Passage
from routerl_jax.data.pictures import check_picture, picture_beside

Row = Mapping[str, Any]

ANSWER_KEYS = ("golden_answers", "answers", "answer")  # a row's possible keys of its accepted answers
URL_KEYS = ("image_urls", "image_url")  # a row's possible keys of the URLs of its pictures
_LITERAL = r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\""  # a string of Python
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


def strings(value: Any, location: RowLocation, key: str, *, listed: bool = False) -> list[str]:
    """The texts of a value: a string, a number, or lists of these; null is left out, and whole numbers have no `.0`.

    A list in a string is read as a list: JSON, or as Python, pandas and numpy write it (`["a", "b"]`, `['a', 'b']`,
    `['a' 'b']`). A text that only may be one, such as `[4, 6]`, is an error, except as the item of a list, where it is a text.

    Args:
      listed: the key always holds a list, so `[4, 6]` in a string is one.

    Raises:
      ValueError: something else; names file, row, key and the fix.
    """
    if isinstance(value, str):
        found = _list_in(value, location, key, listed)
        return [value] if found is None else _flat(found, location, key)
    if isinstance(value, list | tuple):
        items = [(item, _list_in(item, location, key, None) if isinstance(item, str) else None) for item in value]
        return [text for item, found in items for text in _flat(item if found is None else found, location, key)]
    return _flat(value, location, key)


def _flat(value: Any, location: RowLocation, key: str) -> list[str]:
    if isinstance(value, list | tuple):
        return [text for item in value for text in _flat(item, location, key)]
    if value is None or value != value:  # pandas writes NaN for null
        return []
    if isinstance(value, bool) or not isinstance(value, str | int | float) or value in (math.inf, -math.inf):
        raise location.error(f"key {key!r} must be a string, a number or a list of these, found {str(value)[:80]!r}")
    return [str(int(value) if isinstance(value, float) and value.is_integer() else value)]


def _list_in(text: str, location: RowLocation, key: str, listed: bool | None) -> list[Any] | None:
    """The list in a string; None for a string that is no list, and for one that may be a text if `listed` is None."""
    plain = text.strip()
    quoted = re.match(r"\[\s*(?:['\"\[{]|\w*\.?\w+\(\[?['\"]|\])|[({]\s*['\"]|array\(\s*\[|\"\[\s*\\\"", plain)
    if not quoted and not (plain[:1] == "[" and (listed or plain[-1:] == "]")):
        return None
    try:
        value = unpacked(plain)
    except ValueError as error:
        value = error
    if isinstance(value, list) and (quoted or listed):
        return value
    no_list = isinstance(value, ValueError) and (plain[:1] != "[" or not (quoted or listed or "," in plain))
    if listed is None or no_list:  # such as "('Heroes') and Low" or "[Fe/H]"
        return None
    if isinstance(value, Mapping):
        raise location.error(f"key {key!r} holds an object in a string: {plain[:80]!r}. Give its texts as a list")
    why = f" ({value})" if isinstance(value, ValueError) else ""
    raise location.error(
        f"key {key!r} may be a list in a string: {plain[:80]!r}{why}. Write it as a list: each text as an item, or, for "
        f"one text with these brackets, this text as the only item: {json.dumps([plain[:80]], ensure_ascii=False)}"
    )


def unpacked(text: str) -> Any:
    """The list or object that a string holds: JSON, or what `str` makes of a list in Python, pandas and numpy.

    Raises:
      ValueError: it is none of these, was shortened by numpy (`...`), or holds half of a surrogate pair.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        try:
            if not re.search(r"['\"]", text):  # numpy's numbers
                text = re.sub(r"(?<=\d)\.?\s+(?=[-\d])", ",", text)
            value = _evaluated(ast.parse(text, mode="eval").body, text)
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
            raise ValueError("it can't be read as JSON or as a list of Python") from error
    if isinstance(value, str) and value[:1] in ("[", "{"):  # written as JSON twice
        return unpacked(value)
    if not isinstance(value, list | dict):
        raise ValueError("it is neither a list nor an object")
    if "\\" in text:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    return value


def _evaluated(node: ast.AST, text: str) -> Any:
    """The value of literals, and of the calls in which numpy packs them: `array([..], dtype=object)`, `np.str_('a')`."""
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return [value for item in node.elts for value in _items(item, text)]
    if isinstance(node, ast.Dict):
        return {ast.literal_eval(key or node): _evaluated(value, text) for key, value in zip(node.keys, node.values)}
    if isinstance(node, ast.Call) and node.args:
        return _evaluated(node.args[0], text)
    if isinstance(node, ast.Name) and node.id in ("nan", "null", "true", "false"):
        return {"true": True, "false": False}.get(node.id)
    value = ast.literal_eval(node)
    if value is Ellipsis:
        raise ValueError("numpy left out items")
    return value


def _items(node: ast.AST, text: str) -> list[Any]:
    """The value of an item of a list; numpy's strings without commas between them, which Python joins, are several."""
    value = _evaluated(node, text)
    if isinstance(node, ast.Constant) and isinstance(value, str):
        parts = re.findall(_LITERAL, ast.get_source_segment(text, node) or "")
        return [ast.literal_eval(part) for part in parts] if len(parts) > 1 else [value]
    return [value]


PACKED = (  # keys that hold lists or objects, which files of cells, and some of JSON, have in strings
    *("metadata", "reward_model", "extra_info", "prompt", "meta_info", "paragraphs", "contexts", "context"),
    *("supporting", "supporting_titles", "supporting_passages", "supporting_facts", "decomposition", "options"),
    *("question_decomposition", "evidences", "evidence_triples", "answer_eval", "answer-node"),
)


def unpacked_row(row: Row) -> dict[str, Any]:
    """The row with the lists and objects that strings under `PACKED` hold. Other strings stay, for its format to judge."""
    result = dict(row)
    for key in PACKED:
        if isinstance(value := row.get(key), str) and value.strip()[:1] in ("[", "{"):
            with contextlib.suppress(ValueError):
                result[key] = unpacked(value)
    return result


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


def image_urls(row: Row, location: RowLocation) -> dict[str, Any]:
    """`{"image_urls": [..]}` of a row: the values under `URL_KEYS`, or else the URLs among its pictures. {} if there are none.

    Raises:
      ValueError: a value under `URL_KEYS` is no URL.
    """
    all_urls: list[str] = []
    for key in URL_KEYS:
        urls = strings(row.get(key), location, key, listed=True)
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


def answer_key(row: Row) -> str | None:
    """The first of `ANSWER_KEYS` under which the row has something; 0 is an answer."""
    return next((key for key in ANSWER_KEYS if row.get(key) not in (None, "", [])), None)


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
