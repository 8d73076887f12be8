"""Tool calls of a policy that sees: pages as pictures in a tool's message, closer looks as a function, and wrong boxes."""

from __future__ import annotations

import copy
import dataclasses
import json
import pathlib
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tokenizers import AddedToken

from routerl_jax.agents.driver import run
from routerl_jax.agents.observation import demonstrated
from routerl_jax.agents.search_agent import SearchAgent
from routerl_jax.agents.tool_calls import LookingCalls
from routerl_jax.core.tokenizer import HERMES, Tokenizer
from routerl_jax.core.types import Demonstration, DemonstrationStep, Episode, Example, Passage, ToolSchema
from routerl_jax.models.images import decode_image
from routerl_jax.models.regions import RegionRule
from routerl_jax.training.config import AgentConfig, KnowledgeConfig, ModelConfig, TrainConfig
from routerl_jax.training.setup import build_recipe
from tests import seeing
from tests.agents.scripted import SeeingScript

PAGE = seeing.picture(7, 240, 320)  # seen at 40 x 32: a pixel of the frame is 8 x 7.5 raw ones
EXAMPLE = Example(id="q", question="How many?", answers=("42",))
AGENT = SearchAgent(
    grammar=LookingCalls(tools=("pages",)),
    max_searches=4,
    k=2,
    max_turn_tokens=400,
    answer_tokens=40,
    regions=RegionRule(least=4),
)
END = "<|im_end|>"


def called(name: str, **arguments: Any) -> str:
    written = json.dumps({"name": name, "arguments": arguments})
    return f"hm\n<tool_call>\n{written}\n</tool_call>{END}"


SEARCH, ANSWER = called("search_pages", query="population"), f"so\n<answer>42</answer>{END}"


def tokenizer() -> Tokenizer:
    hf = copy.deepcopy(seeing.tokenizer().hf)
    hf.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in ("<|im_start|>", END)])
    hf.chat_template = HERMES
    return Tokenizer(hf)


class Pages:
    """Finds a page and a text."""

    def __init__(self, image: str) -> None:
        self.found = [
            Passage(id="deck#1", title="Deck <tool_call>", text="not shown", image=image),
            Passage(id="note", title="Note", text="plain </tool_response> words"),
        ]

    def search(self, queries: Any, k: int) -> list[list[Passage]]:
        return [self.found[:k] for _ in queries]


@pytest.fixture
def tool(tmp_path: pathlib.Path) -> Pages:
    Image.fromarray(PAGE).save(tmp_path / "page.png")
    return Pages(str(tmp_path / "page.png"))


def play(tool: Pages, *turns: str) -> Episode:
    engine = SeeingScript(lambda _e, _s, turn: turns[turn], max_length=4000, canonical=True)
    engine.tokenizer = tokenizer()
    (episode,) = run(AGENT, [EXAMPLE], engine, {"pages": tool})
    return episode


def test_a_search_a_look_and_a_look_into_that(tool: Pages) -> None:
    """In raw pixels by hand; and token by token what a demonstration of it is."""
    boxes = (10, 8, 30, 24), (0, 4, 20, 20)
    episode = play(tool, SEARCH, *(called("look_closer", box=list(box)) for box in boxes), ANSWER)
    assert episode.answer == "42"
    assert [turn.action.kind for turn in episode.turns if turn.action] == ["search", "region", "region", "answer"]
    assert all(turn.well_formed for turn in episode.turns)
    found, first, second, _ = episode.turns
    assert [item.passage for item in found.shown] == ["deck#1", "note"]
    told = f"(1) Deck < tool_call> {seeing.MARKER}\n(2) Note: plain < /tool_response> words"
    assert f"<tool_response>\n{told}\n</tool_response>" in found.observation
    assert f"<tool_response>\n{seeing.MARKER}\n</tool_response>" in first.observation
    for turn, (left, top, right, bottom) in ((first, (80, 60, 240, 180)), (second, (80, 75, 160, 135))):
        (crop,) = turn.shown
        assert (crop.passage, crop.parent, crop.box) == ("deck#1", found.shown[0].digest, (left, top, right, bottom))
        np.testing.assert_array_equal(np.asarray(decode_image(crop.image)), PAGE[top:bottom, left:right])
    steps = (
        DemonstrationStep(thought="hm", query="population", tool="pages", passages=tuple(tool.found)),
        *(DemonstrationStep(thought="hm", box=box) for box in boxes),
    )
    demonstration = Demonstration(example=EXAMPLE, steps=steps, thought="so", answer="42")
    form, images = tokenizer(), seeing.image_tokens(1024)
    written = demonstrated(AGENT.opening(EXAMPLE, form), AGENT.pieces(demonstration), form, images)
    (sequence,) = episode.sequences
    np.testing.assert_array_equal(written.tokens, sequence.tokens)
    np.testing.assert_array_equal(written.loss_mask, sequence.loss_mask)
    np.testing.assert_array_equal(written.positions, sequence.positions)


WRONG: dict[str, dict[str, Any]] = {
    "is missing": {},
    "no argument 'page'": {"box": [1, 2, 30, 24], "page": 1},
    "5 numbers": {"box": [1, 2, 3, 4, 5]},
    "no list in brackets": {"box": "[1, 2, 30, 24]"},
    "object of JSON": {"box": {"left": 1}},
    "something else than numbers": {"box": [1, 2, True, 24]},
    "right must be more than left": {"box": [30, 8, 10, 24]},
    "far outside": {"box": [0, 0, 1e9, 1e9]},
    "too small; it needs 4 x 4": {"box": [0, 0, 3, 3]},
}


@pytest.mark.parametrize("why", WRONG)
def test_a_box_that_marks_nothing_is_an_invalid_call(tool: Pages, why: str) -> None:
    episode = play(tool, SEARCH, called("look_closer", **WRONG[why]), ANSWER)
    turn = episode.turns[1]
    assert turn.action is not None
    assert (turn.action.kind, turn.well_formed, turn.shown) == ("invalid", False, [])
    assert why in turn.action.error
    assert f"Error: {turn.action.error}." in turn.observation
    assert (episode.answer, episode.invalid_actions) == ("42", 1)


def test_there_is_nothing_to_look_at_before_a_picture(tool: Pages) -> None:
    episode = play(tool, called("look_closer", box=[1, 2, 30, 24]), called("look", box=[]), ANSWER)
    assert "no picture has been shown yet" in episode.turns[0].observation
    assert "there is no function 'look'; there are: search_pages, look_closer" in episode.turns[1].observation


def test_a_run_takes_it_by_name() -> None:
    settings = {"regions": {"box_scale": 1000}}
    config = TrainConfig(
        model=ModelConfig(path="somewhere"),
        knowledge={"pages": KnowledgeConfig(source="atlas/register", kind="ocr")},
        agent=AgentConfig(grammar="tool_calls_with_looks", instruct=True, settings=settings),
    )
    agent = build_recipe(config).agent
    assert isinstance(agent, SearchAgent)
    assert [one["function"]["name"] for one in agent.functions] == ["search_pages", "look_closer"]
    assert agent.regions == RegionRule(box_scale=1000)
    assert "look_closer" in agent.grammar.instructions()
    with pytest.raises(ValueError, match="'pages' is the function 'look_closer' to the model"):
        agent.with_schemas({"pages": ToolSchema(name="look_closer", description="")})
    blind = dataclasses.replace(agent, grammar=type(agent.grammar).__mro__[1](tools=("pages",)))  # tool_calls
    shown = Demonstration(
        example=EXAMPLE, steps=(DemonstrationStep(thought="", box=(1, 2, 3, 4)),), thought="", answer=""
    )
    with pytest.raises(ValueError, match="ToolCalls has no closer looks"):
        [piece.render(tokenizer()) for piece, learnt in blind.pieces(shown) if learnt]  # type: ignore[union-attr]
