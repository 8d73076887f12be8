"""Requests to our server of knowledge bases, checked, and its replies. `knowledge.client.schema` describes their form."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from routerl_jax.core.config import Positive, Size, checked
from routerl_jax.core.types import Query, TextAndImage
from routerl_jax.knowledge.base import MOST_PASSAGES, TimedResults, with_question
from routerl_jax.knowledge.client.schema import passage_json
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


def reply_json(results: TimedResults, *, seconds: float, cost: float, mode: str, images: bool = True) -> dict[str, Any]:
    """The reply to a search. `seconds` is the time of the whole request, with waiting and other queries."""
    rows = [[passage_json(passage, images=images) for passage in passages] for passages in results]
    walks = {"walks": [walk._asdict() for walk in results.walks]} if any(map(any, results.walks)) else {}
    return {"results": rows, "query_seconds": results.seconds, **walks, "seconds": seconds, "cost": cost, "mode": mode}
