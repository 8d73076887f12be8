"""What baselines share: questions put to a policy in chats of their own, searches, documents in prompts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from routerl_jax.agents.agent import LLM, Agent, Tools
from routerl_jax.agents.conversation import Conversation, Prompt
from routerl_jax.agents.fitting import fitting
from routerl_jax.agents.grammar import TOO_LONG, unshown
from routerl_jax.baselines.forms import CONCLUSION, concluded, short, without_thinking
from routerl_jax.core.types import Action, Call, Episode, Example, Message, Passage, Turn

ANSWER_ALONE = "Now write the answer alone, in a few words."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """What a policy is asked.

    Attributes:
      task: what to do, for models that must be told (`Baseline.instruct`).
      text: documents and question.
      cue: what stands before the reply where it is plain text, such as `Answer:`; a chat template has marks of its own.
      begun: the beginning of the reply, written in the policy's place in either form.
    """

    task: str
    text: str
    cue: str = ""
    begun: str = ""


@dataclasses.dataclass(frozen=True)
class Found:
    """What the knowledge bases have found for a query: best first, by turns from each."""

    calls: tuple[Call, ...] = ()

    @property
    def passages(self) -> list[Passage]:
        """The first of each knowledge base, then the second of each, and so on."""
        longest = max((len(call.passages) for call in self.calls), default=0)
        return [call.passages[rank] for rank in range(longest) for call in self.calls if rank < len(call.passages)]

    @property
    def trouble(self) -> str:
        """Why there are no passages; "" where there are some."""
        notes = [note for call in self.calls if (note := unshown(call, call.passages))]
        return "" if self.passages or not notes else notes[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Baseline(Agent):
    """An agent that asks the policy in one or several chats.

    Attributes:
      tools: knowledge bases, of which every search asks each for k documents (not a fusion to k); (): all there are.
      k: documents per search and knowledge base.
      instruct: say how to work, in the model's chat template if it has one; without, plain text in the bare form, for small
        policies that know it.
      max_turn_tokens: most tokens of a turn.
      answer_tokens: most tokens of a short answer.
    """

    tools: tuple[str, ...] = ()
    k: int = 5
    instruct: bool = True
    max_turn_tokens: int = 512
    answer_tokens: int = 64

    # --- what the policy is asked ---

    def chats(self, llm: LLM) -> bool:
        """Whether prompts are chats."""
        return self.instruct and llm.tokenizer.has_chat_template

    def prompt(self, llm: LLM, asked: Asked) -> Prompt:
        """Messages, or plain text; `begun` apart."""
        if self.chats(llm):
            return [Message(role="system", content=asked.task), Message(role="user", content=asked.text)]
        task = f"{asked.task}\n\n" if self.instruct and asked.task else ""
        return f"{task}{asked.text}\n{asked.cue}"

    def begin(self, example: Example, llm: LLM, asked: Asked) -> Conversation:
        """A chat of its own."""
        chat = llm.conversation(self.prompt(llm, asked), example.images)
        if asked.begun:
            chat.force(f" {asked.begun}" if asked.cue and not self.chats(llm) else asked.begun)
        return chat

    async def ask(
        self, example: Example, llm: LLM, asked: Asked, *, stop: Sequence[str] = (), max_tokens: int = 0
    ) -> tuple[Conversation, Turn, str]:
        """A chat of one turn: the chat, the turn, and what it says (`said`)."""
        chat = self.begin(example, llm, asked)
        turn = await self.generate(chat, stop, max_tokens)
        chat.close()
        return chat, turn, said(turn, llm)

    def ends(self, llm: LLM) -> tuple[str, ...]:
        """What ends a chain of thought: a policy that is given plain text may go on with a question of its own."""
        return () if self.chats(llm) else ("\nQuestion:",)

    async def generate(
        self, chat: Conversation, stop: Sequence[str] = (), max_tokens: int = 0, opening: str = ""
    ) -> Turn:
        """A turn of at most so many tokens, `max_turn_tokens` by default.

        Args:
          opening: of an answer that may be begun afterwards: room is kept for both.
        """
        kept = self.answer_tokens + chat.tokens_of(opening) if opening else 0
        return await chat.generate(
            stop=stop, max_tokens=max(1, min(max_tokens or self.max_turn_tokens, chat.room - kept))
        )

    def question(self, example: Example, llm: LLM) -> str:
        """The question, after its pictures, without marks of turns in it."""
        return llm.image_marker * len(example.images) + llm.tokenizer.plain(example.question)

    # --- documents ---

    async def search(self, tools: Tools, query: str, k: int = 0) -> Found:
        """Asks each of its knowledge bases."""
        return Found(tuple([await tools[name].search(query, k or self.k) for name in self.tools or tuple(tools)]))

    def searching(self, query: str, thought: str = "") -> Action:
        """The action of a turn that leads to a search; it names a knowledge base where there is just one."""
        return Action(kind="search", tool=self.tools[0] if len(self.tools) == 1 else "", query=query, thought=thought)

    def fitted(
        self,
        example: Example,
        llm: LLM,
        found: Sequence[Passage],
        asking: Callable[[str], Asked],
        trouble: str = "",
        tokens: int = 0,
    ) -> Asked:
        """What is asked with as many documents, best first, as leave room for a turn (half of the room, if that is less).

        Args:
          asking: of the documents' text.
          trouble: what stands in the place of documents where none was found.
          tokens: of the turn, `max_turn_tokens` by default.
        """

        def asked(some: Sequence[Passage]) -> Asked:
            return asking(documents(some, llm) if some else trouble or (TOO_LONG if found else "Nothing was found."))

        def room(some: Sequence[Passage]) -> int:
            made = asked(some)
            return llm.room(self.prompt(llm, made), example.images) - len(llm.tokenizer.encode(made.begun))

        least = min(tokens or self.max_turn_tokens, room(()) // 2)
        return asked(fitting(found, lambda some: room(some) >= least))

    # --- what it says in a growing chat ---

    def tell(self, chat: Conversation, llm: LLM, turn: Turn, text: str) -> bool:
        """Says something after a turn: as a user's message where the policy has ended its turn in a chat, else in its text.
        False where there is no room for it beside a short answer."""
        as_message = self.chats(llm) and turn.stop_reason == "eos"
        size = chat.reply_tokens(text) if as_message else chat.tokens_of(text)
        if size + self.answer_tokens > chat.room:
            return False
        if as_message:
            chat.reply(text)
        else:
            chat.observe(text)
        return True

    async def answer(self, example: Example, llm: LLM, asked: Asked) -> Episode:
        """The end of an episode: a chat of its own whose one turn is a short answer; of plain text its first line."""
        stop = () if self.chats(llm) else ("\n",)
        chat, turn, text = await self.ask(example, llm, asked, stop=stop, max_tokens=self.answer_tokens)
        return chat.episode(answer=answered(turn, concluded(text) or short(text)))

    async def think(self, chat: Conversation, llm: LLM) -> Episode:
        """The end of a chat: a chain of thought with its conclusion (`concluded`), or, where it has none, `conclude`.

        Plain text ends with the line of the conclusion, or where a policy goes on with a question of its own.
        """
        turn = await self.generate(chat, self.ends(llm), opening=f"\n{CONCLUSION}")
        text = said(turn, llm).split("\nQuestion:")[0]
        answer = concluded(text)
        if answer is None:
            return await self.conclude(chat, llm, turn)
        return chat.episode(answer=answered(turn, answer))

    async def conclude(
        self, chat: Conversation, llm: LLM, turn: Turn, *, opening: str = f"\n{CONCLUSION}", closing: str = "\n"
    ) -> Episode:
        """The end of a chat in which the policy has given no answer: it is asked for one where it has ended its turn in a chat,
        else one is begun for it. Without room for that the episode is truncated, without an answer.

        Args:
          turn: the last one.
          opening, closing: of an answer that is begun.
        """
        if turn.action is None and not turn.observation:
            answered(turn, None)
        as_message = self.chats(llm) and turn.stop_reason == "eos" and not turn.observation
        size = chat.reply_tokens(ANSWER_ALONE) if as_message else chat.tokens_of(opening)
        if size >= chat.room:
            return chat.episode(answer=None, truncated=True)
        if as_message:
            chat.reply(ANSWER_ALONE)
        else:
            chat.force(opening)
        last = await self.generate(chat, () if as_message else (closing,), self.answer_tokens)
        text, mark = said(last, llm), opening.strip().splitlines()[-1]
        if closing.strip() and (mark in text or not as_message):  # it may write the opening itself
            text = text.split(mark)[-1].split(closing)[0]
        return chat.episode(answer=answered(last, concluded(text) or short(text)))


def documents(passages: Sequence[Passage], llm: LLM) -> str:
    """Documents as prompts show them: numbered, with their titles, one line each."""
    lines = [
        f"[{number}] {' '.join(f'{passage.title}: {passage.text}'.removeprefix(': ').split())}"
        for number, passage in enumerate(passages, 1)
    ]
    return llm.tokenizer.plain("\n".join(lines))


def said(turn: Turn, llm: LLM) -> str:
    """What a turn says, without the mark that ends it and what a reasoning model thought before."""
    return without_thinking(turn.text.removesuffix(end_mark(turn, llm)) if turn.stop_reason == "eos" else turn.text)


def end_mark(turn: Turn, llm: LLM) -> str:
    """The mark with which a turn ends; "" for none."""
    marks = (llm.tokenizer.decode([one]) for one in llm.tokenizer.eos_ids)
    return next((mark for mark in marks if turn.text.endswith(mark)), "")


def answered(turn: Turn, answer: str | None, error: str = "there is no answer in it") -> str | None:
    """Notes on a turn that it was to answer, and returns the answer."""
    turn.well_formed = answer is not None
    turn.action = Action(kind="invalid", error=error) if answer is None else Action(kind="answer", answer=answer)
    return answer
