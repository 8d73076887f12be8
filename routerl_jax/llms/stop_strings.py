"""Stop strings of endpoints: which are sent, and where a reply ended at one, which of them it was."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from routerl_jax.core.types import StopReason
from routerl_jax.llms.base import Completion

MOST = 4  # that OpenAI takes


class Ended(NamedTuple):
    """A turn's text, with the stop string that ended it, and why it ended."""

    text: str
    reason: StopReason


def opening_of(stop: str) -> str:
    """What stands before a text that a stop string closes: `<search>` before `</search>`, `<|begin_of_query|>` before
    `<|end_of_query|>`, `[tool]` before `[/tool]`; "" where the string closes nothing."""
    if found := re.fullmatch(r"([<\[])/([^<>\[\]]+)([>\]])", stop):
        return "".join(found.groups())
    if found := re.fullmatch(r"<\|end_of_(.+)\|>", stop):
        return f"<|begin_of_{found[1]}|>"
    return ""


def to_send(stops: Sequence[str]) -> list[str]:
    """The stop strings that the endpoint is told. Replies come without the one that ended them, so it is told those alone that
    can be put back; at the others, what came is cut here."""
    return [stop for stop in stops if opening_of(stop)][:MOST]


def ended(reply: Completion, text: str, stops: Sequence[str], begun: str = "") -> Ended:
    """How a reply ended.

    It is cut after the first stop string in it, whatever the endpoint did. Else, where the endpoint says that it stopped, and
    the text has an opening tag that is not closed, the stop string that closes it is put back (one in which the model itself
    ended before closing it can't be told from that).

    Args:
      text: of the reply, as far as it belongs to the turn.
      begun: what was begun for the policy, and the text goes on from.
    """
    found = [(place + len(stop), stop) for stop in stops if (place := text.find(stop)) >= 0]
    if found:
        return Ended(text[: min(found)[0]], "stop")
    if reply.finish == "length":
        return Ended(text, "length")
    if reply.stopped_by in stops:
        return Ended(text + reply.stopped_by, "stop")
    whole = begun + text
    unclosed = [
        (place, stop)
        for stop in to_send(stops)
        if (place := whole.rfind(opening_of(stop))) >= 0 and place > whole.rfind(stop)
    ]
    return Ended(text + max(unclosed)[1], "stop") if unclosed else Ended(text, "eos")


def gone_on(text: str, begun: str) -> str:
    """A reply without the beginning that it was asked to begin with, and whatever it wrote before that."""
    words = begun.strip()
    last = words.splitlines()[-1].strip() if words else ""
    for repeated in dict.fromkeys((words, last if last.endswith(">") else "")):
        if repeated and repeated in text:
            return text[text.index(repeated) + len(repeated) :]
    return text
