"""Prompts that leave no room for a turn are found without a model's help."""

import dataclasses
from typing import Any

import pytest

from routerl_jax.agents.agent import LLM, Agent, Tools
from routerl_jax.agents.driver import no_room
from routerl_jax.core.types import Episode, Example
from tests.agents.scripted import AGENT, ScriptedEngine

SHORT = Example(id="short", question="Who?", answers=("x",))
LONG = Example(id="long", question="Who? " * 100, answers=("x",))


def room(agent: Agent, examples: list[Example], max_length: int) -> str:
    engine: Any = ScriptedEngine(lambda *_: "", max_length=max_length)
    found = no_room(agent, examples, engine, ("text", "table"))
    assert engine.live == []
    return found


def test_one_question_that_fits_is_enough() -> None:
    assert room(AGENT, [SHORT], 1000) == ""
    assert room(AGENT, [LONG, SHORT], 100) == ""
    assert "'long'" in room(AGENT, [LONG], 100)
    assert room(AGENT, [], 1) == ""


def test_a_prompt_alone_is_no_conversation() -> None:
    """The agent keeps room for its answer; where only the prompt fits, no turn is asked for."""
    engine = ScriptedEngine(lambda *_: "")
    prompt = len(AGENT.opening(SHORT, engine.tokenizer))
    reserve = AGENT.answer_tokens + len(engine.tokenizer.encode(AGENT.last_opening))
    assert room(AGENT, [SHORT], prompt + reserve) == ""
    told = room(AGENT, [SHORT], prompt + reserve - 1)
    assert told == f"the prompt of example 'short' has {prompt} tokens, and a turn does not fit beside it"


@dataclasses.dataclass(frozen=True)
class SearchesFirst(Agent):
    async def run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        try:
            await tools["text"].search(example.question)
        except Exception:
            pytest.fail("what ends the trial is nobody's error")
        raise AssertionError("a tool was asked, and answered")


def test_an_agent_that_asks_a_tool_first_is_not_judged() -> None:
    assert room(SearchesFirst(), [LONG], 10) == ""


class AsksForNoTool(Agent):
    async def run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        await tools["texts"].search(example.question)
        raise AssertionError("there is no such tool")


class NotAsync(Agent):
    def run(self, example: Example, llm: LLM, tools: Tools) -> Episode:  # type: ignore[override]
        return llm.conversation("x").episode(answer="x")


def test_what_is_wrong_with_an_agent_is_told_here_as_by_the_driver() -> None:
    with pytest.raises(ValueError, match="example 'short': there is no tool 'texts'; did you mean 'text'"):
        room(AsksForNoTool(), [SHORT], 1000)
    with pytest.raises(ValueError, match=r"NotAsync\.run is no coroutine: write it as `async def run`"):
        room(NotAsync(), [SHORT], 1000)
