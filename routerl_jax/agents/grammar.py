"""How an agent writes its actions and reads its observations: one interface; each recipe file has its own class of it."""

from __future__ import annotations

import abc
import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from routerl_jax.core.registry import Registry
from routerl_jax.core.tokenizer import Tokenizer
from routerl_jax.core.tool_schema import ToolSchema
from routerl_jax.core.types import Action, Call, Observation, Passage, Shown

GRAMMARS: Registry[type[Grammar]] = Registry("grammar")

NO_TOOL = "none"  # the tool name of "I need no (further) retrieval"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouteChoices:
    """How a policy writes its choice of a knowledge base, or of what else to do.

    Attributes:
      opening: what it writes right before the name, such as `<ret>`.
      stop: the stop string of turns in which it may choose.
      names: by knowledge base, or what else it may do ("answer"), what it writes after the opening to choose it; no name is
        another's beginning.
      open: whether a turn so far, opening included, may still choose: one that has decided against a search, or can't be read
        whatever it chooses, is not forked.

    Raises:
      ValueError: a name is another's beginning, so that their probabilities would overlap.
    """

    opening: str
    stop: str
    names: Mapping[str, str]
    open: Callable[[str], bool] = lambda text: True

    def __post_init__(self) -> None:
        for one, other in itertools.permutations(self.names, 2):
            if self.names[other].startswith(self.names[one]):
                raise ValueError(
                    f"the policy writes {self.names[one]!r} for {one!r} and {self.names[other]!r} for {other!r}: the first is "
                    "the beginning of the second, and which of them it chooses can't be told there"
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grammar(abc.ABC):
    """A tag protocol.

    Attributes:
      tools: names of the knowledge bases that the policy may call.
    """

    tools: tuple[str, ...]

    # --- what the policy writes ---

    @property
    @abc.abstractmethod
    def stops(self) -> tuple[str, ...]:
        """Strings that end a turn; they belong to the turn."""

    @property
    @abc.abstractmethod
    def special_tokens(self) -> tuple[str, ...]:
        """The protocol's tags, for tokenizers that are trained for it."""

    @abc.abstractmethod
    def parse(self, text: str) -> Action:
        """The action in a turn's text (forced opening included); `invalid` with a reason if there is none."""

    @abc.abstractmethod
    def well_formed(self, text: str) -> bool:
        """True if the turn is written exactly as the protocol says, with nothing outside its tags."""

    @abc.abstractmethod
    def write_search(self, thought: str, query: str, tool: str) -> str:
        """A well-formed search turn, for demonstrations."""

    @abc.abstractmethod
    def write_answer(self, thought: str, answer: str) -> str:
        """A well-formed answer turn, for demonstrations."""

    @property
    @abc.abstractmethod
    def answer_opening(self) -> str:
        """What is fed so that the policy answers now: at the end of its budget if `forces_answer`, and in baselines."""

    @property
    def forces_answer(self) -> bool:
        """Whether a spent budget ends in `answer_opening`; else in a turn that is all the policy's, whose search leads
        nowhere."""
        return True

    @property
    def choices(self) -> RouteChoices | None:
        """How the policy writes its choice of a knowledge base; None: in no way that an attempt could be forked at."""
        return None

    # --- where every turn is a message of a chat ---

    @property
    def functions(self) -> tuple[dict[str, Any], ...]:
        """JSON schemas of the functions that the model's chat template shows; () of a protocol in one growing text.

        With functions, every turn is a message that the policy ends with the template's own token, and what follows it is a
        tool's message (Conversation.reply)."""
        return ()

    def of(self, tokenizer: Tokenizer) -> Grammar:
        """The protocol as this model writes it. Raises ValueError if it can't."""
        return self

    def told(self, schemas: Mapping[str, ToolSchema]) -> Grammar:
        """The protocol with these functions, by knowledge base, if it has any."""
        return self

    # --- what the surroundings write ---

    @abc.abstractmethod
    def observation(self, call: Call, passages: Sequence[Passage]) -> Observation:
        """What is fed back after a search: these passages (the first ones of `call.passages`), as text or with their pictures
        (`Shown`), or the call's error."""

    def closer(self, crop: Shown) -> Observation:
        """What is fed back after a look at a region (an action of kind `region`): the crop."""
        return ["\n", crop, "\n"]

    @abc.abstractmethod
    def reminder(self, error: str) -> str:
        """The text fed back after an invalid action."""

    @abc.abstractmethod
    def instructions(self) -> str:
        """How to work and what to write, for models that must be told."""


def check_one_tool(grammar: Grammar) -> None:
    """For protocols whose queries name no knowledge base. Raises ValueError unless there is exactly one."""
    if len(grammar.tools) != 1:
        raise ValueError(
            f"grammar {type(grammar).__name__} names no knowledge base, so it needs exactly one, got {grammar.tools}"
        )


TOO_LONG = "What was found is too long to be shown."


def unshown(call: Call, passages: Sequence[Passage]) -> str | None:
    """What is said where there are no passages to show: the call failed, or found nothing, or nothing that fits."""
    if call.error is not None:
        return f"The search failed: {call.error}"
    if not call.passages:
        return "Nothing was found."
    return None if passages else TOO_LONG


def between(text: str, opening: str, closing: str) -> str | None:
    """The content of the last complete tag pair, stripped."""
    found = re.findall(re.escape(opening) + r"(.*?)" + re.escape(closing), text, re.DOTALL)
    return found[-1].strip() if found else None


def one_line(text: str, tags: Iterable[str]) -> str:
    """A text on one line, and with none of a protocol's tags in it: a space breaks each."""
    for tag in tags:
        text = text.replace(tag, f"{tag[0]} {tag[1:]}")
    return " ".join(text.split())
