"""Finds the beginning of the policy's own text in an endpoint's reply, and the stop string that ended it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from routerl_jax.core.types import StopReason
from routerl_jax.services.base import Completion

MOST = 4  # the most that OpenAI takes
_NO_THOUGHTS = re.compile(r"<think>\s*</think>")


class Ended(NamedTuple):
    """A turn's text, including the stop string that ended it, and the reason why it ended."""

    text: str
    reason: StopReason


def opening_of(stop: str) -> str:
    """The opening tag of a stop string: `<search>` for `</search>`, `<|begin_of_query|>` for `<|end_of_query|>`, `[tool]` for
    `[/tool]`; "" if the string closes nothing."""
    if match := re.fullmatch(r"([<\[])/([^<>\[\]]+)([>\]])", stop):
        return "".join(match.groups())
    if match := re.fullmatch(r"<\|end_of_(.+)\|>", stop):
        return f"<|begin_of_{match[1]}|>"
    return ""


def to_send(stops: Sequence[str]) -> list[str]:
    """The stop strings that are sent to the endpoint.

    A reply comes without the stop string that ended it. So only strings that can be put back are sent; at the others, the reply
    is cut here.
    """
    return [stop for stop in stops if opening_of(stop)][:MOST]


def ended(reply: Completion, text: str, stops: Sequence[str], begun: str = "") -> Ended:
    """How a reply ended.

    The reply is cut after the first stop string in it, whatever the endpoint did. Otherwise, unless `max_tokens` cut it off,
    the stop string that the endpoint names is put back. If it names none, the one that closes the last open tag is put back.
    (If the model itself ended before it closed the tag, that looks the same.)

    Args:
      text: the part of the reply that belongs to the turn.
      begun: the forced beginning of the turn, which the text continues.
    """
    stop_ends = [(at + len(stop), stop) for stop in stops if (at := text.find(stop)) >= 0]
    if stop_ends:
        return Ended(text[: min(stop_ends)[0]], "stop")
    if reply.finish == "length":
        return Ended(text, "length")
    if reply.stopped_by in stops:
        return Ended(text + reply.stopped_by, "stop")
    turn = begun + text
    unclosed = [
        (at, stop) for stop in to_send(stops) if (at := turn.rfind(opening_of(stop))) >= 0 and at > turn.rfind(stop)
    ]
    return Ended(text + max(unclosed)[1], "stop") if unclosed else Ended(text, "eos")


def continuation(text: str, begun: str) -> str:
    """A reply without the beginning that it was asked to repeat, and without anything before that."""
    beginning = begun.strip()
    last_line = beginning.splitlines()[-1].strip() if beginning else ""
    for repeated in dict.fromkeys((beginning, last_line if last_line.endswith(">") else "")):
        if repeated and repeated in text:
            return text[text.index(repeated) + len(repeated) :]
    return text


def after_message(text: str, message: str) -> str:
    """A reply that continues an unfinished message, without that message.

    llama.cpp's server repeats the message, after the empty thoughts of a template that has them; vLLM's does not.
    """
    if not message.strip():
        return text
    before, repeated, after = text.partition(message if message in text else message.strip())
    return after if repeated and not _NO_THOUGHTS.sub("", before).strip() else text
