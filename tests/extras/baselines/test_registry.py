"""The registry, and every registered baseline with a random policy, the real engine and driver, on Atlas."""

import dataclasses
from typing import Any

import pytest

from routerl_jax.agents.driver import run
from routerl_jax.core.types import Example
from routerl_jax.data.atlas.questions import real_questions
from routerl_jax.data.atlas.world import KNOWLEDGE_BASES, passages_of
from routerl_jax.engine.engine import Engine
from routerl_jax.engine.sampling import Sampling
from routerl_jax.evaluation.metrics import summarize
from routerl_jax.extras.baselines.known import BASELINES
from routerl_jax.extras.baselines.registry import baseline_agents, listing
from tests import tiny
from tests.extras.baselines.playing import with_template

# Few tokens, so that all of them together take seconds. Names that an agent has no field of are left out.
SMALL = {
    "k": 1,
    "max_turn_tokens": 12,
    "answer_tokens": 6,
    "shots": 0,
    "max_steps": 2,
    "max_turns": 2,
    "max_follow_ups": 1,
    "sentence_tokens": 6,
    "reading_tokens": 6,
    "summary_tokens": 6,
    "max_searches": 2,
}


class Shared:
    """A knowledge base of Atlas: the passages that share most words with a query."""

    def __init__(self, name):
        self.passages = [(one, set(one.text.lower().split())) for one in passages_of(name)]

    def search(self, queries, k):
        return [self.best(set(query.lower().split()), k) for query in queries]

    def best(self, words, k):
        return [one for one, _ in sorted(self.passages, key=lambda item: -len(item[1] & words))[:k]]


@pytest.fixture(scope="module")
def tools():
    return {name: Shared(name) for name in KNOWLEDGE_BASES}


@pytest.fixture(scope="module")
def examples():
    questions = real_questions("test")[:2]
    return [Example(id=one.id, question=one.text, answers=(one.answer,)) for one in questions]


@pytest.fixture(scope="module")
def engine():
    """A random policy with a chat template."""
    model = tiny.model(layers=1, max_length=1536)
    model.tokenizer = with_template()
    return Engine(model, rows=2, max_length=1536, segment=4)


def kind(episode):
    """Of the last turn's action."""
    return episode.turns[-1].action and episode.turns[-1].action.kind


@pytest.mark.parametrize("name", list(BASELINES))
@pytest.mark.parametrize("instruct", [True, False])
def test_every_baseline_runs_on_atlas(name, instruct, engine, tools, examples):
    usual: Any = next(iter(baseline_agents(name, tuple(tools)).values()))
    fields = {field.name for field in dataclasses.fields(usual)}
    settings = {key: value for key, value in SMALL.items() if key in fields} | {"instruct": instruct}
    agents = baseline_agents(name, tuple(tools), settings)
    for agent in list(agents.values())[-1:]:  # over all knowledge bases
        episodes = run(agent, examples, engine, tools, sampling=Sampling(temperature=1.0))
        assert [episode.example.id for episode in episodes] == [example.id for example in examples]
        assert all(episode.turns and episode.turns[-1].text for episode in episodes)
        # one that ends without an answer has a reason: a limit, or a turn that says nothing
        assert all(episode.answer or episode.truncated or kind(episode) == "invalid" for episode in episodes)
        assert all(call.error is None for episode in episodes for call in episode.calls)
        budget = agent.search_budget
        assert budget is not None
        assert all(len(episode.calls) <= budget * len(tools) for episode in episodes)
        summarize(episodes, budget=budget)


def test_a_baseline_is_made_for_each_knowledge_base_and_for_all():
    made: dict[str, Any] = dict(baseline_agents("vanilla_rag", ("text", "table"), {"k": 2}))
    assert {row: (agent.tools, agent.k) for row, agent in made.items()} == {
        "vanilla_rag_text": (("text",), 2),
        "vanilla_rag_table": (("table",), 2),
        "vanilla_rag_all": (("text", "table"), 2),
    }
    assert list(baseline_agents("vanilla_rag", ("text",))) == ["vanilla_rag"]
    assert list(baseline_agents("direct", ())) == ["direct"]


def test_the_listing_says_what_each_is():
    rows = {name: rest for name, *rest in listing()}
    assert rows["ircot"] == ["2212.10509", "a knowledge base", BASELINES.get("ircot").about]
    assert rows["direct"][1] == "none"
    assert rows["replug"][1] == "a knowledge base, an engine"
    assert list(rows) == sorted(BASELINES)
    assert all(about for _, _, about in rows.values())


def test_one_of_ones_own_is_named_by_a_dotted_path():
    name = "routerl_jax.extras.baselines.vanilla_rag:VanillaRAG"
    assert list(baseline_agents(name, ("text",))) == [name]


@pytest.mark.parametrize(
    ("name", "tools", "settings", "message"),
    [
        ("ircott", ("text",), {}, "unknown baseline 'ircott'; did you mean 'ircot'"),
        ("ircot", (), {}, "baseline 'ircot' needs a knowledge base, and there is none"),
        ("ircot", ("text",), {"steps": 2}, "baseline 'ircot'.*steps"),
        ("ircot", ("text",), {"max_steps": "two"}, "baseline 'ircot'.max_steps"),
    ],
)
def test_what_is_wrong_is_named(name, tools, settings, message):
    with pytest.raises(ValueError, match=message):
        baseline_agents(name, tools, settings)
