"""InfoSeek's rows: `{data_id, image_id, question, answer, answer_eval}`. R1-Router evaluates on a thousand of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from routerl_jax.core.rows import RowLocation
from routerl_jax.core.types import Example
from routerl_jax.data.formats.flashrag import FlashRag
from routerl_jax.data.formats.format import FORMATS, Row, distinct, strings


class InfoSeek(FlashRag):
    """Plain rows (`flashrag`) with `answer_eval`: the answers that the data set's scorer accepts.

    It is a list of strings (accepted answers) or of `{wikidata, range: [low, high]}`. The ranges go to
    `metadata["answer_ranges"]` (rewards.metrics). Pictures are those of OVEN: `images/IMAGE_ID.jpg` beside the file, or paths
    under `image`.
    """

    def matches(self, row: Row) -> bool:
        return "answer_eval" in row

    def example(self, row: Row, location: RowLocation) -> Example | None:
        accepted = row.get("answer_eval") or []
        accepted = accepted if isinstance(accepted, list) else [accepted]
        other_fields = {key: value for key, value in row.items() if key != "answer_eval"}
        example = super().example({"id": row.get("data_id"), **other_fields}, location)
        if example is None:
            return None
        ranges = [_range(item, location) for item in accepted if isinstance(item, Mapping)]
        texts = strings([item for item in accepted if not isinstance(item, Mapping)], location, "answer_eval")
        metadata = {**example.metadata, "answer_ranges": ranges} if ranges else example.metadata
        return dataclasses.replace(example, answers=distinct(example.answers, texts), metadata=metadata)


def _range(item: Mapping, location: RowLocation) -> list[float]:
    ends = item.get("range")
    if (
        isinstance(ends, list)
        and len(ends) == 2
        and all(isinstance(end, int | float) for end in ends)
        and ends[0] <= ends[1]
    ):
        return [float(end) for end in ends]
    raise location.error(f"key 'answer_eval' must hold strings or {{range: [low, high]}}, found {str(item)[:80]}")


FORMATS.register("infoseek")(InfoSeek())
