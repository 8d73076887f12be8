"""Numerical answers within a range, as InfoSeek accepts them."""

from __future__ import annotations

import re

from routerl_jax.core.types import Example

_NUMBER = re.compile(r"(?<![\d.])-?\d+(?:,\d{3})*(?:\.\d+)?")  # the hyphen of "18-28" is no minus sign


def accepted_answers(example: Example, prediction: str | None) -> tuple[str, ...]:
    """The accepted answers for a prediction: the example's own, and the numbers in the prediction that lie in one of the ranges
    `[low, high]` of `metadata["answer_ranges"]` (ends included), as the prediction writes them.

    So every metric treats such a number like an exact answer. InfoSeek's scorer lists all numbers of a range, up to a number of
    digits, instead.
    """
    ranges = example.metadata.get("answer_ranges") or ()
    numbers = _NUMBER.findall(prediction or "") if ranges else ()
    near = [text for text in numbers if any(low <= float(text.replace(",", "")) <= high for low, high in ranges)]
    return tuple(dict.fromkeys((*example.answers, *near)))
