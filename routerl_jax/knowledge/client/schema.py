"""Our HTTP schema of served knowledge bases, its passages, and the documents of other servers as passages.

POST /v1/search   {"queries": ["text", {"text": "..", "image": "data:image/png;base64,.."}], "k": 5, "mode": "default"}
200               {"results": [[{"id", "title", "text", "score", "image"}]], "query_seconds": [0.002],
                   "seconds": 0.01, "cost": 1.0, "mode": "default"}
POST /v1/pictures {"ids": ["slides.pdf#3"], "mode": "default"}      if GET /v1/kbs has "pictures": true
200               {"images": ["data:image/jpeg;base64,.."]}
4xx, 5xx          {"error": {"type": "invalid_request", "message": ".."}}

The server's side is `extras.kb_server.requests`.
"""

from __future__ import annotations

import hashlib
import math
import mimetypes
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from absl import logging

from routerl_jax.core.text import replace_surrogates
from routerl_jax.core.types import Passage
from routerl_jax.knowledge.base import StageCounts
from routerl_jax.knowledge.corpus import IDS, title_and_text
from routerl_jax.models.images import image_bytes


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
