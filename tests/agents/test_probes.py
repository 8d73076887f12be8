"""Probes of a conversation, and which tokens are trained on: masks by hand, for all that an agent can do to a conversation."""

import asyncio
import dataclasses
import itertools
import math

import jax.numpy as jnp
import numpy as np
import pytest

from routerl_jax.agents.agent import Agent
from routerl_jax.agents.driver import run
from routerl_jax.core.types import Example
from routerl_jax.engine.engine import Engine
from routerl_jax.engine.sampling import Sampling
from routerl_jax.services.policy import ChatModel
from routerl_jax.training.config import LearnerConfig
from routerl_jax.training.credit import assign
from tests import tiny
from tests.agents.scripted import ScriptedEngine
from tests.engine.reference import logprobs

EXAMPLE = Example(id="q", question="What is the capital of Togo?", answers=("Lome",))


@dataclasses.dataclass(frozen=True)
class Probing(Agent):
    """Two turns, after each of which it may ask aside how likely the answer is."""

    probes: bool = True

    async def run(self, example, llm, tools):
        chat = llm.conversation("Question: " + example.question)
        for word in (" first", " second"):
            turn = await chat.generate(max_tokens=4)
            if self.probes:
                async with chat.aside() as probe:
                    probe.force("<answer>")
                    turn.info["logprob"], turn.info["end"] = await probe.score([*example.answers, "</answer>"])
                    guess = await probe.generate(max_tokens=2)
                    probe.observe("seen aside")
                    turn.info["guess"] = guess.text
            chat.observe(word)
        return chat.episode(answer="")


def engine(rows=2, **settings):
    return Engine(tiny.model(), rows=rows, max_length=128, segment=4, **settings)


@pytest.mark.parametrize("rows", [2, 1])  # with one row, the probe borrows the conversation's own
def test_a_probe_changes_nothing_of_the_attempt_and_reads_no_token_again(rows):
    with_probes, without = engine(rows), engine(rows)
    (probed,) = run(Probing(), [EXAMPLE], with_probes, {})
    (plain,) = run(Probing(probes=False), [EXAMPLE], without, {})
    assert len(probed.sequences) == 1
    for field in ("tokens", "loss_mask", "versions", "positions"):
        np.testing.assert_array_equal(getattr(probed.sequences[0], field), getattr(plain.sequences[0], field))
    np.testing.assert_allclose(probed.sequences[0].logprobs, plain.sequences[0].logprobs, atol=1e-5)
    assert [dataclasses.replace(turn, info={}) for turn in probed.turns] == plain.turns
    opened = 2 * len(tiny.tokenizer().encode("<answer>"))
    assert with_probes.stats.prefilled_tokens - without.stats.prefilled_tokens <= opened + 2  # the last token of each
    assert not with_probes._streams
    assert with_probes.rows == with_probes._table.free()


def test_a_probe_tells_what_a_forward_pass_over_the_same_tokens_does():
    model = tiny.model()
    (episode,) = run(Probing(), [EXAMPLE], Engine(model, rows=2, max_length=128, segment=4), {})
    encode = model.tokenizer.encode
    for turn in episode.turns:
        past = episode.sequences[0].tokens[: turn.start + turn.tokens].tolist()
        opening, gold, end = encode("<answer>"), encode("Lome"), encode("</answer>")
        scored = logprobs(model, np.asarray([*past, *opening, *gold, *end]))[len(past) + len(opening) - 1 :]
        assert turn.info["logprob"] == pytest.approx(scored[: len(gold)].sum(), abs=1e-4)
        assert turn.info["end"] == pytest.approx(scored[len(gold) :].sum(), abs=1e-4)


@dataclasses.dataclass(frozen=True)
class Everything(Agent):
    """Feeds, forces, scores, writes for the policy and lets it write, in one conversation; scores in another."""

    async def run(self, example, llm, tools):
        chat = llm.conversation("Question:")  # fed
        await chat.score([" Accra", " Lome"])  # scored
        await chat.generate(max_tokens=3)  # the policy's
        chat.observe(" so")  # fed
        chat.force(" I")  # forced
        await chat.generate(max_tokens=2)  # the policy's
        chat.write(" need it.")  # written for it
        chat.force(" It")  # forced
        await chat.score([" is"])  # scored
        await chat.generate(max_tokens=2)  # the policy's
        measured = llm.conversation("Gold:")
        await measured.score(list(example.answers))
        measured.close()
        return chat.episode(answer="")


def test_only_what_the_policy_wrote_is_trained_on_whatever_the_credit():
    encode = tiny.tokenizer().encode
    episodes = run(Everything(), [EXAMPLE], engine(4), {}, samples=2, sampling=Sampling(temperature=1.0))
    for episode in episodes:
        chat, measured = episode.sequences
        prompt = len(tiny.tokenizer().encode_prompt("Question:"))
        mask = [0] * (prompt + len(encode(" Accra")) + len(encode(" Lome"))) + [1] * 3
        mask += [0] * (len(encode(" so")) + len(encode(" I"))) + [1] * 2
        mask += [0] * (len(encode(" need it.")) + len(encode(" It")) + len(encode(" is"))) + [1] * 2
        assert chat.loss_mask.astype(int).tolist() == mask
        assert not measured.loss_mask.any()
        for sequence in (chat, measured):
            assert not sequence.logprobs[~sequence.loss_mask].any()
            assert (sequence.versions[~sequence.loss_mask] == -1).all()
    for credit in ("episode", "turn"):
        for episode, total in zip(episodes, (1.0, 0.0)):
            episode.rewards = {"total": total}
        found = assign(LearnerConfig(advantage="dr_grpo", credit=credit), episodes, np.zeros(2, int))
        assert found.keep.tolist() == [0, 2]  # not the conversations that only measured
        for values, sequence in zip(found.advantages, [s for e in episodes for s in e.sequences]):
            assert (values != 0).tolist() == sequence.loss_mask.tolist()


def test_scores_that_are_cut_short_are_not_trained_on_either():
    @dataclasses.dataclass(frozen=True)
    class Cut(Agent):
        async def run(self, example, llm, tools):
            first, second = llm.conversation("Question:"), llm.conversation("Question:")
            await second.generate(max_tokens=1)
            await asyncio.gather(first.score([" Lome" * 8]), self.fill(second))
            return first.episode(answer="")

        async def fill(self, chat):
            await chat.generate(max_tokens=5)
            chat.observe("word " * 200)

    (episode,) = run(Cut(), [EXAMPLE], engine(), {})
    assert episode.truncated
    assert not episode.sequences[0].loss_mask.any()
    assert len(episode.sequences[0]) > len(tiny.tokenizer().encode_prompt("Question:"))


def test_probes_of_probes_and_of_failed_agents_are_closed():
    @dataclasses.dataclass(frozen=True)
    class Nested(Agent):
        fails: bool

        async def run(self, example, llm, tools):
            chat = llm.conversation("Question:")
            await chat.generate(max_tokens=2)
            async with chat.aside() as probe, probe.aside() as deeper:
                assert await deeper.score([" Lome"]) == pytest.approx(await probe.score([" Lome"]), abs=1e-4)
                with pytest.raises(ValueError, match="episode"):
                    probe.episode(answer="")
                if self.fails:
                    raise KeyError("mine")
            return chat.episode(answer="")

    made = engine(3)
    (episode,) = run(Nested(False), [EXAMPLE], made, {})
    assert len(episode.turns) == 1
    with pytest.raises(RuntimeError, match="mine"):
        run(Nested(True), [EXAMPLE], made, {})
    assert not made._streams


def test_a_closed_conversation_is_asked_for_nothing():
    @dataclasses.dataclass(frozen=True)
    class Late(Agent):
        probes: bool

        async def run(self, example, llm, tools):
            chat = llm.conversation("Question:")
            async with chat.aside() as probe:
                probe.force(" I")
            if self.probes:
                await probe.score([" Lome"])
            chat.close()
            await chat.generate()

    for probes in (True, False):
        with pytest.raises(RuntimeError, match="closed"):
            run(Late(probes), [EXAMPLE], engine(), {})


def test_an_endpoint_refuses_probes_and_scores_with_the_reason():
    chat = ChatModel("some-model", base_url="http://127.0.0.1:9/v1")
    stream = chat.open(chat.tokenizer.encode("Question:"), "q")
    with pytest.raises(ValueError, match=r"log-probabilities.*Engine"):
        chat.probe(stream, "q?0")
    with pytest.raises(ValueError, match=r"log-probabilities.*Engine"):
        chat.request(stream, given=[1], scored=True)
    chat.end()


@dataclasses.dataclass(frozen=True)
class Measuring(Agent):
    """Writes something into its turn."""

    info: dict
    rewards: dict = dataclasses.field(default_factory=dict)

    async def run(self, example, llm, tools):
        chat = llm.conversation("Question:")
        turn = await chat.generate()
        turn.info.update(self.info)
        turn.rewards.update(self.rewards)
        return chat.episode(answer="")


def scripted(agent):
    return run(agent, [EXAMPLE], ScriptedEngine(lambda *_: "hm"), {})[0]


def test_numbers_of_any_kind_and_texts_are_measured():
    info = {"gain": np.float32(0.5), "hit": True, "count": np.int64(3), "kind": "bridge", "cut": "a\ud800"}
    info |= {"same": np.bool_(True), "mean": np.array(2.5), "jax": jnp.float32(0.25), "name": np.str_("x")}
    found = scripted(Measuring(info)).turns[0].info
    assert found == {
        **{"gain": 0.5, "hit": 1.0, "count": 3.0, "kind": "bridge", "cut": "a?"},
        **{"same": 1.0, "mean": 2.5, "jax": 0.25, "name": "x"},
    }
    assert all(type(value) in (float, str) for value in found.values())


@pytest.mark.parametrize("value", [math.nan, -math.inf, 10**400, None, [1.0], np.ones(2)])
def test_what_no_record_takes_is_refused_by_name(value):
    with pytest.raises(ValueError, match=r"info\['gain'\].*turn 0 of example 'q'"):
        scripted(Measuring({"gain": value}))


def test_an_agent_s_own_turn_rewards_are_refused_with_the_fix():
    with pytest.raises(ValueError, match=r"turn 0 of example 'q'.*turn\.info\['gain'\]"):
        scripted(Measuring({}, {"gain": 0.4}))


# --- scoring texts in a conversation: the log-probabilities of one whole forward pass ---


TEXTS = (" Accra", "", " is the\n", "capital")


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
