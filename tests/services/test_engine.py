"""Our engine as a chat model: the same answers as the engine gives by itself, whoever else asks."""

from __future__ import annotations

import threading
import types
from typing import Any

import pytest

from routerl_jax.core.types import Message
from routerl_jax.engine.engine import Engine
from routerl_jax.engine.sampling import Sampling
from routerl_jax.services.engine import EngineModel
from tests import seeing, tiny


@pytest.fixture(scope="module")
def engine():
    made = Engine(tiny.model(layers=1), rows=4, max_length=96)
    turns = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    made.tokenizer = tiny.with_template(made.tokenizer, turns + "{% if add_generation_prompt %}assistant:{% endif %}")
    return made


def say(*texts):
    return [[Message(role="user", content=text)] for text in texts]


def test_answers_are_those_of_the_engine(engine):
    texts = [f"question {i}" for i in range(6)]
    expected = engine.generate([engine.tokenizer.chat(c) for c in say(*texts)], max_tokens=12)
    model = EngineModel(engine, "tiny")
    answers = model.complete(say(*texts), max_tokens=12)
    for answer, turn in zip(answers, expected):
        tokens = turn.tokens[:-1] if turn.stop_reason == "eos" else turn.tokens
        assert answer.text == engine.tokenizer.decode(tokens).strip()
        assert answer.tokens == len(turn.tokens)
        assert answer.finish == ("length" if turn.stop_reason == "length" else "stop")
    model.close()


def test_threads_share_batches_and_company_changes_nothing(engine):
    model = EngineModel(engine)
    alone = [model.complete(say(f"q{i}"), max_tokens=10, temperature=1.0)[0].text for i in range(8)]
    together: dict[int, str] = {}

    def ask(i):
        together[i] = model.complete(say(f"q{i}"), max_tokens=10, temperature=1.0)[0].text

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [together[i] for i in range(8)] == alone
    model.close()


def test_samples_differ_and_repeat(engine):
    model = EngineModel(engine)
    texts = [model.complete(say("q"), max_tokens=10, temperature=1.0, sample=i)[0].text for i in (0, 1, 2, 1)]
    assert len(set(texts)) == 3
    assert texts[1] == texts[3]
    model.close()


def test_a_model_that_sees_is_shown_pictures(engine):
    """The answer is the engine's own to the marked prompt, and a mark in a message is text; a model that sees nothing says so,
    and answers others."""
    sees = Engine(seeing.model(), rows=2, max_length=128)
    sees.tokenizer = tiny.with_template(sees.tokenizer, engine.tokenizer.hf.chat_template)
    pictures = (seeing.picture(0), seeing.picture(1))
    asked = Message(role="user", content="what is on it?", images=pictures)
    prompt = sees.tokenizer.chat([Message(role="user", content=seeing.MARKER * 2 + asked.content)])
    (answer,) = (model := EngineModel(sees)).complete([[asked]], max_tokens=8)
    stream = sees.open(prompt, images=pictures)
    sees.request(stream, max_tokens=8, sampling=Sampling(temperature=0.0))
    ((_, turn),) = _until_done(sees)
    assert answer.error is None
    assert answer.tokens == len(turn.tokens)
    ids = turn.tokens[:-1] if turn.stop_reason == "eos" else turn.tokens
    assert answer.text == sees.tokenizer.decode(ids).strip()
    marked = Message(role="user", content=f"here {seeing.MARKER} was one")
    told = [Message(role="user", content="here < |vision_start|>< |image_pad|>< |vision_end|> was one"), asked]
    both = model.complete([[marked, asked], told, [asked, marked]], max_tokens=8)
    assert [answer.error for answer in both] == [None] * 3
    assert both[0] == both[1]
    model.close()
    blind, other = (model := EngineModel(engine)).complete([[asked], *say("q")], max_tokens=4)
    assert "sees no images" in blind.error
    assert other.error is None
    model.close()


def _until_done(engine):
    while not (finished := engine.step()):
        pass
    return finished


def test_what_does_not_fit_fails_alone(engine):
    model = EngineModel(engine)
    long, good = model.complete(say("much too long " * 50, "short"), max_tokens=5)
    assert "tokens, but a conversation may hold 96" in long.error
    assert good.error is None
    model.close()


def test_an_engine_that_fails_answers_with_errors_and_goes_on(engine, monkeypatch):
    model = EngineModel(engine)
    monkeypatch.setattr(engine, "step", lambda: 1 / 0)
    answers = model.complete(say("a", "b"), max_tokens=5)
    assert all("ZeroDivisionError" in answer.error for answer in answers)
    monkeypatch.undo()
    assert model.complete(say("a"), max_tokens=5)[0].error is None
    model.close()


def test_a_schema_is_in_the_prompt(engine, monkeypatch):
    seen = []
    chat = engine.tokenizer.chat
    monkeypatch.setattr(engine.tokenizer, "chat", lambda messages: seen.append(messages) or chat(messages[:1]))
    EngineModel(engine).complete(say("a"), max_tokens=2, schema={"type": "array"})
    assert '{"type": "array"}' in seen[0][-1].content


def test_a_model_without_a_template_is_refused(engine, monkeypatch):
    monkeypatch.setattr(engine.tokenizer.hf, "chat_template", None)
    with pytest.raises(ValueError, match="no chat template"):
        EngineModel(engine)


def test_an_answer_that_cannot_be_decoded_fails_alone():
    """Nobody waits for ever, and the thread goes on."""

    class Tokenizer:
        hf, has_chat_template = None, True

        def chat(self, conversation):
            return [1]

        def plain(self, text):
            return text

        def decode(self, tokens):
            if tokens == [7]:
                raise OverflowError("no such token")
            return "fine"

    class Odd:
        tokenizer, max_length, seed = Tokenizer(), 8, 0

        def open(self, prompt, example_id, sample, images):
            return types.SimpleNamespace(ledger=prompt)

        def request(self, stream, **settings):
            self._stream = stream

        def step(self):
            token = 7 if not hasattr(self, "_stepped") else 8
            self._stepped = True
            return [(self._stream, types.SimpleNamespace(tokens=[token], stop_reason="stop"))]

        def close(self, stream):
            pass

    engine: Any = Odd()
    model = EngineModel(engine, "odd")
    question = [[Message(role="user", content="?")]]
    assert model.complete(question)[0].error == "OverflowError: no such token"
    assert model.complete(question)[0].text == "fine"
    model.close()
