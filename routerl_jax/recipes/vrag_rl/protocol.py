"""What VRAG-RL's policy may do and writes (arXiv 2505.22019, section 2.2, algorithm 1, figures 9 to 11), in words of our own.

Every turn is thoughts in `<think>`, then one of a search, a closer look at a region of the picture shown last, or an answer.
What follows is a picture: a page, or the region. The paper's text has regions in `<region>`, its prompt, code and data in
`<bbox>`: both are read, the latter is written.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from routerl_jax.agents.grammar import RouteChoices, between, one_line, unshown
from routerl_jax.core.types import Action, Call, Passage, Shown
from routerl_jax.models.regions import RefusedRegion, RegionRule, read_box

Shows = Literal["picture", "text"]

THINK = ("<think>", "</think>")
SEARCH_OPENING, REGION_OPENING, ANSWER_OPENING = "<search>", "<bbox>", "<answer>"
_ACTIONS = ("search", "bbox", "region", "answer")

STOPS = tuple(f"</{name}>" for name in _ACTIONS)
TAGS = (*THINK, *(f"<{slash}{name}>" for name in _ACTIONS for slash in ("", "/")))
_QUERY_LETTERS = 2000  # of a query; no page is found by more
_BOX = re.compile(r"(<(bbox|region)>).*?(</\2>)", re.DOTALL)
_CONTENT = rf"(?:(?!{'|'.join(TAGS)}).)*"

NO_REGIONS = "there are no closer looks here; search, or answer"
UNSEARCHED = "the answer came before anything was searched for"


def choices(tool: str, looks: bool) -> RouteChoices:
    """How the policy writes what it does after its thoughts."""
    names = {"answer": ANSWER_OPENING, tool: SEARCH_OPENING, **({"region": REGION_OPENING} if looks else {})}
    return RouteChoices(opening=f"{THINK[1]}\n", stop="</answer>", names=names)


def parse(text: str, tool: str) -> Action:
    """The action of a turn: the one after its thoughts. Several, or none, are invalid, and so is an empty one."""
    thought = between(text, *THINK) or ""
    rest = text.rpartition(THINK[1])[2]
    found = [name for name in _ACTIONS for _ in range(rest.count(f"<{name}>"))]

    def invalid(error: str) -> Action:
        return Action(kind="invalid", thought=thought, error=error)

    if len(found) > 1:
        return invalid("there are several actions in one turn; write one")
    content = between(rest, f"<{found[0]}>", f"</{found[0]}>") if found else None
    if content is None:
        return invalid("there is neither a complete search nor a box nor an answer")
    if found[0] in ("bbox", "region"):
        try:
            return Action(kind="region", box=read_box(content), thought=thought)
        except RefusedRegion as error:
            return invalid(str(error))
    if not content:
        return invalid(f"there is nothing between <{found[0]}> and </{found[0]}>")
    if found[0] == "answer":
        return Action(kind="answer", answer=content, thought=thought)
    return Action(kind="search", tool=tool, query=" ".join(content.split())[:_QUERY_LETTERS], thought=thought)


def with_box(text: str, box: Sequence[float]) -> str:
    """A turn with this box in the place of its own."""
    head, close, rest = text.rpartition(THINK[1])
    return head + close + _BOX.sub(lambda found: f"{found[1]}{_listed(box)}{found[3]}", rest)


def has_box(text: str) -> bool:
    """Whether a turn has a box, or something in a box's place, after its thoughts."""
    return _BOX.search(text.rpartition(THINK[1])[2]) is not None


def well_formed(text: str) -> bool:
    """Whether a turn is thoughts, then one action, and nothing else."""
    form = rf"\s*<think>{_CONTENT}</think>\s*<({'|'.join(_ACTIONS)})>{_CONTENT}</\1>\s*"
    return bool(re.fullmatch(form, text, re.DOTALL))


# --- what the policy writes, for demonstrations ---


def search(thought: str, query: str) -> str:
    return f"<think>{thought}</think>\n<search>{query}</search>"


def look(thought: str, box: Sequence[float]) -> str:
    return f"<think>{thought}</think>\n<bbox>{_listed(box)}</bbox>"


def _listed(box: Sequence[float]) -> str:
    return f"[{', '.join(f'{value:g}' for value in box)}]"


def answer(thought: str, answer: str) -> str:
    return f"<think>{thought}</think>\n<answer>{answer}</answer>"


# --- what is said to the policy ---


def task(max_turns: int, looks: bool, rule: RegionRule, shows: Shows) -> str:
    """How to work, for models that must be told (figure 9; without regions figure 10)."""
    what = "page" if shows == "picture" else "text of the page"
    unit = f"on a scale from 0 to {rule.box_scale:g} over each side" if rule.box_scale else "in pixels"
    closer = (
        "If something in the picture shown last is too small to be read, give a box around it as "
        f"<bbox>[left, top, right, bottom]</bbox>, {unit}, and that part of it is shown enlarged. "
    )
    return (
        "Find the answer to the question in a collection of pages. Whenever you are shown something new, think first, inside "
        "<think> and </think>. Then do one thing. If you lack something, write a search query inside <search> and </search>: "
        f"the best {what} for it that you have not been shown yet follows. "
        + (closer if looks else "")
        + f"You have {max_turns} turns in all. As soon as you know the answer, write it alone, in a few words, inside <answer> "
        "and </answer>, for example <answer>Mount Kenya</answer>."
    )


def page(call: Call, fresh: Sequence[Passage], shown: Sequence[Passage], shows: Shows) -> list[str | Shown]:
    """What a search brings: a page, or why there is none.

    Args:
      fresh: the pages found that are to be shown.
      shown: those of them that there is room for.
    """
    if call.error is None and call.passages and not fresh:
        return ["No page is left: all that this query finds have been shown."]
    if said := unshown(call, shown):
        return [said]
    pieces: list[str | Shown] = []
    for passage in shown:
        if shows == "picture" and passage.image:
            pieces.append(Shown(passage=passage.id, image=passage.image))
        else:
            pieces.append(one_line(f"{passage.title}: {passage.text}" if passage.title else passage.text, TAGS))
    return pieces


def reminder(error: str, looks: bool) -> str:
    """After a turn that could not be carried out."""
    closer = " a box as <bbox>[left, top, right, bottom]</bbox>," if looks else ""
    return (
        f"That could not be done: {error}. Think inside <think> and </think>, then write one of these: a query inside <search> "
        f"and </search>,{closer} the answer inside <answer> and </answer>."
    )
