"""R1-Searcher (arXiv 2503.05592): searching while thinking, taught in two stages.

Agent: one growing text. The prompt ends with `<think>`; a query between its marks stops the policy, documents follow between
theirs, and it goes on; `</think>` and `<answer>` end it. Reward: stage 1 that it searches and keeps the format, stage 2 the
answer, less a penalty for any violation. Both look at what the policy wrote and never at what was retrieved.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from routerl_jax.agents.grammar import GRAMMARS, Grammar, between, check_one_tool, unshown
from routerl_jax.core.types import Action, Call, Episode, Passage
from routerl_jax.recipes.recipe import RECIPES
from routerl_jax.recipes.search import search_recipe
from routerl_jax.rewards.garbled import garbled
from routerl_jax.rewards.metrics import ANSWER_METRICS
from routerl_jax.rewards.ranges import accepted_answers
from routerl_jax.rewards.terms import REWARD_TERMS

BEGIN_QUERY, END_QUERY = "<|begin_of_query|>", "<|end_of_query|>"
BEGIN_DOCUMENTS, END_DOCUMENTS = "<|begin_of_documents|>", "<|end_of_documents|>"
TAGS = (BEGIN_QUERY, END_QUERY, BEGIN_DOCUMENTS, END_DOCUMENTS)

MAX_SEARCHES = 8  # the ninth stretch of the released rollout is its last: it may answer, its query is not searched
TRAIN_K, EVALUATION_K = 3, 5  # documents per search
PROMPT_SUFFIX = "<think>"  # fed, so that the policy writes no <think> of its own

RECIPES.register("r1_searcher")(search_recipe("r1_searcher", headline=("cover_em",)))  # ACC_R


@GRAMMARS.register("r1_searcher")
@dataclasses.dataclass(frozen=True, kw_only=True)
class R1SearcherGrammar(Grammar):
    """Queries between marks in running text, documents injected right after, reasoning until </think>, then the answer.

    The prompt ends with `<think>`. One knowledge base, as a query names none. When the budget is spent the policy writes one
    more turn of its own, in which a query leads nowhere, as in the released code.
    """

    def __post_init__(self) -> None:
        check_one_tool(self)

    @property
    def stops(self) -> tuple[str, ...]:
        return (END_QUERY, "</answer>")

    @property
    def special_tokens(self) -> tuple[str, ...]:
        return (*TAGS, "<think>", "</think>", "<answer>", "</answer>")

    def parse(self, text: str) -> Action:
        answer = between(text, "<answer>", "</answer>")
        if answer is not None:
            thought = text.split("<answer>")[0].replace("</think>", "").replace("<think>", "").strip()
            return Action(kind="answer", answer=answer, thought=thought)
        before, mark, rest = text.rpartition(BEGIN_QUERY)
        thought = before.replace("<think>", "").strip()
        if not mark or END_QUERY not in rest:
            return Action(kind="invalid", thought=text.strip(), error="there is neither a complete query nor an answer")
        query = " ".join(rest.split(END_QUERY)[0].replace('"', " ").split())
        if not query:
            return Action(kind="invalid", thought=thought, error="the query is empty")
        return Action(kind="search", tool=self.tools[0], query=query, thought=thought)

    def well_formed(self, text: str) -> bool:
        if BEGIN_DOCUMENTS in text or END_DOCUMENTS in text:
            return False  # documents are written by the retriever alone
        content = r"(?:(?!<\||<answer>|</answer>|</think>|<think>).)*"
        query = rf"{re.escape(BEGIN_QUERY)}{content}{re.escape(END_QUERY)}"
        return bool(
            re.fullmatch(rf"{content}{query}\s*", text, re.DOTALL)
            or re.fullmatch(rf"{content}</think>\s*<answer>{content}</answer>\s*", text, re.DOTALL)
        )

    def write_search(self, thought: str, query: str, tool: str) -> str:
        return f"{thought} {BEGIN_QUERY}{query}{END_QUERY}"

    def write_answer(self, thought: str, answer: str) -> str:
        return f"{thought}</think>\n<answer>{answer}</answer>"

    @property
    def answer_opening(self) -> str:
        return "</think>\n<answer>"

    @property
    def forces_answer(self) -> bool:
        return False

    def observation(self, call: Call, passages: Sequence[Passage]) -> str:
        note = unshown(call, passages)
        entries = [note] if note else [f"Title: {p.title} Text: {' '.join(p.text.split())}" for p in passages]
        body = "".join(f"({i}){entry}\n" for i, entry in enumerate(entries, 1))
        return f"\n\n{BEGIN_DOCUMENTS}\n{body}{END_DOCUMENTS}\n\n"

    def reminder(self, error: str) -> str:
        return f"\n\n{BEGIN_DOCUMENTS}\n(1)That was no valid step: {error}.\n{END_DOCUMENTS}\n\n"

    def instructions(self) -> str:
        return INSTRUCTIONS


@GRAMMARS.register("r1_searcher_answer")
@dataclasses.dataclass(frozen=True, kw_only=True)
class R1SearcherOpenedAnswer(R1SearcherGrammar):
    """As "r1_searcher", but when the budget is spent the answer is begun for the policy: a small one would search on.

    The tags are not the policy's then, so such an answer counts in evaluation and earns nothing from R1-Searcher's rewards.
    """

    @property
    def forces_answer(self) -> bool:
        return True


# Instruct models get this as their system message (config.agent.instruct) and `<think>` behind the chat template.
INSTRUCTIONS = (
    "The User asks, and the Assistant solves it: reasoning first, then a short answer, written as <think> reasoning </think> "
    "<answer> answer </answer>. Whenever a fact is missing or uncertain while it reasons, the Assistant searches: it writes "
    f"{BEGIN_QUERY} keywords {END_QUERY}, where one query asks for one fact about one thing. What the search finds comes back "
    f"between {BEGIN_DOCUMENTS} and {END_DOCUMENTS}; then the reasoning goes on. Nothing but the answer itself stands between "
    "<answer> and </answer>, in a few words."
)

# Base models (config.agent.prompt): the same as plain text. A base model's tokenizer may have a chat template all the same.
BASE_PROMPT = INSTRUCTIONS + "\n\nUser: {question}\nAssistant: "


# --- rewards -----------------------------------------------------------------------------------------------------------


def own_text(episode: Episode) -> str:
    """All that the policy wrote: no documents, no reminders, no opening that was forced on it."""
    return "\n".join(turn.text for turn in episode.turns)


def own_answer(episode: Episode) -> str | None:
    """What stands between answer tags that the policy wrote itself; None without such tags."""
    return between(own_text(episode), "<answer>", "</answer>")


def _query_tags(episode: Episode) -> bool:
    """Query marks are unpaired, or a query was not searched: an empty one, or two in one turn."""
    text = own_text(episode)
    return not text.count(BEGIN_QUERY) == text.count(END_QUERY) == len(episode.calls)


def _documents(episode: Episode) -> bool:
    """The policy wrote a document mark itself."""
    return any(tag in own_text(episode) for tag in (BEGIN_DOCUMENTS, END_DOCUMENTS))


def _assistant(episode: Episode) -> bool:
    """The word "assistant" anywhere, in a right answer ("assistant professor") too."""
    return any(word in own_text(episode) for word in ("Assistant", "assistant"))


# How another role's turn begins: in the prompt of base models and in their dialogues, and in chat templates.
_ROLE = re.compile(
    r"^[ \t]*(?:User|Human|Assistant)[ \t]*:|<\|im_start\|>|<\|start_header_id\|>|<start_of_turn>|\[INST\]", re.M
)


def _another_role(episode: Episode) -> bool:
    """The policy went on with the dialogue: a line that begins with User:, Human: or Assistant:, or a chat template's mark."""
    return _ROLE.search(own_text(episode)) is not None


def _think_tags(episode: Episode) -> bool:
    """Not exactly one </think>, or a <think> beside the prompt's."""
    text = own_text(episode)
    return text.count("<think>") != 0 or text.count("</think>") != 1


def _answer_tags(episode: Episode) -> bool:
    """Not exactly one <answer> and one </answer>; so also an answer that was begun for the policy."""
    text = own_text(episode)
    return text.count("<answer>") != 1 or text.count("</answer>") != 1


def _tags_in_answer(episode: Episode) -> bool:
    """A query or document mark within the answer."""
    return any(tag in (own_answer(episode) or "") for tag in TAGS)


def _long_answer(episode: Episode) -> bool:
    """More than ten words in the answer."""
    return len((own_answer(episode) or "").split()) > 10


def _chinese(episode: Episode) -> bool:
    """Chinese characters: what Qwen2.5 writes when it goes astray."""
    return re.search(r"[\u4e00-\u9fff]", own_text(episode)) is not None


def _garbled(episode: Episode) -> bool:
    """Text that can't be read in any script."""
    return garbled(own_text(episode))


# What an episode can do wrong, by name (docs/r1_searcher.md).
VIOLATIONS: Mapping[str, Callable[[Episode], bool]] = {
    "query_tags": _query_tags,
    "documents": _documents,
    "another_role": _another_role,
    "assistant": _assistant,
    "think_tags": _think_tags,
    "answer_tags": _answer_tags,
    "tags_in_answer": _tags_in_answer,
    "long_answer": _long_answer,
    "garbled": _garbled,
    "chinese": _chinese,
}

# Sets of them: the paper's format (section 2.2.1), the released Qwen server's, and the Llama server's, which spares the
# wording of the answer.
RULES: Mapping[str, tuple[str, ...]] = {
    "paper": tuple(name for name in VIOLATIONS if name not in ("assistant", "chinese")),
    "released": tuple(name for name in VIOLATIONS if name not in ("another_role", "garbled")),
    "llama": ("query_tags", "documents", "think_tags", "answer_tags", "chinese"),
}


def violations(episode: Episode, rules: str = "paper") -> list[str]:
    """The names of the rules that an episode violates, of a set of `RULES`; empty if it is fine.

    Raises:
      ValueError: there is no such set.
    """
    if rules not in RULES:
        raise ValueError(f"rules={rules!r} of R1-Searcher's format is not known; use one of {', '.join(RULES)}")
    return [name for name in RULES[rules] if VIOLATIONS[name](episode)]


@REWARD_TERMS.register("r1_searcher.format")
def format_kept(episode: Episode, rules: str = "paper") -> float:
    """1 without violations, else 0 (eq. 2, whose weight is 0.5)."""
    return float(not violations(episode, rules))


@REWARD_TERMS.register("r1_searcher.violation")
def violation(episode: Episode, rules: str = "paper") -> float:
    """1 with any violation, else 0 (eq. 3, whose weight is -2)."""
    return float(bool(violations(episode, rules)))


@REWARD_TERMS.register("r1_searcher.answer")
def answer(episode: Episode, metric: str = "f1", signed: bool = False, normalizer: str = "r1_searcher") -> float:
    """The answer's score (eq. 4), 0 if the policy did not write the tags itself.

    Args:
      metric: a name in `rewards.metrics.ANSWER_METRICS`; the paper's ablation has f1, cover_em and em.
      signed: from -1 to 1 instead of from 0 to 1 (eq. 5; the Llama server's stage 1).
    """
    if metric not in ANSWER_METRICS:
        raise ValueError(f"metric={metric!r} is not known; use one of {', '.join(ANSWER_METRICS)}")
    own = own_answer(episode)
    score = ANSWER_METRICS[metric](own, accepted_answers(episode.example, own), normalizer)
    return 2 * score - 1 if signed else score


@REWARD_TERMS.register("r1_searcher.calls")
def calls_in_order(episode: Episode) -> float:
    """1 if there is at least one search and every query mark belongs to one (the Llama server's stage 1)."""
    return float(bool(episode.calls) and not _query_tags(episode) and not _documents(episode))


@REWARD_TERMS.register("r1_searcher.tags")
def tags_in_order(episode: Episode) -> float:
    """1 if there are exactly one </think>, <answer> and </answer> and no <think> (the Llama server's stage 1)."""
    return float(not _think_tags(episode) and not _answer_tags(episode))


Reward = Mapping[str, float | Mapping[str, Any]]

# The paper's stages: eq. 1 + eq. 2, then eq. 4 + eq. 3. `searched` is the common term "at least one search".
STAGE_1: Reward = {"searched": 0.5, "r1_searcher.format": 0.5}
STAGE_2: Reward = {"r1_searcher.answer": 1.0, "r1_searcher.violation": -2.0}

# The released Qwen server's; there is none for stage 1.
RELEASED_STAGE_2: Reward = {
    "r1_searcher.answer": 1.0,
    "r1_searcher.violation": {"weight": -2.0, "rules": "released"},
}

# What the released scripts reward Llama for: an answer in stage 1 too, and a milder penalty.
LLAMA_STAGE_1: Reward = {
    "r1_searcher.answer": {"metric": "cover_em", "signed": True},
    "r1_searcher.calls": 0.5,
    "r1_searcher.tags": 0.5,
}
LLAMA_STAGE_2: Reward = {
    "r1_searcher.answer": 1.0,
    "r1_searcher.violation": {"weight": -1.0, "rules": "llama"},
}


def stage_2(metric: str) -> Reward:
    """Stage 2 with another metric of the answer: table 5 compares f1, cover_em and em, of which the last two are 1 or -1
    (eq. 5).

    Raises:
      ValueError: there is no such metric.
    """
    if metric not in ANSWER_METRICS:
        raise ValueError(f"metric={metric!r} is not known; use one of {', '.join(ANSWER_METRICS)}")
    return {**STAGE_2, "r1_searcher.answer": {"metric": metric, "signed": metric in ("em", "cover_em")}}
