"""The base class of baselines: chats with a policy, searches, documents in prompts, and what is read in a policy's replies; and
the worked questions that they put into their prompts."""

from __future__ import annotations

import dataclasses
import pathlib
import re
import tomllib
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from routerl_jax.agents.agent import LLM, Agent, Tools
from routerl_jax.agents.chat import fitting
from routerl_jax.agents.conversation import Conversation, Prompt
from routerl_jax.agents.grammar import TOO_LONG, unshown
from routerl_jax.agents.observation import Reply
from routerl_jax.core.text import sentences, split_thoughts
from routerl_jax.core.types import Action, Call, Episode, Example, Message, Passage, Turn

CONCLUSION = "So the answer is:"  # the end of a chain of thought (IRCoT, arXiv 2212.10509)

ANSWER_ALONE = "Now write the answer alone, in a few words."


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatPrompt:
    """A prompt for a policy.

    Attributes:
      task: the instructions, for models that need them (`Baseline.instruct`).
      text: documents and question.
      cue: text before the reply in a plain-text prompt, such as `Answer:`. A chat template has its own marks.
      begun: the beginning of the reply, forced in the policy's place. Both kinds of prompts use it.
    """

    task: str
    text: str
    cue: str = ""
    begun: str = ""


@dataclasses.dataclass(frozen=True)
class SearchResults:
    """The results of a query from all knowledge bases that were asked."""

    calls: tuple[Call, ...] = ()

    @property
    def passages(self) -> list[Passage]:
        """The passages: the first of each knowledge base, then the second of each, and so on."""
        longest = max((len(call.passages) for call in self.calls), default=0)
        return [call.passages[rank] for rank in range(longest) for call in self.calls if rank < len(call.passages)]

    @property
    def failure(self) -> str:
        """The reason why there are no passages; "" if there are some."""
        notes = [note for call in self.calls if (note := unshown(call, call.passages))]
        return "" if self.passages or not notes else notes[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Baseline(Agent):
    """An agent that asks the policy in one or several chats.

    Attributes:
      tools: knowledge bases. Every search asks each of them for k documents, and the results are not cut to k. (): all.
      k: documents per search and knowledge base.
      instruct: True: give instructions, in the model's chat template if it has one. False: plain text without instructions,
        for small policies that know the form.
      max_turn_tokens: most tokens of a turn.
      answer_tokens: most tokens of a short answer.
    """

    tools: tuple[str, ...] = ()
    k: int = 5
    instruct: bool = True
    max_turn_tokens: int = 512
    answer_tokens: int = 64

    # --- prompts ---

    def chats(self, llm: LLM) -> bool:
        """Whether prompts are chats."""
        return self.instruct and llm.tokenizer.instructs_in_chats

    def prompt(self, llm: LLM, request: ChatPrompt) -> Prompt:
        """The prompt as messages or plain text, without `begun`."""
        if self.chats(llm):
            return [Message(role="system", content=request.task), Message(role="user", content=request.text)]
        task = f"{request.task}\n\n" if self.instruct and request.task else ""
        return f"{task}{request.text}\n{request.cue}"

    def begin(self, example: Example, llm: LLM, request: ChatPrompt) -> Conversation:
        """Opens a new chat with a prompt and the question's pictures."""
        chat = llm.conversation(self.prompt(llm, request), example.images)
        if request.begun:
            chat.force(f" {request.begun}" if request.cue and not self.chats(llm) else request.begun)
        return chat

    async def ask(
        self, example: Example, llm: LLM, request: ChatPrompt, *, stop: Sequence[str] = (), max_tokens: int = 0
    ) -> tuple[Conversation, Turn, str]:
        """Opens a new chat for a single turn. Returns the chat, the turn, and the turn's text (`reply_text`)."""
        chat = self.begin(example, llm, request)
        turn = await self.generate(chat, stop, max_tokens)
        chat.close()
        return chat, turn, reply_text(turn, llm)

    async def ask_line(
        self, example: Example, llm: LLM, request: ChatPrompt, max_tokens: int = 0
    ) -> tuple[Conversation, Turn, str]:
        """As `ask`, for a reply of one line, by default a short answer. In a chat the reply ends by itself."""
        stop = () if self.chats(llm) else ("\n",)
        return await self.ask(example, llm, request, stop=stop, max_tokens=max_tokens or self.answer_tokens)

    def ends(self, llm: LLM) -> tuple[str, ...]:
        """Stop strings of a chain of thought. After a plain-text prompt, a policy may go on with a new question."""
        return () if self.chats(llm) else ("\nQuestion:",)

    async def generate(
        self, chat: Conversation, stop: Sequence[str] = (), max_tokens: int = 0, opening: str = ""
    ) -> Turn:
        """Samples a turn of at most `max_tokens` tokens, by default `max_turn_tokens`.

        Args:
          opening: beginning of an answer that may be forced after the turn. Room is kept for it and the answer.
        """
        reserve = self.answer_tokens + chat.tokens_of(opening) if opening else 0
        return await chat.generate(
            stop=stop, max_tokens=max(1, min(max_tokens or self.max_turn_tokens, chat.room - reserve))
        )

    def question(self, example: Example, llm: LLM) -> str:
        """The question after its pictures. Chat marks in its text are made plain text."""
        return llm.image_marker * len(example.images) + llm.tokenizer.plain(example.question)

    def asking(self, example: Example, llm: LLM, task: str, cue: str = "Answer:", begun: str = "") -> ChatPrompt:
        """A prompt with the question alone."""
        return ChatPrompt(task=task, text=f"Question: {self.question(example, llm)}", cue=cue, begun=begun)

    # --- documents ---

    async def search(self, tools: Tools, query: str, k: int = 0) -> SearchResults:
        """Sends a query to each of its knowledge bases."""
        return SearchResults(
            tuple([await tools[name].search(query, k or self.k) for name in self.tools or tuple(tools)])
        )

    def search_action(self, query: str, thought: str = "") -> Action:
        """The action of a turn that leads to a search. It names the knowledge base if there is only one."""
        return Action(kind="search", tool=self.tools[0] if len(self.tools) == 1 else "", query=query, thought=thought)

    def fitted(
        self,
        example: Example,
        llm: LLM,
        passages: Sequence[Passage],
        request_of: Callable[[str], ChatPrompt],
        failure: str = "",
        tokens: int = 0,
    ) -> ChatPrompt:
        """A prompt with as many documents, best first, as leave room for a turn (or for half of the room, if that is less).

        Args:
          request_of: makes the prompt from the documents' text.
          failure: text in place of documents if none was found.
          tokens: length of the turn, by default `max_turn_tokens`.
        """

        def request_with(subset: Sequence[Passage]) -> ChatPrompt:
            return request_of(
                documents(subset, llm) if subset else failure or (TOO_LONG if passages else "Nothing was found.")
            )

        def room(subset: Sequence[Passage]) -> int:
            prompt = request_with(subset)
            return llm.room(self.prompt(llm, prompt), example.images) - len(llm.tokenizer.encode(prompt.begun))

        least = min(tokens or self.max_turn_tokens, room(()) // 2)
        return request_with(fitting(passages, lambda subset: room(subset) >= least))

    def reading(
        self,
        example: Example,
        llm: LLM,
        passages: Sequence[Passage],
        request: ChatPrompt,
        failure: str = "",
        tokens: int = 0,
    ) -> ChatPrompt:
        """A prompt with documents above its text, as many as have room (`fitted`)."""

        def request_of(documents: str) -> ChatPrompt:
            return dataclasses.replace(request, text=f"Documents:\n{documents}\n\n{request.text}")

        return self.fitted(example, llm, passages, request_of, failure, tokens)

    @property
    def search_budget(self) -> int | None:
        """As many searches of each knowledge base as `searches_field` says; None if there is no such field."""
        rounds = getattr(self, self.searches_field, None)
        return None if rounds is None else rounds * max(1, len(self.tools))

    # --- chats of several turns ---

    def tell(self, chat: Conversation, llm: LLM, turn: Turn, text: str) -> bool:
        """Adds a text after a turn: as a user's message if the policy has ended its turn in a chat, else within its turn.

        Returns False, and adds nothing, if the text leaves no room for a short answer.
        """
        as_message = self.chats(llm) and turn.stop_reason == "eos"
        observation = Reply(text) if as_message else text
        if chat.tokens_of(observation) + self.answer_tokens > chat.room:
            return False
        chat.observe(observation)
        return True

    async def answer(self, example: Example, llm: LLM, request: ChatPrompt) -> Episode:
        """Ends an episode with a new chat of one turn, which is a short answer. In plain text the first line counts."""
        chat, turn, text = await self.ask_line(example, llm, request)
        return chat.episode(answer=answered(turn, extracted(text)))

    async def think(self, chat: Conversation, llm: LLM) -> Episode:
        """Ends a chat with a chain of thought and its answer (`extracted`). If it has none, `conclude` asks for one.

        A chain in plain text ends where the policy goes on with a new question.
        """
        turn = await self.generate(chat, self.ends(llm), opening=f"\n{CONCLUSION}")
        text = reply_text(turn, llm).split("\nQuestion:")[0]
        found = extracted(text, chain=True)
        if found is None:
            return await self.conclude(chat, llm, turn)
        return chat.episode(answer=answered(turn, found))

    async def conclude(
        self, chat: Conversation, llm: LLM, turn: Turn, *, opening: str = f"\n{CONCLUSION}", closing: str = "\n"
    ) -> Episode:
        """Ends a chat in which the policy has given no answer.

        If the policy has ended its turn in a chat, it is asked for the answer. Else the answer is begun for it. If there is no
        room for either, the episode is truncated and has no answer.

        Args:
          turn: the last turn.
          opening, closing: beginning and end of an answer that is begun for the policy.
        """
        if turn.action is None and not turn.observation:
            answered(turn, None)
        as_message = self.chats(llm) and turn.stop_reason == "eos" and not turn.observation
        size = chat.tokens_of(Reply(ANSWER_ALONE) if as_message else opening)
        if size >= chat.room:
            return chat.episode(answer=None, truncated=True)
        if as_message:
            chat.reply(ANSWER_ALONE)
        else:
            chat.force(opening)
        last = await self.generate(chat, () if as_message else (closing,), self.answer_tokens)
        text, mark = reply_text(last, llm), opening.strip().splitlines()[-1]
        begun = not as_message and mark not in text
        if closing.strip() and (mark in text or begun):  # the policy may write the opening itself
            text = f"{mark}{text}" if begun else text
            text = boxed(text) or text.rpartition(mark)[2].split(closing)[0]
        found = extracted(text)
        if found is not None and found.rule == "line" and (begun or closing.strip()):
            found = found._replace(rule="begun" if begun else "own")
        return chat.episode(answer=answered(last, found))


def documents(passages: Sequence[Passage], llm: LLM) -> str:
    """Documents in the form of prompts: numbered, with their titles, one line each."""
    lines = [
        f"[{number}] {' '.join(f'{passage.title}: {passage.text}'.removeprefix(': ').split())}"
        for number, passage in enumerate(passages, 1)
    ]
    return llm.tokenizer.plain("\n".join(lines))


def reply_text(turn: Turn, llm: LLM) -> str:
    """The text of a turn, without its end mark and without a reasoning model's thoughts."""
    text = turn.text.removesuffix(end_mark(turn, llm)) if turn.stop_reason == "eos" else turn.text
    said = split_thoughts(text)[1]
    return said if said == text else said.lstrip()


def end_mark(turn: Turn, llm: LLM) -> str:
    """The mark at the end of a turn; "" if there is none."""
    marks = (llm.tokenizer.decode([token]) for token in llm.tokenizer.eos_ids)
    return next((mark for mark in marks if turn.text.endswith(mark)), "")


# --- what is read in a reply ---


class Extracted(NamedTuple):
    """An answer, and the name of the rule that found it (`extracted`)."""

    answer: str
    rule: str


def answered(turn: Turn, found: Extracted | None, error: str = "there is no answer in it") -> str | None:
    """Marks a turn as an answer, or as invalid if there is none, and returns the answer. `Turn.info` has the rule."""
    turn.well_formed = found is not None
    if found is None:
        turn.action = Action(kind="invalid", error=error)
        return None
    turn.action, turn.info["answer_rule"] = Action(kind="answer", answer=found.answer), found.rule
    return found.answer


_STYLE = r"[ \t*_`]*"
_FINAL = re.compile(rf"\bfinal answer{_STYLE}(?:is\b|[:：]|$)(?:{_STYLE}[:：])?", re.IGNORECASE | re.MULTILINE)
_CONCLUDED = re.compile(
    r"\banswer(?: to (?:the|this|your)(?: \w+)? question)? (?:is|would be|should be|must be)\b"
    rf"(?:{_STYLE}[:：])?",
    re.IGNORECASE,
)
_LABEL = re.compile(
    rf"^[ \t>#*_`•-]*(?:(?:the|my|short|direct|correct|right) )?answer{_STYLE}(?:[:：]| [–—-] |$)"
    rf"|\banswer{_STYLE}[:：](?={_STYLE}$)",
    re.IGNORECASE | re.MULTILINE,
)
_ANSWER_TAG = re.compile(r"<answer>(.*?)(?:</answer>|$)", re.IGNORECASE | re.DOTALL)


def extracted(text: str, *, chain: bool = False) -> Extracted | None:
    """The answer in a reply, by the first of these rules that finds one; None if none does.

    - `boxed`: the last \\boxed{X}.
    - `tag`: the last <answer>X</answer>.
    - `final`: after the last "Final answer:" or "final answer is".
    - `label`: after the first "Answer:" at the beginning of a line, or at the end of one that names what follows.
    - `conclusion`: after the last "the answer is:", or, if none has a colon, after the last "the answer is".
    - `line`: the first line, or the next one if it only names what follows. Not in a chain.

    Of the last four, the first sentence counts: "X. I hope this helps." is X. Behind a mark that ends its line, the next line
    counts. Two more names are those of callers: `own`, an answer in the method's own form, and `begun`, one after a beginning
    that was written for the policy. Every answer is `tidied`.

    Args:
      chain: the reply is a chain of thought. Conclusions go before labels, and the last label counts; one at the beginning
        only if a single sentence follows.
    """
    if (content := boxed(text)) is not None:
        return Extracted(content, "boxed")
    if content := tidied(" ".join((_ANSWER_TAG.findall(text) or [""])[-1].split())):
        return Extracted(content, "tag")
    cue = _LABEL.match(text.lstrip()) if chain else None
    if cue is not None and len(sentences(text.lstrip()[cue.end() :])) > 1:
        text = text.lstrip()[cue.end() :]
    labels = list(_LABEL.finditer(text))
    rules = {
        "final": lambda: _after(reversed(list(_FINAL.finditer(text))), text),
        "label": lambda: _after(reversed(labels) if chain else labels, text),
        "conclusion": lambda: _conclusion(text),
        "line": lambda: _line(text),
    }
    for rule in ("final", "conclusion", "label") if chain else rules:
        content = rules[rule]()
        if rule == "label":  # "Answer: The answer is X"
            content = _conclusion(content) or content
        if answer := first_sentence(content):
            return Extracted(answer, rule)
    return None


def first_sentence(text: str) -> str:
    """The first sentence of a text that is not empty when tidied; "" if there is none."""
    return next(filter(None, map(tidied, sentences(text))), "")


def _conclusion(text: str) -> str:
    """What stands after the last "answer is:", or, if none has a colon, after the last "answer is"."""
    marks = list(_CONCLUDED.finditer(text))
    return _after(reversed([mark for mark in marks if mark[0].endswith((":", "："))] or marks), text)


def _after(marks: Iterable[re.Match[str]], text: str) -> str:
    """What stands on the line after a mark, or on the next line that is not empty: of the first mark that something follows;
    "" if there is none."""
    for mark in marks:
        if line := next(filter(tidied, text[mark.end() :].splitlines()), ""):
            return line
    return ""


def _line(text: str) -> str:
    """The first line that is not empty, or the next one if it only names what follows."""
    lines = [line for line in text.splitlines() if tidied(line)]
    return next((line for line in lines if not line.rstrip(" \t*_").endswith((":", "："))), (lines or [""])[0])


def marked(text: str, label: str) -> Extracted | None:
    """The answer after a method's own label, from the last line that has it (rule `own`); None if there is none."""
    answer = first_sentence(last_line(text, label) or "")
    return Extracted(answer, "own") if answer else None


def boxed(text: str) -> str | None:
    r"""The content of the last \boxed{}, which may contain braces; None if there is none."""
    begin = text.rfind("\\boxed{")
    if begin < 0:
        return None
    depth = 0
    for at in range(begin + 6, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return tidied(text[begin + 7 : at]) or None
    return None


def short(text: str, label: str) -> str | None:
    """The first line that is not empty, without its label; None if there is none."""
    return next(filter(None, (tidied(line.strip().removeprefix(label)) for line in text.splitlines())), None)


_QUOTES = str.maketrans({"“": '"', "”": '"', "„": '"', "’": "'", "\xa0": " "})
_WRAPS = [*(mark * 2 for mark in "`\"'_$"), "‘'", "«»", ("$$", "$$"), ("\\(", "\\)"), ("\\[", "\\]")]
_LATEX = re.compile(r"\\(?:text\w*|math\w+|operatorname|emph|boxed)[ \t]*\{|[{}]")
_BOLD_FIRST = re.compile(r"[\s*]{0,6}?\*\*(?=\S)([^*]+)\*\*(?=[ \t]*(?:[,;:(–—-]|\.(?:\s|$)))")
_EMPHASIS = re.compile(r"(?<![\w*])(\*{1,3})(\S[^*]*?)\1(?![\w*])")
_CITED = re.compile(r"(?:(?:\]\d+(?: ?,\d+)*\[|】[^【】]*【)[ \t]*[,;]?)+")  # of a text backwards


def _without_commands(text: str) -> str:
    """A text without LaTeX's commands for the look of letters, such as \\text{..}. Other braces stay."""
    if "\\" not in text:
        return text
    kept: list[str] = []
    braces: list[bool] = []  # the open ones: whether each is kept
    at = 0
    for match in _LATEX.finditer(text):
        keep = match[0] == "{" if match[0] != "}" else not braces or braces.pop()
        if match[0] != "}":
            braces.append(keep)
        kept += [text[at : match.start()], match[0] if keep else ""]
        at = match.end()
    return "".join(kept) + text[at:]


def tidied(text: str) -> str:
    """An answer as it is compared: without surrounding space, bullets, emphasis, quotes, LaTeX, numbers of documents ("[2]")
    and a full stop. Curly quotes are written straight. Of "**X**, who wrote it", X is kept."""
    text = _without_commands(text.translate(_QUOTES))
    for _ in range(4):  # one may stand in the other
        text = re.sub(r"^(?:[-•]|#+)[ \t]+", "", text.strip())
        if match := _BOLD_FIRST.match(text):
            text = match[1]
        text = _EMPHASIS.sub(r"\2", text).strip("*`").strip()
        text = text.removesuffix(".").rstrip().strip("*`")
        if (cited := _CITED.match(text[::-1])) and cited.end() < len(text):
            text = text[: -cited.end()]
        for opening, closing in _WRAPS:
            inner = text[len(opening) : -len(closing)]
            if inner and text == f"{opening}{inner}{closing}" and opening not in inner and closing not in inner:
                text = inner
    return re.sub(r"\\([%$&#_ ])", r"\1", text).replace("{,}", ",").strip()


def last_line(text: str, label: str) -> str | None:
    """The text after a label, from the last line that has the label; None if no line has it."""
    contents = re.findall(rf"{re.escape(label)}[ \t]*(.*)", text)
    return contents[-1].strip() if contents else None


# --- worked questions (worked.toml), which are the same for all baselines ---


@dataclasses.dataclass(frozen=True)
class Hop:
    """A step: a question, a sentence that answers it, the answer alone, and a page (title, text) that says so."""

    question: str
    fact: str
    answer: str
    title: str
    text: str


@dataclasses.dataclass(frozen=True)
class WorkedExample:
    """A question with its steps and its answer."""

    question: str
    hops: tuple[Hop, ...]
    answer: str

    @property
    def chain(self) -> str:
        """The chain of thought."""
        return " ".join([*(hop.fact for hop in self.hops), f"{CONCLUSION} {self.answer}."])


WORKED_FILE = tomllib.loads(pathlib.Path(__file__).with_name("worked.toml").read_text())
WORKED = tuple(
    WorkedExample(worked["question"], tuple(Hop(*hop) for hop in worked["hops"]), worked["answer"])
    for worked in WORKED_FILE["questions"]
)


def chains(count: int) -> str:
    """The first `count` worked questions with their chains of thought, as text; "" for none."""
    return examples([f"Question: {worked.question}\nAnswer: {worked.chain}" for worked in WORKED[:count]])


def examples(texts: Sequence[str]) -> str:
    """Worked examples in the form in which they end a task; "" for none."""
    return "\n\nExamples:\n\n" + "\n\n".join(texts) if texts else ""
