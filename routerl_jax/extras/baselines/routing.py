"""Baselines that decide, before each search, whether to search, and where: SKR, UniversalRAG, CogPlanner, CR-Planner."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from routerl_jax.agents.agent import LLM, Tools
from routerl_jax.agents.conversation import Conversation
from routerl_jax.agents.grammar import NO_TOOL
from routerl_jax.core.types import Action, Call, Episode, Example, Turn
from routerl_jax.extras.baselines.baseline import (
    CONCLUSION,
    Baseline,
    ChatPrompt,
    SearchResults,
    answered,
    documents,
    extracted,
    last_line,
    short,
    tidied,
)
from routerl_jax.extras.baselines.registry import baseline
from routerl_jax.extras.baselines.vanilla_rag import DIRECT, VanillaRAG

# --- SKR: the policy says whether it needs a search (Wang et al., arXiv 2310.05002). ---


NEED = (
    "Say whether more information is needed to answer the question for certain: Yes or No. Do not answer the question."
)
NEEDED = "Is more information needed to answer this?"


@baseline(
    "skr", paper="2310.05002", about="asks the policy whether it must search; then vanilla RAG or a direct answer"
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class SKR(VanillaRAG):
    """The paper's direct prompting (section 3.2). The policy is asked whether it needs more information.

    After yes, vanilla RAG follows; after no, the policy answers directly. A reply that is neither, or both without beginning
    with one, is invalid and counts as yes.

    The paper's best variant, which is also R1-Searcher's row (by FlashRAG), decides by the nearest training questions for which
    it is known whether a search helped. That takes a training set, and is not implemented here.
    """

    async def run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        request = ChatPrompt(task=NEED, text=f"Question: {self.question(example, llm)}\n{NEEDED}", cue="Answer:")
        _, turn, text = await self.ask_line(example, llm, request)
        turn.asked = "route"
        first = re.match(r"\W*(yes|no)\b", text.lower())
        said = {first[1]} if first else set(re.findall(r"\b(?:yes|no)\b", text.lower()))
        if len(said) != 1:
            answered(turn, None, "it says neither Yes nor No" if not said else "it says both Yes and No")
        elif said == {"no"}:
            turn.action, turn.well_formed = Action(kind="search", tool=NO_TOOL, query=NO_TOOL), True
            return await self.answer(example, llm, self.asking(example, llm, DIRECT))
        else:
            turn.action, turn.well_formed = self.search_action(example.question), True
        return await super().run(example, llm, tools)


# --- UniversalRAG: first chooses a knowledge base, or none (Yeo et al., arXiv 2504.20734). ---


ROUTE = (
    "Knowledge bases can be searched for what answers a question. Say which one of them should be, by its name alone, or "
    f'"{NO_TOOL}" where the question can be answered without a search. They are:\n{{names}}'
)


@baseline(
    "universal_rag", paper="2504.20734", about="chooses a knowledge base, or none; reads and answers", searches="chosen"
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class UniversalRAG(VanillaRAG):
    """Routes the question in one turn to a knowledge base or to none.

    Vanilla RAG over this knowledge base follows, with the question as the query; or a direct answer. If a reply names neither a
    knowledge base nor "none", it is invalid, and the first knowledge base is asked.

    This is the paper's router without training. Its trained routers and the examples in its prompt are not implemented here
    (R1-Router's row has 8 examples).

    Attributes:
      about: contents of the knowledge bases, by name, for the task. Those without an entry are listed by name only.
    """

    about: Mapping[str, str] = dataclasses.field(default_factory=dict)

    async def run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        names = self.tools or tuple(tools)
        request = self.asking(example, llm, ROUTE.format(names=described(names, self.about)), cue="Knowledge base:")
        _, turn, text = await self.ask_line(example, llm, request)
        turn.asked = "route"
        name = chosen(text, names)
        if name is None:
            answered(turn, None, f"it names none of {', '.join(names)} and {NO_TOOL}")
        else:
            turn.action, turn.well_formed = Action(kind="search", tool=name, query=example.question), True
        if name == NO_TOOL:
            return await self.answer(example, llm, self.asking(example, llm, DIRECT))
        call = await tools[name or names[0]].search(example.question, self.k)
        return await self.read(example, llm, SearchResults((call,)))

    @property
    def search_budget(self) -> int:
        """One search."""
        return 1


def described(names: Sequence[str], about: Mapping[str, str]) -> str:
    """Knowledge bases as a list, with their contents."""
    return "\n".join(f"- {name}: {about[name]}" if about.get(name) else f"- {name}" for name in names)


def chosen(text: str, names: Sequence[str]) -> str | None:
    """The knowledge base, or "none", that a text names first; the longest if several match there. None if it names none."""
    pattern = "|".join(re.escape(name) for name in sorted((*names, NO_TOOL), key=len, reverse=True))
    match = re.search(rf"(?<!\w)({pattern})(?!\w)", text, re.IGNORECASE)
    return None if match is None else next(name for name in (*names, NO_TOOL) if name.lower() == match[1].lower())


# --- CogPlanner: plans queries and their knowledge bases until nothing is missing (Yu et al., arXiv 2501.15470). ---


QUERY = (
    "A question is to be answered with the help of searches. Given what was found so far, write the query that should be "
    f'searched for next, alone, on one line; it asks for one thing. Write "{NO_TOOL}" where nothing is missing.'
)
CHOICE = (
    "A question is to be answered with the help of searches. Say which knowledge base should be searched for the query, by its "
    f'name alone, or "{NO_TOOL}" where no search is needed. They are:\n{{names}}'
)
BOTH = (
    "A question is to be answered with the help of searches. Given what was found so far, write two lines: "
    f'"Query:" with what should be searched for next, one thing, and "Knowledge base:" with the name of one, or "{NO_TOOL}" '
    "where nothing is missing. They are:\n{names}"
)


@baseline(
    "cogplanner",
    paper="2501.15470",
    about="plans the next query and its knowledge base, round by round",
    searches="chosen",
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class CogPlanner(VanillaRAG):
    """Plans a search per round, then answers from all documents.

    In a round the policy writes the next query and chooses a knowledge base for it, or decides that nothing is missing. The
    documents found join those of the earlier rounds. A choice that can't be read is invalid and ends the planning.

    Sequential modelling asks for the query first, and for the knowledge base in a second chat with this query. Parallel
    modelling asks for both at once. The paper has both. Its strategies are image search, text search and none; here they are
    the run's knowledge bases. The paper's code was not available when this was written: the flow follows its abstract and
    R1-Router's description (appendix A.5).

    Attributes:
      rounds: most rounds. The default 3 is R1-Router's number for such loops; the paper leaves it to the model.
      about: contents of the knowledge bases, by name.
    """

    modelling: Literal["sequential", "parallel"] = "sequential"
    searches_field: ClassVar[str] = "rounds"

    rounds: int = 3
    about: Mapping[str, str] = dataclasses.field(default_factory=dict)

    async def run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        calls: list[Call] = []
        names = self.tools or tuple(tools)
        for _ in range(self.rounds):
            plan = self.sequential if self.modelling == "sequential" else self.parallel
            action = await plan(example, llm, names, SearchResults(tuple(calls)))
            if action is None:
                break
            calls.append(await tools[action.tool].search(action.query, self.k))
        return await self.read(example, llm, SearchResults(tuple(calls)))

    async def sequential(
        self, example: Example, llm: LLM, names: Sequence[str], results: SearchResults
    ) -> Action | None:
        """The next search, planned in two chats: the query, then its knowledge base. None: no further search."""
        request = self.planning(example, llm, results, QUERY, "Query:")
        _, turn, text = await self.ask_line(example, llm, request)
        query = short(text, "Query:")
        if query is None:
            answered(turn, None, "there is no query in it")
            return None
        turn.well_formed, turn.asked = True, "query"
        if chosen(query, ()) == NO_TOOL and len(query.split()) == 1:
            turn.action = Action(kind="search", tool=NO_TOOL, query=NO_TOOL)
            return None
        task = CHOICE.format(names=described(names, self.about))
        text = f"Question: {self.question(example, llm)}\nQuery: {llm.tokenizer.plain(query)}"
        request = ChatPrompt(task=task, text=text, cue="Knowledge base:")
        _, turn, text = await self.ask_line(example, llm, request)
        return self.decided(turn, query, chosen(text, names), names)

    async def parallel(self, example: Example, llm: LLM, names: Sequence[str], results: SearchResults) -> Action | None:
        """The next search, planned in one reply with query and knowledge base. None: no further search."""
        request = self.planning(example, llm, results, BOTH.format(names=described(names, self.about)), "")
        _, turn, text = await self.ask(example, llm, request, max_tokens=2 * self.answer_tokens)
        query, name = last_line(text, "Query:") or "", chosen(last_line(text, "Knowledge base:") or "", names)
        return self.decided(turn, query, name if query or name == NO_TOOL else None, names)

    def decided(self, turn: Turn, query: str, name: str | None, names: Sequence[str]) -> Action | None:
        """Marks a turn with its choice. Returns the search that it asks for, or None."""
        turn.asked = "route"
        if name is None:
            answered(turn, None, f"there is no query, or it names none of {', '.join(names)} and {NO_TOOL}")
            return None
        turn.action, turn.well_formed = Action(kind="search", tool=name, query=query or NO_TOOL), True
        return None if name == NO_TOOL else turn.action

    def planning(self, example: Example, llm: LLM, results: SearchResults, task: str, cue: str) -> ChatPrompt:
        """The prompt that asks for the next search."""
        request = self.asking(example, llm, task, cue)

        def request_of(documents: str) -> ChatPrompt:
            return dataclasses.replace(request, text=f"Found so far:\n{documents}\n\n{request.text}")

        if not results.calls:
            return request
        return self.fitted(example, llm, results.passages, request_of, results.failure, 2 * self.answer_tokens)

    @property
    def search_budget(self) -> int:
        """One search per round."""
        return self.rounds


# --- CR-Planner: proposes candidates for every step, and a critic chooses (Li et al., arXiv 2410.01428). ---


REASON, SEARCH = "reason", "search"
_SETTING = "A question is answered step by step: a step is a thought, or a search that fetches one document. "
PLAN = _SETTING + f'Say what should come next: write "{REASON}" or "{SEARCH}", alone.'
THOUGHTS = _SETTING + (
    "Propose {count} different thoughts that could come next, as a list with a line each: 1. .., 2. .. A thought draws one "
    f'conclusion from the steps so far; one that settles the question ends with "{CONCLUSION}" and the answer alone, in a few '
    "words."
)
QUERIES = _SETTING + (
    "Propose {count} different queries that could be searched for next, as a list with a line each: 1. .., 2. .. A query asks "
    "for one thing that is missing."
)
CHOOSE = (
    _SETTING + "Below are proposals for the next one. Write the number of the proposal that brings the answer nearest."
)
DOCUMENT = _SETTING + "Below is what the last search found. Write the number of the document that helps most."
ANSWER = _SETTING + "The steps are below. Write the answer to the question alone, in a few words."

_NUMBERED = re.compile(r"^[ \t]*\d+[.)][ \t]*(.+)$", re.MULTILINE)


@baseline(
    "cr_planner", paper="2410.01428", about="proposes thoughts, queries and documents; a critic chooses each step"
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class CRPlanner(Baseline):
    """Plans step by step. A step is a thought, or a query with one of the documents that it finds.

    First the sub-goal critic chooses between a thought and a search. Then candidates are proposed, and the execution critic
    takes one: among thoughts, among queries, and among the k documents of the chosen query. The episode ends with a thought
    that gives the answer. When no steps are left, the policy is asked for the answer. When no searches are left, all further
    steps are thoughts.

    Every choice and every list of candidates is a new chat over the steps so far, or over the latest ones that have room. A
    single candidate is taken without a choice. If a choice can't be read, it is invalid, and the first candidate is taken. If a
    plan can't be read, the step is a thought.

    The paper's critics are reward models, trained on values that a Monte Carlo tree search estimates. Here the policy chooses
    itself, which needs no log-probabilities. Its candidates come in one list; the paper samples each. Neither the paper's full
    text nor its code was at hand, so details may differ.

    Attributes:
      k: documents that a query finds; one of them is kept.
      candidates: number of thoughts or queries that are proposed.
      max_steps: most thoughts and searches together.
      max_searches: most searches among these steps.
    """

    searches_field: ClassVar[str] = "max_searches"

    candidates: int = 3
    max_steps: int = 8
    max_searches: int = 3

    async def run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        steps: list[str] = []
        searches = 0
        for _ in range(self.max_steps):
            goal = await self.goal(example, llm, steps) if searches < self.max_searches else REASON
            if goal == SEARCH:
                searches += 1
                steps += await self.searched(example, llm, tools, steps)
                continue
            chat, turn, thought = await self.select(example, llm, steps, THOUGHTS, "Thoughts", self.max_turn_tokens)
            if found := extracted(thought, chain=True):
                return chat.episode(answer=answered(turn, found))
            steps.append(f"Thought: {thought}")
        request = self.over(example, llm, steps, ANSWER, "", "Answer:", self.answer_tokens)
        return await self.answer(example, llm, request)

    async def goal(self, example: Example, llm: LLM, steps: Sequence[str]) -> str:
        """Chooses whether a thought or a search comes next."""
        request = self.over(example, llm, steps, PLAN, "", "Next:", self.answer_tokens)
        _, turn, text = await self.ask_line(example, llm, request)
        goal = chosen(text, (REASON, SEARCH))
        if goal not in (REASON, SEARCH):
            answered(turn, None, f"it says neither {REASON} nor {SEARCH}")
            return REASON
        turn.asked, turn.well_formed = "route", True
        return goal

    async def searched(self, example: Example, llm: LLM, tools: Tools, steps: Sequence[str]) -> list[str]:
        """Chooses a query and one of the documents that it finds. Returns both as steps."""
        tokens = self.answer_tokens * self.candidates
        _, turn, query = await self.select(example, llm, steps, QUERIES, "Queries", tokens)
        turn.action = self.search_action(query)
        step = f"Query: {llm.tokenizer.plain(query)}"
        results = await self.search(tools, query)
        if not results.passages:
            return [step, f"Document: {results.failure or 'Nothing was found.'}"]
        shown_count = 0

        def request_of(text: str) -> ChatPrompt:
            nonlocal shown_count
            shown_count = text.count("\n") + 1
            return self.over(example, llm, [*steps, step], DOCUMENT, f"Found:\n{text}", "Number:", self.answer_tokens)

        request = self.fitted(example, llm, results.passages, request_of, tokens=self.answer_tokens)
        number = await self.choice(example, llm, request, min(shown_count, len(results.passages)))
        return [step, f"Document: {documents([results.passages[number]], llm).removeprefix('[1] ')}"]

    async def select(
        self, example: Example, llm: LLM, steps: Sequence[str], task: str, name: str, tokens: int
    ) -> tuple[Conversation, Turn, str]:
        """Has candidates proposed and takes one. Returns the chat and the turn of the proposals, and the candidate."""
        request = self.over(example, llm, steps, task.format(count=self.candidates), "", f"{name}:\n1.", tokens)
        chat, turn, text = await self.ask(example, llm, request, stop=self.ends(llm), max_tokens=tokens)
        text = text if self.chats(llm) else f"1.{text}".split("\nQuestion:")[0]
        plain = " ".join(text.removeprefix("1.").split())
        proposed = list(dict.fromkeys(filter(None, map(tidied, _NUMBERED.findall(text)))))[: self.candidates]
        turn.asked, turn.well_formed = name.lower(), bool(proposed)
        if not proposed:
            answered(turn, None, "there is no list 1. .., 2. .. in it")
            return chat, turn, example.question if task == QUERIES else plain
        listed = "\n".join(f"[{number}] {candidate}" for number, candidate in enumerate(proposed, 1))
        proposals = f"Proposals:\n{llm.tokenizer.plain(listed)}"
        request = self.over(example, llm, steps, CHOOSE, proposals, "Number:", self.answer_tokens)
        return chat, turn, proposed[await self.choice(example, llm, request, len(proposed))]

    async def choice(self, example: Example, llm: LLM, request: ChatPrompt, count: int) -> int:
        """The index (from 0) of the critic's choice among `count` candidates."""
        if count <= 1:
            return 0
        _, turn, text = await self.ask_line(example, llm, request)
        number = re.search(r"\d+", text)
        if number is None or not 1 <= int(number[0]) <= count:
            answered(turn, None, f"there is no number from 1 to {count} in it")
            return 0
        turn.asked, turn.well_formed = "choice", True
        return int(number[0]) - 1

    def over(
        self, example: Example, llm: LLM, steps: Sequence[str], task: str, suffix: str, cue: str, tokens: int
    ) -> ChatPrompt:
        """A prompt with the steps so far, and `suffix` after them.

        It has as many of the latest steps as leave room for a turn (or for half of the room, if that is less).
        """

        def request_of(latest_steps: Sequence[str]) -> ChatPrompt:
            parts = [
                f"Question: {self.question(example, llm)}",
                *(["\n".join(latest_steps)] if latest_steps else []),
                suffix,
            ]
            return ChatPrompt(task=task, text="\n\n".join(filter(None, parts)), cue=cue)

        def room(request: ChatPrompt) -> int:
            return llm.room(self.prompt(llm, request), example.images)

        least = min(tokens, room(request_of(())) // 2)
        latest = (steps[start:] for start in range(len(steps)))
        return request_of(
            next((latest_steps for latest_steps in latest if room(request_of(latest_steps)) >= least), ())
        )
