"""Our HTTP schema of served knowledge bases: requests, replies and errors; and the documents of other servers as passages.

POST /v1/search   {"queries": ["text", {"text": "..", "image": "data:image/png;base64,.."}], "k": 5, "mode": "default"}
200               {"results": [[{"id", "title", "text", "score", "image"}]], "query_seconds": [0.002],
                   "seconds": 0.01, "cost": 1.0, "mode": "default"}
POST /v1/pictures {"ids": ["slides.pdf#3"], "mode": "default"}      if GET /v1/kbs has "pictures": true
200               {"images": ["data:image/jpeg;base64,.."]}
4xx, 5xx          {"error": {"type": "invalid_request", "message": ".."}}

"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import mimetypes
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from absl import logging

from routerl_jax.core.config import Positive, Size, checked
from routerl_jax.core.text import replace_surrogates
from routerl_jax.core.types import Passage, Query, TextAndImage
from routerl_jax.knowledge.base import MOST_PASSAGES, StageCounts, TimedResults, with_question
from routerl_jax.knowledge.corpus import IDS, title_and_text
from routerl_jax.models.images import image_bytes, is_url
from routerl_jax.services.asgi import Refusal


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class Limits:
    """Limits of one request.

    Attributes:
      body_bytes: most bytes of the body, which includes pictures in base64.
      queries: most queries.
      query_chars: most characters of a query's text.
      k: most passages per query; no more than any search gives (`knowledge.base.MOST_PASSAGES`).
      seconds: most seconds, with the wait; a client may set a shorter time by `X-Timeout-Seconds`.
    """

    body_bytes: Size = 32 << 20
    queries: Size = 1024
    query_chars: Size = 32_768
    k: Size = MOST_PASSAGES
    seconds: Positive = 60.0

    def __post_init__(self) -> None:
        if self.k > MOST_PASSAGES:
            raise ValueError(f"k={self.k} is more than a search gives ({MOST_PASSAGES})")

    def default(self, k: int) -> int:
        """The default number of passages: `k`, or the limit if that is smaller."""
        return min(k, self.k)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchRequest:
    """A checked request. `mode` is None if the client leaves it to the server. `images`: send pictures along."""

    queries: list[Query]
    k: int
    mode: str | None = None
    images: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class PicturesRequest:
    """A checked request for the pictures of passages. `mode` as in a search."""

    ids: list[str]
    mode: str | None = None


def read_request(body: Any, limits: Limits) -> SearchRequest:
    """A search request from parsed JSON. Raises Refusal that names the problem."""
    fields = _checked_fields(body, ("queries", "k", "mode", "images"))
    mode, images = _mode(fields), fields.get("images", True)
    if not isinstance(images, bool):
        raise invalid(f"images={images!r} must be true or false")
    k = read_k(fields.get("k", limits.default(5)), limits)
    return SearchRequest(queries=read_queries(fields.get("queries"), limits), k=k, mode=mode, images=images)


def read_pictures(body: Any, limits: Limits) -> PicturesRequest:
    """A request for pictures from parsed JSON. The limit of queries applies to ids. Raises Refusal."""
    fields = _checked_fields(body, ("ids", "mode"))
    ids = fields.get("ids")
    if not isinstance(ids, list) or not all(isinstance(id, str) for id in ids):
        raise invalid("ids must be a list of strings: the ids of passages that a search gave")
    if len(ids) > limits.queries:
        raise Refusal(413, "too_large", f"{len(ids)} ids in one request; at most {limits.queries}: send several")
    return PicturesRequest(ids=ids, mode=_mode(fields))


def _checked_fields(body: Any, keys: tuple[str, ...]) -> dict[str, Any]:
    fields = read_object(body)
    unknown = sorted(set(fields) - set(keys))
    if unknown:
        raise invalid(f"unknown key {unknown[0]!r}; known: {', '.join(keys)}")
    return fields


def _mode(fields: Mapping[str, Any]) -> str | None:
    mode = fields.get("mode")
    if mode is not None and not isinstance(mode, str):
        raise invalid(f"mode={mode!r} must be a string")
    return mode


def read_object(body: Any) -> dict[str, Any]:
    """The body, which must be a JSON object."""
    if not isinstance(body, dict):
        raise invalid(f"the body must be a JSON object, got {type(body).__name__}")
    return body


def read_k(k: Any, limits: Limits, key: str = "k") -> int:
    """A number of passages between 1 and the limit."""
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise invalid(f"{key}={k!r} must be a whole number of at least 1")
    if k > limits.k:
        raise invalid(f"{key}={k} is more than this server gives ({limits.k})")
    return k


def read_queries(queries: Any, limits: Limits) -> list[Query]:
    """A list of queries within the limits."""
    if not isinstance(queries, list):
        got = "nothing" if queries is None else type(queries).__name__
        raise invalid(f"queries must be a list of strings (or of objects with text and image), got {got}")
    if len(queries) > limits.queries:
        raise Refusal(
            413, "too_large", f"{len(queries)} queries in one request; at most {limits.queries}: send several"
        )
    return [read_query(query, f"queries[{i}]", limits) for i, query in enumerate(queries)]


def read_query(query: Any, where: str, limits: Limits) -> Query:
    """One query: a string, or an object with `text`, `image` (a data URI) or both, and perhaps the user's `question` and the
    picture's `url`."""
    if isinstance(query, str):
        return _checked_text(query, where, limits)
    if not isinstance(query, dict):
        raise invalid(f"{where} must be a string or an object with text and image, got {type(query).__name__}")
    unknown = sorted(set(query) - {"text", "image", "question", "url"})
    if unknown:
        raise invalid(f"{where} has an unknown key {unknown[0]!r}; known: text, image, question, url")
    image, words = query.get("image"), {key: query.get(key) for key in ("text", "question", "url")}
    for key, value in words.items():
        if value is not None and not isinstance(value, str):
            raise invalid(f"{where}.{key} must be a string, got {type(value).__name__}")
        _checked_text(value or "", f"{where}.{key}", limits)
    text, question, url = words["text"], words["question"] or "", words["url"] or ""
    if url and not is_url(url):
        raise invalid(f"{where}.url must begin with http:// or https://")
    if image is None and not url:
        return with_question(text or "", question)
    if image is None:
        return TextAndImage(text=text, question=question, url=url)
    if not isinstance(image, str) or not image.startswith("data:"):  # a path would be read on this machine
        raise invalid(f"{where}.image must be a data URI: data:image/png;base64,...")
    try:
        return TextAndImage(text=text, image=image_bytes(image, f"{where}.image"), question=question, url=url)
    except ValueError as error:
        raise invalid(str(error)) from error


def _checked_text(text: str, where: str, limits: Limits) -> str:
    if len(text) > limits.query_chars:
        raise Refusal(413, "too_large", f"{where} has {len(text)} characters; at most {limits.query_chars}")
    return text


def invalid(message: str) -> Refusal:
    """The refusal of an invalid request."""
    return Refusal(400, "invalid_request", message)


def passage_json(passage: Passage, *, images: bool = True) -> dict[str, Any]:
    """A passage for a reply. Its picture is a data URI, or "" if it can't be read."""
    image = portable_image(passage.image) if images else ""
    return {
        "id": passage.id,
        "title": passage.title,
        "text": passage.text,
        "score": float(passage.score),
        "image": image,
    }


def portable_image(image: str) -> str:
    """A picture's data URI; "" if there is none, or its file is missing."""
    if not image or image.startswith("data:"):
        return image
    try:
        data = image_bytes(image)
    except ValueError:
        return ""
    return data_uri(data, mimetypes.guess_type(image)[0] or "image/png")


def data_uri(data: bytes, kind: str) -> str:
    """Encoded bytes of a media type as a base64 URI."""
    return f"data:{kind};base64,{b64encode(data).decode()}"


class NoValue(ValueError):
    """A passage of a known form, in which a value is missing: null in the place of a text, or a score that is no number."""


def passage_of(fields: Any) -> Passage:
    """The passage that `passage_json` wrote. Raises ValueError if it is no passage, or its picture is no data URI: a path from
    another machine would be read on this one; NoValue if a value is missing."""
    try:
        image = str(fields.get("image") or "")
        if image and not image.startswith("data:"):
            raise ValueError("its image is not a data URI")
        texts = [fields[key] for key in ("id", "title", "text")]
        if any(text is None or isinstance(text, bool | list | dict) for text in texts):
            raise NoValue(f"a passage with a value that is no text: {str(fields)[:200]!r}")
        score = fields["score"]
        if score is None or isinstance(score, bool | list | dict) or not math.isfinite(float(score)):
            raise NoValue(f"a passage with a score that is no finite number: {str(fields)[:200]!r}")
        id, title, text = (replace_surrogates(str(text)) for text in texts)
        return Passage(id=id, title=title, text=text, score=float(score), image=image)
    except NoValue:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"not a passage: {str(fields)[:200]!r} ({error!r})") from error


def reply_json(results: TimedResults, *, seconds: float, cost: float, mode: str, images: bool = True) -> dict[str, Any]:
    """The reply to a search. `seconds` is the time of the whole request, with waiting and other queries."""
    rows = [[passage_json(passage, images=images) for passage in passages] for passages in results]
    walks = {"walks": [walk._asdict() for walk in results.walks]} if any(map(any, results.walks)) else {}
    return {"results": rows, "query_seconds": results.seconds, **walks, "seconds": seconds, "cost": cost, "mode": mode}


TEXT_KEYS = ("text", "content", "contents", "page_content", "snippet", "description")


class Documents:
    """Reads the documents of a server's replies. One that is no passage, or a repetition, is left out: it is counted, and the
    first one is logged. So it harms neither the others nor other queries.

    Args:
      where: the server, for messages.
      counts: its stage `server` counts what is left out.
      read: makes a passage of a document and its rank. Raises ValueError if it is in no known form, NoValue if it is, but a
        value is missing.
    """

    def __init__(self, where: str, counts: StageCounts, read: Callable[[Any, int], Passage]) -> None:
        self._where, self._counts, self._read = where, counts, read
        self._logged = False

    def __call__(self, results: Iterable[Sequence[Any]], k: int) -> list[list[Passage]]:
        """At most k passages for each query. Raises ValueError if no document of the reply is in a known form."""
        answers, read = [], False
        unread: ValueError | None = None
        for documents in results:
            if documents is None:  # in a batch with others
                unread, documents = ValueError("the documents of a query are null"), []
                self._leave_out(unread)
            if not isinstance(documents, list):
                raise ValueError(f"the documents of a query are a JSON {type(documents).__name__}, expected an array")
            passages: dict[tuple[str, ...], Passage] = {}
            for rank, document in enumerate(documents[:k]):
                try:
                    passage = self._read(document, rank)
                    read = True
                    passages.setdefault((passage.id, passage.title, passage.text, passage.image), passage)
                except ValueError as error:
                    unread = unread if isinstance(error, NoValue) else error
                    read |= isinstance(error, NoValue)
                    self._leave_out(error)
            answers.append(list(passages.values()))
        if unread is not None and not read:
            raise unread
        return answers

    def _leave_out(self, error: ValueError) -> None:
        if not self._logged:
            logging.warning("%s: a document is left out, as others of its kind will be: %s", self._where, error)
            self._logged = True
        self._counts.add("server", left_out=1)


def document_passage(item: Any, score: float = 0.0) -> Passage:
    """`{document: {id, title, text or contents}, score}`, or the document alone; a document may be a text.

    Known keys are those of `IDS` and TEXT_KEYS, `score` or `similarity`, and `title`, also under `metadata`. A document without
    an id gets one that depends on its contents alone.

    Args:
      score: where there is none.

    Raises:
      NoValue: it has no text, or a score that is no finite number.
      ValueError: it is in another form, or two keys hold different texts.
    """
    fields = item if isinstance(item, dict) else {"document": item}
    document = fields.get("document", fields)
    if document is None:
        raise NoValue("a document that is null")
    if isinstance(document, str):
        document = {"contents": document}
    if not isinstance(document, dict) or not any(key in document for key in TEXT_KEYS):
        raise ValueError(f"not a document: {str(item)[:200]!r}; it needs one of: {', '.join(TEXT_KEYS)}")
    texts = {key: value for key in TEXT_KEYS if (value := _string(document, key)) is not None}
    image = _string(document, "image") or ""
    image = image if image.startswith("data:") else ""  # a path would be read on this machine
    if not texts and not image:
        raise NoValue(f"a document without a text: {str(item)[:200]!r}")
    about = document.get("metadata")
    title = _string(document, "title") or (_string(about, "title") if isinstance(about, dict) else None) or ""
    if "text" in texts or "contents" not in texts:
        text = next((texts[key] for key in TEXT_KEYS if key in texts and key != "contents"), "")
        title, text = title_and_text(title, text, texts.get("contents"))
    else:
        title, text = title_and_text(title, None, texts["contents"])
    if not (text.strip() or title.strip() or image):
        raise NoValue(f"an empty document: {str(item)[:200]!r}")
    id = next(
        (value for part in (document, fields) for key in (*IDS, "url", "link") if (value := _string(part, key))), ""
    )
    scores = (part.get(key) for part in (fields, document) for key in ("score", "similarity"))
    return Passage(
        id=id or hashlib.sha256(f"{title}\0{text}\0{image}".encode(errors="replace")).hexdigest()[:16],
        title=title,
        text=text,
        score=_finite(next((value for value in scores if value is not None), score)),
        image=image,
    )


def _finite(value: Any) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise NoValue(f"a score that is no finite number: {value!r}")
    return number


def _string(fields: Mapping[str, Any], key: str) -> str | None:
    """The text or number under a key; None if it is absent or null. Raises NoValue for a list, an object or a truth value."""
    value = fields.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise NoValue(f"key {key!r} holds {type(value).__name__}, expected a string")
    return replace_surrogates(str(value))
