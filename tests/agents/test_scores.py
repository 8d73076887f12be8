"""Scoring texts in a conversation: the log-probabilities of one whole forward pass."""

import dataclasses
import itertools

import numpy as np
import pytest

from routerl_jax.agents.agent import Agent
from routerl_jax.agents.driver import run
from routerl_jax.core.types import Example
from routerl_jax.engine.engine import Engine
from tests import tiny
from tests.engine.reference import logprobs

TEXTS = (" Accra", "", " is the\n", "capital")
EXAMPLE = Example(id="q", question="What is the capital of Ghana?", answers=("Accra",))


@dataclasses.dataclass(frozen=True)
class Scoring(Agent):
    """Scores texts after a prompt, and what the policy says after them."""

    texts: tuple[str, ...] | str
    found: list[list[float]] = dataclasses.field(default_factory=list)

    async def run(self, example, llm, tools):
        chat = llm.conversation("Question: " + example.question)
        self.found.append(await chat.score(self.texts))
        await chat.generate(max_tokens=3)
        return chat.episode(answer="")


def test_scores_are_those_of_a_forward_pass():
    """In float32 on one device; the engine decodes token by token, the reference in one pass."""
    model, agent = tiny.model(), Scoring(TEXTS)
    (episode,) = run(agent, [EXAMPLE], Engine(model, rows=2, max_length=128, segment=4), {})
    sequence = episode.sequences[0]
    tokens = model.tokenizer.encode("Question: " + EXAMPLE.question)
    lengths = [len(model.tokenizer.encode(text)) for text in TEXTS]
    written = [i for text in TEXTS for i in model.tokenizer.encode(text)]
    assert sequence.tokens[: len(tokens) + len(written)].tolist() == [*tokens, *written]
    expected = logprobs(model, sequence.tokens[: len(tokens) + len(written)])[len(tokens) - 1 :]
    places = np.cumsum([0, *lengths])
    np.testing.assert_allclose(
        agent.found[0], [expected[a:b].sum() for a, b in itertools.pairwise(places)], rtol=1e-4, atol=1e-4
    )
    assert agent.found[0][1] == 0
    assert len(episode.turns) == 1  # scores are no turn
    assert episode.turns[0].start == places[-1] + len(tokens)


def test_a_text_that_ends_the_turn_is_refused():
    agent = Scoring((tiny.tokenizer().decode([min(tiny.tokenizer().eos_ids)]), "more"))
    with pytest.raises(RuntimeError, match="a text that is scored holds what ends a turn"):
        run(agent, [EXAMPLE], Engine(tiny.model(), rows=1, max_length=128, segment=4), {})


def test_one_text_for_the_list_of_texts_is_refused():
    with pytest.raises(RuntimeError, match=r"score\(\['Accra'\]\)"):
        run(Scoring("Accra"), [EXAMPLE], Engine(tiny.model(), rows=1, max_length=128, segment=4), {})


def test_what_does_not_fit_ends_the_episode():
    agent = Scoring(("word " * 200,))
    (episode,) = run(agent, [EXAMPLE], Engine(tiny.model(), rows=1, max_length=64, segment=4), {})
    assert episode.truncated
    assert agent.found == []
