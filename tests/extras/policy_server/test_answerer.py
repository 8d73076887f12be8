"""A policy with its searches behind the OpenAI protocol: the driver's answers, with the sources that they rest on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from routerl_jax.agents.agent import LLM, Agent, Tools
from routerl_jax.agents.driver import run
from routerl_jax.core.types import Episode, Example
from routerl_jax.engine.engine import Engine
from routerl_jax.engine.loop import EngineLoop
from routerl_jax.engine.sampling import Sampling
from routerl_jax.extras.policy_server.answerer import AnswererModel
from routerl_jax.extras.policy_server.app import Served, create_app
from routerl_jax.extras.policy_server.generator import Admission
from routerl_jax.extras.policy_server.live import LiveAgent
from tests import tiny
from tests.agents.scripted import AGENT, ANSWER, SEARCH, ScriptedEngine, knowledge
from tests.extras.kb_server.servers import running, wait_until
from tests.extras.policy_server.served import Server


def serving(engine: Any, agent: Any, tools: Any) -> Any:
    loop, admission = EngineLoop(engine), Admission(100)
    model = AnswererModel(loop, admission, LiveAgent(agent, loop, tools, 20), tools)
    served = Served(models={"answers": model}, busy=lambda: "", body_bytes=1 << 20, close=loop.close)
    return create_app(served), admission


def ask(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def script(name: str, sample: int, turn: int) -> str:
    """Searches both knowledge bases, then answers, some in another way."""
    searches = [SEARCH.format("text"), SEARCH.format("table"), SEARCH.format("text")]
    return [*searches[: 1 + int(name.split()[-1]) % 2], ANSWER.replace("Accra", f"Accra {sample}")][turn]


class Scripted(ScriptedEngine):
    """The script is by the question's seed; it ends after its answer."""

    def __init__(self) -> None:
        super().__init__(script)


@pytest.fixture(scope="module")
def scripted() -> Iterator[tuple[Server, dict[str, Any], Any]]:
    engine: Any = Scripted()
    tools = knowledge()
    app, admission = serving(engine, AGENT, tools)
    with running(app) as url:
        yield Server(url=url, engine=engine, admission=admission), tools, engine


def test_a_reply_names_what_it_rests_on(scripted: tuple[Server, dict[str, Any], Any]) -> None:
    server, _, _ = scripted
    reply = server.client().chat.completions.create(model="answers", messages=ask("capital?"), seed=1, n=2)
    first, second = reply.choices
    assert (first.message.content, second.message.content) == ("Accra 0", "Accra 1")
    said = first.message.model_extra or {}
    assert [(one["knowledge_base"], one["query"]) for one in said["searches"]] == [
        ("text", "capital of Ghana"),
        ("table", "capital of Ghana"),
    ]
    assert [one["id"] for one in said["sources"]] == ["text-0", "text-1", "table-0", "table-1"]
    assert said["sources"][0]["text"] == "fact 0 about 16"
    citations = [one.url_citation for one in first.message.annotations or []]
    assert [one.url for one in citations] == [
        f"urn:routerl:{name}:{name}-{i}" for name in ("text", "table") for i in (0, 1)
    ]
    assert {(one.start_index, one.end_index) for one in citations} == {(0, len("Accra 0"))}
    assert reply.usage is not None
    assert reply.usage.completion_tokens > 0
    assert reply.usage.prompt_tokens > 0


def test_pieces_end_with_the_answer_and_its_sources(scripted: tuple[Server, dict[str, Any], Any]) -> None:
    server, _, _ = scripted
    options: dict[str, Any] = {"model": "answers", "messages": ask("capital?"), "seed": 2, "stream": True}
    chunks = list(server.client().chat.completions.create(**options, stream_options={"include_usage": True}))
    assert [chunk.choices[0].delta.content for chunk in chunks[:-1]] == ["", "Accra 0"]
    assert [one["id"] for one in chunks[1].choices[0].delta.model_extra["sources"]] == ["text-0", "text-1"]
    assert chunks[1].choices[0].finish_reason == "stop"
    assert chunks[-1].usage.total_tokens > 0


def test_64_questions_at_once_share_searches(scripted: tuple[Server, dict[str, Any], Any]) -> None:
    server, tools, engine = scripted
    before = {name: len(kb.batches) for name, kb in tools.items()}

    async def one(client: openai.AsyncOpenAI, i: int) -> list[str]:
        reply = await client.chat.completions.create(model="answers", messages=ask(f"question {i}"), seed=i)
        return [source["id"] for source in reply.choices[0].message.model_extra["sources"]]

    async def all_of_them() -> list[list[str]]:
        async with server.async_client() as client:
            return await asyncio.gather(*(one(client, i) for i in range(64)))

    found = asyncio.run(all_of_them())
    assert found == [[f"{kb}-{k}" for kb in ("text", "table")[: 1 + i % 2] for k in (0, 1)] for i in range(64)]
    batches = {name: kb.batches[before[name] :] for name, kb in tools.items()}
    assert [sum(map(len, batches[name])) for name in ("text", "table")] == [64, 32]
    assert len(batches["text"]) < 64  # a search of its own for each would be 64
    assert engine.live == []
    assert server.admission.open == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"messages": [*ask("x"), {"role": "assistant", "content": "y"}]}, "the last message is the question"),
        ({"messages": ask("  ")}, "holds no question"),
        ({"stop": ["a"]}, "stop: this model answers with its own searches"),
        ({"logprobs": True}, "logprobs: this model answers with its own searches"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
            "no pictures",
        ),
    ],
)
def test_refusals(scripted: tuple[Server, dict[str, Any], Any], changes: dict[str, Any], message: str) -> None:
    client = scripted[0].client()
    with pytest.raises(openai.BadRequestError, match=message):
        client.chat.completions.create(**{"model": "answers", "messages": ask("x"), **changes})
    with pytest.raises(openai.BadRequestError, match="ask /v1/chat/completions"):
        client.completions.create(model="answers", prompt="x")


def test_what_is_no_picture_is_the_clients_mistake(
    scripted: tuple[Server, dict[str, Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, _, engine = scripted
    monkeypatch.setattr(engine, "images", object(), raising=False)  # it sees
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "x"}, part]}]
    with pytest.raises(openai.BadRequestError, match="not an image") as caught:
        server.client().chat.completions.create(model="answers", messages=messages)
    assert caught.value.param == "messages[0].content[1]"


class Reader(Agent):
    """Searches for what it writes first, and answers with what it writes then."""

    async def run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        chat = llm.conversation(f"Question: {example.question}")
        query = await chat.generate(max_tokens=12)
        chat.observe((await tools["text"].search(query.text, 1)).passages[0].text)
        return chat.episode(answer=(await chat.generate(max_tokens=10)).text)


def test_answers_are_those_of_the_driver() -> None:
    """Of a random policy, beside `agents.driver` on the same questions and the same seed."""
    engine = Engine(tiny.model(layers=1), rows=4, max_length=256, segment=8)
    tools = knowledge()
    examples = [Example(id=f"seed {i}", question=f"What is {i}?", answers=()) for i in range(6)]
    expected = [one.answer or "" for one in run(Reader(), examples, engine, tools, sampling=Sampling(temperature=1.0))]
    assert len(set(expected)) == 6
    app, admission = serving(engine, Reader(), tools)

    async def all_of_them(client: openai.AsyncOpenAI) -> list[str]:
        async with client:
            replies = await asyncio.gather(
                *(
                    client.chat.completions.create(
                        model="answers", messages=ask(f"What is {i}?"), seed=i, temperature=1.0
                    )
                    for i in range(6)
                )
            )
        return [reply.choices[0].message.content or "" for reply in replies]

    with running(app) as url:
        server = Server(url=url, engine=engine, admission=admission)
        assert asyncio.run(all_of_them(server.async_client())) == expected
        with pytest.raises(openai.BadRequestError) as caught:
            server.client().chat.completions.create(model="answers", messages=ask("long " * 300))
        assert caught.value.code == "context_length_exceeded"


def test_who_hangs_up_gives_its_rows_back_while_a_search_lasts() -> None:
    class Slow(tiny.ScriptedKB):
        begun, over = threading.Event(), threading.Event()

        def search(self, queries: Any, k: int) -> Any:
            self.begun.set()
            self.over.wait(60)
            return super().search(queries, k)

    engine: Any = Scripted()
    app, admission = serving(engine, AGENT, knowledge(text=Slow()))
    with running(app) as url:
        client = Server(url=url, engine=engine, admission=admission).client()
        held = client.chat.completions.create(model="answers", messages=ask("capital?"), seed=1, n=8, stream=True)
        next(iter(held))
        assert Slow.begun.wait(60)
        wait_until(lambda: (admission.open, len(engine.live)) == (8, 8))
        held.close()
        wait_until(lambda: not admission.open and not engine.live)
        assert not Slow.over.is_set()
        Slow.over.set()
        reply = client.chat.completions.create(model="answers", messages=ask("capital?"), seed=1)
        assert reply.choices[0].message.content == "Accra 0"
