"""A chat model behind an endpoint as the policy of agents, against a server of that protocol: what each agent sends call by
call, what becomes of what comes back, and of what does not."""

from __future__ import annotations

import base64
import collections
import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import PIL.Image
import pytest
from aiohttp import web
from rich.console import Console

import routerl_jax as rj
from routerl_jax.agents.driver import run
from routerl_jax.agents.search_agent import SearchAgent
from routerl_jax.core.rows import RowLocation
from routerl_jax.core.types import Episode, Example, Passage
from routerl_jax.engine.sampling import GREEDY, Sampling
from routerl_jax.evaluation.metrics import summarize
from routerl_jax.evaluation.records import episode_of, episode_record
from routerl_jax.evaluation.trajectory import render
from routerl_jax.extras.baselines.rounds import BEGIN_QUERY, END_QUERY, IRCoT, ReAct, SearchO1
from routerl_jax.models.images import decode_image
from routerl_jax.models.regions import RegionRule
from routerl_jax.recipes.mmsearch_r1 import protocol as mmsearch
from routerl_jax.recipes.mmsearch_r1.agents import DirectAnswer, MMSearchAgent, RagWorkflow
from routerl_jax.recipes.r1_router.agents import StepwiseAgent
from routerl_jax.recipes.r1_router.steps import StepProtocol
from routerl_jax.recipes.r1_searcher import R1SearcherGrammar
from routerl_jax.recipes.routerag import RouteRAGGrammar
from routerl_jax.recipes.vrag_rl.agents import VRAGAgent
from routerl_jax.services import faults
from routerl_jax.services.cache import LayeredCache, MemoryCache, SqliteCache
from routerl_jax.services.policy import ChatModel
from routerl_jax.training.credit import sequences_of
from tests import seeing, tiny
from tests.web_servers import Chats, http_error, refused_by_openai, serving

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLE = Example(id="q", question="What is the capital of Ghana?", answers=("Accra",))
AGENT = SearchAgent(grammar=tiny.GRAMMAR, max_searches=3, k=2, instruct=True)
SEARCH = "<think>hm</think><sub-question>capital of Ghana</sub-question><ret>text retriever</ret>"
ANSWER = "<think>so</think><answer>Accra</answer>"
FOUND = "<information>\nter-0: fact 0 about 16\nter-1: fact 1 about 16\n</information>"


def scripted(*turns: str):
    """Replies by the number of assistant's messages so far, with more after the stop string, which nobody may see."""

    def reply(messages: list[dict[str, Any]]) -> str:
        return turns[sum(message["role"] == "assistant" for message in messages)] + " and more"

    return reply


@pytest.fixture
def chats() -> Iterator[Any]:
    handler: Any = Chats(scripted(SEARCH, ANSWER))
    handler.refuse = refused_by_openai
    with serving(handler) as server:
        handler.url, handler.server = f"{server.url}/v1", server
        yield handler


def model(chats: Any, **settings: Any) -> ChatModel:
    fields: dict[str, Any] = {"base_url": chats.url, "retries": 0, "cache": MemoryCache(), **settings}
    return rj.ChatModel("m", **fields)


def knowledge() -> dict[str, Any]:
    return {"text": tiny.ScriptedKB("text"), "table": tiny.ScriptedKB("table")}


def ask(
    chats: Any,
    agent: Any = AGENT,
    example: Example = EXAMPLE,
    tools: Any = None,
    sampling: Any = GREEDY,
    **settings: Any,
) -> Episode:
    (episode,) = run(agent, [example], model(chats, **settings), tools or knowledge(), sampling=sampling)
    return episode


def said(body: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(message["role"], message["content"]) for message in body["messages"]]


# --- agents that say how to work, and that don't ---


def test_a_search_agent_call_by_call(chats):
    episode = ask(chats)
    first, second = chats.bodies
    instructions = tiny.GRAMMAR.instructions()
    assert said(first) == [("system", instructions), ("user", EXAMPLE.question)]
    assert said(second) == [*said(first), ("assistant", SEARCH), ("user", FOUND)]
    assert {key: first[key] for key in first if key not in ("messages",)} == {
        "model": "m",
        "stop": ["</ret>", "</answer>"],
        "max_tokens": 512,
        "temperature": 0.0,
    }
    assert episode.answer == "Accra"
    assert [(turn.text, turn.stop_reason, turn.well_formed) for turn in episode.turns] == [
        (SEARCH, "stop", True),
        (ANSWER, "stop", True),
    ]
    assert [call.query for call in episode.calls] == ["capital of Ghana"]
    assert (episode.sequences, episode.failure, episode.truncated) == ([], None, False)
    # the server counts 7 of every prompt, and words
    assert [turn.tokens for turn in episode.turns] == [4, 1]
    usage = episode.usage
    assert usage is not None
    assert (usage.replies, usage.kept, usage.prompt_tokens, usage.tokens, usage.cost) == (2, 0, 14, 5, 0.0)
    assert usage.seconds > 0


def test_an_agent_that_does_not_say_how_to_work(chats):
    assert ask(chats, dataclasses.replace(AGENT, instruct=False)).answer == "Accra"
    assert said(chats.bodies[0]) == [("user", f"Question: {EXAMPLE.question}")]
    assert said(chats.bodies[1])[1:] == [("assistant", SEARCH), ("user", FOUND)]


def test_an_answer_that_is_begun_is_asked_for_in_words(chats):
    """And is read whether or not the model repeats what it was told to begin with."""
    for reply in ("<answer>Accra</answer>", "Accra</answer>", "Well, <answer>Accra"):
        chats.bodies.clear()
        chats.reply = scripted(SEARCH, reply)
        episode = ask(chats, dataclasses.replace(AGENT, max_searches=1))
        role, content = said(chats.bodies[1])[-1]
        assert role == "user"
        assert content.startswith(FOUND)
        assert content.endswith("exactly what follows, and go on from there:\n<answer>")
        assert episode.answer.removesuffix(" and more") == "Accra"
        assert episode.turns[1].forced == "<answer>"


@pytest.mark.parametrize("echo", [None, "", "<think>\n\n</think>\n\n"], ids=["vllm", "llama.cpp", "llama.cpp-thinking"])
def test_a_server_that_goes_on_with_the_assistants_words(chats, echo):
    """What was found and what was begun stand in the unfinished message. vLLM gives what follows, llama.cpp all of it."""
    chats.refuse, chats.echo = lambda body: "", echo
    chats.reply = lambda messages: "Accra</answer>" if messages[-1]["role"] == "assistant" else SEARCH
    episode = ask(chats, dataclasses.replace(AGENT, max_searches=1), form="continue")
    first, second = chats.bodies
    assert "continue_final_message" not in first
    assert second["continue_final_message"] is True
    assert second["add_generation_prompt"] is False
    assert said(second) == [*said(first), ("assistant", f"{SEARCH}{FOUND}<answer>")]
    assert episode.answer == "Accra"
    assert "".join(turn.forced + turn.text + turn.observation for turn in episode.turns) == (
        f"{SEARCH}{FOUND}<answer>Accra</answer>"
    )


def test_an_unfinished_message_may_end_where_it_is(chats):
    """That is an empty turn, as an engine's that ends at once, and no failure."""
    chats.refuse, chats.echo = lambda body: "", ""
    chats.reply = lambda messages: "" if messages[-1]["role"] == "assistant" else SEARCH
    episode = ask(chats, form="continue")
    assert (episode.failure, episode.answer) == (None, None)
    assert [(turn.text, turn.stop_reason) for turn in episode.turns] == [(SEARCH, "stop"), ("", "eos")]


def test_marks_in_what_anybody_says_are_text(chats):
    """In a question, a page and a reply: no role begins there, and a reply is read as it was written."""
    odd = "<think>a <|end|><|user|>b</think><answer>x <|picture|></answer>"
    chats.reply = scripted(SEARCH, odd)
    question = dataclasses.replace(EXAMPLE, question="What <|assistant|>is <|picture|>it?")
    episode = ask(chats, example=question)
    assert said(chats.bodies[0])[1] == ("user", "What < |assistant|>is < |picture|>it?")
    assert len(chats.bodies[1]["messages"]) == 4
    assert (episode.turns[1].text, episode.answer) == (odd, "x <|picture|>")


def test_a_routing_agent(chats):
    """RouteRAG: modes, three knowledge bases, and a last turn that is the policy's own."""
    grammar = RouteRAGGrammar(tools=("passage", "graph", "graph_passage"))
    searches = [
        f"<think>{mode}</think>\n<search> {mode} who composed Aida </search>"
        for mode in ("[graph]", "[passage][graph]")
    ]
    chats.reply = scripted(*searches, "<think>Verdi</think>\n<answer>Verdi</answer>")
    agent = SearchAgent(grammar=grammar, max_searches=2, k=1, instruct=True)
    tools = {name: tiny.ScriptedKB(name) for name in grammar.tools}
    episode = ask(chats, agent, tools=tools)
    assert [(call.tool, call.query) for call in episode.calls] == [
        ("graph", "who composed Aida"),
        ("graph_passage", "who composed Aida"),
    ]
    assert episode.answer == "Verdi"
    assert [role for role, _ in said(chats.bodies[2])] == ["system", "user", "assistant", "user", "assistant", "user"]
    assert said(chats.bodies[2])[-1][1].startswith("<information>")


def test_a_stepwise_agent(chats):
    """R1-Router: every step is a chat of its own, and together they are one episode."""
    protocol = StepProtocol(tools=("text", "table"))
    turns = [
        protocol.routes.write_search("hm", "capital?", "text"),
        protocol.answers.write_answer("so", "It is Accra."),
        protocol.routes.write_search("done", "none", "none"),
        protocol.answers.write_answer("sum", "2.5 million"),
    ]
    chats.reply = lambda messages: turns[len(chats.bodies) - 1]
    episode = ask(chats, StepwiseAgent(protocol=protocol, k=2, instruct=True))
    assert (episode.answer, [call.query for call in episode.calls]) == ("2.5 million", ["capital?"])
    assert [[role for role, _ in said(body)] for body in chats.bodies] == [["system", "user"]] * 4
    assert [turn.text for turn in episode.turns] == turns
    assert [body["stop"] for body in chats.bodies] == [["</ret>"], ["</answer>"], ["</ret>"], ["</answer>"]]
    assert episode.usage is not None
    assert episode.usage.replies == 4


def test_thoughts_that_are_begun(chats):
    """R1-Searcher's form: every question's first words are `<think>`, and queries stand between tokens of their own."""
    chats.reply = scripted(
        "<think>hm <|begin_of_query|>capital of Ghana<|end_of_query|>", "so</think><answer>Accra</answer>"
    )
    grammar = R1SearcherGrammar(tools=("text",))
    agent = SearchAgent(grammar=grammar, max_searches=2, k=1, instruct=True, prompt_suffix="<think>")
    episode = ask(chats, agent, tools={"text": tiny.ScriptedKB()})
    assert (episode.answer, [call.query for call in episode.calls]) == ("Accra", ["capital of Ghana"])
    assert said(chats.bodies[0])[1][1].endswith("go on from there:\n<think>")
    assert said(chats.bodies[1])[2] == ("assistant", f"<think>{episode.turns[0].text}")
    assert episode.turns[0].text.startswith("hm <|begin_of_query|>")


def test_a_reply_that_ends_by_itself(chats):
    chats.reply = lambda messages: "It is Accra."
    episode = ask(chats)
    assert (episode.answer, episode.turns[0].stop_reason, episode.failure) == (None, "eos", None)


def test_a_reply_that_is_cut(chats):
    chats.reply = lambda messages: "word " * 40
    episode = ask(chats, dataclasses.replace(AGENT, max_turn_tokens=9, max_searches=1, answer_tokens=5))
    assert [turn.stop_reason for turn in episode.turns] == ["length", "length"]
    assert episode.turns[0].text == " ".join(["word"] * 9)
    assert episode.truncated


def test_a_server_that_names_the_stop_string(chats):
    """It is believed: text that ends at no stop string gets none."""
    chats.names_stops = True
    chats.reply = scripted(SEARCH, "<answer>Accra")
    episode = ask(chats)
    assert episode.turns[0].text == SEARCH
    assert ask(chats, dataclasses.replace(AGENT, max_searches=0)).turns[0].stop_reason == "stop"


def test_a_model_that_takes_no_stop_strings(chats):
    chats.refuse = lambda body: (
        "Unsupported parameter: 'stop' is not supported with this model." if "stop" in body else ""
    )
    episode = ask(chats)
    assert [turn.text for turn in episode.turns] == [SEARCH, ANSWER]
    assert ["stop" in body for body in chats.bodies] == [True, False, False]


# --- pictures ---


def pictures(content: Any) -> list[Any]:
    """Parts of a message: texts, and pictures as arrays. A message without pictures is one text."""
    if isinstance(content, str):
        return [content]
    parts = []
    for part in content:
        if part["type"] == "text":
            parts.append(part["text"])
        else:
            data = base64.b64decode(part["image_url"]["url"].partition(",")[2])
            parts.append(np.asarray(decode_image(data)))
    return parts


class Pages:
    """Finds the same pages whatever is asked."""

    def __init__(self, images: Sequence[str]) -> None:
        self.asked: list[Any] = []
        self.found = [
            Passage(id=f"p{i}", title=f"Page {i}", text=f"words {i}", image=image) for i, image in enumerate(images)
        ]

    def search(self, queries: Sequence[Any], k: int) -> list[list[Passage]]:
        self.asked += queries
        return [self.found[:k] for _ in queries]


@pytest.fixture
def files(tmp_path: pathlib.Path) -> list[str]:
    paths = [tmp_path / f"{number}.png" for number in range(3)]
    for number, path in enumerate(paths):
        PIL.Image.fromarray(seeing.picture(number, 240, 320)).save(path)
    return [str(path) for path in paths]


IMAGE = "<reason>which flag?</reason>\n<search><img></search>"
TEXT = "<reason>Ghana</reason>\n<text_search>capital of Ghana</text_search>"
RIGHT = "<reason>so</reason>\n<answer>Accra</answer>"
MMSEARCH = MMSearchAgent(image_tool="image", text_tool="text", k=1, image_k=2, instruct=True)


def test_mmsearch_r1(chats, files):
    """The question's picture, thumbnails where they stand among titles, then a search in words."""
    chats.reply = scripted(IMAGE, TEXT, RIGHT)
    picture = seeing.picture(7, 84, 112)
    example = dataclasses.replace(EXAMPLE, question="Its capital?", images=(picture,))
    tools = {"image": Pages(files), "text": Pages([""])}
    episode = ask(chats, MMSEARCH, example, tools)
    assert episode.answer == "Accra"
    assert [call.tool for call in episode.calls] == ["image", "text"]
    shown, words = pictures(said(chats.bodies[0])[0][1])
    np.testing.assert_array_equal(shown, picture)  # 84 and 112 are multiples of 28: nothing is resized
    assert "Its capital?" in words
    assert [role for role, _ in said(chats.bodies[2])] == ["user", "assistant", "user", "assistant", "user"]
    found = pictures(said(chats.bodies[1])[2][1])
    kinds = "".join("t" if isinstance(part, str) else "p" for part in found)
    assert kinds == "tptpt"
    assert "Page 0" in found[2]
    assert "Page 1" in found[4]
    assert "Its capital?" in found[4]  # the question again, its text alone
    assert chats.bodies[0]["stop"] == ["</search>", "</text_search>", "</answer>"]  # the refusal closes no tag


def test_mmsearch_r1_refuses(chats):
    chats.reply = lambda messages: f"<reason>no</reason>\n{mmsearch.REFUSAL}. Sorry"
    tools = {"image": Pages([""]), "text": Pages([""])}
    episode = ask(chats, MMSEARCH, tools=tools)
    assert episode.turns[0].text.endswith(mmsearch.REFUSAL)
    assert episode.turns[0].action is not None
    assert episode.turns[0].action.kind == "refusal"


def test_searches_that_are_written_in_the_policys_place(chats, files):
    """The fixed workflow: they are the assistant's words; the query's beginning, and the answer's, are asked for."""
    picture = seeing.picture(7, 84, 112)
    example = dataclasses.replace(EXAMPLE, question="Its capital?", images=(picture,))
    chats.reply = scripted("", "<text_search>capital of Ghana</text_search>", "<answer>Accra</answer>")
    tools = {"image": Pages(files), "text": Pages([""])}
    episode = ask(
        chats, RagWorkflow(**{f.name: getattr(MMSEARCH, f.name) for f in dataclasses.fields(MMSEARCH)}), example, tools
    )
    assert (episode.answer, [call.query for call in episode.calls]) == ("Accra", ["", "capital of Ghana"])
    first, second = (said(body) for body in chats.bodies)
    assert first[1] == ("assistant", "<search><img></search>")
    assert first[2][1][-1]["text"].endswith("go on from there:\n<text_search>")
    assert second[3] == ("assistant", "<text_search>capital of Ghana</text_search>")
    direct = DirectAnswer(image_tool="image", text_tool="text", instruct=True)
    chats.reply = scripted("<answer>Lagos</answer>")
    assert ask(chats, direct, example, tools).answer == "Lagos"


def test_vrag_rl(chats, files):
    """Pages, then a closer look: the box is in the frame of the page that was sent, the crop from the file."""
    chats.reply = scripted(
        "<think>which?</think>\n<search>population</search>",
        "<think>small</think>\n<bbox>[56, 56, 140, 112]</bbox>",
        "<think>so</think>\n<answer>32.6M</answer>",
    )
    agent = VRAGAgent(tool="pages", k=3, instruct=True, regions=RegionRule(least=28))
    episode = ask(chats, agent, tools={"pages": Pages(files)}, max_pixels=112 * 168)
    assert episode.answer == "32.6M"
    (page,) = [part for part in pictures(said(chats.bodies[1])[3][1]) if not isinstance(part, str)]
    assert page.shape == (112, 140, 3)  # 240 x 320 within 112 * 168 pixels, by multiples of 28
    (crop,) = [part for part in pictures(said(chats.bodies[2])[5][1]) if not isinstance(part, str)]
    look = episode.turns[1].shown[0]
    assert look.box == (128, 120, 320, 240)
    raw = PIL.Image.fromarray(seeing.picture(0, 240, 320)[120:240, 128:320])
    sent = np.asarray(raw.resize((crop.shape[1], crop.shape[0]), PIL.Image.Resampling.BICUBIC))
    np.testing.assert_array_equal(crop, sent)
    assert episode.failure is None


def test_a_model_without_sight(chats):
    example = dataclasses.replace(EXAMPLE, images=(seeing.picture(0),))
    with pytest.raises(RuntimeError, match=r"m sees no pictures, as config\.chat_model\.pictures says"):
        ask(chats, MMSEARCH, example, {"image": Pages([""]), "text": Pages([""])}, pictures=False)


# --- what goes wrong ---


def _reply(**message: Any) -> web.Response:
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": "stop"}
    return web.json_response({"choices": [choice], "usage": {"prompt_tokens": 7, "completion_tokens": 0}})


TOO_LONG = "This model's maximum context length is 8192 tokens. However, your messages resulted in 9001 tokens."
FAULTS = {
    "server": lambda: http_error(500),
    "rate_limit": lambda: http_error(429),
    "not_allowed": lambda: http_error(401),
    "request": lambda: http_error(404),
    "context_length": lambda: web.json_response({"error": {"message": TOO_LONG}}, status=400),
    "half_reply": lambda: web.Response(text='{"choices": [{"mess', content_type="application/json"),
    "empty": lambda: _reply(content=""),
    "refused": lambda: _reply(content=None, refusal="I can't help with that."),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_turn_that_does_not_come_ends_its_episode(chats, kind):
    """With a name for why, in whichever turn it is; the episode keeps what was there before."""
    for before in (0, 1):

        async def broken(request: Any, before: int = before) -> web.StreamResponse:
            messages = (await request.json())["messages"]
            done = sum(message["role"] == "assistant" for message in messages)
            bad = done == before and "Togo" in json.dumps(messages)
            return FAULTS[kind]() if bad else await chats(request)

        with serving(broken) as server:
            chats.url = f"{server.url}/v1"
            bad = dataclasses.replace(EXAMPLE, id="bad", question="What is the capital of Togo?")
            good, failed = run(AGENT, [EXAMPLE, bad], model(chats), knowledge(), sampling=GREEDY)
        assert (good.answer, good.failure) == ("Accra", None)
        assert failed.answer is None
        assert failed.failure is not None
        assert failed.failure.kind == kind
        assert failed.failure.message
        assert "\n" not in failed.failure.message
        assert failed.truncated == (kind == "context_length")
        assert len(failed.turns) == before
        assert failed.usage is not None
        row = summarize([good, failed])
        assert (row["policy_failed_rate"], row[f"policy_failed/{kind}"], row["em"]) == (0.5, 0.5, 0.5)


@pytest.mark.parametrize(
    ("status", "message", "kind"),
    [
        (400, TOO_LONG, faults.CONTEXT_LENGTH),
        (400, "prompt is too long: 210000 tokens > 200000 maximum", faults.CONTEXT_LENGTH),
        (400, "the request exceeds the available context size. try increasing the context size", faults.CONTEXT_LENGTH),
        (
            400,
            "The input token count (40000) exceeds the maximum number of tokens allowed (32768)",
            faults.CONTEXT_LENGTH,
        ),
        (400, "max_tokens is too large: 40000. This model supports at most 16384 completion tokens", faults.REQUEST),
        (404, "The model `m` does not exist", faults.REQUEST),
        (413, "Maximum request body size 1048576 exceeded.", faults.REQUEST),
        (403, "Country not supported", faults.NOT_ALLOWED),
        (503, "overloaded", faults.SERVER),
        (0, "no reply within 3 s", faults.NO_REPLY),
        (0, "the rate limit leaves no turn in time", faults.RATE_LIMIT),
    ],
)
def test_what_servers_say(status, message, kind):
    assert faults.of_status(status, message) == kind


def test_a_server_that_is_not_there(chats):
    episode = ask(chats, base_url="http://127.0.0.1:9/v1")
    assert episode.failure is not None
    assert episode.failure.kind == "no_reply"


def test_a_picture_that_can_not_be_read(chats, tmp_path, files):
    """Of a question, it ends the episode; among what was found, words stand in its place."""
    example = dataclasses.replace(EXAMPLE, images=(tmp_path / "absent.png",))
    tools = {"image": Pages([str(tmp_path / "gone.png")]), "text": Pages([""])}
    episode = ask(chats, MMSEARCH, example, tools)
    assert episode.failure is not None
    assert episode.failure.kind == "picture"
    assert "absent.png: can't be read" in episode.failure.message
    assert not chats.bodies
    chats.reply = scripted(IMAGE, RIGHT)
    episode = ask(chats, MMSEARCH, dataclasses.replace(EXAMPLE, images=(files[0],)), tools)
    assert episode.answer == "Accra"
    words = [part for part in pictures(said(chats.bodies[1])[2][1]) if isinstance(part, str)]
    assert "gone.png: can't be read" in words[0]


def test_one_in_ten_fails_and_a_second_run_asks_for_those_alone(chats, tmp_path):
    """Every tenth question fails at every attempt, in many ways; nothing is lost, and what was answered is not asked again."""
    kinds = [FAULTS[kind] for kind in ("server", "half_reply", "context_length", "refused")]
    examples = [dataclasses.replace(EXAMPLE, id=f"q{i}", question=f"Question {i}?") for i in range(80)]
    failing = True
    asked: collections.Counter[str] = collections.Counter()

    async def faulty(request: Any) -> web.StreamResponse:
        messages = (await request.json())["messages"]
        number = int(messages[1]["content"].split()[1][:-1])
        asked[json.dumps(messages)] += 1
        if failing and number % 10 == 3 and len(messages) == (2 if number % 20 == 3 else 4):
            return kinds[number // 10 % 4]()
        return await chats(request)

    def evaluate() -> list[Episode]:
        cache = LayeredCache([SqliteCache(tmp_path / "replies.sqlite", max_bytes=None)])
        policy = model(chats, cache=cache, concurrency=8)
        try:
            return run(AGENT, examples, policy, knowledge(), sampling=GREEDY)
        finally:
            policy.end()

    with serving(faulty) as server:
        chats.url = f"{server.url}/v1"
        episodes = evaluate()
        assert [episode.example.id for episode in episodes] == [example.id for example in examples]
        failed = [episode.example.id for episode in episodes if episode.failure]
        assert failed == [f"q{i}" for i in range(3, 80, 10)]
        assert {episode.answer for episode in episodes if not episode.failure} == {"Accra"}
        assert server.most <= 8
        first = dict(asked)
        assert set(first.values()) == {1}
        failing = False
        again = evaluate()
    assert {episode.answer for episode in again} == {"Accra"}
    repeated = [json.loads(messages)[1]["content"] for messages, count in asked.items() if count > 1]
    assert sorted(repeated) == sorted(f"Question {i}?" for i in range(3, 80, 10))
    # the four that failed at their first turn had no second one before
    assert len(asked) == len(first) + 4
    healthy = [(one, other) for one, other in zip(episodes, again) if not one.failure]
    for one, other in healthy:
        assert [(t.text, t.observation, t.tokens) for t in one.turns] == [
            (t.text, t.observation, t.tokens) for t in other.turns
        ]
        assert one.usage is not None
        assert other.usage == dataclasses.replace(one.usage, kept=2)


async def _cut(request: Any) -> web.StreamResponse:
    """Half of what its headers announce."""
    response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": "900"})
    await response.prepare(request)
    await response.write(b'{"choices": [')
    request.transport.close()
    return response


async def _closed(request: Any) -> web.StreamResponse:
    request.transport.close()
    return web.Response()


def _whole(answer: Any) -> web.Response:
    return web.json_response(answer)


ONCE: list[Any] = [
    *(lambda status=status: http_error(status) for status in (429, 500, 503)),
    lambda: web.Response(text='{"choices": [{"mess', content_type="application/json"),
    lambda: web.Response(text="<html>Bad gateway</html>", content_type="text/html"),
    lambda: _reply(content=None),
    lambda: _reply(content=""),
    lambda: _reply(content=" \n "),
    lambda: _whole({"error": {"message": "try later", "code": 529}}),
    lambda: _whole({"choices": []}),
    lambda: _whole({"choices": [{"index": 0}]}),
    _closed,
    _cut,
]


def _script(messages: list[dict[str, Any]]) -> str:
    """What a policy says that knows the answers, whichever agent asks it."""
    task = messages[0]["content"]
    number = re.findall(r"(?:of country|capital) (\d+)", json.dumps(messages))[-1]
    turn = sum(message["role"] == "assistant" for message in messages)
    if "Action:" in task:
        turns = (
            f"Thought: hm\nAction: search[capital {number}]\nObservation",
            f"Action: finish[“City {number}”]\nThought",
        )
        return turns[turn]
    if "Final Information:" in task:
        return f"**Final Information:** It is City {number}."
    if "begin_search_query" in task:
        turns = (f"I wonder. {query(number)} and", f"So $\\boxed{{\\text{{City {number}}}}}$ it is.")
        return turns[turn]
    if "<ret>" in task:
        return (SEARCH, f"<think>so</think><answer>City {number}</answer>")[turn] + " and more"
    return f"It is ruled by J. Lee. So the answer is: City {number}. I hope this helps.\nQuestion: and"


def query(number: str) -> str:
    return f"{BEGIN_QUERY}capital {number}{END_QUERY}"


def test_each_request_fails_once_in_one_of_thirteen_ways_and_every_answer_is_right(chats, monkeypatch, tmp_path):
    """Four agents, 25 questions each. With one retry nothing is lost; a second run asks nothing."""
    monkeypatch.setattr("routerl_jax.services.http.random.uniform", lambda low, high: 0.02)  # short pauses
    chats.reply, failed = _script, set[str]()

    async def once(request: Any) -> web.StreamResponse:
        asked = json.dumps((await request.json())["messages"])
        if asked in failed:
            return await chats(request)
        failed.add(asked)
        way = ONCE[len(failed) % len(ONCE)]
        return await way(request) if way in (_closed, _cut) else way()

    agents = [AGENT, IRCoT(k=1), ReAct(k=1), SearchO1(k=1)]
    examples = [
        Example(id=f"q{i}", question=f"What is the capital of country {i}?", answers=(f"City {i}",)) for i in range(25)
    ]
    with serving(once) as server:
        chats.url = f"{server.url}/v1"
        runs = []
        for _ in range(2):
            policy = model(chats, retries=1, concurrency=8, cache=SqliteCache(tmp_path / "kept.sqlite", max_bytes=None))
            runs.append(
                [episode for agent in agents for episode in run(agent, examples, policy, knowledge(), sampling=GREEDY)]
            )
            policy.end()
    first, second = runs
    assert summarize(first)["em"] == summarize(second)["em"] == 1.0
    assert all(episode.failure is None for episode in first)
    usages = [[episode.usage for episode in episodes if episode.usage] for episodes in runs]
    assert sum(usage.retries for usage in usages[0]) == len(failed) == len(chats.bodies)  # each once
    assert sum(usage.kept for usage in usages[1]) == sum(usage.replies for usage in usages[1]) == len(failed)
    # stop strings: of tags and of lines, never of sentences; one that a reply without text may have ended at is not sent again
    sent = {tuple(body.get("stop", ())) for body in chats.bodies}
    assert {("</ret>", "</answer>"), ("\n",), ("\nObservation", "\nQuestion:"), (END_QUERY,)} <= sent
    assert not any(stop.strip() in (".", "?", "]") and stop.strip() for stops in sent for stop in stops)
    # a sentence is cut here, and what was written behind it costs, and is not counted: 6 of 15 words
    chain = first[25].turns[0]
    assert (chain.text, chain.tokens) == ("It is ruled by J. Lee. ", 6)


def _one() -> dict[str, Any]:
    return {"text": tiny.ScriptedKB("text")}


def test_a_reply_that_only_repeats_its_beginning_is_an_empty_turn(chats):
    """It ends IRCoT's chain, and the reader answers."""
    said_so = iter(["Shelley wrote it.", "Shelley wrote it.", "So the answer is: Mary."])
    chats.reply = lambda messages: next(said_so)
    episode = ask(chats, IRCoT(k=1), tools=_one())
    assert (episode.failure, episode.answer, [call.query for call in episode.calls]) == (
        None,
        "Mary",
        [EXAMPLE.question, "Shelley wrote it."],
    )
    assert [turn.text for turn in episode.turns] == ["Shelley wrote it.", "", "So the answer is: Mary."]


def test_a_model_that_thinks_before_a_line_is_asked_without_the_line_break(chats):
    """A server would stop in its thoughts."""
    chats.reply = lambda messages: "<think>\nhm.\n</think>\nSo the answer is: Mary.\nThat is it."
    episode = ask(chats, IRCoT(k=1, reader="none"), tools=_one())
    assert episode.answer == "Mary"
    assert [body.get("stop") for body in chats.bodies] == [["\n"], None]


KILLED = """
import sys
from absl import logging
import routerl_jax as rj
from routerl_jax.engine.sampling import GREEDY
from routerl_jax.services.cache import LayeredCache, SqliteCache
from tests.services.test_policy import AGENT, EXAMPLE, knowledge
import dataclasses
examples = [dataclasses.replace(EXAMPLE, id=f"q{i}", question=f"Question {i}?") for i in range(40)]
model = rj.ChatModel("m", base_url=sys.argv[1], concurrency=4, cache=LayeredCache([SqliteCache(sys.argv[2], max_bytes=None)]))
episodes = rj.run(AGENT, examples, model, knowledge(), sampling=GREEDY)
print(sum(episode.answer == "Accra" for episode in episodes), sum(episode.usage.kept for episode in episodes))
"""


def test_killed_and_started_again_it_asks_nothing_twice(chats, tmp_path):
    """By SIGKILL, while four requests are under way: these alone may have been answered to nobody."""
    asked: collections.Counter[str] = collections.Counter()
    process: Any = None

    async def counting(request: Any) -> web.StreamResponse:
        asked[json.dumps((await request.json())["messages"])] += 1
        number = asked.total()
        reply = await chats(request)
        if number == 33:
            os.kill(process.pid, signal.SIGKILL)
        return reply

    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    with serving(counting) as server:
        command = [sys.executable, "-c", KILLED, f"{server.url}/v1", str(tmp_path / "replies.sqlite")]
        process = subprocess.Popen(command, cwd=ROOT, env=env)
        assert process.wait(300) == -signal.SIGKILL
        before = asked.total()
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    answered, kept = map(int, done.stdout.split())
    assert answered == 40
    assert len(asked) == 80
    assert before - 4 <= kept <= before
    assert asked.total() - 80 == before - kept


# --- money, rates, samples ---


def test_a_budget_is_not_overdrawn(chats, tmp_path):
    """Seven tokens read and four or one written at a price; episodes end where the money does, and nothing is lost."""
    examples = [dataclasses.replace(EXAMPLE, id=f"q{i}", question=f"Question {i}?") for i in range(10)]
    cache = SqliteCache(tmp_path / "replies.sqlite", max_bytes=None)
    price = {"price_read": 1000.0, "price_written": 100000.0, "concurrency": 1, "cache": cache}
    agent = dataclasses.replace(AGENT, max_turn_tokens=20, answer_tokens=20)
    whole = 2 * 7 * 1e-3 + 5 * 0.1  # of a question
    policy = model(chats, budget=5.0, **price)
    episodes = run(agent, examples, policy, knowledge(), sampling=GREEDY)
    ended = [episode for episode in episodes if episode.failure]
    assert {episode.failure.kind for episode in ended} == {"budget"}
    assert "of the budget of 5, " in ended[0].failure.message
    assert "raise the budget and run again" in ended[0].failure.message
    spent = sum(episode.usage.cost for episode in episodes if episode.usage)
    assert spent == pytest.approx(policy.budget.spent)
    assert 5.0 - 2 * whole - 2.0 < spent <= 5.0  # what a request may cost is set aside: 20 tokens, 2 and the prompt
    count = len(chats.bodies)
    done = [episode for episode in episodes if not episode.failure]
    assert 1 <= len(done) < 10
    assert done[0].usage is not None
    assert done[0].usage.cost == pytest.approx(whole)
    richer = run(agent, examples, model(chats, budget=50.0, **price), knowledge(), sampling=GREEDY)
    assert all(episode.answer == "Accra" for episode in richer)
    assert len(chats.bodies) == 20
    assert count < 20
    assert sum(episode.usage.kept for episode in richer if episode.usage) == count
    row = summarize(richer)
    assert row["money_per_question"] == pytest.approx(whole)
    assert (row["prompt_tokens_per_question"], row["tokens_per_question"]) == (14, 5)


def test_a_server_that_counts_nothing(chats):
    """Is paid by estimate, or a budget would bound nothing: 3 letters a token, and 8 tokens a message."""

    async def silent(request: Any) -> web.StreamResponse:
        whole: Any = await chats(request)
        reply = json.loads(whole.text)
        del reply["usage"]
        return web.json_response(reply)

    chats.reply = lambda messages: "<answer>Accra</answer>"
    with serving(silent) as server:
        episode = ask(chats, base_url=f"{server.url}/v1", price_read=1.0, price_written=1.0)
    usage = episode.usage
    assert usage is not None
    assert usage.prompt_tokens == 8 + len(tiny.GRAMMAR.instructions()) // 3 + 8 + len(EXAMPLE.question) // 3
    assert usage.tokens == 1 + len("<answer>Accra") // 3
    assert usage.cost == pytest.approx((usage.prompt_tokens + usage.tokens) / 1e6)


def test_a_rate_of_tokens(chats, monkeypatch):
    """A minute's worth at once, then what the rate lets through: 600 a minute, and requests of over 300 each."""
    slept: list[float] = []
    monkeypatch.setattr("routerl_jax.services.limits.time.sleep", slept.append)
    agent = dataclasses.replace(AGENT, max_turn_tokens=300, answer_tokens=300)
    assert ask(chats, agent, token_rate=600.0).answer == "Accra"
    (wait,) = slept
    assert 20 < wait < 60  # 2 * 300 and two prompts of some 150 and 200, less 600, at 10 a second


def test_samples_are_drawn_apart_and_equal_again(chats):
    sampling = Sampling(temperature=0.7, top_p=0.9)
    cache = MemoryCache()
    for seed in (0, 0, 1):
        run(AGENT, [EXAMPLE], model(chats, cache=cache), knowledge(), samples=3, seed=seed, sampling=sampling)
    assert len(chats.bodies) == 12  # the second run asks nothing
    seeds = [body["seed"] for body in chats.bodies]
    assert len(set(seeds)) == 12
    assert {(body["temperature"], body["top_p"]) for body in chats.bodies} == {(0.7, 0.9)}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"budget": 1.0}, "budget=1 needs a price"),
        ({"form": "raw"}, "form='raw' must be 'turns' or 'continue'"),
        ({"min_pixels": 1000, "max_pixels": 10}, "min_pixels=1000 is above"),
        ({"token_rate": -1.0}, "token_rate"),
        ({"base_url": "127.0.0.1"}, "base_url='127.0.0.1' must begin with http"),
    ],
)
def test_impossible_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        rj.ChatModel("m", **settings)
    with pytest.raises(ValueError, match="`model` is not set"):
        rj.ChatModel("")


# --- what nobody can do with it ---


def test_nothing_is_learnt_from_it_and_nothing_forked(chats):
    episode = ask(chats)
    with pytest.raises(ValueError, match="example 'q' was written by a chat model behind an endpoint"):
        sequences_of([episode])
    with pytest.raises(ValueError, match=r"forks=1: .* an endpoint does not tell"):
        run(AGENT, [EXAMPLE], model(chats), knowledge(), forks=1)


def test_a_prompt_that_does_not_fit(chats):
    long = dataclasses.replace(EXAMPLE, question="why " * 400)
    assert ask(chats, example=long, max_length=300).truncated
    assert not chats.bodies


def test_records_keep_usage_and_failure(chats, tmp_path):
    chats.storm = [http_error(500)]
    for episode, told in ((ask(chats), "no reply  server"), (ask(chats), "2 replies, 14 tokens read, 5 written")):
        record = json.loads(json.dumps(episode_record(episode)))
        console = Console(record=True, width=200)
        console.print(render(record))
        assert told in console.export_text()
        again = episode_of(record, RowLocation(tmp_path / "x.jsonl", "line", 1))
        assert (again.usage, again.failure) == (episode.usage, episode.failure)
