"""An agent written on a `Chat`, as docs/extending.md has it: the same page for tags and for tool calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from routerl_jax.agents.agent import LLM, Tools
from routerl_jax.agents.chat import fitting
from routerl_jax.agents.driver import run
from routerl_jax.agents.grammar import TOO_LONG
from routerl_jax.agents.search_agent import SearchAgent
from routerl_jax.agents.tool_calls import ToolCalls
from routerl_jax.core import tokenizer as tokenizer_module
from routerl_jax.core.tokenizer import Tokenizer
from routerl_jax.core.types import Episode, Example, Passage
from tests import tiny
from tests.agents import chat_templates as templates
from tests.agents.scripted import ANSWER, SEARCH, ScriptedEngine, knowledge

EXAMPLE = Example(id="q", question="What is the capital of Ghana?", answers=("Accra",))
CALL = '<tool_call>\n{"name": "search_text", "arguments": {"query": "capital of Ghana"}}\n</tool_call><|im_end|>'
CALLED = "<answer>Accra</answer><|im_end|>"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Insisting(SearchAgent):
    """Lets the policy answer only after a search that found something."""

    async def run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        chat, found = self.begin(example, llm), False
        for _ in range(self.max_searches):
            action = await chat.act()
            if action is None:
                break
            if action.kind == "answer" and found:
                return chat.episode(answer=action.answer)
            if action.kind == "search":
                call = await tools[action.tool].search(action.query, self.k)
                found = found or bool(call.passages)
                await chat.show(call)
            elif action.kind == "answer":
                chat.remind("search first")
            else:
                chat.remind()
        return await chat.final_answer()


AGENT = Insisting(grammar=tiny.GRAMMAR, k=2, max_turn_tokens=200, answer_tokens=30)
CALLING = dataclasses.replace(AGENT, grammar=ToolCalls(tools=("text",)))


def play(agent: SearchAgent, *turns: str, room: int = 2000) -> tuple[Episode, list[str]]:
    """The episode of these turns in a context with this room after the prompt, and what the policy was shown."""
    tokenizer = templates.tokenizer(templates.TEMPLATES["hermes"]) if agent.functions else tiny.tokenizer()
    length = len(agent.opening(EXAMPLE, tokenizer)) + room
    engine = ScriptedEngine(lambda _e, _s, turn: turns[turn], max_length=length, canonical=True, tokenizer=tokenizer)
    (episode,) = run(agent, [EXAMPLE], engine, {"text": knowledge()["text"], "table": knowledge()["table"]})
    return episode, [turn.observation for turn in episode.turns]


@pytest.mark.parametrize(
    ("agent", "search", "answer"),
    [(AGENT, SEARCH.format("text"), ANSWER), (CALLING, CALL, CALLED)],
    ids=["tags", "calls"],
)
def test_one_page_serves_tags_and_tool_calls(agent: SearchAgent, search: str, answer: str) -> None:
    episode, observed = play(agent, answer, "nothing of use", search, answer)
    assert [turn.action.kind for turn in episode.turns if turn.action] == ["answer", "invalid", "search", "answer"]
    assert (episode.answer, episode.truncated, len(episode.calls)) == ("Accra", False, 1)
    assert "search first" in observed[0]
    assert "there is n" in observed[1]  # neither a search nor an answer
    assert "fact 0 about" in observed[2]


@pytest.mark.parametrize(
    ("agent", "search", "note"), [(AGENT, SEARCH.format("text"), ""), (CALLING, CALL, TOO_LONG)], ids=["tags", "calls"]
)
def test_where_nothing_more_fits_the_answer_is_begun(agent: SearchAgent, search: str, note: str) -> None:
    """The result of the search has no room. In tool calls the turn gets a note, because its message has ended."""
    tokenizer = templates.tokenizer(templates.TEMPLATES["hermes"]) if agent.functions else tiny.tokenizer()
    after = len(tokenizer.reply(TOO_LONG, role="tool")) if agent.functions else 0
    needed = len(tokenizer.encode("<answer>")) + agent.answer_tokens + after
    room = len(tokenizer.encode(search)) + needed
    episode, observed = play(agent, search, "Accra</answer>", room=room)
    assert (episode.answer, episode.truncated, episode.turns[-1].forced) == ("Accra", True, "<answer>")
    assert (TOO_LONG in observed[0]) == bool(note)
    assert "fact" not in observed[0]
    unanswered, _ = play(agent, search, "Accra</answer>", room=needed - after - 1)
    assert (unanswered.answer, unanswered.truncated, unanswered.turns) == (None, True, [])


class Flood:
    """A knowledge base whose passages have millions of words."""

    def __init__(self, *passages: str) -> None:
        self.passages = passages

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        found = [Passage(id=str(i), title="", text=text, score=1.0 - i) for i, text in enumerate(self.passages)]
        return [found for _ in queries]


@pytest.mark.parametrize("most", [0, 300])
@pytest.mark.parametrize(
    "passages", [("Accra lies there. " * 3_000_000,), ("Accra lies there. " * 20_000,) * 40, ("x" * 48_000_000,)]
)
def test_a_flood_of_text_costs_what_is_shown_of_it(
    monkeypatch: pytest.MonkeyPatch, passages: tuple[str, ...], most: int
) -> None:
    encoded = 0
    fast = tokenizer_module._fast

    def counting(backend: Any, text: str) -> tuple[int, ...]:
        nonlocal encoded
        encoded += len(text)
        return fast(backend, text)

    monkeypatch.setattr(tokenizer_module, "_fast", counting)
    monkeypatch.setattr(Tokenizer, "prepare", lambda self, texts: counting(self._inner, "".join(texts)))
    agent = dataclasses.replace(AGENT, max_observation_tokens=most)
    tokenizer = tiny.tokenizer()
    length = len(agent.opening(EXAMPLE, tokenizer)) + 2000
    engine = ScriptedEngine(
        lambda _e, _s, turn: [SEARCH.format("text"), ANSWER][turn],
        max_length=length,
        canonical=True,
        tokenizer=tokenizer,
    )
    (episode,) = run(agent, [EXAMPLE], engine, {"text": Flood(*passages), "table": Flood()})
    (call,) = episode.calls
    assert sum(len(passage.text) for passage in call.passages) <= 1 << 20
    assert ("Accra lies there. Accra" in episode.turns[0].observation) == (most == 300 and "Accra" in passages[0])
    assert episode.answer == "Accra"
    assert encoded < 500_000


def test_a_question_that_no_context_holds_ends_unanswered_and_harms_no_other() -> None:
    long = dataclasses.replace(EXAMPLE, id="long", question="Where is Accra? " * 1_000_000)
    engine = ScriptedEngine(lambda _e, _s, turn: [SEARCH.format("text"), ANSWER][turn], canonical=True)
    episodes = run(AGENT, [long, EXAMPLE], engine, knowledge())
    assert [(episode.answer, episode.truncated) for episode in episodes] == [(None, True), ("Accra", False)]


def test_as_many_passages_are_shown_as_fit_and_few_are_tried() -> None:
    passages = [Passage(id=str(i), title="", text="word " * (i + 1)) for i in range(100)]
    for most in (0, 1, 4, 90, 5049, 5050):
        tried: list[int] = []

        def fits(some: Sequence[Passage], most: int = most, tried: list[int] = tried) -> bool:
            tried.append(sum(len(passage.text.split()) for passage in some))
            return tried[-1] <= most

        shown = sum(len(passage.text.split()) for passage in fitting(passages, fits, cut=False))
        assert shown == max(n * (n + 1) // 2 for n in range(101) if n * (n + 1) // 2 <= most)
        assert max(tried[1:], default=0) <= 4 * most + 3
        assert len(tried) <= 15
