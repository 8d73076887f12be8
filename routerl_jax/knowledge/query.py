"""Queries of a knowledge base: a text, a picture, or both; optionally with the user's question behind it and the picture's
URL."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

from routerl_jax.core.text import replace_surrogates
from routerl_jax.core.types import Query, TextAndImage
from routerl_jax.models.images import image_digest

_BESIDE = ("question", "url")  # further fields of a query


def query_text(query: Query) -> str:
    """The text of a query; "" for a picture alone."""
    return query if isinstance(query, str) else query.text or ""


def query_image(query: Query) -> str:
    """The digest of a query's picture; "" if it has none."""
    return "" if isinstance(query, str) or query.image is None else image_digest(query.image)


def query_question(query: Query) -> str:
    """The user's question behind a query; "" if it has none."""
    return "" if isinstance(query, str) else query.question


def query_url(query: Query) -> str:
    """The web address of a query's picture; "" if it has none."""
    return "" if isinstance(query, str) else query.url


def query_key(query: Query) -> str:
    """A string that identifies a query: the text, and if there are any, the digest of the picture, the user's question and the
    picture's URL."""
    parts = {"image": query_image(query), "question": query_question(query), "url": query_url(query)}
    return query_text(query) + "".join(f"\0{name}:{value}" for name, value in parts.items() if value)


def with_question(text: str, question: str) -> Query:
    """A query of a text, with the user's question behind it."""
    return TextAndImage(text=text, question=question) if question.strip() else text


def as_read(query: Query, reads: Collection[str]) -> Query:
    """The query without the user's question and the picture's URL, unless the knowledge base reads these. Otherwise equal
    searches would have different keys."""
    if isinstance(query, str):
        return query
    return _simplified(dataclasses.replace(query, **{key: "" for key in _BESIDE if key not in reads}))


def _simplified(query: TextAndImage) -> Query:
    """The query as a string if it is a text alone."""
    alone = query.image is None and not any(getattr(query, key) for key in _BESIDE)
    return query.text or "" if alone else query


def with_picture(text: str, images: Sequence[Any]) -> Query:
    """A query of a text and the first of a question's pictures; of the text alone if there are none."""
    return TextAndImage(text=text, image=images[0]) if images else text


def is_blank(query: Query) -> bool:
    """Whether a query is blank: it has no picture, no URL of one, and no text but white space."""
    return not query_text(query).strip() and (isinstance(query, str) or (query.image is None and not query.url.strip()))


def checked_query(query: object, number: int, reads: Collection[str], name: str) -> Query:
    """Checks a query for a knowledge base and reduces it to the parts that it `reads`. A text alone becomes a string.

    Halves of surrogate pairs, which JSON may contain and no encoder reads, become question marks.

    Raises:
      ValueError: the query is no query, or has a text or a picture that the knowledge base does not read.
    """
    if isinstance(query, str):
        query = TextAndImage(text=query)
    elif not isinstance(query, TextAndImage):
        raise ValueError(f"query {number} is of type {type(query).__name__}, expected a string or a TextAndImage")
    extra_fields = {key: getattr(query, key) for key in _BESIDE if key in reads}
    for key, value in extra_fields.items():
        if not isinstance(value, str):
            raise ValueError(f"query {number} has a {key} of type {type(value).__name__}, expected a string")
    text, image = replace_surrogates(query.text or ""), query.image
    if image is not None and "image" not in reads:
        raise ValueError(f"query {number} has a picture, but knowledge base {name!r} is searched by text alone")
    if text.strip() and "text" not in reads:
        raise ValueError(f"query {number} has a text, but knowledge base {name!r} is searched by pictures alone")
    extra_fields = {key: replace_surrogates(value) for key, value in extra_fields.items()}
    return _simplified(TextAndImage(text=text or None, image=image, **extra_fields))
