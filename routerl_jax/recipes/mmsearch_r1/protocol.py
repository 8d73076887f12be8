"""MMSearch-R1's protocol: the actions, their form and the prompts (arXiv 2506.20670, sections 2.2 and 4.1, tables 3, 5 and 6).

The prompts are in our own words. Every round is one message and one turn. A turn has thoughts in `<reason>`, then one
action: an image search, a text search, an answer or a refusal. The results of a search come in `<information>`, and after
them the question again.
"""

from __future__ import annotations

import abc
import dataclasses
import re
from collections.abc import Sequence
from typing import Literal

from routerl_jax.agents.grammar import Grammar, RouteChoices, between, inert, one_line, unshown
from routerl_jax.agents.tool_calls import ToolCalls, has_tags, thought_of, without_ends
from routerl_jax.core.text import split_thoughts
from routerl_jax.core.types import Action, Call, Observation, Passage, Shown, ToolSchema

Kind = Literal["image", "text"]

IMAGE_SEARCH = "<search><img></search>"
REFUSAL = "Unable to answer due to lack of relevant information"  # these words belong to the protocol, like a tag
REASON = ("<reason>", "</reason>")
ANSWER_OPENING = "<answer>"
TEXT_OPENING = "<text_search>"

STOPS = ("</search>", "</text_search>", "</answer>", REFUSAL)
TAGS = (
    *(*REASON, "<search>", "<img>", "</search>", "<text_search>", "</text_search>"),
    *("<information>", "</information>", "<answer>", "</answer>"),
)
_ACTION_MARKS = (IMAGE_SEARCH, "<text_search>", "</text_search>", "<answer>", "</answer>")
QUERY_LETTERS = 2000  # most letters of a query; search engines take less


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of searches, used by the prompt, the parser, the format reward and the evaluation.

    Attributes:
      searches: most searches in all. After them comes one more round, in which the policy must answer.
      image_searches, text_searches: most searches of each kind. The paper has one of each; the released code two text searches.
      image_first: an image search is only allowed in the first round (paper). The released code allows it in any round.
    """

    searches: int = 2
    image_searches: int = 1
    text_searches: int = 1
    image_first: bool = True

    @property
    def allowed(self) -> int:
        """The largest number of searches of an episode."""
        return min(self.searches, self.image_searches + self.text_searches)

    def refused(self, kind: Kind, earlier: Sequence[Kind]) -> str:
        """Why a search of this kind may not follow the earlier ones; "" if it may."""
        if len(earlier) >= self.searches:
            return "no search is left: this was the last round"
        if earlier.count(kind) >= (self.image_searches if kind == "image" else self.text_searches):
            return f"no further search {'by the picture' if kind == 'image' else 'in words'} is left"
        if kind == "image" and earlier and self.image_first:
            return "the picture may be searched by in the first round alone"
        return ""

    def allows(self, kind: Kind, earlier: Sequence[Kind]) -> bool:
        """Whether a search of this kind may come next."""
        return not self.refused(kind, earlier)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Words:
    """The instructions on how to write actions. Tool calls have other ones.

    Attributes:
      inside: where thoughts stand.
      by_picture, in_words: how to search, in the description of the task.
      query: how to search by text after an earlier search.
      results: the sentence that says where results stand.
    """

    inside: str = " inside <reason> and </reason>"
    by_picture: str = f"end your turn with {IMAGE_SEARCH}"
    in_words: str = "end your turn with a short search query inside <text_search> and </text_search>"
    query: str = "end with a query inside <text_search> and </text_search>"
    results: str = "What is found stands inside <information> and </information>. "


@dataclasses.dataclass(frozen=True, kw_only=True)
class MMSearchGrammar(Grammar):
    """What tags and tool calls have in common: what is said to the policy in every round, and how results are shown.

    Attributes:
      image_tool: the knowledge base that is searched by the picture; the other one is searched in words.
      limits: what the texts say about searches.
    """

    image_tool: str
    limits: Limits = Limits()

    @property
    @abc.abstractmethod
    def words(self) -> Words:
        """How the policy is told to write its actions."""

    def first(self, question: str, instruct: bool) -> str:
        """The text after the picture in the first message."""
        if not instruct:
            return f"Question: {question}\n"
        return f"{self.instructions()}\n\nThe question: {question}"

    def after(self, question: str, earlier: Sequence[Kind], instruct: bool) -> str:
        """The text after a search's results: the question again, and the actions allowed now (table 3)."""
        if not instruct:
            return f"Question: {question}\n"
        words, lines = self.words, [f"The question: {question}"]
        if earlier[-1] == "image":
            lines.append("Find out from these results what the picture shows, as far as the question asks for it.")
        if self.limits.allows("text", earlier):
            lines.append(
                f"Think{words.inside} about what is still missing. If it must be looked up, {words.query} that names what the "
                "picture shows. Otherwise write the answer alone inside <answer> and </answer>."
            )
        else:
            lines.append(
                f"Think{words.inside} about what the results say. No search is left. If the answer is neither in "
                f"them nor known to you, end with the words: {REFUSAL}. Otherwise write the answer alone inside <answer> and "
                "</answer>."
            )
        return "\n".join(lines)

    def results(self, call: Call, passages: Sequence[Passage], kind: Kind) -> list[str | Shown]:
        """The results of a search: thumbnails with titles, or summaries with links (section 2.2, figure 2); or why there are
        none.

        Tags within titles and summaries are broken up, so that results can't write actions in place of the policy.
        """
        if message := unshown(call, passages, self.foreign):
            return [f"{message}\n"]
        pieces: list[str | Shown] = []
        for number, passage in enumerate(passages, 1):
            if kind == "image":
                pieces.append(f"{number}. ")
                if passage.image:
                    pieces.append(Shown(passage=passage.id, image=passage.image))
                pieces.append(f" {one_line(passage.title or passage.text, self.foreign)}\n")
            else:
                link = f"({inert(passage.id, self.foreign)}) " if "://" in passage.id else ""
                titled = passage.title and passage.title not in passage.text
                text = f"{passage.title}: {passage.text}" if titled else passage.text
                pieces.append(f"{number}. {link}{one_line(text, self.foreign)}\n")
        return pieces

    def observation(self, call: Call, passages: Sequence[Passage]) -> Observation:
        return self.results(call, passages, "image" if call.tool == self.image_tool else "text")

    def instructions(self) -> str:
        words, limits = self.words, self.limits
        by_picture = (
            f"If you cannot tell what the picture shows and need to, {words.by_picture}. The picture is then "
            "searched for, and you see similar pictures with their titles"
            + (" (in your first turn alone)" if limits.image_first else "")
            + (". " if limits.image_searches == 1 else f", up to {limits.image_searches} times. ")
        )
        in_words = f"If you know what is shown but lack a fact, {words.in_words}; summaries of what is found follow" + (
            ". " if limits.text_searches == 1 else f". You may do this {limits.text_searches} times. "
        )
        return (
            "Answer the question about the picture. First look for what you recognise in it: people, places, objects, "
            "writing, events. "
            + (by_picture if limits.image_searches else "")
            + (in_words if limits.text_searches else "")
            + f"{words.results}If you are sure of what is shown and of the answer, "
            f"search for nothing. Begin each turn with your thoughts{words.inside}, then do one thing: search or "
            "answer. Write the answer alone, in a few words, inside <answer> and </answer>, for example <answer>Mount "
            "Kenya</answer>."
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MMSearchTags(MMSearchGrammar):
    """The paper's tags."""

    @property
    def words(self) -> Words:
        return Words()

    @property
    def text_tool(self) -> str:
        """The knowledge base that is searched in words."""
        return next(tool for tool in self.tools if tool != self.image_tool)

    @property
    def stops(self) -> tuple[str, ...]:
        return STOPS

    @property
    def special_tokens(self) -> tuple[str, ...]:
        return TAGS

    @property
    def choices(self) -> RouteChoices:
        """The action after the thoughts: an answer, or a search by the picture or in words."""
        names = {"answer": ANSWER_OPENING, self.image_tool: "<search>", self.text_tool: TEXT_OPENING}
        return RouteChoices(opening=f"{REASON[1]}\n", stop="</answer>", names=names)

    def parse(self, text: str) -> Action:
        """The action of a turn. A search must be at its end. The agent checks whether the action is allowed now.

        If there are an answer and a refusal, the answer counts. Several actions, or none, are invalid. Thoughts are no actions,
        though the released scorer takes an answer from them, too.
        """
        thought, said = split_thoughts(text, "reason")
        said = said.strip()
        answer, query = between(said, "<answer>", "</answer>"), between(said, "<text_search>", "</text_search>")
        if sum((answer is not None, query is not None, IMAGE_SEARCH in said)) > 1:
            error = "there are several actions in one turn; write one"
            return Action(kind="invalid", thought=thought, error=error)
        if answer is not None:
            return Action(kind="answer", answer=answer, thought=thought)
        if said.endswith(IMAGE_SEARCH):
            return Action(kind="search", tool=self.image_tool, thought=thought)
        if query is not None and said.endswith("</text_search>"):
            query = " ".join(query.split())[:QUERY_LETTERS]
            if query:
                return Action(kind="search", tool=self.text_tool, query=query, thought=thought)
            return Action(kind="invalid", thought=thought, error="the query is empty")
        if REFUSAL in said:
            return Action(kind="refusal", thought=thought)
        return Action(kind="invalid", thought=thought, error="there is neither a search at the end nor an answer")

    def well_formed(self, text: str) -> bool:
        """Whether a turn has a `form`. A refusal has; the reward decides whether it earns anything."""
        return self.parse(text).kind != "invalid" and form(text) != ""

    def write_search(self, thought: str, query: str, tool: str) -> str:
        action = IMAGE_SEARCH if tool == self.image_tool else f"<text_search>{query}</text_search>"
        return f"<reason>{thought}</reason>\n{action}"

    def write_answer(self, thought: str, answer: str) -> str:
        return f"<reason>{thought}</reason>\n<answer>{answer}</answer>"

    def results(self, call: Call, passages: Sequence[Passage], kind: Kind) -> list[str | Shown]:
        return ["<information>\n", *super().results(call, passages, kind), "</information>\n"]

    def reminder(self, error: str) -> str:
        """The protocol has none: the answer follows an invalid turn."""
        return ""


def form(text: str, released: bool = False) -> Literal["answer", "image", "text", "refusal", ""]:
    """The action of a turn in the right form: thoughts first, then one action, at the end (section 2.4); "" in another form.

    Each of the action's tags stands once in the turn, and no other action's.

    Args:
      released: by the letter of the released scorer, which knows no refusal, takes nothing behind the action, not even a full
        stop, and does not look for `<information>`.
    """
    text = text.strip()
    if text.count("<reason>") != 1 or text.count("</reason>") != 1 or (not released and "information>" in text):
        return ""
    forms: dict[Literal["answer", "image", "text", "refusal"], tuple[str, tuple[str, ...]]] = {
        "answer": (r"<answer>.*</answer>", ("<answer>", "</answer>")),
        "image": (re.escape(IMAGE_SEARCH), (IMAGE_SEARCH,)),
        "text": (r"<text_search>.*</text_search>", ("<text_search>", "</text_search>")),
        "refusal": (re.escape(REFUSAL), (REFUSAL,)),
    }
    marks = _ACTION_MARKS if released else (*_ACTION_MARKS, REFUSAL)
    end = "" if released else r"\W*"
    for name, (written, own) in forms.items():
        once = set(own) <= set(marks) and all(text.count(mark) == (mark in own) for mark in marks)
        # where a tag stands more than once, the pattern would try all pairs of them
        if once and re.fullmatch(rf"<reason>.*</reason>.*{written}{end}", text, re.DOTALL):
            return name
    return ""


_REFUSED = re.compile(rf"(.*?){re.escape(REFUSAL)}\W*", re.DOTALL)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MMSearchCalls(MMSearchGrammar, ToolCalls):
    """`ToolCalls` with a search by the question's picture, and with the protocol's words of refusal."""

    @property
    def _all_schemas(self) -> dict[str, ToolSchema]:
        schemas = super()._all_schemas
        words = schemas[self.image_tool]
        about = f"{words.description} The query is the picture of the question."
        return {**schemas, self.image_tool: dataclasses.replace(words, description=about, query="")}

    def _words(self, text: str) -> Action:
        if (at := split_thoughts(text)[1].find(REFUSAL)) >= 0:
            return Action(kind="refusal", thought=thought_of(text[:at]))
        return super()._words(text)

    def well_formed(self, text: str) -> bool:
        """As for other tool calls; or thoughts and the words of refusal, with nothing behind them."""
        if self.parse(text).kind != "refusal":
            return super().well_formed(text)
        refused = _REFUSED.fullmatch(without_ends(text))
        return refused is not None and not has_tags(refused[1])

    @property
    def words(self) -> Words:
        by_picture, (in_words,) = (
            self._all_schemas[self.image_tool].name,
            [schema.name for tool, schema in self._all_schemas.items() if tool != self.image_tool],
        )
        return Words(
            inside="",
            by_picture=f"call {by_picture}",
            in_words=f"call {in_words} with a short search query",
            query=f"call {in_words} with a query",
            results="",
        )
