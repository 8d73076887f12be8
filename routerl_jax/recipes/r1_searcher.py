"""R1-Searcher (arXiv 2503.05592): searching while thinking, taught in two stages.

The agent writes one growing text. The prompt ends with `<think>`. A query between its marks stops the policy, documents follow
between theirs, and the policy continues. `</think>` and `<answer>` end the text. Stage 1 rewards searching and the right
format; stage 2 rewards the answer, less a penalty for any violation. Both judge only what the policy wrote, never what was
retrieved.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from routerl_jax.agents.grammar import Grammar, between, check_one_tool, inert, one_line, unshown
from routerl_jax.core.text import garbled, split_thoughts
from routerl_jax.core.types import Action, Call, Episode, Passage
from routerl_jax.recipes.search import search_recipe
from routerl_jax.rewards.metrics import ANSWER_METRICS, accepted_answers
from routerl_jax.rewards.terms import READS_TAGS

BEGIN_QUERY, END_QUERY = "<|begin_of_query|>", "<|end_of_query|>"
BEGIN_DOCUMENTS, END_DOCUMENTS = "<|begin_of_documents|>", "<|end_of_documents|>"
TAGS = (BEGIN_QUERY, END_QUERY, BEGIN_DOCUMENTS, END_DOCUMENTS)

MAX_SEARCHES = (
    8  # the ninth segment of the released rollout is the last: it may answer, but a query in it gets no search
)
TRAIN_K, EVALUATION_K = 3, 5  # documents per search
PROMPT_SUFFIX = "<think>"  # fed, so the policy must not write <think> itself

recipe = search_recipe("r1_searcher", headline=("cover_em",))  # ACC_R


@dataclasses.dataclass(frozen=True, kw_only=True)
class R1SearcherGrammar(Grammar):
    """Queries between marks in running text, documents right after them, reasoning until </think>, then the answer.

    The prompt ends with `<think>`. There is one knowledge base, because a query names none. When the budget is spent, the
    policy writes one more turn, in which a query gets no reply, as in the released code.
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
        said = split_thoughts(text)[1]  # queries stand in thoughts here, answers behind them
        answer = between(said, "<answer>", "</answer>")
        if answer is not None:
            thought = text[: said.index("<answer>")].replace("</think>", "").replace("<think>", "").strip()
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
            return False  # only the retriever may write documents
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
        tags = self.foreign
        note = unshown(call, passages, tags)
        entries = (
            [note] if note else [f"Title: {inert(p.title, tags)} Text: {one_line(p.text, tags)}" for p in passages]
        )
        body = "".join(f"({i}){entry}\n" for i, entry in enumerate(entries, 1))
        return f"\n\n{BEGIN_DOCUMENTS}\n{body}{END_DOCUMENTS}\n\n"

    def reminder(self, error: str) -> str:
        return f"\n\n{BEGIN_DOCUMENTS}\n(1)That was no valid step: {error}.\n{END_DOCUMENTS}\n\n"

    def instructions(self) -> str:
        return INSTRUCTIONS


@dataclasses.dataclass(frozen=True, kw_only=True)
class R1SearcherOpenedAnswer(R1SearcherGrammar):
    """Like "r1_searcher", but the answer is begun for the policy when the budget is spent; a small policy would search on.

    The policy has not written the tags then. So such an answer counts in evaluation, but R1-Searcher's rewards give it nothing.
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

# Base models (config.agent.prompt) get the same as plain text. The tokenizer of a base model may have a chat template anyway.
BASE_PROMPT = INSTRUCTIONS + "\n\nUser: {question}\nAssistant: "


# --- rewards -----------------------------------------------------------------------------------------------------------


def own_text(episode: Episode) -> str:
    """All text that the policy wrote, without documents, reminders and forced openings."""
    return "\n".join(turn.text for turn in episode.turns)


def own_answer(episode: Episode) -> str | None:
    """The text between answer tags that the policy wrote itself behind its thoughts; None without such tags."""
    return between(split_thoughts(own_text(episode))[1], "<answer>", "</answer>")


def _query_tags(episode: Episode) -> bool:
    """Query marks are unpaired, or a query was not searched (it is empty, or the second one in a turn)."""
    text = own_text(episode)
    return not text.count(BEGIN_QUERY) == text.count(END_QUERY) == len(episode.calls)


def _documents(episode: Episode) -> bool:
    """The policy wrote a document mark itself."""
    return any(tag in own_text(episode) for tag in (BEGIN_DOCUMENTS, END_DOCUMENTS))


def _assistant(episode: Episode) -> bool:
    """The word "assistant" occurs anywhere, even in a right answer ("assistant professor")."""
    return any(word in own_text(episode) for word in ("Assistant", "assistant"))


# Beginnings of another role's turn: in dialogues of base models, and in chat templates.
_ROLE = re.compile(
    r"^[ \t]*(?:User|Human|Assistant)[ \t]*:|<\|im_start\|>|<\|start_header_id\|>|<start_of_turn>|\[INST\]", re.M
)


def _another_role(episode: Episode) -> bool:
    """The policy continued the dialogue: a line begins with User:, Human: or Assistant:, or has a chat template's mark."""
    return _ROLE.search(own_text(episode)) is not None


def _think_tags(episode: Episode) -> bool:
    """There is not exactly one </think>, or there is a <think> besides that of the prompt."""
    text = own_text(episode)
    return text.count("<think>") != 0 or text.count("</think>") != 1


def _answer_tags(episode: Episode) -> bool:
    """There are not exactly one <answer> and one </answer>. This includes an answer that was begun for the policy."""
    text = own_text(episode)
    return text.count("<answer>") != 1 or text.count("</answer>") != 1


def _tags_in_answer(episode: Episode) -> bool:
    """A query or document mark within the answer."""
    return any(tag in (own_answer(episode) or "") for tag in TAGS)


def _long_answer(episode: Episode) -> bool:
    """More than ten words in the answer."""
    return len((own_answer(episode) or "").split()) > 10


def _chinese(episode: Episode) -> bool:
    """There are Chinese characters, which Qwen2.5 writes when it collapses."""
    return re.search(r"[\u4e00-\u9fff]", own_text(episode)) is not None


def _garbled(episode: Episode) -> bool:
    """There is text that is unreadable in any script."""
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
    """The names of the rules of a set in `RULES` that an episode violates; [] if there are none.

    Raises:
      ValueError: there is no such set.
    """
    if rules not in RULES:
        raise ValueError(f"rules={rules!r} of R1-Searcher's format is not known; use one of {', '.join(RULES)}")
    return [name for name in RULES[rules] if VIOLATIONS[name](episode)]


def format_kept(episode: Episode, rules: str = "paper") -> float:
    """1 without violations, else 0 (eq. 2, whose weight is 0.5)."""
    return float(not violations(episode, rules))


def violation(episode: Episode, rules: str = "paper") -> float:
    """1 with any violation, else 0 (eq. 3, whose weight is -2)."""
    return float(bool(violations(episode, rules)))


def answer(episode: Episode, metric: str = "f1", signed: bool = False, normalizer: str = "r1_searcher") -> float:
    """The answer's score (eq. 4); 0 if the policy did not write the tags itself.

    Args:
      metric: a name in `rewards.metrics.ANSWER_METRICS`; the paper's ablation has f1, cover_em and em.
      signed: scale the score to [-1, 1] instead of [0, 1] (eq. 5; the Llama server's stage 1).
    """
    if metric not in ANSWER_METRICS:
        raise ValueError(f"metric={metric!r} is not known; use one of {', '.join(ANSWER_METRICS)}")
    answer_text = own_answer(episode)
    score = ANSWER_METRICS[metric](answer_text, accepted_answers(episode.example, answer_text), normalizer)
    return 2 * score - 1 if signed else score


def calls_in_order(episode: Episode) -> float:
    """1 if there is at least one search and every query mark belongs to a search (the Llama server's stage 1)."""
    return float(bool(episode.calls) and not _query_tags(episode) and not _documents(episode))


def tags_in_order(episode: Episode) -> float:
    """1 if there are exactly one </think>, <answer> and </answer> and no <think> (the Llama server's stage 1)."""
    return float(not _think_tags(episode) and not _answer_tags(episode))


for _name in ("format", "violation", "calls", "tags"):
    READS_TAGS[f"r1_searcher.{_name}"] = lambda options: True

Reward = Mapping[str, float | Mapping[str, Any]]

# The paper's stages: eq. 1 + eq. 2, then eq. 4 + eq. 3. `searched` is the common term "at least one search".
STAGE_1: Reward = {"searched": 0.5, "r1_searcher.format": 0.5}
STAGE_2: Reward = {"r1_searcher.answer": 1.0, "r1_searcher.violation": -2.0}

# The released Qwen server's; there is none for stage 1.
RELEASED_STAGE_2: Reward = {
    "r1_searcher.answer": 1.0,
    "r1_searcher.violation": {"weight": -2.0, "rules": "released"},
}

# The rewards of the released scripts for Llama: the answer also counts in stage 1, and the penalty is milder.
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
    """Stage 2 with another metric of the answer. Table 5 compares f1, cover_em and em; the last two are 1 or -1 (eq. 5).

    Raises:
      ValueError: there is no such metric.
    """
    if metric not in ANSWER_METRICS:
        raise ValueError(f"metric={metric!r} is not known; use one of {', '.join(ANSWER_METRICS)}")
    return {**STAGE_2, "r1_searcher.answer": {"metric": metric, "signed": metric in ("em", "cover_em")}}
