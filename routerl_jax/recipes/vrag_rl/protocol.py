"""VRAG-RL's protocol: the actions, their form and the prompts (arXiv 2505.22019, section 2.2, algorithm 1, figures 9 to 11).

The prompts are in our own words. Every turn has thoughts in `<think>`, then one action: a search, a closer look at a region of
the latest picture, or an answer. A picture follows: a page, or the region. The paper's text writes regions in `<region>`; its
prompt, code and data use `<bbox>`. We read both and write the latter.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Literal

from routerl_jax.agents.grammar import Grammar, RouteChoices, one_line, unshown
from routerl_jax.agents.tool_calls import LOOK
from routerl_jax.core.text import split_thoughts
from routerl_jax.core.types import Action, Call, Observation, Passage, Shown
from routerl_jax.models.regions import RefusedRegion, RegionRule, read_box

Shows = Literal["picture", "text"]

THINK = ("<think>", "</think>")
SEARCH_OPENING, REGION_OPENING, ANSWER_OPENING = "<search>", "<bbox>", "<answer>"
_ACTIONS = ("search", "bbox", "region", "answer")

STOPS = tuple(f"</{name}>" for name in _ACTIONS)
TAGS = (*THINK, *(f"<{slash}{name}>" for name in _ACTIONS for slash in ("", "/")))
QUERY_LETTERS = 2000  # most letters of a query; more don't help to find a page
_ACTION = re.compile(rf"<({'|'.join(_ACTIONS)})>((?:(?!<\1>).)*?)</\1>", re.DOTALL)
_BOX = re.compile(r"(<(bbox|region)>).*?(</\2>)", re.DOTALL)
_CONTENT = rf"(?:(?!{'|'.join(TAGS)}).)*"

NO_SEARCHES = "no search is left; answer from what was found"
NO_REGIONS = "there are no closer looks here; search, or answer"
UNSEARCHED = "the answer came before anything was searched for"


@dataclasses.dataclass(frozen=True, kw_only=True)
class VRAGTags(Grammar):
    """The tags as a grammar. The agent makes the observations of pages (`page`).

    Attributes:
      looks: whether there are closer looks.
      max_turns, regions, shows: what the instructions say (`task`).
    """

    looks: bool = True
    max_turns: int = 4
    regions: RegionRule = RegionRule()
    shows: Shows = "picture"

    @property
    def stops(self) -> tuple[str, ...]:
        return STOPS

    @property
    def special_tokens(self) -> tuple[str, ...]:
        return TAGS

    @property
    def choices(self) -> RouteChoices:
        """The action after the thoughts."""
        looks = {"region": REGION_OPENING} if self.looks else {}
        names = {"answer": ANSWER_OPENING, self.tools[0]: SEARCH_OPENING, **looks}
        return RouteChoices(opening=f"{THINK[1]}\n", stop="</answer>", names=names)

    def parse(self, text: str) -> Action:
        return parse(text, self.tools[0])

    def well_formed(self, text: str) -> bool:
        return self.parse(text).kind != "invalid" and well_formed(text)

    def write_search(self, thought: str, query: str, tool: str) -> str:
        return search(thought, query)

    def write_look(self, thought: str, box: Sequence[float]) -> str:
        return look(thought, box)

    def observation(self, call: Call, passages: Sequence[Passage]) -> Observation:
        return page(call, passages, passages, self.shows)

    def reminder(self, error: str) -> str:
        closer = " a box as <bbox>[left, top, right, bottom]</bbox>," if self.looks else ""
        return (
            f"That could not be done: {error}. Think inside <think> and </think>, then write one of these: a query inside "
            f"<search> and </search>,{closer} the answer inside <answer> and </answer>."
        )

    def instructions(self) -> str:
        return task(self.max_turns, self.looks, self.regions, self.shows)


def parse(text: str, tool: str) -> Action:
    """The action after a turn's thoughts. Several actions, none, or an empty one are invalid."""
    thought, rest = split_thoughts(text)
    actions = _ACTION.findall(rest)

    def invalid(error: str) -> Action:
        return Action(kind="invalid", thought=thought, error=error)

    begun = sum(rest.count(f"<{name}>") for name in _ACTIONS)
    if len(actions) > 1 or (begun > 1 and rest != text):  # without tags of thoughts, words may name tags
        return invalid("there are several actions in one turn; write one")
    if not actions:
        return invalid("there is neither a complete search nor a box nor an answer")
    (name, content), *_ = actions
    content = content.strip()
    if name in ("bbox", "region"):
        try:
            return Action(kind="region", box=read_box(content), thought=thought)
        except RefusedRegion as error:
            return invalid(str(error))
    if not content:
        return invalid(f"there is nothing between <{name}> and </{name}>")
    if name == "answer":
        return Action(kind="answer", answer=content, thought=thought)
    return Action(kind="search", tool=tool, query=" ".join(content.split())[:QUERY_LETTERS], thought=thought)


def with_box(text: str, box: Sequence[float]) -> str:
    """The turn with this box instead of its own."""
    head, close, rest = text.rpartition(THINK[1])
    return head + close + _BOX.sub(lambda match: f"{match[1]}{_listed(box)}{match[3]}", rest)


def has_box(text: str) -> bool:
    """Whether a turn has a box, or other content in the tags of a box, after its thoughts."""
    return _BOX.search(text.rpartition(THINK[1])[2]) is not None


def well_formed(text: str) -> bool:
    """Whether a turn consists of thoughts, then one action, and nothing else."""
    form = rf"\s*<think>{_CONTENT}</think>\s*<({'|'.join(_ACTIONS)})>{_CONTENT}</\1>\s*"
    return bool(re.fullmatch(form, text, re.DOTALL))


# --- what the policy writes, for demonstrations ---


def search(thought: str, query: str) -> str:
    """A turn that searches."""
    return f"<think>{thought}</think>\n<search>{query}</search>"


def look(thought: str, box: Sequence[float]) -> str:
    """A turn that looks closer at a box: left, top, right, bottom, as the model writes boxes (`RegionRule`)."""
    return f"<think>{thought}</think>\n<bbox>{_listed(box)}</bbox>"


def _listed(box: Sequence[float]) -> str:
    return f"[{', '.join(f'{value:g}' for value in box)}]"


def answer(thought: str, answer: str) -> str:
    """A turn that answers."""
    return f"<think>{thought}</think>\n<answer>{answer}</answer>"


# --- what is said to the policy ---


@dataclasses.dataclass(frozen=True, kw_only=True)
class Words:
    """The instructions on how to write thoughts, searches and boxes. Tool calls have other ones (`tool_call_words`)."""

    think: str = "think first, inside <think> and </think>"
    search: str = "write a search query inside <search> and </search>"
    look: str = "give a box around it as <bbox>[left, top, right, bottom]</bbox>"


def tool_call_words(search: str) -> Words:
    """The `Words` for a policy that calls functions. `search` is the name of the search function."""
    return Words(
        think="think first",
        search=f"call {search} with a search query",
        look=f"call {LOOK} with a box around it, [left, top, right, bottom]",
    )


def task(max_turns: int, looks: bool, rule: RegionRule, shows: Shows, words: Words = Words()) -> str:
    """The explanation of the task, for pretrained models (figure 9; without regions figure 10)."""
    item = "page" if shows == "picture" else "text of the page"
    unit = f"on a scale from 0 to {rule.box_scale:g} over each side" if rule.box_scale else "in pixels"
    closer = (
        f"If something in the picture shown last is too small to be read, {words.look}, {unit}, and that part of it is shown "
        "enlarged. "
    )
    return (
        f"Find the answer to the question in a collection of pages. Whenever you are shown something new, {words.think}. Then "
        f"do one thing. If you lack something, {words.search}: "
        f"the best {item} for it that you have not been shown yet follows. "
        + (closer if looks else "")
        + f"You have {max_turns} turns in all. As soon as you know the answer, write it alone, in a few words, inside <answer> "
        "and </answer>, for example <answer>Mount Kenya</answer>."
    )


def page(
    call: Call, fresh: Sequence[Passage], shown: Sequence[Passage], shows: Shows, tags: Sequence[str] = TAGS
) -> list[str | Shown]:
    """The observation after a search: a page, or why there is none.

    Args:
      fresh: the new pages that were found.
      shown: the new pages for which there is room.
      tags: tags that are broken up in the text of a page.
    """
    if call.error is None and call.passages and not fresh:
        return ["No page is left: all that this query finds have been shown."]
    if message := unshown(call, shown):
        return [message]
    pieces: list[str | Shown] = []
    for passage in shown:
        if shows == "picture" and passage.image:
            pieces.append(Shown(passage=passage.id, image=passage.image))
        else:
            pieces.append(one_line(f"{passage.title}: {passage.text}" if passage.title else passage.text, tags))
    return pieces
