"""Answers that are numbers within a range, as InfoSeek accepts them."""

from __future__ import annotations

import re

from routerl_jax.core.types import Example

_NUMBER = re.compile(r"(?<![\d.])-?\d+(?:,\d{3})*(?:\.\d+)?")  # the hyphen of "18-28" is no sign


def accepted_answers(example: Example, prediction: str | None) -> tuple[str, ...]:
    """An example's accepted answers to a prediction: its own, and those numbers in the prediction that lie in one of the ranges
    `[low, high]` of `metadata["answer_ranges"]`, ends included, as they are written there.

    So every metric counts such a number as it would count the exact one. InfoSeek's scorer lists the numbers of a range, to so
    many digits, instead.
    """
    ranges = example.metadata.get("answer_ranges") or ()
    numbers = _NUMBER.findall(prediction or "") if ranges else ()
    near = [text for text in numbers if any(low <= float(text.replace(",", "")) <= high for low, high in ranges)]
    return tuple(dict.fromkeys((*example.answers, *near)))
