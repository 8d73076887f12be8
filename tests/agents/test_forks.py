"""Attempts that go every way at a routing decision: one conversation and chats of their own, one fork and several."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from routerl_jax.agents.driver import run
from routerl_jax.core.types import Example
from routerl_jax.engine.engine import Engine
from routerl_jax.recipes.r1_router.agents import StepwiseAgent
from routerl_jax.recipes.r1_router.steps import StepProtocol
from routerl_jax.recipes.routerag import RouteRAGGrammar
from tests import tiny
from tests.agents.scripted import AGENT, AGENTS, ANSWER, ScriptedEngine, knowledge

EXAMPLE = Example(id="q", question="What is the capital of Ghana?", answers=("Accra",))
ASK = "<think>hm</think><sub-question>capital of Ghana</sub-question><ret>"
NAMES = {"text": "text retriever</ret>", "table": "table retriever</ret>"}
STEPS = StepwiseAgent(protocol=StepProtocol(tools=("text", "table")), max_searches=2, k=1, max_turn_tokens=100)


def ways(episodes):
    return [tuple(branch.tool for branch in episode.branches) for episode in episodes]


class Asker(ScriptedEngine):
    """A policy that asks `searches` times (of a name that it is given, else of the text retriever), and answers."""

    def __init__(self, searches, **options):
        super().__init__(self._say, max_length=2000, **options)
        self.searches = searches
        self._given = {}

    def request(self, stream, *, given=(), **options):
        self._given[id(stream)] = (self.tokenizer.decode(list(given)), stream)
        super().request(stream, given=given, **options)

    def _say(self, example, sample, turn):
        raise NotImplementedError

    def searches_in(self, text):
        return self.searches

    def step(self):
        texts = {}
        for key in self._wanted:
            name, stream = self._given[key]
            text = self.tokenizer.decode(stream.ledger.tokens)
            asked = text.count("<information>")
            if name or text.endswith("<ret>"):
                texts[key] = name or NAMES["text"]
            else:
                texts[key] = ASK + NAMES["text"] if asked < self.searches_in(text) else ANSWER
        said = iter([texts[key] for key in list(self._wanted)])
        self.script = lambda example, sample, turn: next(said)
        return super().step()


def test_one_conversation_goes_every_way_and_each_token_counts_once():
    engine = Asker(1)
    kbs = knowledge()
    episodes = run(AGENT, [EXAMPLE], engine, kbs, samples=2, forks=1)
    assert [(e.sample, *way) for e, way in zip(episodes, ways(episodes))] == [
        (0, "text"),
        (0, "table"),
        (1, "text"),
        (1, "table"),
    ]
    assert [[c.tool for c in e.calls] for e in episodes] == [["text"], ["table"]] * 2
    for episode in episodes:
        assert episode.answer == "Accra"
        assert all(turn.well_formed for turn in episode.turns)
        (branch,) = episode.branches
        (sequence,) = episode.sequences
        name = sequence.tokens[branch.start : branch.start + branch.tokens]
        assert engine.tokenizer.decode(name) == NAMES[branch.tool]
        assert sequence.loss_mask[branch.start : branch.start + branch.tokens].all()
        assert branch.logprob == -branch.tokens
        before = sequence.loss_mask[: branch.start].any()
        assert before == (branch.tool == "text")
        turn = episode.turns[branch.turn]
        assert engine.tokenizer.decode(sequence.tokens[turn.start : turn.start + turn.tokens]) == turn.text
    again = run(AGENT, [EXAMPLE], Asker(1), knowledge(), samples=2, forks=1)
    assert [e.sequences[0].tokens.tolist() for e in again] == [e.sequences[0].tokens.tolist() for e in episodes]
    first, second = (e.sequences[0] for e in episodes[:2])
    fork = episodes[0].branches[0].start
    assert (first.tokens[:fork] == second.tokens[:fork]).all()
    assert not engine.live


def test_two_decisions_are_a_tree_of_four():
    engine = Asker(2)
    episodes = run(AGENT, [EXAMPLE], engine, knowledge(), forks=2)
    assert ways(episodes) == [("text", "text"), ("text", "table"), ("table", "text"), ("table", "table")]
    assert [[c.tool for c in e.calls] for e in episodes] == [list(way) for way in ways(episodes)]
    decided = [np.flatnonzero(e.sequences[0].loss_mask)[0] for e in episodes]
    starts = [[b.start for b in e.branches] for e in episodes]
    assert decided[1] == starts[1][1]  # all before its own way is another's
    assert decided[2] == starts[2][0]
    assert decided[3] == starts[3][1]
    # Once each: the tree's segments are all there is.
    assert sum(s.loss_mask.sum() for e in episodes for s in e.sequences) < sum(
        sum(t.tokens for t in e.turns) for e in episodes
    )
    assert len({name for name, _ in engine.shared}) == 3


def test_chats_of_their_own_are_replayed_up_to_the_fork():
    """The second decision: what the first search and answer were is not asked again, neither of the policy nor of a tool."""
    route = "<think>hm</think>\n<sub-question>capital of Ghana</sub-question>\n<ret>"

    class Chats(Asker):
        def step(self):
            texts = []
            for key in self._wanted:
                name, stream = self._given[key]
                text = self.tokenizer.decode(stream.ledger.tokens)
                ask = text.rstrip().endswith("Next sub-question:")
                texts.append(name if name else route + NAMES["text"] if ask else ANSWER)
            said = iter(texts)
            self.script = lambda example, sample, turn: next(said)
            return ScriptedEngine.step(self)

    engine, kbs = Chats(9), knowledge()
    episodes = run(STEPS, [EXAMPLE], engine, kbs, forks=2)
    assert ways(episodes) == [("text", "text"), ("text", "table"), ("table", "text"), ("table", "table")]
    assert [[turn.asked for turn in e.turns] for e in episodes] == [["route", "answer"] * 2 + ["final"]] * 4
    assert [[c.tool for c in e.calls] for e in episodes] == [list(way) for way in ways(episodes)]
    assert sum(len(batch) for kb in kbs.values() for batch in kb.batches) == 2 + 4
    second = episodes[1]
    assert [bool(s.loss_mask.any()) for s in second.sequences] == [False, False, True, True, True]
    assert [s.tokens.tolist() for s in second.sequences[:2]] == [s.tokens.tolist() for s in episodes[0].sequences[:2]]
    assert not engine.live


def test_where_the_policy_needs_nothing_more_there_is_nothing_to_fork():
    """The sub-question none, or none at all: whichever name followed, the route could not be read, or would not search."""

    class Stops(Asker):
        routes = iter(())

        def step(self):
            texts = []
            for key in self._wanted:
                name, stream = self._given[key]
                text = self.tokenizer.decode(stream.ledger.tokens)
                if name or text.endswith("<ret>"):
                    texts.append(name or "none</ret>")
                else:
                    texts.append(next(self.routes) if text.rstrip().endswith("Next sub-question:") else ANSWER)
            said = iter(texts)
            self.script = lambda example, sample, turn: next(said)
            return ScriptedEngine.step(self)

    enough = "<think>hm</think>\n<sub-question>none</sub-question>\n<ret>none</ret>"
    wanting = ASK + NAMES["text"]
    engine = Stops(9)
    engine.routes = iter([wanting, enough, enough])
    episodes = run(STEPS, [EXAMPLE], engine, knowledge(), forks=2)
    assert ways(episodes) == [("text",), ("table",)]
    assert all(turn.well_formed for e in episodes for turn in e.turns if turn.asked == "route")
    engine = Stops(9)
    engine.routes = iter([enough])
    (episode,) = run(STEPS, [EXAMPLE], engine, knowledge(), forks=2)
    assert (episode.branches, episode.answer) == ((), "Accra")
    assert not STEPS.choices.open("<think>hm</think><ret>")
    assert STEPS.choices.open(ASK)


def test_the_engine_s_rows_are_copied_and_log_probabilities_are_the_policy_s():
    """A real policy, made to come to the decision: each way's log-probabilities are those of a whole forward pass."""
    model = tiny.model()
    engine = Engine(model, rows=4, max_length=128, segment=3)  # names are longer than a segment
    source = engine.open(engine.tokenizer.encode("Question: What is the capital of Ghana?"), "q")
    engine.request(source, max_tokens=7)
    while engine.busy:
        engine.step()
    fed = engine.stats.prefilled_tokens
    name = engine.tokenizer.encode("table retriever</ret>")
    other = engine.open(list(source.ledger.tokens), "q@0:table")
    engine.share([(source, other)])
    assert (other_cached := other.cached) == len(source.ledger) - 1
    engine.request(other, stops=("</ret>",), max_tokens=40, given=name)
    engine.request(source, max_tokens=4)
    done = {}
    while engine.busy:
        done |= {id(stream): generated for stream, generated in engine.step()}
    assert done[id(other)].tokens == name
    assert done[id(other)].stop_reason == "stop"
    assert engine.stats.prefilled_tokens == fed
    assert engine.stats.forked_tokens == other_cached
    for stream in (source, other):
        sequence = stream.ledger.sequence()
        logits = np.asarray(jax.nn.log_softmax(model(jnp.asarray(sequence.tokens[None]))[0]))
        expected = logits[np.arange(len(sequence) - 1), sequence.tokens[1:]]
        mask = sequence.loss_mask[1:]
        np.testing.assert_allclose(sequence.logprobs[1:][mask], expected[mask], atol=1e-4)
    wrong = engine.open([1] * 40)
    with pytest.raises(ValueError, match=r"differs from that of example .*, sample 0, within the"):
        engine.share([(source, wrong)])
    with pytest.raises(ValueError, match=r"5 given tokens do not fit: the conversation .* may have a turn of 4"):
        engine.request(source, max_tokens=4, given=[1] * 5)


def test_runs_without_a_fixed_order_are_refused():
    with pytest.raises(ValueError, match="forks=1 with deterministic=False: a forked attempt replays"):
        run(AGENT, [EXAMPLE], ScriptedEngine(lambda *_: ANSWER), knowledge(), forks=1, deterministic=False)


def test_agents_without_choices_are_refused():
    with pytest.raises(ValueError, match="forks=1: SearchAgent does not say how its policy writes the choice"):
        run(AGENTS["r1_searcher"], [EXAMPLE], ScriptedEngine(lambda *_: ANSWER), knowledge(), forks=1)


@pytest.mark.parametrize("tools", [("passage", "graph"), ("passage", "graph_passage")])
def test_routerag_chooses_between_modes_that_can_be_told_apart(tools):
    """[graph] is the beginning of [graph][passage]: with both of them there is nothing to fork."""
    grammar = RouteRAGGrammar(tools=tools)
    assert grammar.choices is not None
    for tool, name in grammar.choices.names.items():
        written = f"<think>x</think>\n{grammar.choices.opening}{name} river Volta {grammar.choices.stop}"
        assert grammar.well_formed(written)
        assert grammar.parse(written).tool == tool
    agent = dataclasses.replace(AGENT, grammar=RouteRAGGrammar(tools=("passage", "graph", "graph_passage")))
    with pytest.raises(ValueError, match=r"writes ' \[graph\]' for 'graph' and .* is the beginning of the second"):
        run(agent, [EXAMPLE], ScriptedEngine(lambda *_: ANSWER), knowledge(), forks=1)
    (episode,) = run(agent, [EXAMPLE], ScriptedEngine(lambda *_: ANSWER), knowledge())
    assert episode.answer == "Accra"


def test_a_stop_string_may_begin_before_a_decision_that_is_not_forked():
    """The turn goes on after `<ret>`; what stood before is told to the engine, as stop strings may begin there."""

    class Told(Asker):
        begun = ()

        def request(self, stream, *, begun=(), **options):
            self.begun += (self.tokenizer.decode(list(begun)),)
            super().request(stream, **options)

        def step(self):
            text = self.tokenizer.decode(next(stream for stream, *_ in self._wanted.values()).ledger.tokens)
            said = "none</ret>" if text.endswith("<ret>") else enough if not self.begun[1:] else ANSWER
            self.script = lambda example, sample, turn: said
            return ScriptedEngine.step(self)

    enough = "<think>hm</think>\n<sub-question>none</sub-question>\n<ret>none</ret>"
    engine = Told(9)
    (episode,) = run(STEPS, [EXAMPLE], engine, knowledge(), forks=2)
    assert episode.answer == "Accra"
    assert engine.begun == ("", enough.removesuffix("none</ret>"), "")
