"""What is asked of a knowledge base: a text, a picture, or both; and perhaps the user's question that it is asked for and the
picture's URL."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

from routerl_jax.core.text import whole_letters
from routerl_jax.core.types import Query, TextAndImage
from routerl_jax.models.images import image_digest

_BESIDE = ("question", "url")  # what a query may carry beside what is searched for


def query_text(query: Query) -> str:
    """The words of a query; "" where it is a picture alone."""
    return query if isinstance(query, str) else query.text or ""


def query_image(query: Query) -> str:
    """The digest of a query's picture; "" where it has none."""
    return "" if isinstance(query, str) or query.image is None else image_digest(query.image)


def query_question(query: Query) -> str:
    """The user's question that a query is asked for; "" where it carries none."""
    return "" if isinstance(query, str) else query.question


def query_url(query: Query) -> str:
    """Where a query's picture stands on the web; "" where that is not told."""
    return "" if isinstance(query, str) else query.url


def query_key(query: Query) -> str:
    """What two equal queries have in common, as one string: the text, and the digest of the picture, the user's question and
    the picture's URL where it carries them."""
    parts = {"image": query_image(query), "question": query_question(query), "url": query_url(query)}
    return query_text(query) + "".join(f"\0{name}:{value}" for name, value in parts.items() if value)


def with_question(text: str, question: str) -> Query:
    """A text that is searched for on behalf of a user's question."""
    return TextAndImage(text=text, question=question) if question.strip() else text


def as_read(query: Query, reads: Collection[str]) -> Query:
    """The query without the user's question and the picture's URL, where who is asked does not read them: what is found does
    not depend on them then."""
    if isinstance(query, str):
        return query
    return _plain(dataclasses.replace(query, **{key: "" for key in _BESIDE if key not in reads}))


def _plain(query: TextAndImage) -> Query:
    """A text alone as a string."""
    alone = query.image is None and not any(getattr(query, key) for key in _BESIDE)
    return query.text or "" if alone else query


def with_picture(text: str, images: Sequence[Any]) -> Query:
    """A text and the first of a question's pictures; the text alone where it has none."""
    return TextAndImage(text=text, image=images[0]) if images else text


def is_blank(query: Query) -> bool:
    """Nothing is asked: no picture, no URL of one, and no text but white space."""
    return not query_text(query).strip() and (isinstance(query, str) or (query.image is None and not query.url.strip()))


def checked_query(query: object, number: int, reads: Collection[str], name: str) -> Query:
    """The query as a knowledge base of that name takes it, which reads "text", "image" or both: texts alone as strings. The
    user's question and the picture's URL are left out where it reads no "question" and no "url", too.

    Halves of surrogate pairs, which JSON may hold and no encoder reads, become question marks.

    Raises:
      ValueError: something else, or a text or a picture where the knowledge base reads none.
    """
    if isinstance(query, str):
        query = TextAndImage(text=query)
    elif not isinstance(query, TextAndImage):
        raise ValueError(f"query {number} is of type {type(query).__name__}, expected a string or a TextAndImage")
    beside = {key: getattr(query, key) for key in _BESIDE if key in reads}
    for key, value in beside.items():
        if not isinstance(value, str):
            raise ValueError(f"query {number} has a {key} of type {type(value).__name__}, expected a string")
    text, image = whole_letters(query.text or ""), query.image
    if image is not None and "image" not in reads:
        raise ValueError(f"query {number} has a picture, but knowledge base {name!r} is searched by text alone")
    if text.strip() and "text" not in reads:
        raise ValueError(f"query {number} has a text, but knowledge base {name!r} is searched by pictures alone")
    beside = {key: whole_letters(value) for key, value in beside.items()}
    return _plain(TextAndImage(text=text or None, image=image, **beside))
