"""evaluate and ask with a chat model behind an endpoint in the policy's place."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp import web

from routerl_jax.data.atlas import flags
from routerl_jax.services.policy import ChatModel
from routerl_jax.training import config as schema
from tests.programs import launch_here, refusal, write_config
from tests.training.small_run import make_config
from tests.web_servers import Chats, http_error, refused_by_openai, serving

SEARCH = "<think>hm</think><sub-question>{}</sub-question><ret>text retriever</ret>"
ANSWER = "<think>so</think><answer>Accra</answer>"


def reply(messages: list[dict[str, Any]]) -> str:
    """Searches once, then answers; at once where an answer is begun."""
    if "<answer>" in str(messages[-1]["content"])[-40:]:
        return "<answer>Accra</answer>"
    return ANSWER if any(message["role"] == "assistant" for message in messages) else SEARCH.format("Ghana")


@pytest.fixture
def chats(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("ROUTERL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CHAT_KEY", "key-123")
    handler: Any = Chats(reply, key="key-123")
    handler.refuse = refused_by_openai
    with serving(handler) as server:
        handler.url = f"{server.url}/v1"
        yield handler


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("home")


def written(home: pathlib.Path, tmp_path: pathlib.Path, **changes: Any) -> pathlib.Path:
    agent = schema.AgentConfig(
        grammar="r1_router", max_searches=2, k=1, max_turn_tokens=48, answer_tokens=16, instruct=True
    )
    return write_config(make_config(home, agent=agent, **changes), tmp_path / "config.py")


def settings(chats: Any, **more: Any) -> list[str]:
    fields = {"model": "m", "base_url": chats.url, "api_key_env": "CHAT_KEY", "retries": 0, **more}
    return [f"--config.chat_model.{key}={value}" for key, value in fields.items()]


def test_evaluate(chats: Any, home: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Every agent with this policy; again, it asks nothing; with another model it is another evaluation."""
    config, output = written(home, tmp_path), tmp_path / "results"
    given = ["evaluate", f"--config={config}", f"--output={output}", "--agents=trained,no_search,vanilla_rag_text"]
    price = {"price_read": 1000.0, "price_written": 1000.0, "budget": 9.0}
    assert not launch_here(*given, *settings(chats, **price))
    results = json.loads((output / "results.json").read_text())
    assert list(results["agents"]) == ["policy", "no_search", "vanilla_rag_text"]
    policy = results["agents"]["policy"]
    assert (policy["n"], policy["searches_per_question"], policy["policy_failed_rate"]) == (4, 1, 0)
    assert policy["answered_rate"] == 1
    assert results["agents"]["no_search"]["answered_rate"] == 1
    # 7 tokens are read at every turn, four words written in the first and one in the second
    assert policy["money_per_question"] == pytest.approx(2 * 7e-3 + 3e-3)
    assert results["chat model"] == {
        "model": "m",
        "form": "turns",
        "max_length": 32768,
        "min_pixels": 56 * 56,
        "max_pixels": 28 * 28 * 1280,
    }
    assert "policy digest" not in results
    report = (output / "report.md").read_text()
    assert "| no reply % | money |" in report
    records = [json.loads(line) for line in (output / "trained.jsonl").read_text().splitlines()]
    assert [record["usage"]["replies"] for record in records] == [2, 2, 2, 2]
    asked = len(chats.bodies)
    assert asked == 4 * (2 + 1 + 1)
    (output / "results.json").unlink()
    assert not launch_here(*given, *settings(chats, **price))
    assert json.loads((output / "results.json").read_text())["agents"] == results["agents"]
    assert len(chats.bodies) == asked
    other = refusal(*given, *settings(chats, model="n"))
    assert "has results of chat model" in other
    assert "give another --output" in other


def test_the_model_is_closed_after_an_error(
    chats: Any, home: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file stands where the records should go; the threads and connections of the model end all the same."""
    ended: list[ChatModel] = []
    end = ChatModel.end
    monkeypatch.setattr(ChatModel, "end", lambda model: (end(model), ended.append(model)))
    config, output = written(home, tmp_path), tmp_path / "results"
    (output / "trained.jsonl").mkdir(parents=True)
    given = ["evaluate", f"--config={config}", f"--output={output}", "--agents=trained"]
    assert "trained.jsonl" in refusal(*given, *settings(chats))
    assert chats.bodies
    assert [model._workers for model in ended] == [[]]


def test_failures_are_in_the_report(chats: Any, home: pathlib.Path, tmp_path: pathlib.Path) -> None:
    chats.storm = [http_error(500), web.Response(text='{"choices', content_type="application/json")]
    config, output = written(home, tmp_path), tmp_path / "results"
    given = ["evaluate", f"--config={config}", f"--output={output}", "--agents=trained"]
    assert "policy on " + str(home / "questions.jsonl") + " (replies for 2 of 4)" in refusal(*given, *settings(chats))
    policy = json.loads((output / "results.json").read_text())["agents"]["policy"]
    assert (policy["policy_failed_rate"], policy["n"], policy["n_answered"]) == (0.5, 4, 2)
    assert (policy["policy_failed/server"], policy["policy_failed/half_reply"]) == (0.25, 0.25)
    report = (output / "report.md").read_text()
    assert "| 50.0 |" in report
    assert ", 2 of 4 |" in report
    assert '"n of N": n of N questions have a whole reply of the policy.' in report


def test_ask(chats: Any, home: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = written(home, tmp_path)
    picture = tmp_path / "flag.png"
    picture.write_bytes(flags.flag("Mali"))
    given = ["ask", f"--config={config}", *settings(chats), f"--image={picture}", "What is its capital?"]
    assert not launch_here(*given, "--json")
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record["prediction"] == "Accra"
    assert record["usage"]["replies"] == 2
    assert [part["type"] for part in chats.bodies[0]["messages"][1]["content"]] == ["image_url", "text"]
    blind = refusal(*given, "--config.chat_model.pictures=False")
    assert "the chat model m, as config.chat_model.pictures says, sees no pictures" in blind


def test_what_does_not_go_together(chats: Any, home: pathlib.Path, tmp_path: pathlib.Path) -> None:
    config = written(home, tmp_path)
    given = [f"--config={config}", *settings(chats)]
    assert "can't be trained" in refusal("train", *given, f"--workdir={tmp_path / 'run'}")
    assert "config.chat_model needs --config" in refusal("evaluate", *given)
    both = refusal("evaluate", *given, "--model=atlas-warm-start", f"--output={tmp_path / 'o'}")
    assert "give either --workdir or --model, or --config with a config.chat_model.model" in both
    untold = refusal("evaluate", *given, "--config.agent.instruct=False", f"--output={tmp_path / 'o'}")
    assert "set config.agent.instruct=True" in untold
    unset = refusal("evaluate", *given, "--config.chat_model.api_key_env=NO_SUCH_KEY", f"--output={tmp_path / 'o'}")
    assert "the environment variable NO_SUCH_KEY is not set" in unset
    budget = refusal("evaluate", *given, "--config.chat_model.budget=2.0", f"--output={tmp_path / 'o'}")
    assert "config.chat_model: budget=2 needs a price" in budget
    assert "config.chat_model: `model` is not set" in refusal("ask", f"--config={config}", "Why?")
    assert "give either --workdir or --config" in refusal("ask", "Why?")
