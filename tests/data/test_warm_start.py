"""The shipped warm start can read and ask but does not know where: what the quickstart's learning curve rests on."""

import collections
from collections.abc import Sequence

import pytest

from routerl_jax.agents.driver import run
from routerl_jax.agents.search_agent import SearchAgent
from routerl_jax.core.config import from_config_dict
from routerl_jax.core.types import Example, Passage
from routerl_jax.data.atlas import world
from routerl_jax.data.readers import open_dataset
from routerl_jax.engine.sampling import GREEDY
from routerl_jax.rewards.metrics import exact_match
from routerl_jax.training.config import TrainConfig
from routerl_jax.training.setup import build_mesh, build_policy, build_recipe, make_engine


class Gold:
    """Returns the passage that answers a sub-question, whichever knowledge base is asked, and one that does not."""

    def __init__(self, examples: Sequence[Example]) -> None:
        passages = {passage.id: passage for kb in world.KNOWLEDGE_BASES for passage in world.passages_of(kb)}
        self.gold = {hop["query"]: passages[hop["passage_id"]] for e in examples for hop in e.metadata["path"]}
        self.other = next(iter(passages.values()))
        self.unknown: list[str] = []

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        self.unknown += [query for query in queries if query not in self.gold]
        return [[self.gold.get(query, self.other), self.other][:k] for query in queries]


@pytest.mark.slow
@pytest.mark.parametrize("max_searches", [2, 3])
def test_it_reads_what_it_is_shown_under_any_budget(max_searches: int) -> None:
    from configs.quickstart import get_config

    config = from_config_dict(TrainConfig, get_config())
    source = open_dataset("atlas/validation")
    examples = [source[i] for i in range(120)]
    agent = build_recipe(config).agent
    assert isinstance(agent, SearchAgent)
    agent = SearchAgent(**{**vars(agent), "max_searches": max_searches})
    engine = make_engine(config, build_policy(config, build_mesh(config.mesh)), rows=64)
    tool = Gold(examples)
    episodes = run(agent, examples, engine, dict.fromkeys(world.KNOWLEDGE_BASES, tool), sampling=GREEDY)
    right = collections.defaultdict(list)
    for episode in episodes:
        right[episode.example.metadata["kind"]].append(exact_match(episode.answer, episode.example.answers))
    assert len(tool.unknown) < 0.2 * sum(len(episode.calls) for episode in episodes)
    shares = {kind: sum(values) / len(values) for kind, values in right.items()}
    assert all(shares[kind] > least for kind, least in {"none": 0.9, "single": 0.85, "multi": 0.6}.items()), shares
