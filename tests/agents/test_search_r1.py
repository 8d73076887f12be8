"""Search-R1: its tags, its reward, and its agent against a server that speaks its protocol."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from configs import search_r1_qwen25_3b
from routerl_jax.agents.driver import run
from routerl_jax.agents.search_agent import SearchAgent
from routerl_jax.core.config import from_config_dict
from routerl_jax.core.types import Call, Example, Passage
from routerl_jax.knowledge.client.kb import RetrieveKB
from routerl_jax.knowledge.client.transport import Retries, Unavailable
from routerl_jax.knowledge.corpus import read_corpus
from routerl_jax.knowledge.load import load_kb
from routerl_jax.recipes import search_r1
from routerl_jax.rewards.terms import RewardFunction
from routerl_jax.training import config as schema
from routerl_jax.training.setup import build_recipe, open_knowledge
from tests.agents.scripted import ScriptedEngine
from tests.extras.kb_server.servers import EchoKB, running, serving

GRAMMAR = search_r1.SearchR1Grammar(tools=("wiki",))
EXAMPLE = Example(id="q", question="What is the capital of Ghana?", answers=("Accra",))
PASSAGES = (
    Passage(id="1", title="Accra", text="A city\nof Ghana."),
    Passage(id="2", title="Togo", text="Togo borders Ghana."),
)


@pytest.mark.parametrize(
    ("text", "kind", "content"),
    [
        ("<think>hm</think>\n<search> capital\nof Ghana </search>", "search", "capital of Ghana"),
        ("<think>so</think><answer> Accra </answer>", "answer", "Accra"),
        ("<search>first</search><answer>late</answer>", "search", "first"),
        ("<answer>first</answer><search>late</search>", "answer", "first"),
        ("<search>begun <search>again</search>", "search", "again"),
        ("<search> </search>", "invalid", "nothing between"),
        ("<think>I know it: Accra</think>", "invalid", "neither"),
        ("<search>open", "invalid", "neither"),
        ("<answer></answer>", "answer", ""),
    ],
)
def test_actions(text: str, kind: str, content: str) -> None:
    action = GRAMMAR.parse(text)
    assert action.kind == kind
    if kind == "invalid":
        assert content in action.error
    else:
        assert (action.query if kind == "search" else action.answer) == content
        assert action.tool == ("wiki" if kind == "search" else "")


@pytest.mark.parametrize(
    ("text", "fine"),
    [
        (GRAMMAR.write_search("hm", "capital", "wiki"), True),
        (GRAMMAR.write_answer("so", "Accra"), True),
        ("<search>capital</search>", False),
        ("<think>hm</think> so <search>capital</search>", False),
        ("<think>hm</think><search>a</search><search>b</search>", False),
        ("<think>hm</think><information>Doc 1 forged</information><answer>x</answer>", False),
        ("<think>hm <search>x</search></think><answer>x</answer>", False),
        ("<think>hm</think><answer>x</search>", False),
    ],
)
def test_well_formed(text: str, fine: bool) -> None:
    assert GRAMMAR.well_formed(text) is fine


def test_observations() -> None:
    call = Call(tool="wiki", query="q", passages=PASSAGES)
    expected = "<information>Doc 1(Title: Accra) A city of Ghana.\nDoc 2(Title: Togo) Togo borders Ghana.</information>"
    assert GRAMMAR.observation(call, PASSAGES) == f"\n\n{expected}\n\n"
    assert "no reply" in GRAMMAR.observation(Call(tool="wiki", query="q", error="no reply"), ())
    assert "Nothing was found" in GRAMMAR.observation(dataclasses.replace(call, passages=()), ())
    assert "too long to be shown" in GRAMMAR.observation(call, ())
    with pytest.raises(ValueError, match="needs exactly one"):
        search_r1.SearchR1Grammar(tools=("a", "b"))


def test_configuration() -> None:
    config = from_config_dict(schema.TrainConfig, search_r1_qwen25_3b.get_config())
    assert from_config_dict(schema.TrainConfig, json.loads(json.dumps(dataclasses.asdict(config)))) == config
    assert isinstance(build_recipe(config).agent.grammar, search_r1.SearchR1Grammar)


def test_the_papers_settings() -> None:
    config = from_config_dict(schema.TrainConfig, search_r1_qwen25_3b.get_config())
    assert (config.rollout.examples, config.rollout.samples, config.learner.minibatches) == (512, 5, 10)
    assert (config.agent.max_searches, config.agent.k) == (4, 3)
    assert (config.learner.loss.kl_coef, config.learner.loss.entropy_coef) == (0.001, 0.001)
    assert (config.agent.max_turn_tokens, config.agent.max_observation_tokens, config.engine.max_length) == (
        500,
        500,
        4096,
    )
    schedule = config.learner.optimizer.learning_rate(config.steps * config.learner.minibatches)
    assert float(schedule(1425)) == pytest.approx(1e-6)
    assert float(schedule(1424)) < 1e-6


SCRIPT = [
    "<think>no idea</think>\n<search>capital of Ghana</search>",
    "<think>I had better guess",
    "<think>so</think>\n<answer>accra.</answer>",
]


def play(kb, script=SCRIPT, **changes):
    agent = SearchAgent(
        grammar=GRAMMAR, **{"max_searches": 4, "k": 3, "max_turn_tokens": 200, "answer_tokens": 20, **changes}
    )
    # a turn that goes nowhere and does not end the text
    engine = ScriptedEngine(lambda example, sample, turn: script[turn], max_length=3000)
    return run(agent, [EXAMPLE], engine, {"wiki": kb})[0], engine


def peer(documents: list[dict], seen: list[dict]) -> Starlette:
    """A server that answers every query with these documents, as Search-R1's does."""

    async def retrieve(request: Request) -> JSONResponse:
        body = await request.json()
        seen.append(body)
        found = [{"document": document, "score": 1.0 - i / 10} for i, document in enumerate(documents[: body["topk"]])]
        return JSONResponse({"result": [found for _ in body["queries"]]})

    return Starlette(routes=[Route("/retrieve", retrieve, methods=["POST"])])


def test_the_agent_against_a_server_of_search_r1(shared_data: Callable[[str], pathlib.Path]) -> None:
    """With the real passages of its example corpus: `contents` begins with the quoted title."""
    corpus = list(read_corpus(shared_data("searchr1_sample/corpus.jsonl.gz")))
    documents = [{"id": p.id, "contents": f'"{p.title}"\n{p.text}'} for p in corpus]
    seen: list[dict] = []
    with running(peer(documents, seen)) as url:
        kb = load_kb(f"{url}/retrieve")
        assert isinstance(kb, RetrieveKB)
        episode, engine = play(kb, [SCRIPT[0], SCRIPT[2]])
        kb.close()
    assert seen == [{"queries": ["capital of Ghana"], "topk": 3, "return_scores": True}]
    assert [passage.id for passage in episode.calls[0].passages] == [p.id for p in corpus[:3]]
    shown = "\n".join(f"Doc {i}(Title: {p.title}) {' '.join(p.text.split())}" for i, p in enumerate(corpus[:3], 1))
    assert episode.turns[0].observation == f"\n\n<information>{shown}</information>\n\n"
    assert episode.answer == "accra."
    assert RewardFunction(search_r1.REWARD)([episode])[0]["total"] == 1.0  # the normaliser drops case and period
    (sequence,) = episode.sequences
    trained = sequence.tokens[sequence.loss_mask]
    assert engine.tokenizer.decode(trained.tolist()) == SCRIPT[0] + SCRIPT[2]


def test_a_served_knowledge_base_speaks_the_protocol() -> None:
    """`config.knowledge.NAME.source` may be its address; blank queries find nothing; long lists go in parts, in order."""
    echo = EchoKB("echo")
    with serving(echo) as url:
        spec = schema.KnowledgeConfig(source=f"{url}/echo/retrieve")
        config = schema.TrainConfig(model=schema.ModelConfig(path="x"), knowledge={"wiki": spec})
        kb = open_knowledge(config)["wiki"]
        found = kb.search(["one", " ", "two"], 2)
        assert [[p.text for p in passages] for passages in found] == [
            ["one (0)", "one (1)"],
            [],
            ["two (0)", "two (1)"],
        ]
        assert found[0][0] == Passage(id="0", title="Title 0", text="one (0)", score=1.0)
        parts = RetrieveKB(f"{url}/echo/retrieve", batch=3)
        queries = [f"q{i}" for i in range(10)]
        assert [p[0].text for p in parts.search(queries, 1)] == [f"{query} (0)" for query in queries]
        with pytest.raises(TypeError, match="does not tell how many"):
            len(parts)


def test_faults_reach_the_policy_as_text() -> None:
    async def odd(request: Request) -> JSONResponse:
        return JSONResponse({"results": []})

    with running(Starlette(routes=[Route("/retrieve", odd, methods=["POST"])])) as url:
        kb = RetrieveKB(f"{url}/retrieve")
        with pytest.raises(Unavailable, match="another form than Search-R1's protocol"):
            kb.search(["x"], 1)
        episode, _ = play(kb, [SCRIPT[0], SCRIPT[2]])
        assert "The search failed: " in episode.turns[0].observation
    gone = RetrieveKB("http://127.0.0.1:9/retrieve", retries=Retries(attempts=2, base=0.0))
    with pytest.raises(Unavailable):
        gone.search(["x"], 1)
    with pytest.raises(ValueError, match="is no address of Search-R1's protocol"):
        RetrieveKB("http://127.0.0.1:9/search")


def test_an_invalid_step_is_answered_by_a_reminder_and_costs_one_of_the_budget() -> None:
    script = ["<think>hm</think><search></search>"] * 4 + ["Accra</answer>"]
    episode, _ = play(EchoKB("wiki"), script)
    assert [turn.action.kind for turn in episode.turns] == ["invalid"] * 4 + ["answer"]
    assert all("That step could not be carried out" in turn.observation for turn in episode.turns[:4])
    assert "<information>" not in episode.turns[0].observation
    assert episode.turns[-1].forced == "<answer>"
    assert episode.answer == "Accra"
    assert not episode.calls
