"""Grammars: how a policy writes its actions and how observations are written for it. Each recipe has its own."""

from __future__ import annotations

import abc
import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from routerl_jax.core.registry import Registry
from routerl_jax.core.tokenizer import Tokenizer
from routerl_jax.core.types import Action, Call, Message, Observation, Passage, Shown, ToolSchema

GRAMMARS: Registry[type[Grammar]] = Registry(
    "grammar",
    {
        "r1_router": "routerl_jax.recipes.r1_router.grammar:R1RouterGrammar",
        "r1_searcher": "routerl_jax.recipes.r1_searcher:R1SearcherGrammar",
        "r1_searcher_answer": "routerl_jax.recipes.r1_searcher:R1SearcherOpenedAnswer",
        "routerag": "routerl_jax.recipes.routerag:RouteRAGGrammar",
        "routerag_answer": "routerl_jax.recipes.routerag:OpenedAnswer",
        "search_r1": "routerl_jax.recipes.search_r1:SearchR1Grammar",
        "tool_calls": "routerl_jax.agents.tool_calls:ToolCalls",
        "tool_calls_with_looks": "routerl_jax.agents.tool_calls:LookingCalls",
    },
)

NO_TOOL = "none"  # as a tool's name: the policy wants no (further) search


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouteChoices:
    """How a policy writes its choice of a knowledge base, or of another action.

    Attributes:
      opening: the text right before the name, such as `<ret>`.
      stop: the stop string of turns in which the policy may choose.
      names: maps each knowledge base, or other action ("answer"), to the text that the policy writes after the opening to
        choose it. No text may be the beginning of another.
      open: whether the choice is still open, given the text of the turn up to and including the opening. A turn that has
        already decided against a search, or is invalid whatever it chooses, is not forked.

    Raises:
      ValueError: a text is the beginning of another, so that their probabilities would overlap.
    """

    opening: str
    stop: str
    names: Mapping[str, str]
    open: Callable[[str], bool] = lambda text: True

    def __post_init__(self) -> None:
        for short, long in itertools.permutations(self.names, 2):
            if self.names[long].startswith(self.names[short]):
                raise ValueError(
                    f"the policy writes {self.names[short]!r} for {short!r} and {self.names[long]!r} for {long!r}: the first "
                    "is the beginning of the second, and which of them it chooses can't be told there"
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grammar(abc.ABC):
    """A tag protocol.

    Attributes:
      tools: names of the knowledge bases that the policy may call.
      raw_results: show what searches return with the protocol's tags in it, as the papers' released code does. A passage can
        then end its block, and write an answer.
    """

    tools: tuple[str, ...]
    raw_results: bool = False

    # --- what the policy writes ---

    @property
    @abc.abstractmethod
    def stops(self) -> tuple[str, ...]:
        """Strings that end a turn; they belong to the turn."""

    @property
    @abc.abstractmethod
    def special_tokens(self) -> tuple[str, ...]:
        """The protocol's tags, for tokenizers that are trained for it."""

    @property
    def foreign(self) -> tuple[str, ...]:
        """Tags that are broken up in texts from elsewhere: passages, and errors of tools (`inert`)."""
        return () if self.raw_results else self.special_tokens

    @abc.abstractmethod
    def parse(self, text: str) -> Action:
        """The action in a turn's text (forced opening included); `invalid` with a reason if there is none.

        A thought is never an action: tags in it are text (`core.text.split_thoughts`).
        """

    @abc.abstractmethod
    def well_formed(self, text: str) -> bool:
        """True if the turn is written exactly as the protocol says, with nothing outside its tags."""

    @abc.abstractmethod
    def write_search(self, thought: str, query: str, tool: str) -> str:
        """A well-formed search turn, for demonstrations."""

    def write_answer(self, thought: str, answer: str) -> str:
        """A well-formed answer turn, for demonstrations."""
        return f"<think>{thought}</think>\n<answer>{answer}</answer>"

    def write_look(self, thought: str, box: Sequence[float]) -> str:
        """A well-formed turn with a closer look, for demonstrations. Raises ValueError if the protocol has no such turns."""
        raise ValueError(f"grammar {type(self).__name__} has no closer looks, and a demonstration has one")

    @property
    def answer_opening(self) -> str:
        """Text that is fed so that the policy answers now: at the end of its budget if `forces_answer`, and in baselines."""
        return "<answer>"

    @property
    def forces_answer(self) -> bool:
        """Whether `answer_opening` begins the last turn. If not, the policy writes all of the last turn, and a search in it
        gets no reply."""
        return True

    def label(self, tool: str) -> str:
        """The name of a knowledge base as the policy writes it."""
        return tool

    @property
    def choices(self) -> RouteChoices | None:
        """How the policy writes its choice of a knowledge base; None if attempts can't be forked there."""
        return None

    # --- where every turn is a message of a chat ---

    @property
    def functions(self) -> tuple[dict[str, Any], ...]:
        """JSON schemas of the functions that the model's chat template shows; () for a protocol in one growing text.

        With functions, every turn is a message. The policy ends it with the template's own token, and a tool's message follows
        (Conversation.reply).
        """
        return ()

    def of(self, tokenizer: Tokenizer) -> Grammar:
        """The protocol in this model's form. Raises ValueError if the model has none."""
        return self

    def with_schemas(self, schemas: Mapping[str, ToolSchema]) -> Grammar:
        """The protocol with these functions, by knowledge base. A protocol without functions stays as it is."""
        return self

    # --- what the environment writes ---

    @abc.abstractmethod
    def observation(self, call: Call, passages: Sequence[Passage]) -> Observation:
        """The observation after a search: `passages` (the first ones of `call.passages`) as text or with pictures (`Shown`), or
        the call's error."""

    def closer(self, crop: Shown) -> Observation:
        """The observation after a closer look at a region (an action of kind `region`): the crop."""
        return ["\n", crop, "\n"]

    @abc.abstractmethod
    def reminder(self, error: str) -> str:
        """The text that is fed after an invalid action."""

    @abc.abstractmethod
    def instructions(self) -> str:
        """Instructions on the protocol, for models that are not yet trained for it."""


def check_one_tool(grammar: Grammar) -> None:
    """Raises ValueError unless there is exactly one knowledge base. For protocols whose queries name none."""
    if len(grammar.tools) != 1:
        raise ValueError(
            f"grammar {type(grammar).__name__} names no knowledge base, so it needs exactly one, got {grammar.tools}"
        )


def opening_ids(
    tokenizer: Tokenizer,
    request: str,
    instructions: str | None = None,
    functions: Sequence[Mapping[str, Any]] | None = None,
    suffix: str = "",
) -> list[int]:
    """The token ids of a prompt: messages of the model's chat template, or plain text.

    Args:
      request: the question, or what else is asked.
      instructions: explain the task; None: the request stands alone, as plain text unless there are functions.
      functions: JSON schemas of what the policy may call here; None: it writes tags.
      suffix: text that begins the policy's turn.
    """
    if functions is not None or (instructions is not None and tokenizer.instructs_in_chats):
        system = [] if instructions is None else [Message(role="system", content=instructions)]
        chat = tokenizer.chat([*system, Message(role="user", content=request)], tools=functions or ())
        return [*chat, *tokenizer.encode(suffix)]
    if instructions is not None:
        return tokenizer.encode_prompt(f"{instructions}\n\nUser: {request}\nAssistant: {suffix}")
    return tokenizer.encode_prompt(f"{request}\n{suffix}")


TOO_LONG = "What was found is too long to be shown."


def unshown(call: Call, passages: Sequence[Passage], tags: Iterable[str] = ()) -> str | None:
    """The sentence that stands for passages if there are none to show: the call failed, found nothing, or nothing fits.

    None if there are passages to show. `tags` are broken up in the call's error (`Grammar.foreign`).
    """
    if call.error is not None:
        return f"The search failed: {inert(call.error, tags)}"
    if not call.passages:
        return "Nothing was found."
    return None if passages else TOO_LONG


def between(text: str, opening: str, closing: str) -> str | None:
    """The content of the last complete pair of tags, from the last opening tag before the closing one, stripped; None if there
    is no such pair. An opening tag that the text only names opens nothing."""
    begin = re.escape(opening)
    contents = re.findall(rf"{begin}((?:(?!{begin}).)*?){re.escape(closing)}", text, re.DOTALL)
    return contents[-1].strip() if contents else None


def inert(text: str, tags: Iterable[str]) -> str:
    """A text with a space inside each of these tags, so that none is read as a tag. Text without them stays as it is."""
    for tag in tags:
        text = text.replace(tag, f"{tag[0]} {tag[1:]}")
    return text


def one_line(text: str, tags: Iterable[str]) -> str:
    """A text on one line, with a space inside each of the tags."""
    return inert(" ".join(text.split()), tags)


def inert_call(call: Call, tags: Sequence[str]) -> Call:
    """A call whose passages and error hold none of the tags; the same call if they hold none anyway."""
    passages = tuple(
        dataclasses.replace(passage, title=inert(passage.title, tags), text=inert(passage.text, tags))
        if any(tag in passage.title or tag in passage.text for tag in tags)
        else passage
        for passage in call.passages
    )
    error = None if call.error is None else inert(call.error, tags)
    unchanged = error == call.error and all(new is old for new, old in zip(passages, call.passages))
    return call if unchanged else dataclasses.replace(call, passages=passages, error=error)
