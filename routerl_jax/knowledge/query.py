"""What is asked of a knowledge base: a text, a picture, or both; and perhaps the user's question that it is asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

from routerl_jax.core.text import whole_letters
from routerl_jax.core.types import Query, TextAndImage
from routerl_jax.models.images import image_digest


def query_text(query: Query) -> str:
    """The words of a query; "" where it is a picture alone."""
    return query if isinstance(query, str) else query.text or ""


def query_image(query: Query) -> str:
    """The digest of a query's picture; "" where it has none."""
    return "" if isinstance(query, str) or query.image is None else image_digest(query.image)


def query_question(query: Query) -> str:
    """The user's question that a query is asked for; "" where it carries none."""
    return "" if isinstance(query, str) else query.question


def query_key(query: Query) -> str:
    """What two equal queries have in common, as one string: the text, and the digest of the picture and the user's question
    where it carries them."""
    image, question = query_image(query), query_question(query)
    key = f"{query_text(query)}\0image:{image}" if image else query_text(query)
    return f"{key}\0question:{question}" if question else key


def with_question(text: str, question: str) -> Query:
    """A text that is searched for on behalf of a user's question."""
    return TextAndImage(text=text, question=question) if question.strip() else text


def as_read(query: Query, reads: Collection[str]) -> Query:
    """The query without the user's question, where who is asked does not read it: what is found does not depend on it then."""
    if isinstance(query, str) or not query.question or "question" in reads:
        return query
    return query.text or "" if query.image is None else dataclasses.replace(query, question="")


def with_picture(text: str, images: Sequence[Any]) -> Query:
    """A text and the first of a question's pictures; the text alone where it has none."""
    return TextAndImage(text=text, image=images[0]) if images else text


def is_blank(query: Query) -> bool:
    """Nothing is asked: no picture, and no text but white space."""
    return not query_text(query).strip() and (isinstance(query, str) or query.image is None)


def checked_query(query: object, number: int, reads: Collection[str], name: str) -> Query:
    """The query as a knowledge base of that name takes it, which reads "text", "image" or both: texts alone as strings. The
    user's question is left out where it does not read "question", too.

    Halves of surrogate pairs, which JSON may hold and no encoder reads, become question marks.

    Raises:
      ValueError: something else, or a text or a picture where the knowledge base reads none.
    """
    if isinstance(query, str):
        text, image, question = query, None, ""
    elif isinstance(query, TextAndImage):
        text, image, question = query.text or "", query.image, query.question if "question" in reads else ""
        if not isinstance(question, str):
            raise ValueError(f"query {number} has a question of type {type(question).__name__}, expected a string")
    else:
        raise ValueError(f"query {number} is of type {type(query).__name__}, expected a string or a TextAndImage")
    text = whole_letters(text)
    if image is not None and "image" not in reads:
        raise ValueError(f"query {number} has a picture, but knowledge base {name!r} is searched by text alone")
    if text.strip() and "text" not in reads:
        raise ValueError(f"query {number} has a text, but knowledge base {name!r} is searched by pictures alone")
    question = whole_letters(question)
    if image is None and not question:
        return text
    return TextAndImage(text=text or None, image=image, question=question)
