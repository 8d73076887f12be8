"""RouteRAG (arXiv 2512.09487): the policy learns to search passages, a graph, or both. Stage 1 rewards right answers, stage 2
also low costs."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from routerl_jax.agents.grammar import Grammar, RouteChoices, unshown
from routerl_jax.core.text import split_thoughts
from routerl_jax.core.types import Action, Call, Episode, Passage
from routerl_jax.recipes.search import search_recipe
from routerl_jax.recipes.search_r1 import ACTION, documents
from routerl_jax.rewards.metrics import accepted_answers, exact_match
from routerl_jax.rewards.terms import StepTerm

TOOLS = ("passage", "graph", "graph_passage")  # the last one joins the rankings of the other two (knowledge.hybrid)

# Rewards of the stages (equations 2 and 3), for StageConfig.reward.
STAGE_1 = {"em": 1.0}
STAGE_2 = {"em": 1.0, "routerag.efficiency": {"weight": 1.0, "by": "cost"}}
STAGE_2_SECONDS = {"em": 1.0, "routerag.efficiency": {"weight": 1.0, "by": "seconds"}}  # the paper's measure of cost

_TAGS = ("think", "search", "information", "answer")
_MODE = re.compile(r"\[(passage|graph)\]")
_FREE = rf"(?:(?!</?(?:{'|'.join(_TAGS)})>).)*"  # text without a tag
_WRITTEN_MODE = r"(?:\[passage\]|\[graph\]|\[graph\]\s*\[passage\]|\[passage\]\s*\[graph\])"
_WELL_FORMED = re.compile(
    rf"\s*<think>{_FREE}</think>\s*"
    rf"(?:<search>\s*{_WRITTEN_MODE}(?=[^<]*\w)(?:(?!\[passage\]|\[graph\]|</?(?:{'|'.join(_TAGS)})>).)*</search>"
    rf"|<answer>{_FREE}</answer>)\s*",
    re.DOTALL,
)


recipe = search_recipe("routerag", headline=("em", "f1"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouteRAGGrammar(Grammar):
    """RouteRAG's tags (Algorithm 1, appendix B.2): a thought, then a search that begins with its modes, or the answer.

    The modes are `[passage]` and `[graph]`, in any order. Both together search the knowledge base `graph_passage`; no mode
    means `passage`. When the budget is spent, the policy writes one more turn, in which a search gets no reply, as in the
    released code (the paper's algorithm ends without it). Observations are the same in training and evaluation.
    """

    def __post_init__(self) -> None:
        unknown = [tool for tool in self.tools if tool not in TOOLS]
        if unknown or "passage" not in self.tools:
            raise ValueError(
                f"grammar {type(self).__name__} has modes for the knowledge bases {', '.join(TOOLS)}, of which 'passage' must "
                f"be there; got {self.tools}. Rename those in config.knowledge"
            )

    @property
    def stops(self) -> tuple[str, ...]:
        return ("</search>", "</answer>")

    @property
    def special_tokens(self) -> tuple[str, ...]:
        return (*(f"<{slash}{tag}>" for tag in _TAGS for slash in ("", "/")), "[passage]", "[graph]")

    @property
    def choices(self) -> RouteChoices:
        """Raises ValueError with `graph` beside `graph_passage`: `[graph]` is the beginning of `[graph][passage]`."""
        names = {tool: f" {_written(tool)}" for tool in self.tools}
        return RouteChoices(
            opening="<search>",
            stop="</search>",
            names=names,
            open=lambda text: split_thoughts(text)[1].endswith("<search>"),
        )

    def parse(self, text: str) -> Action:
        match = ACTION.search(split_thoughts(text)[1])
        before = text[: match.start()] if match else text
        thought = before.replace("<think>", "").replace("</think>", "").strip()
        if match is None:
            error = "there is neither a complete <search> nor an <answer>"
            return Action(kind="invalid", thought=thought, error=error)
        if match[1] == "answer":
            return Action(kind="answer", answer=match[2].strip(), thought=thought)
        modes = set(_MODE.findall(match[2]))
        tool = "_".join(sorted(modes)) or "passage"
        query = " ".join(_MODE.sub(" ", match[2]).split())
        if not query:
            return Action(kind="invalid", thought=thought, error="the query is empty")
        if tool not in self.tools:
            names = ", ".join(_written(tool) for tool in self.tools)
            error = f"there is no mode {_written(tool)}; there are: {names}"
            return Action(kind="invalid", thought=thought, query=query, error=error)
        return Action(kind="search", tool=tool, query=query, thought=thought)

    def well_formed(self, text: str) -> bool:
        return bool(_WELL_FORMED.fullmatch(text))

    def write_search(self, thought: str, query: str, tool: str) -> str:
        return f"<think>{thought}</think>\n<search> {_written(tool)} {query} </search>"

    @property
    def forces_answer(self) -> bool:
        return False

    def observation(self, call: Call, passages: Sequence[Passage]) -> str:
        body = unshown(call, passages, self.foreign) or documents(passages, self.foreign)
        return f"\n\n<information>\n{body}\n</information>\n\n"

    def reminder(self, error: str) -> str:
        modes = ", ".join(_written(tool) for tool in self.tools)
        return (
            f"\n\n<information>\nNo action could be carried out: {error}. A search names its mode ({modes}) and then what to "
            "look for, inside <search> and </search>; an answer stands inside <answer> and </answer>.\n</information>\n\n"
        )

    def instructions(self) -> str:
        descriptions = {
            "passage": "compares the meaning of your query with every passage",
            "graph": "starts from the facts that your query mentions and follows the links between them and the passages",
            "graph_passage": "asks both and merges their results",
        }
        modes = "\n".join(f"{_written(tool)} {descriptions[tool]}" for tool in self.tools)
        examples = "\n".join(
            f"<search> {_written(tool)} birthplace of the composer of Aida </search>" for tool in self.tools
        )
        return (
            "Answer the question. Whenever you have read something new, think about it first, inside <think> and </think>. "
            "If a fact is missing, search for it: choose how to look, and write that mode and your query inside <search> and "
            f"</search>. The modes:\n{modes}\nFor example:\n{examples}\nThe documents found follow inside <information> and "
            "</information>; you may search several times. When nothing more is missing, write the answer alone, in a few "
            "words, inside <answer> and </answer>, such as <answer>Roncole</answer>."
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenedAnswer(RouteRAGGrammar):
    """Like "routerag", but `<answer>` is begun for the policy when the budget is spent; a small policy would search on."""

    @property
    def forces_answer(self) -> bool:
        return True


def _written(tool: str) -> str:
    """A knowledge base's modes as the policy writes them: `graph_passage` is [graph][passage]."""
    return "".join(f"[{mode}]" for mode in tool.split("_"))


def retrieval_cost(episode: Episode, by: str = "cost") -> float:
    """The total cost of an episode's searches: the `cost` of their knowledge bases, or the `seconds` that they took.

    Raises:
      ValueError: `by` is neither.
    """
    if by not in ("cost", "seconds"):
        raise ValueError(f"by={by!r} of routerag.efficiency is neither 'cost' nor 'seconds'")
    return float(sum(getattr(call, by) for call in episode.calls))


def scaled_costs(costs: Float[np.ndarray, " N"], scale: float | str = "p95") -> Float[np.ndarray, " N"]:
    """s = min(t / T, 1/2): costs scaled to [0, 1/2] for equation 4. The paper does not specify T.

    Args:
      scale: T, or "p95" for twice the 95th percentile of these costs, as in the released code. If that is 0 because hardly any
        episode has searched, those that have get 1/2.

    Raises:
      ValueError: T is not positive.
    """
    costs = np.asarray(costs, np.float64)
    if scale != "p95" and not (isinstance(scale, int | float) and scale > 0):
        raise ValueError(f"scale={scale!r} of routerag.efficiency must be a positive number or 'p95'")
    if scale == "p95":
        scale = 2 * float(np.percentile(costs, 95)) if len(costs) else 0.0
    if not scale:
        return np.where(costs > 0, 0.5, 0.0)
    return np.minimum(costs / float(scale), 0.5)


def efficiency(
    episodes: Sequence[Episode], by: str = "cost", scale: float | str = "p95", normalizer: str = "search_r1"
) -> list[float]:
    """mean_j(s_j) - s_i for episodes with the right answer, 0 for others (equations 3, 4 and 7). In (-1/2, 1/2).

    The mean is over all episodes of the step, wrong ones included. Costs are read from each episode itself, so their order
    does not matter.

    Args:
      by: "cost", which is the same in every run, or "seconds", as in the paper: `Call.seconds`, the time of a query without the
        other queries of its batch.
      scale: T of equation 4, see `scaled_costs`.
    """
    scaled = scaled_costs(np.asarray([retrieval_cost(episode, by) for episode in episodes], np.float64), scale)
    accepted = [accepted_answers(episode.example, episode.answer) for episode in episodes]
    right = [exact_match(e.answer, answers, normalizer) == 1.0 for e, answers in zip(episodes, accepted)]
    mean = float(scaled.mean()) if len(episodes) else 0.0
    return [mean - float(s) if fine else 0.0 for s, fine in zip(scaled, right)]


EFFICIENCY = StepTerm(efficiency)
