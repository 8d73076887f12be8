"""Numerical answers within a range, as InfoSeek accepts them."""

from __future__ import annotations

import re

from routerl_jax.core.types import Example
from routerl_jax.core.words import folded

_SCALES = {"hundred": 1e2, "thousand": 1e3, "million": 1e6, "billion": 1e9, "trillion": 1e12}
_NUMBER = re.compile(  # the hyphen of "18-28" is no minus sign, and the 2 of "km2" no number
    r"(?:\b(?:minus|negative) |(?<![\w.])-)?(?<![\w.])(?:(?:\d{1,3}(?:[, ]\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:e[+-]?\d+)?"
    rf"(?:[ -](?:{'|'.join(_SCALES)})s?\b)?",
    re.IGNORECASE,
)
_JOINT = re.compile(r"[^\d.,;]*?(?:-|~|\bto\b|\band\b)[^\d.,;]*")  # between the ends of a range
_LEAST_SHARED = 0.5  # share of a predicted range and the accepted one together that must be in both


def accepted_answers(example: Example, prediction: str | None) -> tuple[str, ...]:
    """The accepted answers for a prediction: the example's own, and what of the prediction lies in one of the ranges
    `[low, high]` of `metadata["answer_ranges"]` (ends included), as the prediction writes it.

    Every number in a range is accepted. The prediction as a whole is accepted, too, as in InfoSeek's released scorer, if its
    only number is ("about 170 metres", "11 million"); or if it is a range ("160-190 m", "between 160 and 190") that lies in
    the accepted one, or shares with it at least half of what both cover. So every metric treats it like an exact answer.
    Units are not converted.
    """
    ranges = example.metadata.get("answer_ranges") or ()
    text = folded(prediction or "") if ranges else ""
    matches = list(_NUMBER.finditer(text))
    values = [_value(match[0]) for match in matches]
    accepted = [match[0] for match, value in zip(matches, values) if any(low <= value <= high for low, high in ranges)]
    if len(values) == 2 and _JOINT.fullmatch(text[matches[0].end() : matches[1].start()]):
        if (scale := _scale(matches[1][0])) > 1 == _scale(matches[0][0]) and values[0] < values[1] / scale:
            values[0] *= scale  # "10 to 12 million"
        whole = any(_alike(min(values), max(values), low, high) for low, high in ranges)
    else:
        whole = len(values) == len(accepted) == 1
    return tuple(dict.fromkeys((*example.answers, *accepted, *([prediction] if prediction and whole else ()))))


def _scale(number: str) -> float:
    return next((scale for name, scale in _SCALES.items() if name in number.lower()), 1.0)


def _value(number: str) -> float:
    digits = re.search(r"[\d.][\d, ]*(?:\.\d+)?(?:e[+-]?\d+)?", number, re.IGNORECASE)
    assert digits is not None
    sign = 1 if digits.start() == 0 else -1
    return sign * float(digits[0].replace(",", "").replace(" ", "")) * _scale(number)


def _alike(first: float, last: float, low: float, high: float) -> bool:
    shared, covered = min(last, high) - max(first, low), max(last, high) - min(first, low)
    return low <= first <= last <= high or (shared > 0 and shared >= _LEAST_SHARED * covered)
