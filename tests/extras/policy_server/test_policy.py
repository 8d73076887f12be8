"""A random policy behind the OpenAI protocol, asked with the `openai` package's own client."""

from __future__ import annotations

import asyncio
import math
import re
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import httpx2
import numpy as np
import openai
import pytest

from routerl_jax.core import tokenizer as tokenizer_module
from routerl_jax.core.types import Message
from routerl_jax.engine.engine import Engine
from routerl_jax.engine.sampling import Sampling
from routerl_jax.services.openai import OpenAIModel
from tests import tiny
from tests.engine import reference
from tests.extras.kb_server.servers import wait_until
from tests.extras.policy_server.served import TEMPLATE, Server, serving


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    engine = Engine(tiny.model(layers=1), rows=8, max_length=128, segment=8)
    engine.tokenizer = tiny.with_template(engine.tokenizer, TEMPLATE)
    with serving(engine) as server:
        yield server


def say(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def written(engine: Engine, text: str, seed: int, tokens: int, temperature: float = 1.0) -> str:
    """What the engine writes by itself, without a server."""
    prompt = engine.tokenizer.chat([Message(role="user", content=text)])
    stream = engine.open(prompt, f"seed {seed}", 0)
    engine.request(stream, max_tokens=tokens, sampling=Sampling(temperature=temperature))
    while not (finished := engine.step()):
        pass
    engine.close(stream)
    turn = finished[0][1]
    return engine.tokenizer.decode(turn.tokens[:-1] if turn.stop_reason == "eos" else turn.tokens)


@pytest.mark.slow
def test_64_clients_at_once_get_what_each_would_get_alone(server: Server) -> None:
    """Half of them in pieces; the rows are eight."""
    alone = [written(server.engine, f"question {i}", i, 20 + i % 7) for i in range(64)]

    counts: list[int] = []

    async def ask(client: openai.AsyncOpenAI, i: int) -> str:
        options: dict[str, Any] = {
            "model": "tiny",
            "messages": say(f"question {i}"),
            "seed": i,
            "max_tokens": 20 + i % 7,
        }
        if i % 2:
            reply = await client.chat.completions.create(**options)
            return reply.choices[0].message.content or ""
        stream = await client.chat.completions.create(**options, stream=True)
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
        counts.append(len(pieces))
        return "".join(pieces)

    async def ask_all() -> list[str]:
        async with server.async_client() as client:
            return await asyncio.gather(*(ask(client, i) for i in range(64)))

    assert asyncio.run(ask_all()) == alone
    assert len(set(alone)) > 60
    assert sum(counts) > 3 * 32
    assert server.admission.open == 0


def test_pieces_are_the_whole(server: Server) -> None:
    client = server.client()
    options: dict[str, Any] = {
        "model": "tiny",
        "messages": say("tell me"),
        "seed": 5,
        "max_tokens": 40,
        "n": 2,
        "logprobs": True,
        "top_logprobs": 3,
        "extra_body": {"return_token_ids": True},
    }
    whole = client.chat.completions.create(**options)
    text, ids, logprobs, ends = ["", ""], [[], []], [[], []], {}
    usage = None
    for chunk in client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        assert "usage" in chunk.model_fields_set  # null but in the last
        for choice in chunk.choices:
            text[choice.index] += choice.delta.content or ""
            ids[choice.index] += (choice.model_extra or {}).get("token_ids", [])
            logprobs[choice.index] += choice.logprobs.content if choice.logprobs and choice.logprobs.content else []
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
    assert [choice.message.content for choice in whole.choices] == text
    assert [choice.model_extra["token_ids"] for choice in whole.choices] == ids
    assert [choice.logprobs.content for choice in whole.choices] == logprobs
    assert {choice.index: choice.finish_reason for choice in whole.choices} == ends
    assert usage == whole.usage
    assert text[0] != text[1]
    prompt = server.engine.tokenizer.chat([Message(role="user", content="tell me")])
    assert whole.model_extra["prompt_token_ids"] == prompt
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), len(ids[0]) + len(ids[1]))


def test_logprobs_are_those_of_a_whole_forward_pass(server: Server) -> None:
    """Of the sampled tokens at temperature 1; of the likeliest ones, whose first is what a greedy policy takes."""
    reply = server.client().completions.create(
        model="tiny", prompt=[5, 6, 7], max_tokens=12, seed=1, logprobs=4, extra_body={"return_token_ids": True}
    )
    choice = reply.choices[0]
    ids = choice.model_extra["token_ids"]
    expected = reference.logprobs(tiny.model(layers=1), [5, 6, 7, *ids])[2:]
    np.testing.assert_allclose(choice.logprobs.token_logprobs, expected, atol=2e-5)
    greedy = server.client().chat.completions.create(
        model="tiny", messages=say("x"), max_tokens=12, temperature=0, logprobs=True, top_logprobs=20
    )
    for token in greedy.choices[0].logprobs.content:
        values = [one.logprob for one in token.top_logprobs]
        assert token.logprob == pytest.approx(values[0], abs=1e-5)
        assert values == sorted(values, reverse=True)
        assert sum(map(math.exp, values)) < 1
        assert token.bytes == token.top_logprobs[0].bytes


def test_stop_strings_end_the_text_before_them(server: Server) -> None:
    """Those that the engine looks for, and those that only the text shows: far more than its tables take."""
    client = server.client()
    options: dict[str, Any] = {"model": "tiny", "prompt": "abc", "seed": 3, "max_tokens": 60}
    whole = client.completions.create(**options).choices[0].text
    stops = [whole[at : at + 3] for at in range(4, len(whole) - 3, 1) if "\ufffd" not in whole[at : at + 3]]
    assert len(stops) > 20
    for stop in stops[:40]:
        reply = client.completions.create(**options, stop=[stop, "never there"], extra_body={"return_token_ids": True})
        choice = reply.choices[0]
        assert choice.text == whole[: whole.find(stop)]
        assert (choice.finish_reason, choice.model_extra["stop_reason"]) == ("stop", stop)
        assert stop in server.engine.tokenizer.decode(choice.model_extra["token_ids"])
        assert reply.usage.completion_tokens == len(choice.model_extra["token_ids"])
    pieces = client.completions.create(**options, stop=stops[5], stream=True)
    assert "".join(chunk.choices[0].text for chunk in pieces) == whole[: whole.find(stops[5])]
    kept = client.completions.create(**options, stop=stops[5], extra_body={"include_stop_str_in_output": True})
    assert kept.choices[0].text == whole[: whole.find(stops[5]) + 3]


def test_seeds_and_choices(server: Server) -> None:
    client = server.client()

    def texts(**options: Any) -> list[str]:
        reply = client.completions.create(model="tiny", prompt=["one", "two"], max_tokens=8, **options)
        assert [choice.index for choice in reply.choices] == list(range(len(reply.choices)))
        return [choice.text for choice in reply.choices]

    assert texts(seed=1, n=3) == texts(seed=1, n=3)
    assert len({*texts(seed=1, n=3)}) == 6
    assert texts(seed=1)[0] != texts(seed=2)[0]
    assert texts()[0] != texts()[0]
    assert texts(temperature=0) == texts(temperature=0, seed=9)
    narrow = texts(seed=1, extra_body={"top_k": 1})
    assert narrow == texts(temperature=0)


@pytest.mark.parametrize(
    ("changes", "status", "code", "param", "message"),
    [
        ({"model": "gpt-4o"}, 404, "model_not_found", "model", "there is no model 'gpt-4o' here; there is: tiny"),
        ({"messages": []}, 400, "invalid_value", "messages", "at least one object"),
        ({"messages": [{"role": "critic", "content": "x"}]}, 400, "invalid_value", r"messages\[0\].role", "one of"),
        (
            {"messages": [{"role": "user", "content": 7}]},
            400,
            "invalid_value",
            r"messages\[0\].content",
            "a list of parts",
        ),
        (
            {"messages": say("long " * 100)},
            400,
            "context_length_exceeded",
            "messages",
            "maximum context length is 128 tokens",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": "f"}]},
            400,
            "invalid_value",
            r"messages\[0\].tool_calls",
            "must be a list",
        ),
        (
            {"extra_body": {"chat_template_kwargs": {"chat_template": "{% for i in range(10 ** 9) %}{% endfor %}"}}},
            400,
            "invalid_value",
            "messages",
            "'chat_template' is no variable of a chat template",
        ),
        ({"temperature": -1}, 400, "invalid_value", "temperature", "from 0 to 100"),
        ({"top_p": 0}, 400, "invalid_value", "top_p", "above 0"),
        ({"n": 500}, 400, "invalid_value", "n", "from 1 to 128"),
        ({"max_tokens": 0}, 400, "invalid_value", "max_tokens", "from 1"),
        ({"stop": [""]}, 400, "invalid_value", "stop", "not empty"),
        ({"top_logprobs": 3}, 400, "invalid_value", "top_logprobs", "needs logprobs"),
        ({"logit_bias": {"5": 1}}, 400, "unsupported_parameter", "logit_bias", "not supported"),
        (
            {"response_format": {"type": "json_object"}},
            400,
            "unsupported_parameter",
            "response_format",
            "not supported",
        ),
        ({"extra_body": {"temprature": 1}}, 400, "unknown_parameter", "temprature", "no field 'temprature'"),
        (
            {"tools": [{"type": "function", "function": {"name": "f"}}]},
            400,
            "unsupported_parameter",
            "tools",
            "no tools",
        ),
    ],
)
def test_refusals_are_of_the_protocol(
    server: Server, changes: dict[str, Any], status: int, code: str, param: str, message: str
) -> None:
    options = {"model": "tiny", "messages": say("x"), "max_tokens": 2, **changes}
    for stream in (False, True):
        with pytest.raises(openai.APIStatusError) as caught:
            server.client().chat.completions.create(**options, stream=stream)
        assert caught.value.status_code == status
        assert caught.value.code == code
        assert re.fullmatch(param, caught.value.param)
        assert message in str(caught.value)
    assert server.admission.open == 0


def test_a_text_that_is_too_long_is_its_prompts_fault(server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length is 128 tokens") as caught:
        server.client().completions.create(model="tiny", prompt="long " * 100)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")


def test_a_prompt_of_megabytes_is_refused_before_it_is_encoded(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[int] = []
    fast = tokenizer_module._fast
    monkeypatch.setattr(
        tokenizer_module, "_fast", lambda backend, text: encoded.append(len(text)) or fast(backend, text)
    )
    long = "long " * 200_000  # the server takes a megabyte
    with pytest.raises(openai.BadRequestError, match=r"context length is 128 tokens, .* has 1000000 letters"):
        server.client().completions.create(model="tiny", prompt=long)
    with pytest.raises(openai.BadRequestError, match=r"context length is 128 tokens, .* has more"):
        server.client().chat.completions.create(model="tiny", messages=say(long))
    with pytest.raises(openai.BadRequestError, match="10000 choices in one request"):
        server.client().completions.create(model="tiny", prompt=["x"] * 10_000)
    assert sum(encoded) < 20_000


@pytest.mark.parametrize(
    "arguments", ['{"a": ' + "[" * 700 + "]" * 700 + "}", '{"a": ' + "9" * 5000 + "}", "[" * 100_000]
)
def test_arguments_of_an_earlier_call_that_nobody_can_read(server: Server, arguments: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages: list[Any] = [*say("x"), {"role": "assistant", "content": "", "tool_calls": [call]}, *say("y")]
    with pytest.raises(openai.BadRequestError, match="arguments is no JSON"):
        server.client().chat.completions.create(model="tiny", messages=messages)


def test_options_of_streams_are_read_as_all_others(server: Server) -> None:
    def ask(**options: Any) -> list[Any]:
        extra = {"extra_body": {"stream_options": options}}
        return list(server.client().completions.create(model="tiny", prompt="x", max_tokens=2, stream=True, **extra))

    assert ask(include_obfuscation=False)
    with pytest.raises(openai.BadRequestError, match="no field 'continuous_usage_stats'"):
        ask(include_usage=True, continuous_usage_stats=True)


def test_offsets_of_pieces_are_those_of_the_whole(server: Server) -> None:
    options: dict[str, Any] = {"model": "tiny", "prompt": ["abc", "b"], "seed": 2, "max_tokens": 30, "logprobs": 1}
    whole = [choice.logprobs.text_offset for choice in server.client().completions.create(**options).choices]
    pieces: list[list[int]] = [[], []]
    for chunk in server.client().completions.create(**options, stream=True):
        for choice in chunk.choices:
            pieces[choice.index] += choice.logprobs.text_offset if choice.logprobs else []
    assert pieces == whole
    assert whole[0][-1] > whole[0][0] == 0


def test_pictures_are_refused_by_a_policy_that_sees_none(server: Server) -> None:
    for url, message in (("data:image/png;base64,AAAA", "sees no pictures"), ("http://a/b.png", "data URI")):
        part = {"type": "image_url", "image_url": {"url": url}}
        with pytest.raises(openai.BadRequestError, match=message):
            server.client().chat.completions.create(model="tiny", messages=[{"role": "user", "content": [part]}])


def test_models_paths_and_json(server: Server) -> None:
    client = server.client()
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").model_extra["max_model_len"] == 128
    with pytest.raises(openai.NotFoundError, match="no model 'other'"):
        client.models.retrieve("other")
    reply = httpx2.post(f"{server.url}/v1/chat/completions", content=b'{"model": ', timeout=60)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "invalid_json")
    assert httpx2.get(f"{server.url}/v1/chat/completions", timeout=60).status_code == 405
    assert httpx2.get(f"{server.url}/nowhere", timeout=60).json()["error"]["code"] == "unknown_path"
    assert httpx2.get(f"{server.url}/healthz", timeout=60).status_code == 200


def test_clients_that_have_gone_give_their_rows_back(server: Server) -> None:
    """Eight that would write on hold all rows; when they have gone, nothing of theirs is computed any more."""
    engine, client, streams = server.engine, server.client(), []
    step, held = engine.step, []
    working = threading.Event()

    def watched() -> Any:
        if not working.is_set():
            time.sleep(0.01)
            return []
        working.clear()
        finished = step()
        held.append(sum(stream.row is not None for stream in engine._streams))
        return finished

    engine.step = watched  # type: ignore[method-assign]
    try:
        for number in range(8):
            options: dict[str, Any] = {"model": "tiny", "messages": say("x"), "max_tokens": 90, "seed": number}
            streams.append(client.chat.completions.create(**options, stream=True))
            assert next(iter(streams[-1])).choices[0].delta.content == ""
        working.set()
        wait_until(lambda: held)
        assert (held, server.admission.open) == ([8], 8)
        decoded = engine.stats.decoded_tokens
        for stream in streams:
            stream.close()
        wait_until(lambda: server.admission.open == 0 and not engine._streams)
        assert engine.stats.decoded_tokens == decoded
    finally:
        del engine.step
    assert client.completions.create(model="tiny", prompt=[3], max_tokens=4, seed=0).usage.completion_tokens <= 4


def test_a_full_queue_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, asked = Engine(tiny.model(layers=1), rows=2, max_length=128, segment=4), threading.Event()
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda: (asked.wait(60), step())[1])  # so that the queue stays full till then
    with serving(engine, most=3) as server:
        with pytest.raises(openai.BadRequestError, match="writes 3 at most"):
            server.client().completions.create(model="tiny", prompt="x", n=4)
        with futures.ThreadPoolExecutor(1) as pool:  # the call returns with the first piece, after `asked`
            held = pool.submit(
                server.client().completions.create, model="tiny", prompt="x", n=3, max_tokens=100, stream=True
            )
            wait_until(lambda: server.admission.open == 3)
            with pytest.raises(openai.InternalServerError) as caught:
                server.client().completions.create(model="tiny", prompt="x")
            asked.set()
            held.result().close()
        assert (caught.value.status_code, caught.value.code) == (503, "overloaded")
        assert caught.value.response.headers["Retry-After"] == "1"
        assert server.client(max_retries=9).completions.create(model="tiny", prompt="x").usage.total_tokens > 1


def test_an_engine_that_fails_answers_and_goes_on(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    client, options = server.client(), {"model": "tiny", "prompt": "x", "max_tokens": 4}
    monkeypatch.setattr(server.engine, "step", lambda: 1 / 0)
    with pytest.raises(openai.InternalServerError, match="ZeroDivisionError"):
        client.completions.create(**options)
    with pytest.raises(openai.APIError, match="ZeroDivisionError"):
        list(client.chat.completions.create(model="tiny", messages=say("x"), stream=True))
    monkeypatch.undo()
    assert client.completions.create(**options).choices[0].finish_reason in ("stop", "length")


def test_a_token_is_asked_for() -> None:
    engine = Engine(tiny.model(layers=1), rows=2, max_length=32, segment=4)
    with serving(engine, token="s3cret") as server:
        with pytest.raises(openai.AuthenticationError) as caught:
            server.client().models.list()
        assert caught.value.code == "invalid_api_key"
        assert [model.id for model in server.client(api_key="s3cret").models.list()] == ["tiny"]


def test_messages_cannot_begin_or_end_turns(server: Server) -> None:
    """Special tokens in a message are text, but for those of the policy's protocol; a text completion is as it is written."""
    tag = min(server.engine.tokenizer.marks)
    client = server.client()

    def ids(model: Server, text: str) -> list[int]:
        extra = {"return_token_ids": True}
        reply = model.client().chat.completions.create(model="tiny", messages=say(text), max_tokens=1, extra_body=extra)
        return reply.model_extra["prompt_token_ids"]

    (one,) = server.engine.tokenizer.encode(tag)
    assert one not in ids(server, f"a {tag} b")
    reply = client.completions.create(model="tiny", prompt=tag, max_tokens=1, extra_body={"return_token_ids": True})
    assert reply.choices[0].model_extra["prompt_token_ids"] == [one]
    with serving(server.engine, tags=(tag,)) as other:
        assert one in ids(other, f"a {tag} b")


def test_our_own_client_of_chat_models(server: Server) -> None:
    """`services.openai` as a judge or a tree's summariser uses it: answers in order, one that is too long fails alone."""
    model = OpenAIModel("tiny", f"{server.url}/v1", concurrency=16)
    texts = [*(f"question {i}" for i in range(16)), "long " * 100]
    answers = model.complete([[Message(role="user", content=text)] for text in texts], max_tokens=10)
    assert [one.text for one in answers[:-1]] == [written(server.engine, text, 0, 10, 0.0) for text in texts[:-1]]
    assert (answers[-1].fault, answers[-1].text) == ("context_length", "")
    assert answers[0].prompt_tokens == len(server.engine.tokenizer.chat([Message(role="user", content=texts[0])]))
    model.close()
