"""Agents that see: images of the question, images that come back as observations."""

import numpy as np
import pytest

from routerl_jax.agents.agent import LLM, Agent, Tools
from routerl_jax.agents.driver import run
from routerl_jax.agents.search_agent import SearchAgent
from routerl_jax.core.types import Episode, Example
from routerl_jax.generation.engine import Engine
from routerl_jax.recipes.r1_router.grammar import R1RouterGrammar
from tests import seeing, tiny

EXAMPLES = [
    Example(id="flag", question="whose flag?", answers=("Ghana",), images=(seeing.picture(0),)),
    Example(id="text", question="no picture", answers=("none",)),
]


class Looker(Agent):
    """Writes a few tokens, is shown a picture, writes again."""

    async def run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        chat = llm.conversation(llm.image_marker * len(example.images) + example.question, example.images)
        await chat.generate(max_tokens=4)
        shown = [seeing.picture(llm.sample + 5)]
        text = f"page: {llm.image_marker} "
        before = chat.room
        expected = chat.tokens_of(text, shown)
        chat.observe(text, shown)
        assert before - chat.room == expected > len(shown[0]) // 8
        await chat.generate(max_tokens=4)
        return chat.episode(answer=None)


def test_images_reach_the_sequences() -> None:
    episodes = run(Looker(), EXAMPLES, Engine(seeing.model(), rows=4, max_length=128), {}, samples=2)
    assert [len(episode.sequences[0].images) for episode in episodes] == [2, 2, 1, 1]
    for episode in episodes:
        (sequence,) = episode.sequences
        assert sequence.loss_mask.sum() == sum(turn.tokens for turn in episode.turns) > 4
        for first, image in sequence.images:
            assert not sequence.loss_mask[first : first + image.tokens].any()
    first, second = (episode.sequences[0] for episode in episodes[:2])
    assert first.images[0][1].digest == second.images[0][1].digest
    assert first.images[1][1].digest != second.images[1][1].digest


def test_the_search_agent_shows_the_question_s_image() -> None:
    agent = SearchAgent(grammar=R1RouterGrammar(tools=("text",)), max_searches=1, max_turn_tokens=8, answer_tokens=8)
    engine = Engine(seeing.model(), rows=4, max_length=200)
    episodes = run(agent, EXAMPLES, engine, {"text": tiny.ScriptedKB()})
    assert [len(episode.sequences[0].images) for episode in episodes] == [1, 0]
    again = run(agent, EXAMPLES, Engine(seeing.model(), rows=4, max_length=200), {"text": tiny.ScriptedKB()})
    for one, other in zip(episodes, again):
        np.testing.assert_array_equal(one.sequences[0].tokens, other.sequences[0].tokens)
    with pytest.raises(RuntimeError, match=r"example 'flag', sample 0: .* sees no images; use a vision-language model"):
        run(agent, EXAMPLES, Engine(tiny.model(), rows=4, max_length=200), {"text": tiny.ScriptedKB()})
