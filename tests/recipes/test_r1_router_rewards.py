"""R1-Router's rewards: by hand on the released golden steps, for every kind of step, and each fault of the released code."""

import json

import numpy as np
import pytest

from routerl_jax.core.types import Episode, Example, Turn
from routerl_jax.data.readers import open_dataset
from routerl_jax.data.trajectories import GoldenStep, golden_steps, read_trajectories
from routerl_jax.knowledge.encoders import shared_encoder
from routerl_jax.recipes.r1_router import rewards
from routerl_jax.recipes.r1_router.rewards import (
    RELEASED_REWARD,
    REWARD,
    answer_reward,
    final_accuracy,
    route_reward,
    similarities,
)
from routerl_jax.recipes.r1_router.steps import StepProtocol
from routerl_jax.rewards.terms import RewardFunction

PROTOCOL = StepProtocol(tools=("text", "table", "text_image"))
ROUTE = "<think>hm</think><sub-question>{}</sub-question><ret>{}</ret>"
ANSWER = "<think>so</think><answer>{}</answer>"
GOLD = Example(
    id="t/1",
    question="?",
    answers=("who directed it?",),
    metadata={"step": GoldenStep(kind="route", history=(), query="who directed it?", retrievers=("text retriever",))},
)
END = Example(
    id="t/3",
    question="?",
    answers=("none",),
    metadata={"step": GoldenStep(kind="route", history=(), query="none", retrievers=("none",))},
)


class Encoder:
    """Vectors by hand, not normalised; remembers its calls."""

    vectors = {"who directed it?": (2, 0), "who made it?": (3, 4), "when was it?": (0, 1), "none": (1, 1)}  # noqa: RUF012

    def __init__(self):
        self.calls = []

    def embed(self, inputs, /, *, prefix=None, batch_size=32):
        self.calls.append(list(inputs))
        return np.asarray([self.vectors[text] for text in inputs], np.float32)


@pytest.fixture
def encoder(monkeypatch):
    encoder = Encoder()
    asked = []
    monkeypatch.setattr(rewards, "shared_encoder", lambda name: asked.append(name) or encoder)
    encoder.names = asked
    return encoder


def attempt(example, text):
    """An episode of a golden step, as StepAgent reads it."""
    route = example.metadata["step"].kind == "route"
    turn = Turn(text=text, stop_reason="stop", tokens=1)
    turn.action = PROTOCOL.routes.parse(text) if route else PROTOCOL.answers.parse(text)
    turn.well_formed = PROTOCOL.routes.well_formed(text) if route else PROTOCOL.answers.well_formed(text)
    answer = (turn.action.query if route else turn.action.answer) or None
    return Episode(example=example, sample=0, answer=answer, turns=[turn], sequences=[])


def step_example(answers, kind):
    step = GoldenStep(kind=kind, history=(), query="q", answers=tuple(answers))
    return Example(id="t/2", question="?", answers=tuple(answers), metadata={"step": step})


# --- routes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("example", "text", "paper", "released"),
    [
        (GOLD, ROUTE.format("Who directed it?", "Text Retriever"), 1.0, 1.0),
        (GOLD, ROUTE.format("who made it?", "text retriever"), 0.5 * 0.6 + 0.5, 0.8),
        (GOLD, ROUTE.format("who made it?", "table retriever"), 0.5 * 0.6, 0.3),
        (GOLD, ROUTE.format("when was it?", "text retriever"), 0.5, 0.5),
        (GOLD, ROUTE.format("who made it?", "web retriever"), 0.0, 0.0),
        (GOLD, ROUTE.format("who made it?", "text retriever, table retriever"), 0.0, 0.3),
        (GOLD, ROUTE.format("who made it?", "text retriever, none"), 0.0, 0.0),
        (GOLD, ROUTE.format("none", "none"), 0.0, 0.0),
        (
            GOLD,
            ROUTE.format("none", "text retriever"),
            0.0,
            0.5,
        ),  # can't be carried out; the released code doesn't look
        (GOLD, ROUTE.format("who made it?", "text retriever") + " and so on", 0.0, 0.8),
        (GOLD, "<sub-question>who made it?</sub-question><ret>text retriever</ret>", 0.0, 0.0),
        (GOLD, "who made it?", 0.0, 0.0),
        (END, ROUTE.format("None", "none"), 1.0, 1.0),
        (END, ROUTE.format("who made it?", "text retriever"), 0.0, 0.0),
        (END, ROUTE.format("who made it?", "none"), 0.0, 0.5),
    ],
)
def test_route_rewards_by_hand(encoder, example, text, paper, released):
    episodes = [attempt(example, text)]
    assert route_reward(episodes) == pytest.approx([paper])
    assert route_reward(episodes, variant="released") == pytest.approx([released])


@pytest.mark.parametrize(
    ("answer", "golds", "right"),
    [
        ("Yes, it is.", ("yes",), 1.0),
        ("yes no", ("yes",), 0.0),
        ("yes or no", ("No",), 0.0),
        ("no", ("no", "not at all"), 1.0),
        ("not at all, yes", ("no", "not at all"), 1.0),  # another answer that is accepted
        ("Accra, and no other", ("Accra",), 1.0),
    ],
)
def test_yes_and_no_at_once_is_neither(answer, golds, right):
    assert final_accuracy(answer, golds) == right


def test_a_knowledge_base_may_be_named_with_capitals(encoder):
    """A user's `Wiki_2018`: trajectories and prompts call it "wiki 2018 retriever"."""
    protocol = StepProtocol(tools=("Wiki_2018", "table"))
    step = GoldenStep(kind="route", history=(), query="who made it?", retrievers=("wiki 2018 retriever",))
    text = ROUTE.format("who made it?", "wiki 2018 retriever")
    turn = Turn(text=text, stop_reason="stop", tokens=1, action=protocol.routes.parse(text), well_formed=True)
    assert turn.action.tool == "Wiki_2018"
    example = Example(id="t/1", question="?", answers=("who made it?",), metadata={"step": step})
    assert route_reward([Episode(example=example, sample=0, answer="x", turns=[turn], sequences=[])]) == [1.0]


def test_the_leak_of_none_is_an_option(encoder):
    """The released code compares the word "none" with whatever was asked: cos((3, 4), (1, 1)) = 7 / (5 sqrt 2)."""
    episodes = [attempt(END, ROUTE.format("who made it?", "text retriever"))]
    assert route_reward(episodes) == [0.0]
    assert not encoder.calls
    assert route_reward(episodes, none_by_cosine=True) == pytest.approx([0.5 * 7 / (5 * 2**0.5)])


def test_the_released_reward_has_the_leak_of_none(encoder):
    """At the end of a trajectory any sub-question earns half its cosine with "none": 7 / (5 sqrt 2) = 0.99."""
    tried = [attempt(END, ROUTE.format("who made it?", name)) for name in ("text retriever", "none")]
    half = 0.5 * 7 / (5 * 2**0.5)
    assert [terms["total"] for terms in RewardFunction(RELEASED_REWARD, "vqa")(tried)] == pytest.approx(
        [half, half + 0.5]
    )
    assert [terms["total"] for terms in RewardFunction(REWARD, "vqa")(tried)] == [0.0, 0.0]


def test_all_texts_of_a_step_are_embedded_in_one_call(encoder):
    texts = ["who made it?", "when was it?", "who made it?", "who directed it?", "none"]
    episodes = [attempt(GOLD, ROUTE.format(text, "table retriever")) for text in texts]
    assert route_reward(episodes, encoder="a/b", alpha=0.25) == pytest.approx([0.15, 0, 0.15, 0.25, 0.0])
    assert encoder.calls == [["when was it?", "who directed it?", "who made it?"]]
    assert encoder.names == ["a/b"]
    assert route_reward(episodes, alpha=0, beta=1) == [0.0] * 5


def test_an_encoder_is_not_loaded_for_answers(monkeypatch):
    monkeypatch.setattr(rewards, "shared_encoder", lambda name: pytest.fail("loaded"))
    assert route_reward([attempt(step_example(["x"], "final"), ANSWER.format("x"))]) == [0.0]


def test_similarity_by_a_real_encoder_is_the_cosine_of_its_vectors():
    pairs = [
        ("who directed the film?", "who is the director of the film?"),
        ("when was he born?", "who is the director of the film?"),
    ]
    encoder = shared_encoder("all-MiniLM-L6-v2")
    vectors = np.asarray([[encoder.embed([text])[0] for text in pair] for pair in pairs], np.float64)
    expected = [a @ b / np.sqrt((a @ a) * (b @ b)) for a, b in vectors]
    assert similarities(pairs, lambda: encoder) == pytest.approx(expected, abs=1e-5)  # float32, other batches
    assert expected[0] > 0.8 > 0.4 > expected[1]


# --- answers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("golds", "kind", "text", "paper", "released"),
    [
        # five words of seven, "the" not counted: the graded recall of intermediate answers, in both
        (
            ["frank wisbar directed the film strangler of swamp"],
            "answer",
            "frank wisbar directed the film",
            4 / 7,
            4 / 7,
        ),
        # a short intermediate answer is graded in the paper; the released code makes it right or wrong
        (["frank wisbar"], "answer", "frank", 0.5, 0.0),
        (["frank wisbar"], "answer", "it is Frank Wisbar!", 1.0, 1.0),
        # a long final answer is right or wrong in the paper, graded in the released code
        (["one two three four five six"], "final", "1 2 three", 0.0, 0.5),
        (["9 December 1899"], "final", "December 9, 1899", 1.0, 1.0),
        (["9 December 1899"], "final", "December 1899", 0.0, 0.0),
        (["Mälaren", "Baltic Sea"], "final", "the baltic sea", 1.0, 1.0),
        # the released code looks at the gold of the best F1 alone
        (["a b c d", "x"], "final", "a b c x y", 1.0, 0.0),
        ([""], "answer", "anything", 0.0, 0.0),
    ],
)
def test_answer_rewards_by_hand(golds, kind, text, paper, released):
    episodes = [attempt(step_example(golds, kind), ANSWER.format(text))]
    assert answer_reward(episodes) == pytest.approx([paper])
    assert answer_reward(episodes, variant="released") == pytest.approx([released])


@pytest.mark.parametrize(
    ("text", "paper", "released"),
    [
        ("<answer>x</answer>", 0.0, 0.0),
        ("well: " + ANSWER.format("x"), 0.0, 1.0),
        ("<answer>x</answer><think>so</think>", 0.0, 1.0),
        ("<think>so</think>x", 0.0, 0.0),
    ],
)
def test_the_form_of_answers(text, paper, released):
    episodes = [attempt(step_example(["x"], "final"), text)]
    assert answer_reward(episodes) == [paper]
    assert answer_reward(episodes, variant="released") == [released]


def test_an_episode_without_turns_earns_nothing():
    """Its prompt was too long."""
    empty = [
        Episode(example=e, sample=0, answer=None, turns=[], sequences=[]) for e in (GOLD, step_example(["x"], "final"))
    ]
    for variant in ("paper", "released"):
        assert route_reward(empty, variant=variant) == answer_reward(empty, variant=variant) == [0.0, 0.0]


# --- the released golden steps -----------------------------------------------------------------------------------------


def test_the_released_golden_steps_by_hand(shared_data, encoder, tmp_path):
    """The first trajectory, R A R A R A: the gold itself earns 1 at every step, other attempts what is computed here."""
    source = open_dataset(f"trajectories/text:{shared_data('r1router_trajectories/trajectories_dev.jsonl.gz')}")
    steps = [source[i] for i in range(6)]
    assert [step.metadata["step"].kind for step in steps] == ["route", "answer", "route", "answer", "route", "final"]
    reward = RewardFunction(REWARD, "vqa")
    gold = [attempt(step, PROTOCOL.write_golden(step.metadata["step"])) for step in steps]
    assert [terms["total"] for terms in reward(gold)] == [1.0] * 6
    assert [terms["r1_router.route"] for terms in reward(gold)] == [1.0, 0.0, 1.0, 0.0, 1.0, 0.0]

    Encoder.vectors = {**Encoder.vectors, "when was frank wisbar born?": (0, 5), "who made it?": (3, 4)}
    tried = [
        attempt(steps[2], ROUTE.format("who made it?", "text retriever")),  # cosine 0.8: 0.4 + 0.5
        attempt(steps[2], ROUTE.format("who made it?", "table retriever")),
        attempt(steps[4], ROUTE.format("who made it?", "text retriever")),  # nothing more was needed
        # gold: frank wisbar was born on december 9, 1899. Eight words, of which five are there
        attempt(steps[3], ANSWER.format("he was born on December 9")),
        attempt(steps[5], ANSWER.format("born 9 December 1899, I think")),  # gold: 9 December 1899
        attempt(steps[5], ANSWER.format("December 1899")),
    ]
    expected = [0.9, 0.4, 0.0, 5 / 8, 1.0, 0.0]
    assert [terms["total"] for terms in reward(tried)] == pytest.approx(expected)


def test_every_released_golden_step_earns_its_reward(shared_data, encoder):
    """1 for the gold itself, by both variants, but for the empty gold answer; those about images included."""
    trajectories = read_trajectories(shared_data("r1router_trajectories/trajectories_dev.jsonl.gz"))
    steps = [step for _, trajectory in trajectories for step in golden_steps(trajectory)]
    examples = [Example(id=str(i), question="?", answers=(), metadata={"step": step}) for i, step in enumerate(steps)]
    gold = [attempt(example, PROTOCOL.write_golden(step)) for example, step in zip(examples, steps)]
    expected = [float(step.kind == "route" or bool(step.answers[0])) for step in steps]
    assert expected.count(0.0) == 1
    for weights in (REWARD, RELEASED_REWARD):
        assert [terms["total"] for terms in RewardFunction(weights, "vqa")(gold)] == expected
    assert not encoder.calls


# --- settings ----------------------------------------------------------------------------------------------------------


def test_errors():
    question = Episode(
        example=Example(id="q", question="?", answers=("x",)), sample=0, answer="x", turns=[], sequences=[]
    )
    for term in (route_reward, answer_reward):
        with pytest.raises(ValueError, match=r"example 'q' is none; give config.data.train=trajectories:FILE"):
            term([question])
        with pytest.raises(ValueError, match=r"variant='mine' of .* must be one of paper, released"):
            term([question], variant="mine")
    with pytest.raises(ValueError, match="encoder"):
        RewardFunction({"r1_router.route": {"encodr": "x"}})
    assert json.loads(json.dumps(RELEASED_REWARD)) == RELEASED_REWARD
