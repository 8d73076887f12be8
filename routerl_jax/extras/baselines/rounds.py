"""Baselines that search in rounds while they reason: IRCoT, Iter-RetGen, Self-Ask, ReAct, Search-o1, OmniSearch."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import ClassVar, Literal

from routerl_jax.agents.agent import LLM, Tools
from routerl_jax.agents.conversation import Conversation
from routerl_jax.agents.grammar import NO_TOOL, between, one_line
from routerl_jax.core.text import sentence_ends
from routerl_jax.core.text import sentences as sentences_in
from routerl_jax.core.types import Action, Episode, Example, Passage, Query, Turn
from routerl_jax.extras.baselines.baseline import (
    WORKED,
    Baseline,
    ChatPrompt,
    Extracted,
    SearchResults,
    WorkedExample,
    answered,
    boxed,
    chains,
    examples,
    extracted,
    last_line,
    marked,
    reply_text,
    tidied,
)
from routerl_jax.extras.baselines.registry import baseline
from routerl_jax.extras.baselines.routing import chosen, described
from routerl_jax.extras.baselines.vanilla_rag import READ, THINK
from routerl_jax.knowledge.base import with_picture

# --- IRCoT: alternates between retrieval and chain of thought (Trivedi et al., arXiv 2212.10509). ---


# Where a sentence may end. Whether it does is seen in the text behind (core.text.sentence_ends): "J. Lee" goes on.
SENTENCE_ENDS = (". ", ".\n", "? ", "\n")
READ_AND_THINK = f"Answer the question from the documents and what you know. {THINK}"


@baseline("ircot", paper="2212.10509", about="a search for each sentence of a chain of thought, then a reader")
@dataclasses.dataclass(frozen=True, kw_only=True)
class IRCoT(Baseline):
    """Searches for the question. Then it alternates: it writes one sentence of a chain of thought, with all documents so far in
    the prompt, and searches for this sentence.

    The chain ends with a sentence that has "answer is" (or an answer in another of the forms of `extracted`), with an empty
    one or one that is in the chain already, or after `max_steps`. Then a separate reader answers from the collected documents.

    As in the authors' code (StonyBrookNLP/ircot), a sentence that concludes or calculates is not searched for. The last
    sentence that states a fact is searched for instead, or the question if there is none. The same query is not searched for
    twice in a row. The code differs in three ways: it leaves out the question words of queries, because its retriever is BM25;
    it shows worked examples with documents for each data set (here there are `shots` examples, without documents); and it lets
    the model write on and drops everything after the first sentence (here the model stops there; where only the next word can
    tell whether a sentence ends, as behind an initial, it writes on).

    R1-Router runs it with k=5, max_steps=3 and reader="none". R1-Searcher (by FlashRAG) also runs it without a reader.

    Attributes:
      max_steps: most sentences; 8 in the paper.
      max_documents: most documents that are collected; 15 in the paper.
      reader: how the reader answers. cot: by a chain of thought; direct: directly (the paper has both); none: there is no
        reader, and the answer is the conclusion of the chain, or its last sentence.
      sentence_tokens: most tokens of a sentence.
      shots: number of worked questions in the task, at most 8.
    """

    searches_field: ClassVar[str] = "max_steps"

    max_steps: int = 8
    max_documents: int = 15
    reader: Literal["cot", "direct", "none"] = "cot"
    sentence_tokens: int = 100
    shots: int = 4

    async def run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        collected: dict[tuple[str, str], Passage] = {}
        sentences: list[str] = []
        query, searched, failure = example.question, "", ""
        chain = self.asking(example, llm, f"{READ_AND_THINK}{chains(self.shots)}")
        for step in range(1, self.max_steps + 1):
            if query != searched:
                results = await self.search(tools, query)
                searched, failure = query, results.failure
                fresh = {
                    (item.id, item.text): item for item in results.passages if (item.id, item.text) not in collected
                }
                collected |= dict(list(fresh.items())[: self.max_documents - len(collected)])
            tokens = self.sentence_tokens
            begun = dataclasses.replace(chain, begun=" ".join(sentences))
            request = self.reading(example, llm, list(collected.values()), begun, failure, tokens)
            chat, turn, sentence = await self.sentence(example, llm, request)
            found = extracted(sentence, chain=True)
            concludes = found is not None and (
                found.rule != "label" or bool(sentences)
            )  # a chain may begin with "Answer:"
            repeats = sentence in sentences
            if sentence and not repeats:
                sentences.append(sentence)
            if not sentence or repeats or concludes or step == self.max_steps:
                break
            facts = [item for item in sentences if not is_reasoning(item)]
            query = facts[-1] if facts else example.question
            turn.action, turn.well_formed = self.search_action(query, thought=sentence), True
        if self.reader == "none":
            return chat.episode(answer=answered(turn, extracted(sentences[-1]) if sentences else None))
        if self.reader == "direct":
            chain = dataclasses.replace(chain, task=READ)
        request = self.reading(example, llm, list(collected.values()), chain, failure)
        if self.reader == "cot":
            return await self.think(self.begin(example, llm, request), llm)
        return await self.answer(example, llm, request)

    async def sentence(self, example: Example, llm: LLM, request: ChatPrompt) -> tuple[Conversation, Turn, str]:
        """Asks for a sentence in a new chat. Returns the chat, its last turn, and the sentence.

        An engine stops at every ". ", and goes on in another turn if that ends no sentence. An endpoint has written on.
        """
        chat, text, tokens = self.begin(example, llm, request), "", self.sentence_tokens
        while True:
            turn = await self.generate(chat, SENTENCE_ENDS, tokens)
            text += reply_text(turn, llm)
            tokens -= max(turn.tokens, 1)
            ended = turn.stop_reason != "stop" or text.endswith("\n") or sentence_ends(text) or chat.usage is not None
            if ended or min(tokens, chat.room) < 1:
                chat.close()
                line = (text.strip().splitlines() or [""])[0]
                return chat, turn, next(iter(sentences_in(line)), "")


def is_reasoning(sentence: str) -> bool:
    """True if a sentence draws a conclusion or calculates, and states no new fact. IRCoT's code does not search for these."""
    begins = sentence.lower().startswith(("thus ", "thus,", "so ", "so,", "that is,", "therefore", "hence"))
    return begins or re.search(r"\d [+-] \d[\d,.]* = \d", sentence) is not None


# --- Iter-RetGen: the reply of each round is part of the next query (Shao et al., arXiv 2305.15294). ---


@baseline(
    "iter_retgen", paper="2305.15294", about="reads and writes a chain of thought, then searches with it, in rounds"
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class IterRetGen(Baseline):
    """Searches and writes a chain of thought in rounds.

    A round searches, and writes a whole chain of thought from the documents of this round only. The first query is the
    question. Each later query is the chain of the previous round, followed by the question (section 3.2). The conclusion of
    the last chain is the answer.

    FlashRAG puts the question before the chain, and has 3 rounds. R1-Router's row with this name is another method: it asks for
    sub-questions until "None", answers each, and answers the question from these.

    Attributes:
      rounds: number of rounds. The paper recommends 2, and goes up to 7.
      shots: number of worked questions in the task, at most 8.
    """

    searches_field: ClassVar[str] = "rounds"

    rounds: int = 2
    shots: int = 4

    async def run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        query, prompt = example.question, self.asking(example, llm, f"{READ_AND_THINK}{chains(self.shots)}")
        for _ in range(self.rounds - 1):
            results = await self.search(tools, query)
            request = self.reading(example, llm, results.passages, prompt, results.failure)
            _, turn, text = await self.ask(example, llm, request, stop=self.ends(llm))
            chain = " ".join(text.split("\nQuestion:")[0].split())
            query = f"{chain} {example.question}".strip()
            turn.action, turn.well_formed = self.search_action(query, thought=chain), bool(chain)
        results = await self.search(tools, query)
        request = self.reading(example, llm, results.passages, prompt, results.failure)
        return await self.think(self.begin(example, llm, request), llm)


# --- Self-Ask with a search engine (Press et al., arXiv 2210.03350). ---


# The paper's marks. Its loop stops at them and parses them.
NEEDED = "Are follow up questions needed here:"
FOLLOW_UP = "Follow up:"
INTERMEDIATE = "Intermediate answer:"
FINAL = "So the final answer is:"

SELF_ASK = (
    f'Answer the question by asking simpler ones first. After "{NEEDED}" write Yes or No. Then, for each simpler question, a '
    f'line "{FOLLOW_UP}" with the question; a line "{INTERMEDIATE}" with what a search engine finds for it follows. When '
    f'nothing is missing, write a line "{FINAL}" with the answer alone, in a few words.'
)


@baseline("self_ask", paper="2210.03350", about="asks itself follow-up questions, which a search answers")
@dataclasses.dataclass(frozen=True, kw_only=True)
class SelfAsk(Baseline):
    """Writes follow-up questions in one conversation. Each is searched for, and the results are its intermediate answer.

    If nothing is found, or the search fails, the policy writes the intermediate answer itself, as in the authors' code. If a
    turn has neither a follow-up question nor a final answer, the final answer is begun for the policy. This also happens when
    the budget is used up.

    The paper's search engine gives a short answer (Google's answer box or snippet). A knowledge base gives passages, so here
    the k best of each, on one line, replace it. The paper has no limit on follow-up questions; FlashRAG's is 5. FlashRAG (and
    so R1-Searcher) shows passages above the question, only those of the latest follow-up question, and lets the model write
    all intermediate answers: `above=True`.

    Attributes:
      k: passages per follow-up question.
      max_follow_ups: most follow-up questions.
      above: use FlashRAG's form.
      shots: number of worked questions in the task; 4 in the paper.
    """

    k: int = 1
    searches_field: ClassVar[str] = "max_follow_ups"

    max_follow_ups: int = 5
    above: bool = False
    shots: int = 4

    async def run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        results = await self.search(tools, example.question) if self.above else SearchResults()
        chat, written, turn = self.begin(example, llm, self.request(example, llm, results, "")), "", None
        for follow_up in range(self.max_follow_ups + 1):
            turn = await self.generate(chat, (INTERMEDIATE, "\nQuestion:"), opening=f"\n{FINAL}")
            text = reply_text(turn, llm).split("\nQuestion:")[0]
            said = text.removesuffix(INTERMEDIATE).rstrip()
            query = last_line(said, FOLLOW_UP)
            if found := marked(text, FINAL) or (None if query else extracted(text, chain=True)):
                return chat.episode(answer=answered(turn, found))
            if not query or follow_up == self.max_follow_ups:
                break
            turn.action = self.search_action(query)
            turn.well_formed = said.rpartition("\n")[2].lstrip().startswith(FOLLOW_UP)
            results = await self.search(tools, query)
            if self.above:
                written += f"{said}\n{INTERMEDIATE}"
                chat.close()
                chat = self.begin(example, llm, self.request(example, llm, results, written))
            elif (observation := self.intermediate(text, results)) and not self.tell(chat, llm, turn, observation):
                break
        assert turn is not None
        if turn.action is None:
            answered(turn, None, f'there is neither "{FOLLOW_UP}" nor "{FINAL}"')
        return await self.conclude(chat, llm, turn, opening=f"\n{FINAL}")

    def intermediate(self, text: str, results: SearchResults) -> str:
        """The text after a follow-up question: the mark and the passages, or only the mark, for the policy to go on."""
        mark = "" if text.endswith(INTERMEDIATE) else f"\n{INTERMEDIATE}"
        passages = " ".join(" ".join(passage.text.split()) for passage in results.passages)
        return f"{mark} {passages}\n" if passages else mark

    def request(self, example: Example, llm: LLM, results: SearchResults, written: str) -> ChatPrompt:
        """The prompt with the question and the text so far; with `above`, the passages stand above the question."""
        task = SELF_ASK + examples([_worked_follow_ups(shot) for shot in WORKED[: self.shots]])
        request = self.asking(example, llm, task, cue="", begun=f"{NEEDED}{written}")
        return self.reading(example, llm, results.passages, request, results.failure) if self.above else request

    @property
    def search_budget(self) -> int:
        """One search per follow-up question, of each knowledge base. With `above`, there is one more, for the question."""
        return (self.max_follow_ups + self.above) * max(1, len(self.tools))


def _worked_follow_ups(shot: WorkedExample) -> str:
    """A worked question in Self-Ask's form."""
    steps = "".join(f"{FOLLOW_UP} {hop.question}\n{INTERMEDIATE} {hop.answer}\n" for hop in shot.hops)
    return f"Question: {shot.question}\n{NEEDED} Yes.\n{steps}{FINAL} {shot.answer}"


# --- ReAct: alternating thoughts, actions and observations (Yao et al., arXiv 2210.03629). ---


REACT = (
    'Answer the question in steps. A step is a line "Thought:" and a line "Action:"; a line "Observation:" with what came of '
    "it follows. There are three actions: search[query] looks for documents; lookup[words] shows the next sentence with these "
    "words in what the last search found; finish[answer] ends with the answer alone, in a few words."
)
_ACTION = re.compile(r"Action(?: \d+)?:[ \t]*(search|lookup|finish)\[(.*)\]", re.IGNORECASE)
LAST_STEP = "Thought: I have to answer now.\nAction: finish["
INVALID = "That is no action. Write search[query], lookup[words] or finish[answer]."


@baseline("react", paper="2210.03629", about="thinks, searches or looks up, and observes, step by step")
@dataclasses.dataclass(frozen=True, kw_only=True)
class ReAct(Baseline):
    """Thinks and acts step by step in one conversation.

    In each step the policy writes a thought and an action, and an observation follows. The actions are search[query],
    lookup[words] (shows the next sentence with these words in the results of the last search) and finish[answer]. The
    observation after a turn without an action says that it is invalid, and the turn costs a step. (The authors' code asks once
    more for the action alone.)

    The paper's search opens the Wikipedia page of a name and shows its first five sentences, or names five similar pages. Here
    it shows the k best documents of each knowledge base. If no step has finish[], the paper ends without an answer or falls
    back on chain of thought. Here an answer is begun for the policy.

    Attributes:
      max_steps: most steps; 7 for HotpotQA in the paper.
      shots: number of worked questions in the task; 6 in the paper.
    """

    searches_field: ClassVar[str] = "max_steps"

    max_steps: int = 7
    shots: int = 4

    async def run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        task = REACT + examples([_worked_steps(sentence) for sentence in WORKED[: self.shots]])
        chat = self.begin(example, llm, self.asking(example, llm, task, cue=""))
        sentences: list[str] = []  # sentences in the results of the last search
        looked: dict[str, int] = {}  # number of sentences shown so far, by the words looked up
        turn = None
        for _ in range(self.max_steps):
            turn = await self.generate(chat, ("\nObservation", "]\n", "\nQuestion:"), opening=LAST_STEP)
            kind, argument = parse_action(reply_text(turn, llm))
            if kind == "finish":
                found = Extracted(tidied(argument), "own") if tidied(argument) else None
                return chat.episode(answer=answered(turn, found, "finish[] has nothing in it"))
            if kind == "search":
                turn.action, turn.well_formed = self.search_action(argument), True
                results = await self.search(tools, argument)
                sentences, looked = sentences_of(results), {}
                observation = found_text(results)
            elif kind == "lookup":
                turn.well_formed = True
                matches = [sentence for sentence in sentences if argument.lower() in sentence.lower()]
                index = looked.get(argument, 0)
                looked[argument] = index + 1
                has_match = index < len(matches)
                observation = (
                    f"({index + 1} of {len(matches)}) {matches[index]}" if has_match else "There is no more of it."
                )
            elif found := stated(reply_text(turn, llm)):
                return chat.episode(answer=answered(turn, found))
            else:
                answered(turn, None, INVALID)
                observation = INVALID
            begun = turn.text.rstrip().endswith("Observation")
            mark = ": " if begun else ("" if turn.text.endswith("\n") else "\n") + "Observation: "
            if not self.tell(chat, llm, turn, f"{mark}{one_line(observation, ())}\n"):
                break
        assert turn is not None
        return await self.conclude(chat, llm, turn, opening=LAST_STEP, closing="]")


def parse_action(text: str) -> tuple[str, str]:
    """(action, argument) of the first action on a line of its own, else of the first one.

    ("", "") if there is none or it has no argument; finish[] may be empty.
    """
    lines = (_ACTION.match(line.strip()) for line in text.splitlines())
    # an action ends with a bracket: behind the last one of a line there is none to look for
    within = (_ACTION.search(line, 0, line.rfind("]") + 1) for line in text.split("\n"))
    match = next(filter(None, lines), None) or next(filter(None, within), None)
    kind, argument = (match[1].lower(), " ".join(match[2].split())) if match else ("", "")
    return (kind, argument) if argument or kind == "finish" else ("", "")


def stated(text: str) -> Extracted | None:
    """An answer in another form than the method's, outside the thought of a step; None if there is none."""
    lines = (line for line in text.splitlines() if not line.lstrip(" *").startswith("Thought"))
    found = extracted("\n".join(lines), chain=True)
    return found if found is not None and found.rule != "conclusion" else None


def sentences_of(results: SearchResults) -> list[str]:
    """The sentences of the results, in order."""
    return [sentence for passage in results.passages for sentence in sentences_in(passage.text)]


def found_text(results: SearchResults) -> str:
    """The observation after a search."""
    if not results.passages:
        return results.failure or "Nothing was found."
    return " ".join(f"({number}) {passage.title}: {passage.text}" for number, passage in enumerate(results.passages, 1))


def _worked_steps(shot: WorkedExample) -> str:
    """A worked question in ReAct's form."""
    steps = [f"Question: {shot.question}"]
    for hop in shot.hops:
        steps += [f"Thought: {hop.question}", f"Action: search[{hop.question.rstrip('?')}]"]
        steps.append(f"Observation: (1) {hop.title}: {hop.text}")
    return "\n".join([*steps, f"Thought: {shot.hops[-1].fact}", f"Action: finish[{shot.answer}]"])


# --- Search-o1: a reasoning model searches while it thinks, and reads documents in separate chats (arXiv 2501.05366). ---


BEGIN_QUERY, END_QUERY = "<|begin_search_query|>", "<|end_search_query|>"
BEGIN_RESULT, END_RESULT = "<|begin_search_result|>", "<|end_search_result|>"
TAGS = (BEGIN_QUERY, END_QUERY, BEGIN_RESULT, END_RESULT)

INFORMATION = "Final Information:"
BOXED = "\n\\boxed{"
NOTHING = "No helpful information was found."
REPEATED = "This was searched for before; see what was found then."
SPENT = "There are no searches left. Go on with what is known."

SEARCH_O1 = (
    "Reason step by step about the question. You can search: whenever a fact is missing or uncertain, write a query between "
    f"{BEGIN_QUERY} and {END_QUERY}. What a search finds is read for you, and what helps comes back between {BEGIN_RESULT} and "
    f"{END_RESULT}; then go on reasoning. You may search up to {{searches}} times. At the end write the answer alone, in a few "
    "words, as \\boxed{{answer}}."
)
READ_FOR_REASONING = (
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
        task = SEARCH_O1.format(searches=self.max_searches)
        chat = self.begin(example, llm, self.asking(example, llm, task))
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
        answer = boxed(turn.text)
        if found := Extracted(answer, "boxed") if answer else extracted(reply_text(turn, llm), chain=True):
            return chat.episode(answer=answered(turn, found))
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
            return ChatPrompt(task=READ_FOR_REASONING, text=text, cue=INFORMATION)

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


# --- OmniSearch: a planner asks sub-questions and names a retriever for each (Li et al., arXiv 2411.02937). ---


OMNISEARCH = (
    'Solve the question by sub-questions, one at a time. A step is three lines: "Thought:" with what is known and what is '
    'missing; "Sub-question:" with what to find out next; "Search:" with where to look it up, written NAME: query, or '
    f'"{NO_TOOL}". What is found follows in a line "Found:". When all is known, write a line "Final answer:" with the answer '
    "alone, in a few words. These can be searched:\n{names}"
)


@baseline("omnisearch", paper="2411.02937", about="plans sub-questions and a retriever for each", searches="chosen")
@dataclasses.dataclass(frozen=True, kw_only=True)
class OmniSearch(Baseline):
    """Plans sub-questions in one conversation.

    In each step the policy writes a thought, a sub-question, and a retriever with a query. The search results follow as text.
    With "none" as the retriever, the policy answers the sub-question itself. The conversation ends when the policy writes a
    final answer. A turn with neither a retriever nor a final answer is invalid and costs a step. After the last step the answer
    is begun for the policy.

    The paper's retrievers are a web search by text, a web search by text for pictures, and a search by the question's picture.
    Here they are the run's knowledge bases; those in `sees` also get the picture. The paper's model is fine-tuned for this
    form; here any policy runs.

    Attributes:
      max_steps: most turns. The paper leaves it to the model; R1-Router has a limit, but does not give it.
      about: contents of the knowledge bases, by name.
      sees: knowledge bases that get the question's picture with the query.
    """

    searches_field: ClassVar[str] = "max_steps"

    max_steps: int = 5
    about: Mapping[str, str] = dataclasses.field(default_factory=dict)
    sees: tuple[str, ...] = ()

    async def run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        names = self.tools or tuple(tools)
        task = OMNISEARCH.format(names=described(names, self.about))
        chat = self.begin(example, llm, self.asking(example, llm, task, cue=""))
        turn = None
        for _ in range(self.max_steps):
            turn = await self.generate(chat, ("\nFound:", "\nQuestion:"), opening="Final answer:")
            text = reply_text(turn, llm).split("\nQuestion:")[0]
            behind = text.rpartition("Search:")[2]  # before a search, a thought only names the answer's label
            if found := marked(behind, "Final answer:") or (stated(text) if behind == text else None):
                return chat.episode(answer=answered(turn, found))
            turn.action = action = parse_step(text, names)
            turn.well_formed = action.kind == "search" and "Thought:" in text and "Sub-question:" in text
            if action.kind == "invalid":
                observation = f"That step can't be done: {action.error}."
            elif action.tool == NO_TOOL:
                observation = "Nothing was searched for."
            else:
                query: Query = action.query
                if action.tool in self.sees and example.images:
                    query = with_picture(action.query, example.images)
                observation = found_text(SearchResults((await tools[action.tool].search(query, self.k),)))
            mark = " " if text.endswith("Found:") else "\nFound: "
            if not self.tell(chat, llm, turn, f"{mark}{one_line(observation, ())}\n"):
                break
        assert turn is not None
        return await self.conclude(chat, llm, turn, opening="Final answer:")

    @property
    def search_budget(self) -> int:
        """One search per step."""
        return self.max_steps


def parse_step(text: str, names: tuple[str, ...]) -> Action:
    """The search of a step. Its query is the text after the retriever's name, or else the sub-question."""
    where = last_line(text, "Search:")
    name = None if where is None else chosen(where, names)
    if where is None or name is None:
        return Action(kind="invalid", error=f'after "Search:" it names none of {", ".join(names)} and {NO_TOOL}')
    query = where.partition(":")[2].strip() or last_line(text, "Sub-question:") or ""
    if name != NO_TOOL and not query:
        return Action(kind="invalid", error="there is no query")
    return Action(kind="search", tool=name, query=query or NO_TOOL, thought=last_line(text, "Thought:") or "")
