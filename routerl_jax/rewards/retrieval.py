"""Quality of an episode's searches: how many gold passages they showed, and how early; whether they showed an answer."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence

from routerl_jax.core.text import folded, states
from routerl_jax.core.types import Episode, Example, Passage
from routerl_jax.data.gold_paths import GoldHop, gold_path
from routerl_jax.rewards.metrics import NORMALIZERS, accepted_answers, search_r1

# normalised answers that say nothing about a passage that holds them
CLOSED = frozenset(("yes", "no", "true", "false", "noanswer", "not answerable", "unanswerable"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Retrieval:
    """The passages that the searches of an episode showed, and the gold passages of its question.

    Attributes:
      searches: for each turn with a search, the passages that the policy was shown, in order.
      gold: the gold passages, each once; at least one.
      tools: the tool that found each of them; (): the same one. Equal ids of two tools are one passage if title and text are
        equal, too.
    """

    searches: tuple[tuple[Passage, ...], ...]
    gold: tuple[GoldHop, ...]
    tools: tuple[tuple[str, ...], ...] = ()

    def recall(self) -> float:
        """Share of the gold passages that were shown, in [0, 1]."""
        return self._share(tuple(passage for shown in self.searches for passage in shown))

    def recall_at_first(self) -> float:
        """Share of the gold passages that the first search showed, in [0, 1]; 0 without a search."""
        return self._share(self.searches[0] if self.searches else ())

    def ndcg(self, *, repeats: bool = False) -> float:
        """Normalised discounted cumulative gain of all that was shown, in the order of the searches (VRAG-RL, arXiv 2505.22019,
        equations 7 to 9).

        A gold passage at rank i gains 1 / log2(i + 1), any other 0. The ideal order shows all gold passages first, even if that
        would need more searches than were made. So fewer searches than gold passages give less than 1.

        Args:
          repeats: a passage that is shown again gets a rank of its own, and a gold one gains again, as in VRAG-RL's code (the
            result may exceed 1). Otherwise each passage only has the rank at which it was shown first.
        """
        shown = [passage for search in self.searches for passage in search]
        tools = [tool for search in self.tools for tool in search] or [""] * len(shown)
        if not repeats:
            first: dict[tuple[str, ...], None] = {}  # the names of every passage
            distinct = []
            for tool, passage in zip(tools, shown, strict=True):
                names = [("text", passage.id, passage.title, passage.text)]
                names += [("tool", tool, passage.id)] if passage.id else []
                if first.keys().isdisjoint(names):
                    distinct.append(passage)
                first |= dict.fromkeys(names)
            shown = distinct
        gain, missing = 0.0, list(self.gold)
        for rank, passage in enumerate(shown, 1):
            hits = [hop for hop in (self.gold if repeats else missing) if hop.found_in((passage,))]
            gain += bool(hits) / math.log2(rank + 1)
            missing = [hop for hop in missing if hop not in hits]
        return gain / sum(1 / math.log2(position + 1) for position in range(1, len(self.gold) + 1))

    def _share(self, shown: tuple[Passage, ...]) -> float:
        return sum(hop.found_in(shown) for hop in self.gold) / len(self.gold)


def retrieval(episode: Episode) -> Retrieval | None:
    """The passages that the searches of an episode showed; None if no gold passage of its question is known."""
    gold = gold_passages_of(episode.example)
    if not gold:
        return None
    searches = _shown(episode)
    return Retrieval(
        searches=tuple(tuple(passage for _, passage in search) for search in searches),
        gold=gold,
        tools=tuple(tuple(tool for tool, _ in search) for search in searches),
    )


def _shown(episode: Episode) -> list[list[tuple[str, Passage]]]:
    """The passages that each search showed, each with the tool that found it.

    Crops, and pictures that could not be shown, are not counted. All passages of a search are taken to be in a prompt if it was
    made before its turn, if the next turn is of another chat, or if the episode has no observations at all.
    """
    everywhere = {passage.id: (call.tool, passage) for call in episode.calls for passage in call.passages}
    observed = any(turn.observation for turn in episode.turns)
    searches: list[list[tuple[str, Passage]]] = []
    for turn, after in itertools.zip_longest(episode.turns, episode.turns[1:]):
        if not turn.calls or (turn.action is not None and turn.action.kind == "region"):
            continue
        before = turn.action is not None and turn.action.kind != "search"
        elsewhere = after is not None and after.sequence != turn.sequence
        retrieved = [(call.tool, passage) for call in turn.calls for passage in call.passages]
        if before or elsewhere or not observed:
            searches.append(retrieved)
        elif turn.shown:
            shown = [
                item.passage for item in turn.shown if item.passage and not (item.parent or item.box or item.error)
            ]
            own: dict[str, list[tuple[str, Passage]]] = {}
            for tool, passage in retrieved:
                own.setdefault(passage.id, []).append((tool, passage))
            found = []
            for id in shown:  # two tools of a turn may show the same id, one after the other
                of_turn = own.get(id) or [everywhere.get(id, ("", Passage(id=id, title="", text="")))]
                found.append(of_turn.pop(0) if len(of_turn) > 1 else of_turn[0])
            searches.append(found)
        else:  # agents that don't name what their observations show
            text = " ".join(turn.observation.split())
            searches.append(
                [
                    (tool, passage)
                    for tool, passage in retrieved
                    if passage.text.strip() and " ".join(passage.text.split()) in text
                ]
            )
    return searches


def found(episodes: Sequence[Episode]) -> list[float]:
    """Share of its question's gold passages that an episode's searches showed, in [0, 1].

    A question without gold passages gives 0 for all its attempts.
    """
    return [0.0 if (shown := retrieval(episode)) is None else shown.recall() for episode in episodes]


def has_gold(episode: Episode) -> bool:
    """Whether gold passages of the question are known."""
    return bool(gold_passages_of(episode.example))


def answer_found(episodes: Sequence[Episode], normalizer: str = "search_r1") -> list[float]:
    """1 for an episode whose searches showed a passage that states an accepted answer, word for word, in its title or text;
    else 0. Gold passages need not be known.

    A question whose answers are all yes, no or the like, which many texts hold, gives 0 for all its attempts.
    """
    normalize = NORMALIZERS.get(normalizer)
    return [float(_states_answer(episode, normalize)) for episode in episodes]


def has_telling_answer(episode: Episode) -> bool:
    """Whether an accepted answer is not yes, no or the like."""
    return any(map(telling, episode.example.answers))


def telling(answer: str) -> bool:
    """Whether a passage that states the answer says something, which it does not for yes, no or the like."""
    return search_r1(folded(answer)) not in CLOSED


def _states_answer(episode: Episode, normalize: Callable[[str], str]) -> bool:
    for _, passage in itertools.chain.from_iterable(_shown(episode)):
        text = f"{passage.title}\n{passage.text}"
        plain = normalize(folded(text))
        answers = filter(telling, accepted_answers(episode.example, text))
        if any(states(plain, normalize(folded(answer))) for answer in answers):
            return True
    return False


def gold_passages_of(example: Example) -> tuple[GoldHop, ...]:
    """The hops of an example's gold path that name a passage, by id or title; one hop per passage."""
    named = {hop.passage_id or hop.title: hop for hop in reversed(gold_path(example) or ())}
    return tuple(hop for name, hop in reversed(named.items()) if name)
