"""The prompts of a planner and a grounder, and the parsing of their replies (VRAG-RL, arXiv 2505.22019, section 2.2, equations
3 to 6, appendix D). The wording is ours.

The planner sees pages and decides what to do. To look closer, it describes a region in words, and the grounder gives the
region's box.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from routerl_jax.agents.grammar import between
from routerl_jax.extras.curation.attempts import AttemptFailed
from routerl_jax.models.regions import Box, RefusedRegion, Size, read_box
from routerl_jax.services.base import without_thinking

Kind = Literal["search", "look", "answer"]

KINDS: tuple[Kind, ...] = ("search", "look", "answer")
PAGE, PART = "This is the page that was found.", "This is that part of it, enlarged."
_FORM = (
    "Think first, inside <thought> and </thought>, in a few sentences. Then do one thing: write a query inside <search> and "
    "</search>; or, inside <look> and </look>, in words, which part of the last picture you want to see enlarged; or the "
    "answer inside <answer> and </answer>."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """A planner's step. `content` is the query, the description of a region, or the answer."""

    kind: Kind
    thought: str
    content: str


def planner_task(max_turns: int) -> str:
    """The instructions of the planner."""
    return (
        "You find the answer to a question in a collection of pages, which you can search. A search shows you the best page "
        "that you have not seen yet, as a picture. If something in a picture is too small to be read with certainty, look "
        "closer at that part, also at a part of an enlarged part. Search again where a page does not have what you need. "
        f"{_FORM} The answer is short: a name, a number, a few words. You have {max_turns} turns in all, the answer included."
    )


def planner_question(question: str) -> str:
    """The planner's first message after its task."""
    return f"Question: {question}"


def last_turn(observation: str) -> str:
    """The observation before the planner's last turn."""
    return f"{observation}\n\nThis is your last turn: answer now."


def retry_prompt(prompt: str, why: str) -> str:
    """A repeated prompt after a reply that could not be used, with the reason."""
    return f"{prompt}\n\nA reply to this could not be used: {why}. Reply in the form that was asked for."


def grounder_task(
    question: str, history: Sequence[str], thought: str, region: str, frame: Size, box_scale: float, thinks: bool
) -> str:
    """The prompt that asks where something is in the picture before the prompt.

    Args:
      history: the earlier thoughts and steps, one line each.
      thought: the planner's thought.
      region: the region in the planner's words.
      frame: width and height of the picture as it is sent.
      box_scale: coordinates run from 0 to this; 0: they are pixels.
      thinks: also ask for the thought of this turn.
    """
    so_far = "\n".join(f"{number}. {line}" for number, line in enumerate(history, 1)) or "nothing"
    unit = (
        f"numbers from 0 to {box_scale:g} over each side"
        if box_scale
        else f"pixels of the picture, {frame[0]} x {frame[1]}"
    )
    thinking = (
        "First say inside <thought> and </thought>, in a few sentences and as your own thought, what you see and why you look "
        "closer there. "
    )
    return (
        f"The question is: {question}\n\nDone so far:\n{so_far}\n\nThe picture is what was shown last. The thought now: "
        f"{thought}\n\nTo be looked at: {region}\n\n{thinking if thinks else ''}Find that in the picture, and give the box "
        f"around it, with all that is needed to understand it, as <box>[left, top, right, bottom]</box>, in {unit}."
    )


def history_line(step: Step) -> str:
    """A step as the grounder reads it."""
    verb = {"search": "searched for", "look": "looked closer at", "answer": "answered"}[step.kind]
    return f"{step.thought} ({verb}: {step.content})"


def read_step(reply: str) -> Step:
    """The step in a planner's reply.

    Raises:
      AttemptFailed: the reply has no thought, no action, an empty one, or several.
    """
    text = without_thinking(reply)
    if not text:
        raise AttemptFailed("empty reply", "there is nothing in it")
    after_thought = text.partition("</thought>")[2] or text
    actions: list[Kind] = [kind for kind in KINDS for _ in range(after_thought.count(f"<{kind}>"))]
    if len(actions) > 1:
        raise AttemptFailed("several actions", f"there are {len(actions)} actions in it; write one")
    content = between(after_thought, f"<{actions[0]}>", f"</{actions[0]}>") if actions else None
    if not content:
        raise AttemptFailed("no action", "there is neither a complete search, look nor answer in it")
    return Step(kind=actions[0], thought=_thought(text), content=" ".join(content.split()))


def read_location(reply: str, thinks: bool) -> tuple[Box, str]:
    """The box in a grounder's reply, and its thought ("" unless it is asked for one).

    Raises:
      AttemptFailed: there is no box, or no thought where one is asked for.
    """
    text = without_thinking(reply)
    if not text:
        raise AttemptFailed("empty reply", "there is nothing in it")
    box_text = between(text.rpartition("</thought>")[2], "<box>", "</box>")
    if box_text is None:
        raise AttemptFailed("unreadable box", "there is no box between <box> and </box>")
    try:
        box = read_box(box_text)
    except RefusedRegion as error:
        raise AttemptFailed("unreadable box", str(error)) from error
    return box, _thought(text) if thinks else ""


def _thought(text: str) -> str:
    thought = " ".join((between(text, "<thought>", "</thought>") or "").split())
    if not thought:
        raise AttemptFailed("no thought", "there is no thought between <thought> and </thought>")
    return thought
