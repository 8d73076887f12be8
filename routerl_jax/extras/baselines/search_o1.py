"""Search-o1: a reasoning model searches while it thinks, and reads documents in separate chats (arXiv 2501.05366)."""

from __future__ import annotations

import dataclasses
import re

from routerl_jax.agents.agent import LLM, Tools
from routerl_jax.agents.grammar import between, one_line
from routerl_jax.core.types import Episode, Example
from routerl_jax.extras.baselines.baseline import Baseline, ChatPrompt, answered
from routerl_jax.extras.baselines.forms import tidied
from routerl_jax.extras.baselines.registry import baseline

BEGIN_QUERY, END_QUERY = "<|begin_search_query|>", "<|end_search_query|>"
BEGIN_RESULT, END_RESULT = "<|begin_search_result|>", "<|end_search_result|>"
TAGS = (BEGIN_QUERY, END_QUERY, BEGIN_RESULT, END_RESULT)

INFORMATION = "Final Information:"
BOXED = "\n\\boxed{"
NOTHING = "No helpful information was found."
REPEATED = "This was searched for before; see what was found then."
SPENT = "There are no searches left. Go on with what is known."

TASK = (
    "Reason step by step about the question. You can search: whenever a fact is missing or uncertain, write a query between "
    f"{BEGIN_QUERY} and {END_QUERY}. What a search finds is read for you, and what helps comes back between {BEGIN_RESULT} and "
    f"{END_RESULT}; then go on reasoning. You may search up to {{searches}} times. At the end write the answer alone, in a few "
    "words, as \\boxed{{answer}}."
)
READ = (
    "Somebody reasons about a question and has searched. Read the documents with the query and the reasoning so far in mind, "
    f'pick out what helps to go on, and write it after "{INFORMATION}", so that it can stand in the reasoning as it is. Where '
    f'no document helps, write "{INFORMATION} {NOTHING}"'
)


@baseline("search_o1", paper="2501.05366", about="searches while it reasons; a chat of its own reads what was found")
@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchO1(Baseline):
    """Reasons in one conversation, and writes queries between marks.

    The results of a search are read in another chat (reason-in-documents), which also gets the query and the reasoning so far.
    What that chat writes at its end is put between the result marks. A repeated query, or one beyond the limit, is not searched
    for; the policy is told so, and it costs a turn. A turn without a query is the last one.

    As in the released code (RUC-NLPIR/Search-o1, read in copies of it), the reading chat sees the reasoning line by line: all
    lines if there are at most five, else the first, the last four and those with marks, with "..." for the others. If the
    reading lacks the mark before its result, nothing counts as found. The code reads web pages around their snippets, at most
    3000 letters. It also reads when nothing was found; here that is said without a reading. If an answer is not boxed, it is
    begun for the policy; the paper takes the direct answer of another run instead. R1-Router runs it with k=5 and
    max_searches=3.

    Attributes:
      k: documents per search; 10 in the paper.
      max_searches: most searches; in the code 10 for multi-hop questions, 5 for others.
      max_turns: most turns; 15 in the code.
      reading_tokens: most tokens of a reading.
    """

    k: int = 10
    max_searches: int = 10
    max_turns: int = 15
    reading_tokens: int = 512
    max_turn_tokens: int = 2048

    async def run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        task = TASK.format(searches=self.max_searches)
        chat = self.begin(
            example, llm, ChatPrompt(task=task, text=f"Question: {self.question(example, llm)}", cue="Answer:")
        )
        reasoning, queries = "", []
        turn = None
        for _ in range(self.max_turns):
            turn = await self.generate(chat, (END_QUERY,), opening=BOXED)
            reasoning += turn.text
            query = between(turn.text, BEGIN_QUERY, END_QUERY)
            if not query or not turn.text.rstrip().endswith(END_QUERY):
                break
            query = " ".join(query.split())
            turn.action, turn.well_formed = self.search_action(query), True
            if query in queries or len(queries) >= self.max_searches:
                result = REPEATED if query in queries else SPENT
                turn.action = dataclasses.replace(turn.action, kind="invalid", error=result)
            else:
                result = await self.look_up(query, reasoning, example, llm, tools)
                queries.append(query)
            observation = f"\n\n{BEGIN_RESULT}{result}{END_RESULT}\n\n"
            if not self.tell(chat, llm, turn, observation):
                break
            reasoning += observation
        assert turn is not None
        if answer := boxed(turn.text):
            return chat.episode(answer=answered(turn, answer))
        if turn.action is None:
            answered(turn, None, "there is neither a query between its marks nor a boxed answer")
        return await self.conclude(chat, llm, turn, opening=BOXED, closing="}")

    async def look_up(self, query: str, reasoning: str, example: Example, llm: LLM, tools: Tools) -> str:
        """Searches and reads. Returns the text that goes into the reasoning."""
        results = await self.search(tools, query)
        if not results.passages:
            return f"{NOTHING} {results.failure}" if any(call.error for call in results.calls) else NOTHING

        def request_of(documents: str) -> ChatPrompt:
            before = llm.tokenizer.plain(shortened(reasoning))
            text = f"Reasoning so far:\n{before}\n\nQuery: {llm.tokenizer.plain(query)}\n\nDocuments:\n{documents}"
            return ChatPrompt(task=READ, text=text, cue=INFORMATION)

        request = self.fitted(example, llm, results.passages, request_of, tokens=self.reading_tokens)
        _, turn, text = await self.ask(example, llm, request, max_tokens=self.reading_tokens)
        turn.asked = "read"
        if self.chats(llm):
            _, mark, text = text.replace("*", "").rpartition(INFORMATION)
            turn.well_formed = bool(mark)
            text = text if mark else ""
        return one_line(text, TAGS) or NOTHING

    @property
    def special_tokens(self) -> tuple[str, ...]:
        return TAGS

    @property
    def search_budget(self) -> int:
        """`max_searches` for each knowledge base."""
        return self.max_searches * max(1, len(self.tools))


def shortened(reasoning: str) -> str:
    """The reasoning as the reading chat sees it, with numbered lines."""
    lines = [line for line in reasoning.split("\n") if line.strip()]
    selected = []
    for number, line in enumerate(lines, 1):
        if len(lines) <= 5 or number == 1 or number > len(lines) - 4 or any(tag in line for tag in TAGS):
            selected.append(f"Step {number}: {line}")
        elif selected[-1] != "...":
            selected.append("...")
    return "\n".join(selected)


def boxed(text: str) -> str | None:
    r"""The content of the last \boxed{}, which may contain braces; None if there is none."""
    begin = text.rfind("\\boxed{")
    if begin < 0:
        return None
    depth = 0
    for at in range(begin + 6, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            content = re.sub(r"\\text\{(.*)\}", r"\1", text[begin + 7 : at])
            return tidied(content) or None
    return None
