"""The ids that the real engine feeds and samples are those of the episode and of the learner's batch, one by one."""

import copy
import dataclasses

import jax
import numpy as np
import pytest

from routerl_jax.agents.agent import Agent
from routerl_jax.agents.driver import run
from routerl_jax.agents.observation import Reply
from routerl_jax.core.tokenizer import Tokenizer
from routerl_jax.core.types import Action, Example, Message
from routerl_jax.engine.engine import Engine
from routerl_jax.learning.batch import BatchLayout
from routerl_jax.parallel.mesh import make_mesh
from routerl_jax.recipes.r1_router.grammar import R1RouterGrammar
from tests import tiny
from tests.agents.scripted import AGENT, ScriptedEngine, knowledge

EXAMPLES = [Example(id=f"q{i}", question=f"Question {'why ' * i}?", answers=("Accra",)) for i in range(5)]


class Searching(R1RouterGrammar):
    """Takes whatever a random policy writes for a search."""

    def parse(self, text):
        return Action(kind="search", tool="text", query=str(len(text)))


class RecordingEngine(Engine):
    """Keeps what its device programs were fed at each (row, position), and what they sampled there."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.fed = np.full((self.rows, self.max_length), -1)
        self.sampled = np.full((self.rows, self.max_length), -1)
        extend, decode = self._calls._programs.extend, self._calls._programs.decode

        def recorded_extend(**inputs):
            for i, row in enumerate(inputs["rows"][0]):
                start, count = inputs["starts"][0, i], inputs["counts"][0, i]
                if row < self.rows:
                    self.fed[row, start : start + count] = inputs["tokens"][0, i, :count]
            return extend(**inputs)

        def recorded_decode(**arguments):
            cache, outputs, scratch = decode(**arguments)
            inputs, counts, tokens = arguments["inputs"], np.asarray(outputs.counts), np.asarray(outputs.tokens)
            for i, row in enumerate(inputs.rows[0]):
                start, count = inputs.starts[0, i], counts[0, i]
                if row < self.rows:
                    self.fed[row, start] = inputs.tokens[0, i]
                    self.sampled[row, start + 1 : start + 1 + count] = tokens[0, i, :count]
            return cache, outputs, scratch

        self._calls._programs = dataclasses.replace(
            self._calls._programs, extend=recorded_extend, decode=recorded_decode
        )


def test_ids_are_never_encoded_again():
    agent = dataclasses.replace(AGENT, grammar=Searching(tools=("text", "table")), max_turn_tokens=13)
    engine = RecordingEngine(
        tiny.model(layers=1), rows=len(EXAMPLES), max_length=256, segment=5
    )  # nobody waits for a row
    episodes = run(agent, EXAMPLES, engine, knowledge())
    sequences = [episode.sequences[0] for episode in episodes]
    for sequence, fed, sampled in zip(sequences, engine.fed, engine.sampled):
        length, mask = len(sequence), sequence.loss_mask
        np.testing.assert_array_equal(np.where(sampled >= 0, sampled, fed)[:length], sequence.tokens)
        np.testing.assert_array_equal((sampled >= 0)[:length], mask)
        again = (fed >= 0)[:length] & mask  # a sampled token that begins a segment or an observation is fed on
        assert again.sum() > 5
        np.testing.assert_array_equal(fed[:length][again], sequence.tokens[again])
        assert engine.tokenizer.encode(engine.tokenizer.decode(sequence.tokens)) != sequence.tokens.tolist()
    layout = BatchLayout(make_mesh(devices=jax.devices()[:1]), (128, 256), 512)
    batch, index = layout.build(sequences, [s.loss_mask for s in sequences], [1.0] * len(sequences))
    for sequence, (micro, shard, start) in zip(sequences, index.starts):
        in_batch = np.asarray(batch.tokens)[micro, shard, start : start + len(sequence)]
        np.testing.assert_array_equal(in_batch, sequence.tokens)


def test_a_prompt_that_fills_a_conversation_ends_no_run():
    """Its example counts as unanswered, and the others are worked on."""
    examples = [Example(id="long", question="why " * 300, answers=("x",)), *EXAMPLES[:1]]
    engine = Engine(tiny.model(layers=1), rows=4, max_length=128, segment=8)
    episodes = run(AGENT, examples, engine, knowledge(), samples=2)
    assert [(e.example.id, e.sample, e.truncated, len(e.sequences)) for e in episodes] == [
        ("long", 0, True, 0),
        ("long", 1, True, 0),
        ("q0", 0, episodes[2].truncated, 1),
        ("q0", 1, episodes[3].truncated, 1),
    ]
    assert all(episode.answer is None and not episode.turns for episode in episodes[:2])


class Twice(Agent):
    """The agent of docs/extending.md: it looks at no room."""

    async def run(self, example, llm, tools):
        chat = llm.conversation(f"Question: {example.question}\n")
        for _ in range(2):
            call = await tools["text"].search(example.question, k=2)
            chat.observe(" ".join(passage.text for passage in call.passages))
            turn = await chat.generate(stop=("\n",), max_tokens=8)
        return chat.episode(answer=turn.text.strip())


class Growing(tiny.ScriptedKB):
    """Passages of so many words, from the first batch on."""

    def __init__(self, *words):
        super().__init__()
        self.words = words

    def search(self, queries, k):
        found = super().search(queries, k)
        words = self.words[len(self.batches) - 1]
        return [[dataclasses.replace(p, text="word " * words) for p in of_one] for of_one in found]


@pytest.mark.parametrize(("words", "turns"), [((2, 2), 2), ((2, 90), 1), ((90, 2), 0)])
def test_an_observation_that_does_not_fit_ends_its_episode_and_no_run(words, turns, caplog):
    engine = Engine(tiny.model(layers=1), rows=4, max_length=128, segment=8)
    episodes = run(Twice(), EXAMPLES[:2], engine, knowledge(text=Growing(*words)), samples=2)
    assert [(len(e.turns), e.truncated, e.answer is None, len(e.sequences)) for e in episodes] == [
        (turns, turns < 2, turns < 2, int(turns > 0))
    ] * 4
    assert all(len(sequence) <= 128 for episode in episodes for sequence in episode.sequences)
    assert not engine._streams  # all rows are free again
    if turns < 2:
        assert "4 of 4 episodes end without an answer, as something does not fit a conversation" in caplog.text
        assert "tokens do not fit: the conversation of example 'q0', sample 0, has room for" in caplog.text


def test_a_turn_of_a_full_conversation_ends_its_episode():
    class Full(Agent):
        async def run(self, example, llm, tools):
            chat = llm.conversation("Question: ")
            turn = await chat.generate(max_tokens=4)
            while chat.room:
                chat.observe("a")
            turn = await chat.generate(max_tokens=4)
            return chat.episode(answer=turn.text)

    engine = Engine(tiny.model(layers=1), rows=4, max_length=32, segment=8)
    [episode] = run(Full(), EXAMPLES[:1], engine, knowledge())
    assert (len(episode.turns), episode.truncated, episode.answer, len(episode.sequences[0])) == (1, True, None, 32)


@dataclasses.dataclass(frozen=True)
class Chatting(Agent):
    """Two turns of a chat; the first ends with a stop string, or with the end token as the policy writes it."""

    stop: tuple[str, ...]

    async def run(self, example, llm, tools):
        chat = llm.conversation([Message(role="user", content=example.question)])
        await chat.generate(stop=self.stop, max_tokens=20)
        room, taken = chat.room, chat.tokens_of(Reply("It is Accra."))
        chat.reply("It is Accra.")
        assert chat.room == room - taken
        await chat.generate(max_tokens=20)
        return chat.episode(answer=None)


@pytest.mark.parametrize("ends_itself", [True, False])
def test_a_chat_goes_on_with_the_template_s_tokens(ends_itself, monkeypatch):
    """The end of the first turn is there once: sampled, where the policy writes it, else fed."""
    first = "Hm.<|im_end|>" if ends_itself else "Hm.</search>"
    engine = ScriptedEngine(lambda _example, _sample, turn: (first, "Yes.<|im_end|>")[turn])
    tokenizer = Tokenizer(copy.deepcopy(engine.tokenizer.hf))
    tokenizer.hf.add_special_tokens({"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]})
    tokenizer.hf.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    engine.tokenizer = tokenizer = Tokenizer(tokenizer.hf)
    example = Example(id="q", question="Capital of Ghana?", answers=("Accra",))
    (episode,) = run(Chatting(stop=() if ends_itself else ("</search>",)), [example], engine, {})
    (sequence,) = episode.sequences
    fed = "<|im_start|>user\nIt is Accra.<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(sequence.tokens) == (
        "<|im_start|>user\nCapital of Ghana?<|im_end|>\n<|im_start|>assistant\n"
        f"{first}{'' if ends_itself else '<|im_end|>'}\n{fed}Yes.<|im_end|>"
    )
    assert tokenizer.decode(sequence.tokens[sequence.loss_mask]) == f"{first}Yes.<|im_end|>"
    assert episode.turns[0].observation == f"{'' if ends_itself else '<|im_end|>'}\n{fed}"
