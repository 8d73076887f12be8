"""SimpleVQA's rows (m-a-p/SimpleVQA; arXiv 2502.13059): Chinese and English questions, each with a picture in base64."""

from __future__ import annotations

import dataclasses

from routerl_jax.core.rows import RowLocation
from routerl_jax.core.types import Example
from routerl_jax.data.formats.flashrag import FlashRag
from routerl_jax.data.formats.format import FORMATS, Row

_OWN = ("atomic_question", "atomic_fact", "vqa_category", "original_category")


class SimpleVQA(FlashRag):
    """Plain rows (`flashrag`) `{data_id, image, image_description, language, question, answer, original_category, source,
    atomic_question, atomic_fact, vqa_category}`.

    `image` is base64 without the head of a `data:` URI. Bytes of a column, and paths (which have a dot), are read too. The keys
    and the base64 are taken from public readers; the file was not available. All other keys are metadata.
    """

    def matches(self, row: Row) -> bool:
        return "data_id" in row and any(key in row for key in _OWN)

    def example(self, row: Row, location: RowLocation) -> Example | None:
        picture = row.get("image")
        other_fields = {key: value for key, value in row.items() if key not in ("data_id", "image")}
        if not isinstance(picture, str) or "." in picture or picture.startswith("data:"):
            return super().example({"id": row["data_id"], **other_fields, "image": picture}, location)
        from routerl_jax.models.images import image_bytes  # imports jax, which is slow

        uri = f"data:;base64,{''.join(picture.split())}" if picture else None
        example = super().example({"id": row["data_id"], **other_fields, "image": uri}, location)
        return example and dataclasses.replace(example, images=tuple(map(image_bytes, example.images)))


FORMATS.register("simplevqa")(SimpleVQA())
