"""Attempts that are under way from one run of the driver to the next."""

import asyncio
import contextlib
import dataclasses
import threading
import time
from typing import Any

import numpy as np
import pytest
from flax import nnx

from routerl_jax.agents.agent import LLM, Agent, Tools
from routerl_jax.agents.driver import Attempts, run
from routerl_jax.core.types import Episode, Example
from routerl_jax.engine.engine import Engine
from tests import seeing, tiny
from tests.agents.scripted import AGENT as THREE_SEARCHES
from tests.agents.scripted import ANSWER, SEARCH, ScriptedEngine, knowledge
from tests.agents.test_forks import Asker, ways
from tests.agents.test_images import EXAMPLES as PICTURES
from tests.agents.test_images import Looker

EXAMPLES = [Example(id=f"q{i}", question=f"Question {i}?", answers=("Accra",)) for i in range(6)]
SAMPLES = 3
AGENT = dataclasses.replace(THREE_SEARCHES, max_searches=5)


def searches(example: str, sample: int) -> int:
    """One attempt at q1 is the longest of all."""
    return 5 if (example, sample) == ("q1", 2) else int(example[1:]) % 2


def script(example: str, sample: int, turn: int) -> str:
    return [*[SEARCH.format("text")] * searches(example, sample), ANSWER][turn]


def ids(episodes: list[Episode]) -> list[str]:
    assert [e.sample for e in episodes] == [*range(SAMPLES)] * (len(episodes) // SAMPLES)
    return [e.example.id for e in episodes][::SAMPLES]


def test_whole_groups_the_oldest_first_and_the_others_go_on() -> None:
    engine = ScriptedEngine(script, rows=64)
    alone = {(e.example.id, e.sample): e for e in run(AGENT, EXAMPLES, ScriptedEngine(script), knowledge(), SAMPLES)}
    ended: list[Episode] = []
    with contextlib.closing(Attempts(AGENT, engine, knowledge(), finished=ended.append)) as attempts:
        first = attempts.run(EXAMPLES[:3], SAMPLES, groups=2)
        assert ids(first) == ["q0", "q2"]  # q1 has waited for its searches
        assert attempts.under_way == {"q1": SAMPLES}
        second = attempts.run(EXAMPLES[3:5], SAMPLES, groups=1)
        assert ids(second) == ["q4"]
        assert attempts.under_way == {"q1": 1, "q3": SAMPLES}
        third = attempts.run([], SAMPLES, groups=1)
        assert ids(third) == ["q3"]
        fourth = attempts.run(EXAMPLES[5:], SAMPLES, groups=1, awaited=1)
        assert ids(fourth) == ["q1"]
        assert attempts.under_way == {"q5": 0}  # complete, but not wanted yet
        steps = engine.steps
        fifth = attempts.run([], SAMPLES, groups=1)
        assert ids(fifth) == ["q5"]
        assert engine.steps == steps
    assert len(ended) == len(alone) == 18
    for episode in [*first, *second, *third, *fourth, *fifth]:
        expected = alone[episode.example.id, episode.sample]
        np.testing.assert_array_equal(episode.sequences[0].tokens, expected.sequences[0].tokens)
    assert not engine.live


def test_what_is_under_way_can_be_closed_and_fails_together() -> None:
    engine = ScriptedEngine(script, rows=64)
    attempts = Attempts(AGENT, engine, knowledge())
    attempts.run(EXAMPLES[:3], SAMPLES, groups=2)
    assert len(engine.live) == SAMPLES
    with pytest.raises(ValueError, match="example id 'q1' occurs twice"):
        attempts.run(EXAMPLES[1:2], SAMPLES)
    attempts.close()
    assert not engine.live
    assert attempts.under_way == {}

    class Failing(Agent):
        async def run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
            chat = llm.conversation("?")
            for _ in range(1 + 2 * int(example.id[1:])):
                await chat.generate(max_tokens=4)
            if example.id == "q2":
                raise KeyError("gone")
            return chat.episode(answer=None)

    engine = ScriptedEngine(lambda *_: "so", rows=64)
    with contextlib.closing(Attempts(Failing(), engine, {})) as attempts:
        assert ids(attempts.run(EXAMPLES[:3], SAMPLES, groups=1)) == ["q0"]
        with pytest.raises(RuntimeError, match="the agent failed on example 'q2', sample 0: 'gone'"):
            attempts.run([], SAMPLES)
        assert not engine.live
        assert attempts.under_way == {}


def test_a_tool_that_is_under_way_is_asked_once_and_its_reply_counts_though_nobody_waited() -> None:
    """The reply comes between two runs. In the second run its time is up, too."""
    calm, asked = threading.Event(), []

    class Slow(tiny.ScriptedKB):
        def search(self, queries: Any, k: int) -> Any:
            asked.append(len(queries))
            assert calm.wait(10)
            return super().search(queries, k)

    def say(example: str, sample: int, turn: int) -> str:
        return [*[SEARCH.format("text")] * (example == "q1"), ANSWER][turn]

    engine = ScriptedEngine(say, rows=64)
    settings = {"deterministic": False, "tool_timeout": 0.5}
    with contextlib.closing(Attempts(AGENT, engine, knowledge(text=Slow("text")), **settings)) as attempts:
        assert ids(attempts.run(EXAMPLES[:2], SAMPLES, groups=1)) == ["q0"]
        calm.set()
        time.sleep(0.6)
        late = attempts.run([], SAMPLES)
    assert ids(late) == ["q1"]
    assert sum(asked) == SAMPLES
    assert [call.error for episode in late for call in episode.calls] == [None] * SAMPLES


def test_runs_inside_a_running_event_loop() -> None:
    async def notebook() -> list[Episode]:
        with contextlib.closing(Attempts(AGENT, ScriptedEngine(script, rows=64), knowledge())) as attempts:
            return [*attempts.run(EXAMPLES[:2], SAMPLES, groups=1), *attempts.run([], SAMPLES)]

    assert ids(asyncio.run(notebook())) == ["q0", "q1"]


class Writer(Agent):
    """Writes one long turn at one question, and short ones at the others."""

    async def run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        chat = llm.conversation(f"Question: {example.question}")
        await chat.generate(max_tokens=50 if example.id == "q1" else 6)
        return chat.episode(answer=None)


@pytest.mark.slow
def test_equal_weights_sample_what_they_would_have_sampled_at_once() -> None:
    """A turn goes on in its middle, on other rows, and another job has used the engine meanwhile."""
    engine = Engine(tiny.model(), rows=16, max_length=128, segment=8)
    whole = run(Writer(), EXAMPLES[:3], engine, {}, SAMPLES, seed=5)
    with contextlib.closing(Attempts(Writer(), engine, {})) as attempts:
        found = attempts.run(EXAMPLES[:3], SAMPLES, seed=5, groups=2)
        assert attempts.under_way == {"q1": SAMPLES}
        streams = engine.suspend()
        assert not engine.busy
        assert all(0 < stream.turn_request.sampled < 50 and stream.row is None for stream in streams)
        run(Writer(), EXAMPLES[3:5], engine, {}, SAMPLES, seed=1)
        engine.update(nnx.state(tiny.model(), nnx.Param), version=1)
        engine.resume(streams)
        found += attempts.run([], SAMPLES, seed=5)
    found.sort(key=lambda episode: (episode.example.id, episode.sample))
    for episode, expected in zip(found, whole, strict=True):
        np.testing.assert_array_equal(episode.sequences[0].tokens, expected.sequences[0].tokens)
        np.testing.assert_allclose(episode.sequences[0].logprobs, expected.sequences[0].logprobs, atol=1e-4)
    assert {*np.concatenate([e.sequences[0].versions for e in found])} == {-1, 0, 1}


class Gazer(Looker):
    """Looks longer at the question with a picture."""

    async def run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        if example.images:
            return await super().run(example, llm, tools)
        chat = llm.conversation(example.question)
        await chat.generate(max_tokens=2)
        return chat.episode(answer=None)


def test_pictures_are_seen_again() -> None:
    engine = Engine(seeing.model(), rows=8, max_length=128, segment=2)
    whole = run(Gazer(), PICTURES, engine, {}, 2)
    with contextlib.closing(Attempts(Gazer(), engine, {})) as attempts:
        found = attempts.run(PICTURES, 2, groups=1)
        assert attempts.under_way == {"flag": 2}
        streams = engine.suspend()
        engine.update(nnx.state(seeing.model(), nnx.Param), version=1)
        engine.resume(streams)
        found = attempts.run([], 2) + found
    for episode, expected in zip(found, whole, strict=True):
        np.testing.assert_array_equal(episode.sequences[0].tokens, expected.sequences[0].tokens)
    assert {*found[0].sequences[0].versions} == {-1, 0, 1}


class Curious(Asker):
    """Asks twice about Togo, and once about all else."""

    def searches_in(self, text: str) -> int:
        return 1 + ("Togo" in text)


def test_a_forked_attempt_goes_on_with_all_its_branches() -> None:
    """One branch has ended when the batch is taken, and another is forked later."""
    questions = [Example(id=name, question=f"What of {name}?", answers=("Accra",)) for name in ("Togo", "Ghana")]
    whole = run(AGENT, questions, Curious(0, rows=64), knowledge(), 2, forks=2)
    with contextlib.closing(Attempts(AGENT, Curious(0, rows=64), knowledge(), forks=2)) as attempts:
        found = attempts.run(questions, 2, groups=1)
        assert [e.example.id for e in found] == ["Ghana"] * 4
        assert attempts.under_way["Togo"] > 2
        found = attempts.run([], 2) + found
    assert ways(found) == ways(whole)
    for episode, expected in zip(found, whole, strict=True):
        np.testing.assert_array_equal(episode.sequences[0].tokens, expected.sequences[0].tokens)
