"""VRAG-RL's protocol: the actions, their form and the prompts (arXiv 2505.22019, section 2.2, algorithm 1, figures 9 to 11).

The prompts are in our own words. Every turn has thoughts in `<think>`, then one action: a search, a closer look at a region of
the latest picture, or an answer. A picture follows: a page, or the region. The paper's text writes regions in `<region>`; its
prompt, code and data use `<bbox>`. We read both and write the latter.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Literal

from routerl_jax.agents.grammar import Grammar, RouteChoices, one_line, unshown
from routerl_jax.agents.tool_calls import LOOK, LookingCalls
from routerl_jax.core.text import split_thoughts
from routerl_jax.core.types import Action, Call, Passage, Shown
from routerl_jax.models.regions import RefusedRegion, RegionRule, read_box

Shows = Literal["picture", "text"]

THINK = ("<think>", "</think>")
SEARCH_OPENING, REGION_OPENING, ANSWER_OPENING = "<search>", "<bbox>", "<answer>"
_ACTIONS = ("search", "bbox", "region", "answer")

TAGS = (*THINK, *(f"<{slash}{name}>" for name in _ACTIONS for slash in ("", "/")))
QUERY_LETTERS = 2000  # most letters of a query; more don't help to find a page
_ACTION = re.compile(rf"<({'|'.join(_ACTIONS)})>((?:(?!<\1>).)*?)</\1>", re.DOTALL)
_BOX = re.compile(r"<(?:bbox|region)>")
_CONTENT = rf"(?:(?!{'|'.join(TAGS)}).)*"
_WELL_FORMED = re.compile(rf"\s*<think>{_CONTENT}</think>\s*<({'|'.join(_ACTIONS)})>{_CONTENT}</\1>\s*", re.DOTALL)

NO_SEARCHES = "no search is left; answer from what was found"
NO_REGIONS = "there are no closer looks here; search, or answer"
UNSEARCHED = "the answer came before anything was searched for"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PageGrammar(Grammar):
    """What tags and tool calls have in common: how pages are shown, and the explanation of the task.

    Attributes:
      looks: whether there are closer looks.
      max_turns, regions, shows: what the instructions say.
    """

    looks: bool = True
    max_turns: int = 4
    regions: RegionRule = RegionRule()
    shows: Shows = "picture"

    def page(self, call: Call, fresh: Sequence[Passage], shown: Sequence[Passage]) -> list[str | Shown]:
        """The observation after a search: a page, or why there is none.

        Args:
          fresh: the new pages that were found.
          shown: the new pages for which there is room.
        """
        if call.error is None and call.passages and not fresh:
            return ["No page is left: all that this query finds have been shown."]
        if message := unshown(call, shown, self.foreign):
            return [message]
        pieces: list[str | Shown] = []
        for passage in shown:
            if self.shows == "picture" and passage.image:
                pieces.append(Shown(passage=passage.id, image=passage.image))
            else:
                text = f"{passage.title}: {passage.text}" if passage.title else passage.text
                pieces.append(one_line(text, self.foreign))
        return pieces

    def observation(self, call: Call, passages: Sequence[Passage]) -> list[str | Shown]:
        """`page`, where all passages are new ones."""
        return self.page(call, passages, passages)

    def _task(self, think: str, search: str, look: str) -> str:
        """The explanation of the task (figure 9; without regions figure 10), with how thoughts, searches and boxes are
        written."""
        item = "page" if self.shows == "picture" else "text of the page"
        scale = self.regions.box_scale
        unit = f"on a scale from 0 to {scale:g} over each side" if scale else "in pixels"
        closer = (
            f"If something in the picture shown last is too small to be read, {look}, {unit}, and that part of it is shown "
            "enlarged. "
        )
        return (
            f"Find the answer to the question in a collection of pages. Whenever you are shown something new, {think}. Then "
            f"do one thing. If you lack something, {search}: "
            f"the best {item} for it that you have not been shown yet follows. "
            + (closer if self.looks else "")
            + f"You have {self.max_turns} turns in all. As soon as you know the answer, write it alone, in a few words, inside "
            "<answer> and </answer>, for example <answer>Mount Kenya</answer>."
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class VRAGTags(PageGrammar):
    """The paper's tags."""

    @property
    def stops(self) -> tuple[str, ...]:
        return tuple(f"</{name}>" for name in _ACTIONS)

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
        query = " ".join(content.split())[:QUERY_LETTERS]
        return Action(kind="search", tool=self.tools[0], query=query, thought=thought)

    def well_formed(self, text: str) -> bool:
        """Whether a turn consists of thoughts, then one action that can be read, and nothing else."""
        return self.parse(text).kind != "invalid" and _WELL_FORMED.fullmatch(text) is not None

    def write_search(self, thought: str, query: str, tool: str) -> str:
        return f"<think>{thought}</think>\n<search>{query}</search>"

    def write_look(self, thought: str, box: Sequence[float]) -> str:
        return f"<think>{thought}</think>\n<bbox>{_listed(box)}</bbox>"

    def reminder(self, error: str) -> str:
        closer = " a box as <bbox>[left, top, right, bottom]</bbox>," if self.looks else ""
        return (
            f"That could not be done: {error}. Think inside <think> and </think>, then write one of these: a query inside "
            f"<search> and </search>,{closer} the answer inside <answer> and </answer>."
        )

    def instructions(self) -> str:
        return self._task(
            think="think first, inside <think> and </think>",
            search="write a search query inside <search> and </search>",
            look="give a box around it as <bbox>[left, top, right, bottom]</bbox>",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class VRAGCalls(PageGrammar, LookingCalls):
    """The same actions as tool calls."""

    def instructions(self) -> str:
        return self._task(
            think="think first",
            search=f"call {self.functions[0]['function']['name']} with a search query",
            look=f"call {LOOK} with a box around it, [left, top, right, bottom]",
        )


def with_box(text: str, box: Sequence[float]) -> str:
    """The turn with this box instead of its own."""
    pieces, at = [], 0
    for begin, end in _boxes(text):
        pieces += [text[at:begin], _listed(box)]
        at = end
    return "".join(pieces) + text[at:]


def has_box(text: str) -> bool:
    """Whether a turn has a box, or other content in the tags of a box, after its thoughts."""
    return next(_boxes(text), None) is not None


def _boxes(text: str) -> Iterator[tuple[int, int]]:
    """Where the content of each pair of tags of a box stands, after the thoughts."""
    closed_at, unclosed = text.rfind(THINK[1]) + 1, set[str]()  # a tag that nothing closes is not looked for again
    for opening in _BOX.finditer(text, closed_at):
        if opening.start() >= closed_at and opening[0] not in unclosed:
            closing = f"</{opening[0][1:]}"
            end = text.find(closing, opening.end())
            if end < 0:
                unclosed.add(opening[0])
            else:
                yield opening.end(), end
                closed_at = end + len(closing)


def _listed(box: Sequence[float]) -> str:
    """A box as the policy writes it: left, top, right, bottom (`RegionRule`)."""
    return f"[{', '.join(f'{value:g}' for value in box)}]"
