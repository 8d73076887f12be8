"""A cached model asks nothing twice, saves as it goes, and keeps no failures."""

from __future__ import annotations

import numpy as np
import PIL.Image
import pytest

from routerl_jax.core.types import Message
from routerl_jax.services.base import Completion
from routerl_jax.services.cache import LayeredCache, MemoryCache, SqliteCache
from routerl_jax.services.load import CachedModel


class Counting:
    name = "counting"

    def __init__(self):
        self.asked = []
        self.settings = {}

    def complete(self, conversations, *, max_tokens=1024, temperature=0.0, schema=None, sample=0):
        answers = []
        for messages in conversations:
            text = messages[-1].content
            self.asked.append(text)
            if text == "kill":
                raise KeyboardInterrupt
            answers.append(
                Completion(error="no", finish="error") if text == "bad" else Completion(text=text * 2, tokens=3)
            )
        return answers


def say(*texts):
    return [[Message(role="user", content=text)] for text in texts]


def test_nothing_is_asked_twice_in_any_run(tmp_path):
    model = Counting()
    cached = CachedModel(model, SqliteCache(tmp_path / "c.sqlite"))
    assert [answer.text for answer in cached.complete(say("a", "b", "a"))] == ["aa", "bb", "aa"]
    assert model.asked == ["a", "b"]
    cached.close()
    again = CachedModel(model, SqliteCache(tmp_path / "c.sqlite"))
    assert again.complete(say("b"))[0] == Completion(text="bb", tokens=3, cached=True)
    assert model.asked == ["a", "b"]
    again.complete(say("b"), temperature=1.0)
    again.complete(say("b"), max_tokens=5)
    again.complete(say("b"), schema={"type": "object"})
    model.settings = {"seed": 1}
    CachedModel(model, SqliteCache(tmp_path / "c.sqlite")).complete(say("b"))
    assert model.asked == ["a", "b", "b", "b", "b", "b"]


def test_failures_are_asked_again(tmp_path):
    model = Counting()
    cached = CachedModel(model, LayeredCache([SqliteCache(tmp_path / "c.sqlite")]))
    assert [answer.error for answer in cached.complete(say("bad", "a"))] == ["no", None]
    cached.complete(say("bad", "a"))
    assert model.asked == ["bad", "a", "bad"]


def test_a_killed_call_has_saved_what_it_had(tmp_path):
    model = Counting()
    cached = CachedModel(model, SqliteCache(tmp_path / "c.sqlite"), save_every=2)
    with pytest.raises(KeyboardInterrupt):
        cached.complete(say("a", "b", "c", "kill"))
    cached.complete(say("a", "b"))
    assert model.asked == ["a", "b", "c", "kill"]


def test_default_place(tmp_path, monkeypatch):
    monkeypatch.setenv("ROUTERL_CACHE", str(tmp_path))
    CachedModel(Counting(), MemoryCache()).complete(say("a"))  # an empty cache is one
    assert not (tmp_path / "llms.sqlite").exists()
    CachedModel(Counting()).complete(say("a"))
    assert (tmp_path / "llms.sqlite").is_file()


def test_samples_and_pictures_are_told_apart(tmp_path):
    """By the picture's content, wherever it is; an earlier cache's answers, of the first sample, are found."""
    for name, shade in (("a", 1), ("b", 1), ("c", 2)):
        PIL.Image.fromarray(np.full((4, 4, 3), shade, np.uint8)).save(tmp_path / f"{name}.png")

    def seen(name):
        return [[Message(role="user", content="x", images=(tmp_path / f"{name}.png",))]]

    model = Counting()
    cached = CachedModel(model, SqliteCache(tmp_path / "c.sqlite"))
    for conversation in (say("x"), seen("a"), seen("b"), seen("c")):
        cached.complete(conversation)
    assert len(model.asked) == 3  # a and b look the same
    for sample in (0, 1, 2, 1):
        cached.complete(say("x"), temperature=1.0, sample=sample)
    assert len(model.asked) == 6


def test_a_picture_that_is_gone_fails_its_own_conversation(tmp_path):
    asked = []

    class Model:
        name, settings = "m", {}

        def complete(self, conversations, **_):
            asked.extend(conversations)
            return [Completion(text="yes") for _ in conversations]

    gone = [Message(role="user", content="what?", images=(str(tmp_path / "gone.png"),))]
    fine = [Message(role="user", content="well?")]
    first, second = CachedModel(Model(), MemoryCache()).complete([gone, fine])
    assert "gone.png" in first.error
    assert (second.text, asked) == ("yes", [fine])
