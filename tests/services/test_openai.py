"""The client of OpenAI-compatible endpoints against a server of that protocol: order, failures, storms, dialects, keys."""

from __future__ import annotations

import base64
import json
import threading
import time

import numpy as np
import PIL.Image
import pytest

from routerl_jax.core.types import Message
from routerl_jax.models.images import decode_image
from routerl_jax.services import faults, http
from routerl_jax.services.base import without_thinking
from routerl_jax.services.config import ChatModelConfig
from routerl_jax.services.load import chat_model
from routerl_jax.services.openai import OpenAIModel
from tests.clock import Clock
from tests.web_servers import Chats, http_error, serving

SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}


def say(*texts: str) -> list[list[Message]]:
    return [[Message(role="user", content=text)] for text in texts]


def echo(messages) -> str:
    return messages[-1]["content"].upper()


@pytest.fixture
def chats():
    handler = Chats(echo)
    with serving(handler) as server:
        handler.url = f"{server.url}/v1"
        handler.server = server
        yield handler


def test_answers_come_in_order_and_at_once(chats):
    chats.delay = 0.2
    model = OpenAIModel("m", chats.url, concurrency=16)
    answers = model.complete(say(*(f"text {i}" for i in range(48))), max_tokens=9, temperature=0.5)
    assert [answer.text for answer in answers] == [f"TEXT {i}" for i in range(48)]
    assert 4 <= chats.server.most <= 16
    assert answers[0].error is None
    assert (answers[0].prompt_tokens, answers[0].tokens) == (7, 2)
    assert {key: chats.bodies[0][key] for key in ("model", "max_tokens", "temperature")} == {
        "model": "m",
        "max_tokens": 9,
        "temperature": 0.5,
    }


@pytest.mark.parametrize("changes", [{"concurrency": 0}, {"retries": -1}, {"timeout": 0.0}])
def test_impossible_settings(chats, changes):
    with pytest.raises(ValueError, match=f"{next(iter(changes))}="):
        OpenAIModel("m", chats.url, **changes)


def test_half_a_letter_is_no_text(chats):
    chats.reply = lambda messages: "cut \ud83d"
    assert OpenAIModel("m", chats.url).complete(say("a"))[0].text == "cut ?"


def test_a_failure_harms_no_other(chats):
    chats.refuse = lambda body: "context length exceeded" if "long" in body["messages"][0]["content"] else ""
    good, bad, other = OpenAIModel("m", chats.url).complete(say("a", "long", "b"))
    assert (good.text, other.text) == ("A", "B")
    assert bad.text == ""
    assert "context length exceeded" in bad.error
    assert bad.finish == "error"


def test_storms_are_outlasted(chats):
    chats.storm = [http_error(429, "0.05"), http_error(503), http_error(500), http_error(429)]
    model = OpenAIModel("m", chats.url, backoff=0.01)
    assert [answer.text for answer in model.complete(say("a", "b"))] == ["A", "B"]
    assert chats.server.seen["/v1/chat/completions"] == 6


def test_retry_after_is_kept_by_all_requests(chats, monkeypatch):
    """One is told to wait 40 s, and one that comes meanwhile asks nothing before the clock is turned."""
    clock = Clock(monkeypatch, http)
    chats.storm = [http_error(429, "40")]
    model = OpenAIModel("m", chats.url, backoff=0.01)
    assert model.complete(say("a"))[0].text == "A"
    assert clock.slept == [40]
    clock.slept.clear()
    clock.sleep = clock.slept.append  # who sleeps looks at the clock again and again
    chats.storm = [http_error(429, "40")]
    requests = [threading.Thread(target=model.complete, args=(say(text),)) for text in ("first", "second")]
    before = chats.server.seen["/v1/chat/completions"]
    for request in requests:
        rounds = len(clock.slept) + 20
        request.start()
        while len(clock.slept) < rounds:
            time.sleep(0.001)
        assert chats.server.seen["/v1/chat/completions"] == before + 1
    clock.now += 50
    for request in requests:
        request.join()
    assert chats.server.seen["/v1/chat/completions"] == before + 3


def test_a_storm_that_does_not_end_is_an_error(chats):
    chats.storm = [http_error(502) for _ in range(10)]
    answer = OpenAIModel("m", chats.url, retries=2, backoff=0.01).complete(say("a"))[0]
    assert "HTTP 502" in answer.error
    assert "tried 3 times" in answer.error
    assert len(chats.storm) == 7


def test_a_server_that_hangs_or_is_not_there(chats):
    chats.delay = 30
    answer = OpenAIModel("m", chats.url, timeout=0.2, retries=1, backoff=0.01).complete(say("a"))[0]
    assert "no reply within 0.2 s (tried 2 times)" in answer.error
    answer = OpenAIModel("m", "http://127.0.0.1:9/v1", retries=1, backoff=0.01).complete(say("a"))[0]
    assert "127.0.0.1:9" in answer.error


def test_keys_come_from_the_environment_and_are_never_shown(chats, monkeypatch):
    monkeypatch.setenv("MY_KEY", "sk-right")
    chats.key = "sk-right"
    assert OpenAIModel("m", chats.url, api_key_env="MY_KEY").complete(say("a"))[0].text == "A"
    monkeypatch.setenv("MY_KEY", "sk-wrong-secret")
    answer = OpenAIModel("m", chats.url, api_key_env="MY_KEY").complete(say("a"))[0]
    assert "401" in answer.error
    assert "***" in answer.error
    assert "secret" not in answer.error
    monkeypatch.delenv("MY_KEY")
    with pytest.raises(ValueError, match="MY_KEY is not set"):
        OpenAIModel("m", chats.url, api_key_env="MY_KEY")


def test_schemas_are_asked_for_as_the_server_likes_it(chats):
    model = OpenAIModel("m", chats.url)
    model.complete(say("a"), schema=SCHEMA)
    assert chats.bodies[-1]["response_format"]["json_schema"]["schema"] == SCHEMA
    chats.refuse = lambda body: "unknown type" if body.get("response_format", {}).get("type") == "json_schema" else ""
    assert (
        json.dumps(SCHEMA).upper() in model.complete(say("a"), schema=SCHEMA)[0].text
    )  # the schema is in the prompt now
    assert chats.bodies[-1]["response_format"] == {"type": "json_object"}
    chats.refuse = lambda body: "no such field: response_format" if "response_format" in body else ""
    assert model.complete(say("a"), schema=SCHEMA)[0].error is None
    count = len(chats.bodies)
    model.complete(say("b"), schema=SCHEMA)
    assert len(chats.bodies) == count + 1  # learnt
    chats.refuse = lambda body: "too long"
    assert "too long" in model.complete(say("b"), schema=SCHEMA)[0].error


def test_other_names_of_fields(chats):
    def refuse(body):
        if "max_tokens" in body:
            return "Unsupported parameter: use 'max_completion_tokens' instead."
        return "Unsupported value: 'temperature' does not support 0" if "temperature" in body else ""

    chats.refuse = refuse
    model = OpenAIModel("m", chats.url, extra={"seed": 5})
    assert model.complete(say("a"))[0].text == "A"
    assert chats.bodies[-1]["max_completion_tokens"] == 1024
    assert chats.bodies[-1]["seed"] == 5
    model.complete(say("b"))
    assert len(chats.bodies) == 4


@pytest.mark.parametrize(
    "body", ["", "[]", "{}", '{"choices": []}', '{"choices": [{"message": {"content": null}}]}', "<p>"]
)
def test_replies_that_are_not_of_the_protocol(body):
    from aiohttp import web

    async def handler(request):
        return web.Response(text=body)

    with serving(handler) as server:
        answer = OpenAIModel("m", server.url, backoff=0.01).complete(say("a"))[0]
    assert answer.error
    assert answer.text == ""


def test_redirects_are_not_followed_with_the_key(chats, monkeypatch):
    from aiohttp import web

    async def handler(request):
        raise web.HTTPTemporaryRedirect(f"{chats.url}/chat/completions?secret=1")

    with serving(handler) as server:
        answer = OpenAIModel("m", server.url).complete(say("a"))[0]
    assert "give that URL instead" in answer.error
    assert not chats.bodies


def test_pictures_and_samples(chats, tmp_path):
    """A picture is a part before the text, as the file it is, or as PNG; a seed counts on; failures are apart."""
    PIL.Image.new("RGB", (4, 4), (9, 9, 9)).save(tmp_path / "a.jpg")
    chats.reply = lambda messages: "seen"
    pictures = (tmp_path / "a.jpg", np.zeros((4, 4, 3), np.uint8))
    model = OpenAIModel("m", chats.url, extra={"seed": 5}, backoff=0.01)
    asked = [Message(role="system", content="s"), Message(role="user", content="what?", images=pictures)]
    absent = [Message(role="user", content="what?", images=(tmp_path / "b.jpg",))]
    seen, failed = model.complete([asked, absent], sample=2)
    assert (seen.text, failed.text) == ("seen", "")
    assert "b.jpg: can't be read" in failed.error
    (body,) = chats.bodies
    assert body["seed"] == 7
    assert body["messages"][0]["content"] == "s"
    *shown, text = body["messages"][1]["content"]
    assert text == {"type": "text", "text": "what?"}
    uris = [part["image_url"]["url"] for part in shown]
    assert [uri.partition(",")[0] for uri in uris] == ["data:image/jpeg;base64", "data:image/png;base64"]
    assert base64.b64decode(uris[0].partition(",")[2]) == (tmp_path / "a.jpg").read_bytes()
    assert decode_image(uris[1]).getpixel((0, 0)) == (0, 0, 0)


def test_factory(chats, monkeypatch):
    model = chat_model(ChatModelConfig(model="m", base_url=chats.url, rate=1000))
    assert model.complete(say("a"))[0].text == "A"
    with pytest.raises(ValueError, match="`model` is not set"):
        chat_model(ChatModelConfig())
    with pytest.raises(ValueError, match="unknown kind of chat model 'opnai'; did you mean 'openai'"):
        chat_model(ChatModelConfig(kind="opnai", model="m"))
    with pytest.raises(ValueError, match="must begin with http"):
        OpenAIModel("m", "localhost:8000")


def test_thinking_is_taken_off():
    assert without_thinking("<think>hm\nhm</think>\n\nThe answer.") == "The answer."
    assert without_thinking("hm, begun in the prompt</think> The answer.") == "The answer."
    assert without_thinking("<think>never ended") == ""
    assert without_thinking("The answer.") == "The answer."
    assert without_thinking("<think>a</think>b<think>c</think> <think>d") == "b"
    started = time.process_time()
    assert without_thinking("<think>" * 20_000) == ""  # a model in a loop; took minutes
    assert time.process_time() - started < 5


def says(*replies: object):
    """A handler that gives these as JSON under status 200, the last one for ever, and counts the requests."""
    from aiohttp import web

    queue = list(replies)

    async def handler(request):
        handler.asked += 1
        return web.json_response(queue.pop(0) if len(queue) > 1 else queue[0])

    handler.asked = 0
    return handler


RIGHT = {"choices": [{"message": {"content": "right"}, "finish_reason": "stop"}]}


@pytest.mark.parametrize(
    "reply",
    [
        {"error": {"message": "busy", "code": "529"}},
        {"error": {"message": "slow down", "type": "rate_limit_exceeded", "code": None}},
        {"error": "The engine is overloaded", "choices": None},
        {"object": "error", "message": "CUDA", "code": 500},
        {"code": "Throttling.RateQuota", "message": "later", "request_id": "1"},
        {"errors": [{"message": "gateway", "code": 502}], "success": False},
        [{"error": {"code": 429, "status": "RESOURCE_EXHAUSTED", "message": "quota"}}],
        {"error": True, "message": "try later"},
        {"status": "error", "message": "try later"},
        {"choices": []},
        {"choices": [{"error": {"code": 502, "message": "no provider"}, "finish_reason": "error"}]},
        {"choices": [{"message": {"content": "ri"}, "finish_reason": "error"}]},
        {"choices": [{"message": {"content": "ri"}, "finish_reason": "abort"}]},
    ],
)
def test_a_passing_error_under_status_200_is_tried_again(reply):
    handler = says(reply, RIGHT)
    with serving(handler) as server:
        answer = OpenAIModel("m", server.url, backoff=0.01).complete(say("q"))[0]
    assert (answer.text, answer.error, handler.asked) == ("right", None, 2)


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        ({"message": "who are you", "code": 401}, faults.NOT_ALLOWED),
        ({"message": "No auth", "type": "authentication_error"}, faults.NOT_ALLOWED),
        ({"message": "bad field", "type": "invalid_request_error"}, faults.REQUEST),
        ({"message": "no money", "code": "insufficient_quota", "status": 429}, faults.REQUEST),
        ({"message": "maximum context length is 8", "code": 400}, faults.CONTEXT_LENGTH),
    ],
)
def test_a_final_error_under_status_200_is_not_tried_again(error, fault):
    handler = says({"error": error}, RIGHT)
    with serving(handler) as server:
        answer = OpenAIModel("m", server.url, backoff=0.01).complete(say("q"))[0]
    assert (answer.text, answer.fault, handler.asked) == ("", fault, 1)
    assert error["message"] in answer.error


def test_spent_money_is_final_under_its_own_status_too(chats):
    from aiohttp import web

    body = {"error": {"message": "You exceeded your quota", "type": "insufficient_quota"}}
    chats.storm = [web.json_response(body, status=429)]
    assert "HTTP 429" in OpenAIModel("m", chats.url, backoff=0.01).complete(say("a"))[0].error
    assert chats.server.seen["/v1/chat/completions"] == 1


def test_a_null_beside_a_whole_answer_is_no_error_and_no_text():
    parts = [{"type": "text", "text": None}, {"type": "text", "text": "right"}]
    reply = {"error": None, "choices": [{"message": {"content": parts}, "error": None, "finish_reason": None}]}
    with serving(says(reply)) as server:
        assert OpenAIModel("m", server.url).complete(say("q"))[0].text == "right"


def test_a_redirect_within_the_server_is_followed_and_a_loop_ends(chats):
    from aiohttp import web

    async def handler(request):
        if request.path == "/v1/chat/completions":
            raise web.HTTPPermanentRedirect("/v1/chat/completions/")
        if request.path == "/v1/chat/completions/":
            assert (await request.json())["model"] == "m"
            return web.json_response(RIGHT)
        raise web.HTTPTemporaryRedirect("/loop/chat/completions")

    with serving(handler) as server:
        for url in ("/v1", "/v1/chat/completions/"):
            assert OpenAIModel("m", server.url + url).complete(say("q"))[0].text == "right"
        assert server.seen["/v1/chat/completions"] == 1
        assert "give that URL" in OpenAIModel("m", f"{server.url}/loop").complete(say("q"))[0].error
        assert server.seen["/loop/chat/completions"] < 10
