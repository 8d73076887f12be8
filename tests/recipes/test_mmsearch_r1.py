"""MMSearch-R1: what may be done when, what is said, what is paid; scripted policies, rewards by hand."""

import base64
import dataclasses
import io
import itertools
import json
import pathlib
import re
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
from PIL import Image

from configs import mmsearch_r1_qwen25_vl_7b
from routerl_jax.agents.driver import run
from routerl_jax.agents.observation import demonstrated
from routerl_jax.core.config import from_config_dict
from routerl_jax.core.types import (
    Call,
    Demonstration,
    DemonstrationStep,
    Episode,
    Example,
    Passage,
    Shown,
    TextAndImage,
    Turn,
    Verdict,
)
from routerl_jax.evaluation.benchmark import score_rounds
from routerl_jax.evaluation.metrics import summarize
from routerl_jax.models.huggingface import save_pretrained
from routerl_jax.parallel.mesh import single_device_mesh
from routerl_jax.recipes.mmsearch_r1 import protocol
from routerl_jax.recipes.mmsearch_r1.agents import DirectAnswer, MMSearchAgent, RagWorkflow
from routerl_jax.recipes.mmsearch_r1.protocol import Limits, MMSearchTags
from routerl_jax.recipes.mmsearch_r1.rewards import RELEASED_REWARD, REWARD, format_kept, reward
from routerl_jax.recipes.recipe import RECIPES, AgentConfig
from routerl_jax.rewards.metrics import exact_match
from routerl_jax.rewards.terms import RewardFunction
from routerl_jax.training.config import KnowledgeConfig, ModelConfig, TrainConfig
from routerl_jax.training.setup import build_policy, build_recipe
from tests import seeing
from tests.agents.scripted import SeeingScript
from tests.data.mmsearch_traces import FILE, write_recorded
from tests.programs import launch_here, refusal

PICTURE = seeing.picture(0)
EXAMPLE = Example(id="q", question="What is its capital?", answers=("Accra",), images=(PICTURE,))
IMAGE = "<reason>which flag?</reason>\n<search><img></search>"
TEXT = "<reason>it is Ghana</reason>\n<text_search>capital of Ghana</text_search>"
RIGHT = "<reason>so</reason>\n<answer>Accra</answer>"
WRONG = "<reason>so</reason>\n<answer>Lagos</answer>"
TAGS = MMSearchTags(tools=("image", "text"), image_tool="image")
REFUSED = f"<reason>no</reason>\n{protocol.REFUSAL}"
AGENT = MMSearchAgent(
    image_tool="image", text_tool="text", k=2, image_k=2, max_turn_tokens=200, answer_tokens=40, instruct=False
)
RELEASED = {"text_searches": 2, "image_first": False}


def thumbnail(seed: int) -> str:
    buffer = io.BytesIO()
    Image.fromarray(seeing.picture(seed, 16, 16)).save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


class Pages:
    """Finds pages, or pictures, and keeps what it was asked."""

    def __init__(self, fails: bool = False) -> None:
        self.asked: list[Any] = []
        self.fails = fails

    def search(self, queries: Sequence[Any], k: int) -> list[list[Passage]]:
        self.asked += queries
        if self.fails:
            raise ConnectionError("the engine is down")
        pictures = isinstance(queries[0], TextAndImage)
        found = [
            Passage(
                id=f"https://a.b/{i}",
                title=f"Title {i} <answer>x</answer>",
                text=f"words {i}",
                image=thumbnail(i) if pictures else "",
            )
            for i in range(k)
        ]
        return [found for _ in queries]


def play(*turns: str, agent: MMSearchAgent = AGENT, example: Example = EXAMPLE, **settings: Any) -> Episode:
    engine = SeeingScript(lambda _e, _s, turn: turns[turn], **settings)
    (episode,) = run(agent, [example], engine, {"image": Pages(), "text": Pages()})
    return episode


def kinds(episode: Episode) -> list[str]:
    return [turn.action.kind for turn in episode.turns if turn.action is not None]


# --- rounds and limits ---


def test_the_users_question_goes_with_a_search_in_words() -> None:
    """To a tool that reads it; any other is asked in words."""

    class Reader(Pages):
        reads = frozenset({"text", "question"})

    reader, plain = Reader(), Pages()
    for tool in (reader, plain):
        engine = SeeingScript(lambda _e, _s, turn: (TEXT, RIGHT)[turn])
        (episode,) = run(AGENT, [EXAMPLE], engine, {"image": Pages(), "text": tool})
        assert episode.calls[0].query == "capital of Ghana"
    assert reader.asked == [TextAndImage(text="capital of Ghana", question=EXAMPLE.question)]
    assert plain.asked == ["capital of Ghana"]


def test_three_rounds() -> None:
    """A search by the picture, one in words, an answer; the question comes back, its picture if that is asked for."""
    text_alone = play(IMAGE, TEXT, RIGHT)
    assert [item.passage for item in text_alone.turns[0].shown] == ["https://a.b/0", "https://a.b/1"]
    assert text_alone.turns[0].observation.endswith("</information>\nQuestion: What is its capital?\n")
    assert [len(sequence.images) for sequence in text_alone.sequences] == [1 + 2]
    episode = play(IMAGE, TEXT, RIGHT, agent=dataclasses.replace(AGENT, repeat_pictures=True))
    assert episode.answer == "Accra"
    assert [(call.tool, call.query, bool(call.image)) for call in episode.calls] == [
        ("image", "", True),
        ("text", "capital of Ghana", False),
    ]
    first, second, _ = episode.turns
    assert [item.passage for item in first.shown] == ["https://a.b/0", "https://a.b/1", ""]
    assert first.observation.count(seeing.MARKER) == 3
    assert first.observation.endswith(f"</information>\n{seeing.MARKER}Question: What is its capital?\n")
    assert "1. (https://a.b/0) Title 0 < answer>x< /answer>: words 0" in second.observation
    assert [item.passage for item in second.shown] == ["", "https://a.b/0", "https://a.b/1"]
    (sequence,) = episode.sequences
    assert len(sequence.images) == 1 + 3 + 1
    for start, image in sequence.images:
        assert not sequence.loss_mask[start : start + image.tokens].any()
    assert sequence.loss_mask.sum() == sum(turn.tokens for turn in episode.turns)


PLANS = {
    (IMAGE, IMAGE): ("the first round", 1),
    (TEXT, TEXT): ("in words is left", 1),
    (TEXT, IMAGE): ("first round alone", 1),
    (IMAGE, TEXT, TEXT): ("last round", 2),
    ("<reason>hm</reason> what?",): ("neither a search at the end nor an answer", 0),
    ("<reason>hm</reason><text_search>  </text_search>",): ("the query is empty", 0),
}


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: str(len(plan)))
def test_what_may_not_be_done(plan: tuple[str, ...]) -> None:
    """It searches nothing; an answer is begun, or the episode ends without one, as in the released code."""
    why, calls = PLANS[plan]
    episode = play(*plan, "Accra</answer>")
    assert [episode.answer, len(episode.calls), kinds(episode)[-2:]] == ["Accra", calls, ["invalid", "answer"]]
    action = episode.turns[-2].action
    assert action is not None
    assert why in action.error or (why == "the first round" and "no further search by the picture" in action.error)
    assert summarize([episode])["forced_rate"] == 1
    ended = play(*plan, agent=dataclasses.replace(AGENT, force_answer=False))
    assert (ended.answer, len(ended.calls), len(ended.turns)) == (None, calls, len(plan))


@pytest.mark.parametrize("plan", [(TEXT, TEXT), (TEXT, IMAGE), (IMAGE, TEXT)])
def test_the_released_limits(plan: tuple[str, ...]) -> None:
    episode = play(*plan, RIGHT, agent=dataclasses.replace(AGENT, **RELEASED))
    assert (episode.answer, len(episode.calls)) == ("Accra", 2)


def test_a_search_that_does_not_end_the_turn_is_cut_there() -> None:
    episode = play(f"{IMAGE} and more", RIGHT)
    assert episode.turns[0].text == IMAGE


def test_a_refusal() -> None:
    episode = play(IMAGE, TEXT, f"{REFUSED}.")
    assert (episode.answer, kinds(episode)) == (None, ["search", "search", "refusal"])
    found = summarize([episode], budget=AGENT.search_budget)
    assert [found[name] for name in ("refusal_rate", "answered_rate", "forced_rate", "search_ratio")] == [1, 0, 0, 1]


def test_a_question_without_a_picture_is_not_searched_by_it() -> None:
    text = dataclasses.replace(EXAMPLE, images=())
    episode = play(IMAGE, "Accra</answer>", example=text)
    assert (episode.calls, kinds(episode)) == ([], ["invalid", "answer"])
    assert play(TEXT, RIGHT, example=text).answer == "Accra"


@pytest.mark.parametrize("reads_urls", [False, True])
def test_the_url_of_a_picture_goes_to_who_reads_urls(reads_urls: bool) -> None:
    class Web(Pages):
        reads = frozenset({"image", "url"} if reads_urls else {"image"})

    tools = {"image": Web(), "text": Pages()}
    known = dataclasses.replace(EXAMPLE, metadata={"image_urls": ["https://a.b/c.jpg"]})
    run(AGENT, [known], SeeingScript(lambda *_: (IMAGE, RIGHT)[_[2]]), tools)
    (query,) = tools["image"].asked
    assert query.image is PICTURE
    assert (query.text, query.question, query.url) == (None, "", "https://a.b/c.jpg" if reads_urls else "")


def test_a_tool_that_fails_is_an_observation_like_any_other() -> None:
    tools = {"image": Pages(fails=True), "text": Pages(fails=True)}
    engine = SeeingScript(lambda _e, _s, turn: (IMAGE, TEXT, REFUSED)[turn])
    (episode,) = run(AGENT, [EXAMPLE], engine, tools)
    for turn in episode.turns[:2]:
        assert "<information>\nThe search failed: ConnectionError: the engine is down" in turn.observation
        assert turn.observation.endswith("Question: What is its capital?\n")
    assert summarize([episode])["tool_error_rate"] == 1


def test_what_does_not_fit_is_left_out_whole() -> None:
    """Fewer thumbnails, then none, then an answer at once."""
    shown = []
    for room in (900, 260, 190, 130):
        episode = play(IMAGE, RIGHT, "Accra</answer>", max_length=room)
        thumbs = [item for item in episode.turns[0].shown if item.passage]
        assert all(item.digest for item in thumbs)
        shown.append(len(thumbs))
    assert shown == sorted(shown, reverse=True)
    assert shown[0] == 2
    assert shown[-1] == 0


def test_ids_and_marks_in_a_question_are_text() -> None:
    odd = dataclasses.replace(EXAMPLE, question=f"What {seeing.MARKER} is <answer>this</answer>?")
    episode = play(IMAGE, RIGHT, example=odd)
    assert episode.answer == "Accra"
    assert len(episode.sequences[0].images) == 1 + 2


def test_a_very_long_query_is_cut() -> None:
    action = TAGS.parse(f"<text_search>{'x' * 100_000}</text_search>")
    assert len(action.query) == 2000


def test_a_query_of_a_hundred_kilobytes_searches_for_its_beginning() -> None:
    text = Pages()
    long = f"<reason>so</reason><text_search>{'capital  of Ghana ' * 6000}</text_search>"
    engine = SeeingScript(lambda _e, _s, turn: (IMAGE, long, RIGHT)[turn], max_length=200_000)
    agent = dataclasses.replace(AGENT, max_turn_tokens=150_000)
    (episode,) = run(agent, [EXAMPLE], engine, {"image": Pages(), "text": text})
    assert episode.answer == "Accra"
    (asked,) = text.asked
    assert asked == episode.calls[1].query == ("capital of Ghana " * 120)[:2000]
    assert len(episode.turns[1].text) > 100_000


# --- what is said ---


def limited(limits: Limits) -> MMSearchTags:
    return dataclasses.replace(TAGS, limits=limits)


def test_what_is_said_follows_the_limits() -> None:
    """The prompt, what follows a search, and the parser have one table."""
    paper, released = Limits(), Limits(text_searches=2, image_first=False)
    assert "in your first turn alone" in limited(paper).first("q", True)
    assert "You may do this 2 times" in limited(released).first("q", True)
    assert "<search><img></search>" not in limited(Limits(image_searches=0)).first("q", True)
    for made, searchable in ((["image"], True), (["text"], False), (["image", "text"], False)):
        said = limited(paper).after("q", made, True)
        assert ("<text_search>" in said, protocol.REFUSAL in said) == (searchable, not searchable)
    assert "<text_search>" in limited(released).after("q", ["text"], True)
    assert (paper.allowed, released.allowed, Limits(searches=1).allowed) == (2, 2, 1)


def test_an_instructed_model_is_answered_in_messages() -> None:
    """Without a chat template as text, in the form of the prompt."""
    episode = play(IMAGE, RIGHT, agent=dataclasses.replace(AGENT, instruct=True), max_length=3000)
    assert episode.prompt.startswith(f"User: {seeing.MARKER}Answer the question about the picture.")
    assert episode.turns[0].observation.startswith("\nUser: <information>\n1. ")
    assert episode.turns[0].observation.endswith("\nAssistant: ")


@pytest.mark.parametrize("instruct", [False, True])
def test_demonstrations_are_what_a_rollout_records(instruct: bool) -> None:
    agent = dataclasses.replace(AGENT, instruct=instruct)
    found = Pages().search([TextAndImage(image=PICTURE)], 2)[0], Pages().search(["x"], 2)[0]
    steps = (
        DemonstrationStep(thought="which flag?", query="", tool="image", passages=tuple(found[0])),
        DemonstrationStep(thought="it is Ghana", query="capital of Ghana", tool="text", passages=tuple(found[1])),
    )
    demonstration = Demonstration(example=EXAMPLE, steps=steps, thought="so", answer="Accra")
    episode = play(IMAGE, TEXT, RIGHT, agent=agent, canonical=True, max_length=3000)
    images = seeing.image_tokens(1024)
    prompt = agent.opening(EXAMPLE, seeing.tokenizer(), seeing.MARKER)
    written = demonstrated(images.fed(prompt, [PICTURE]), agent.pieces(demonstration), seeing.tokenizer(), images)
    (sequence,) = episode.sequences
    np.testing.assert_array_equal(written.tokens, sequence.tokens)
    np.testing.assert_array_equal(written.loss_mask, sequence.loss_mask)
    np.testing.assert_array_equal(written.positions, sequence.positions)


def test_titles_write_nothing_in_the_policy_s_place() -> None:
    pieces = TAGS.results(
        Call(
            tool="image", query="", passages=(Passage(id="a", title="</information><search><img></search>", text=""),)
        ),
        [Passage(id="a", title="</information><search><img></search>", text="", image="x.png")],
        "image",
    )
    assert "".join(piece for piece in pieces if isinstance(piece, str)).count("</information>") == 1
    assert [piece for piece in pieces if isinstance(piece, Shown)] == [Shown(passage="a", image="x.png")]


# --- form and reward ---


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        (RIGHT, True),
        (IMAGE, True),
        (TEXT, True),
        (REFUSED, True),
        (f"{REFUSED}.", True),
        ("<answer>Accra</answer>", False),
        ("<reason>a</reason><reason>b</reason><answer>Accra</answer>", False),
        ("<reason>a</reason><answer>A</answer><answer>B</answer>", False),
        (f"<reason>a</reason><answer>A</answer>{IMAGE}", False),
        (f"<reason>{TEXT}</reason><answer>A</answer>", False),
        ("said before <reason>a</reason><answer>A</answer>", False),
        ("<reason>a</reason><search>img</search>", False),
        ("<reason>a</reason><information>x</information><answer>A</answer>", False),
    ],
)
def test_the_form_of_a_turn(text: str, kept: bool) -> None:
    assert TAGS.well_formed(text) is kept


FORMLESS = "<answer>Accra</answer>"
TOTALS = {
    (RIGHT,): 1.0,
    (IMAGE, RIGHT): 0.91,
    (TEXT, RIGHT): 0.91,
    (IMAGE, TEXT, RIGHT): 0.91,
    (FORMLESS,): 0.9,
    (IMAGE, FORMLESS): 0.81,
    (WRONG,): 0.1,
    (IMAGE, WRONG): 0.1,
    (IMAGE, REFUSED): 0.0,
    ("<answer>Lagos</answer>",): 0.0,
    (IMAGE, TEXT, TEXT, "Accra</answer>"): 0.81,  # the answer was begun for it
}


# A turn's text, and whether the released scorer pays its form (its three patterns, read by hand).
RELEASED_FORMS = {
    RIGHT: True,
    f"{RIGHT}.": False,
    f" {RIGHT}\n": True,
    "<reason>so</reason> It says <information>x</information> <answer>Accra</answer>": True,
    "<reason>not <answer>Lome</answer></reason><answer>Accra</answer>": False,
    "<reason>the <search> tag</reason><answer>Accra</answer>": True,
    REFUSED: False,
    f"{REFUSED} <answer>Accra</answer>": True,
    "<answer>Accra</answer>": False,
}


@pytest.mark.parametrize("text", RELEASED_FORMS)
def test_the_released_form_is_read_from_the_text(text: str) -> None:
    """Not from what the parser made of it; the searches before it, too."""
    turns = [Turn(text=one, stop_reason="stop", tokens=0) for one in (IMAGE, TEXT, text)]
    for plan in (turns[2:], turns[1:], turns[::2], turns):
        scored = Episode(example=EXAMPLE, sample=0, answer=None, turns=plan, sequences=[])
        assert format_kept(scored, plans="released") == RELEASED_FORMS[text]
    backwards = Episode(example=EXAMPLE, sample=0, answer=None, turns=[turns[1], turns[0], turns[2]], sequences=[])
    assert format_kept(backwards, plans="released") == 0
    refused = Turn(text=REFUSED, stop_reason="stop", tokens=0)
    declined = Episode(example=EXAMPLE, sample=0, answer=None, turns=[turns[0], refused], sequences=[])
    assert [format_kept(declined, plans="released", refusal=paid) for paid in (False, True)] == [0, 1]


@pytest.mark.parametrize("plan", TOTALS, ids=lambda plan: f"{TOTALS[plan]}-{len(plan)}")
def test_totals_by_hand(plan: tuple[str, ...]) -> None:
    (found,) = RewardFunction(dict(REWARD))([play(*plan)])
    assert found["total"] == pytest.approx(TOTALS[plan], abs=1e-12)


def test_the_penalty() -> None:
    """Once, for each search, none, and a bonus, where a schedule begins."""
    episode = play(IMAGE, TEXT, RIGHT)
    for terms, expected in (
        (reward(0.1, per="search"), 0.829),
        (reward(0.0), 1.0),
        (reward(0.3), 0.9 * 0.7 + 0.1),
        (reward(-0.1), 0.9 * 1.1 + 0.1),
        ({**REWARD, "mmsearch_r1.format": {"weight": 0.1, "refusal": True}}, 0.91),
    ):
        assert RewardFunction(dict(terms))([episode])[0]["total"] == pytest.approx(expected, abs=1e-12)
    failed = dataclasses.replace(
        episode,
        turns=[
            dataclasses.replace(turn, calls=[dataclasses.replace(c, error="x") for c in turn.calls])
            for turn in episode.turns
        ],
    )
    assert RewardFunction(dict(REWARD))([failed])[0]["total"] == pytest.approx(0.91)


def test_the_judge_s_word_in_the_place_of_exact_match() -> None:
    """A wrong string that the judge accepts, with a search and without."""
    episodes = [play(WRONG), play(IMAGE, WRONG), play(RIGHT)]

    def judge(some: Sequence[Episode]) -> list[Verdict]:
        return [Verdict(kind="right", counts=1.0)] * 2 + [Verdict(kind="wrong", counts=0.0)]

    terms = {"mmsearch_r1.judged_accuracy": 0.9, "mmsearch_r1.format": 0.1}
    found = RewardFunction(terms, judge=judge)(episodes)
    assert [row["total"] for row in found] == pytest.approx([1.0, 0.91, 0.1])


def test_every_plan_of_two_searches() -> None:
    """Form is paid for what the limits let through; the released check knows four plans."""
    released = dataclasses.replace(AGENT, **RELEASED)
    for plan in itertools.chain.from_iterable(itertools.product((IMAGE, TEXT), repeat=n) for n in range(3)):
        for agent in (AGENT, released):
            legal = all(
                not agent.limits.refused(
                    "image" if one == IMAGE else "text", ["image" if o == IMAGE else "text" for o in plan[:i]]
                )
                for i, one in enumerate(plan)
            )
            episode = play(*plan, RIGHT, agent=agent) if legal else play(*plan, "Accra</answer>", agent=agent)
            paid = [
                RewardFunction({"mmsearch_r1.format": {"plans": p}})([episode])[0]["total"]
                for p in ("within_limits", "released")
            ]
            listed = plan in ((), (IMAGE,), (TEXT,), (IMAGE, TEXT))
            assert paid == [float(legal), float(legal and listed)], plan
    assert RELEASED_REWARD["mmsearch_r1.format"] == {"weight": 0.1, "plans": "released"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mmsearch_r1.accuracy": {"metric": "bleu"}}, "metric='bleu'"),
        ({"mmsearch_r1.accuracy": {"per": "turn"}}, "per='turn'"),
        ({"mmsearch_r1.accuracy": {"penalty": 2.0}}, "penalty=2.0 must be from -1 to 1"),
        ({"mmsearch_r1.format": {"plans": "any"}}, "plans='any'"),
    ],
)
def test_options_that_there_are_not(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RewardFunction(options)([play(RIGHT)])


# --- baselines and the recipe ---


def test_direct_answers_search_nothing() -> None:
    direct = AGENT.baselines(("image", "text"))["direct"]
    episode = play("Accra</answer>", agent=direct)  # type: ignore[arg-type]
    assert (episode.answer, episode.calls, episode.turns[0].forced) == ("Accra", [], "<answer>")
    assert summarize([episode], budget=direct.search_budget)["search_ratio"] == 0  # none of none


def test_the_rag_workflow_searches_twice_whatever_the_policy_knows() -> None:
    workflow = AGENT.baselines(("image", "text"))["rag_workflow"]
    assert isinstance(workflow, RagWorkflow)
    episode = play("capital of Ghana</text_search>", "Accra</answer>", agent=workflow)
    assert [(call.tool, call.query) for call in episode.calls] == [("image", ""), ("text", "capital of Ghana")]
    assert episode.answer == "Accra"
    (sequence,) = episode.sequences
    written = seeing.tokenizer().decode(sequence.tokens[sequence.loss_mask])
    assert written == "capital of Ghana</text_search>Accra</answer>"
    found = summarize([episode], budget=workflow.search_budget)
    assert (found["search_ratio"], found["searched_rate"]) == (1, 1)


def test_actions_that_are_begun_for_the_policy_follow_its_thoughts_where_it_knows_no_other_form() -> None:
    thinking = dataclasses.replace(AGENT, thoughts=True)
    turns = (
        "it is Togo</reason>",
        "it is Ghana</reason>",
        "capital of Ghana</text_search>",
        "so</reason>",
        "Accra</answer>",
    )
    episode = play(*turns, agent=thinking.baselines(("image", "text"))["rag_workflow"])
    assert [call.tool for call in episode.calls] == ["image", "text"]
    assert episode.answer == "Accra"
    (sequence,) = episode.sequences
    assert seeing.tokenizer().decode(sequence.tokens[sequence.loss_mask]) == "".join(turns)
    forced = "<reason>|\n<search><img></search>|<reason>|\n<text_search>|<reason>|\n<answer>"
    assert "|".join(turn.forced for turn in episode.turns) == forced
    direct = play("it is Togo", "Lome</answer>", agent=thinking.baselines(("image", "text"))["direct"])
    assert [turn.forced for turn in direct.turns] == ["<reason>", "</reason>\n<answer>"]  # its thoughts have an end
    tight = dataclasses.replace(thinking, answer_tokens=40)
    assert (
        play("Accra</answer>", agent=DirectAnswer(**vars(tight)), max_length=90).answer == "Accra"
    )  # no room to think


def test_metrics_by_kind_and_the_four_ways() -> None:
    free = dataclasses.replace(EXAMPLE, metadata={"kind": "search_free"})
    image = dataclasses.replace(EXAMPLE, metadata={"kind": "image"})
    episodes = [play(RIGHT, example=free), play(IMAGE, WRONG, example=free), play(IMAGE, TEXT, RIGHT, example=image)]
    found = summarize([*episodes, play(WRONG, example=image)], budget=2)
    assert found["breakdown"] == {
        "correct_with_search": 0.25,
        "correct_without_search": 0.25,
        "wrong_with_search": 0.25,
        "wrong_without_search": 0.25,
    }
    assert found["search_ratio"] == 3 / 8
    kinds_of = found["by"]["kind"]
    assert {
        kind: (row["em"], row["search_ratio"], row["searched_rate"], row["n"]) for kind, row in kinds_of.items()
    } == {
        "search_free": (0.5, 0.25, 0.5, 2),
        "image": (0.5, 0.5, 0.5, 2),
    }


def test_what_a_turn_does_is_chosen_after_its_thoughts() -> None:
    """Each of the choices, written as the agent says that it is, and as it reads it; so that attempts can be forked there."""
    choices = AGENT.choices
    assert choices.stop in protocol.STOPS
    rest = {"answer": "Accra</answer>", "image": "<img></search>", "text": "flag of Ghana</text_search>"}
    assert set(choices.names) == set(rest)
    for name, opening in choices.names.items():
        written = f"<reason>So.{choices.opening}{opening}{rest[name]}"
        assert TAGS.well_formed(written)
        action = TAGS.parse(written)
        assert (action.tool if action.kind == "search" else action.kind) == name


class Chooser(SeeingScript):
    """A policy that does what it is given to do, else answers."""

    rest: ClassVar = {
        "<answer>": "Accra</answer>",
        "<search>": "<img></search>",
        "<text_search>": "flag of Ghana</text_search>",
    }

    def __init__(self) -> None:
        super().__init__(lambda *_: next(self._said))
        self._said = iter(())

    def step(self):
        given = [self.tokenizer.decode(given) for *_, given in self._wanted.values()]
        self._said = iter([name + self.rest[name] if name else RIGHT for name in given])
        return super().step()


def test_an_attempt_goes_every_way_in_its_first_round() -> None:
    engine = Chooser()
    episodes = run(AGENT, [EXAMPLE], engine, {"image": Pages(), "text": Pages()}, forks=1)
    assert [[branch.tool for branch in episode.branches] for episode in episodes] == [["answer"], ["image"], ["text"]]
    assert [[call.tool for call in episode.calls] for episode in episodes] == [[], ["image"], ["text"]]
    for episode in episodes:
        assert episode.answer == "Accra"
        assert all(turn.well_formed for turn in episode.turns)
        (branch,) = episode.branches
        written = episode.sequences[0].tokens[branch.start : branch.start + branch.tokens]
        assert engine.tokenizer.decode(written) == AGENT.choices.names[branch.tool]
    thought = [episode.sequences[0].loss_mask[: episode.branches[0].start].any() for episode in episodes]
    assert thought == [True, False, False]  # the same thoughts are learnt once


def test_the_recipe_names_its_knowledge_bases() -> None:
    build = RECIPES.get("mmsearch_r1")
    made = build(AgentConfig(max_searches=2), {}, ("words", "reverse_image"), "search_r1").agent
    assert (made.image_tool, made.text_tool, made.searches) == ("reverse_image", "words", 2)
    assert build(AgentConfig(sees=("b",)), {}, ("a", "b"), "search_r1").agent.image_tool == "b"
    for agent, tools, message in (
        (AgentConfig(), ("a", "b"), "needs two knowledge bases"),
        (AgentConfig(sees=("c",)), ("a", "b"), "config.agent.sees"),
        (AgentConfig(), ("image",), "one searched in words"),
        (AgentConfig(grammar="r1_router"), ("image", "text"), "config.agent.grammar"),
        (AgentConfig(prompt="{question}"), ("image", "text"), "config.agent.prompt"),
        (AgentConfig(on_invalid="end"), ("image", "text"), "config.agent.on_invalid"),
    ):
        with pytest.raises(ValueError, match=message):
            build(agent, {}, tools, "search_r1")


# --- real traces ---


def test_real_traces_are_read_as_they_were_counted(shared_data, tmp_path: pathlib.Path) -> None:
    """35 rollouts of the released 7B: actions, form, reward and EM. Form by the released checks' three patterns."""
    file = write_recorded(shared_data(FILE), tmp_path / "rounds.jsonl")
    found = score_rounds(file, "mmsearch_r1", ("image", "text"))
    assert found["n"] == 35
    assert {"search image": 27, "search text": 20, "answer": 27}.items() <= found["actions"].items()
    assert sum(found["actions"].values()) == 27 + 20 + 27
    metrics = found["metrics"]
    assert metrics["em"] == pytest.approx(13 / 35)
    assert metrics["search_ratio"] == pytest.approx(47 / 70)
    assert metrics["searched_rate"] == pytest.approx(27 / 35)
    assert metrics["tool_error_rate"] == pytest.approx(8 / 47)
    assert {kind: row["n"] for kind, row in metrics["by"]["kind"].items()} == {"search_free": 20, "search_required": 15}
    whole = re.compile(
        r"<reason>.*</reason>.*(<answer>.*</answer>|<search><img></search>|<text_search>.*</text_search>)", re.S
    )
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    kept = [
        bool(
            "<answer>" in row["rounds"][-1]["text"]
            and all(whole.fullmatch(item["text"].strip()) for item in row["rounds"])
        )
        for row in rows
    ]
    assert found["reward"]["mmsearch_r1.format"] == pytest.approx(0.1 * sum(kept) / 35)
    by_hand = []
    for row, kept_form, episode in zip(rows, kept, found["episodes"]):
        right = bool(exact_match(episode["answer"], row["golden_answers"]))
        by_hand.append(0.9 * right * (0.9 if len(row["rounds"]) > 1 else 1) + 0.1 * kept_form)
    assert [episode["reward"] for episode in found["episodes"]] == pytest.approx(by_hand)


def test_the_program_scores_recorded_rounds(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"id": "a", "question": "q", "golden_answers": ["Accra"], "image": str(tmp_path / "a.png")}
    Image.fromarray(seeing.picture(0)).save(tmp_path / "a.png")
    rounds = [
        {"text": TEXT, "tool": "text_search", "observation": "x"},
        {"text": TEXT, "tool": "text_search"},
        {"text": RIGHT},
    ]
    (tmp_path / "r.jsonl").write_text(json.dumps({**row, "rounds": rounds}) + "\n")
    assert not launch_here("score", f"--trajectories={tmp_path / 'r.jsonl'}", "--recipe=mmsearch_r1", "--json")
    paper = json.loads(capsys.readouterr().out)
    assert (paper["metrics"]["em"], paper["actions"]) == (0, {"invalid text": 1, "search text": 1})
    limits = '{"text_searches": 2, "image_first": false}'
    assert not launch_here(
        "score", f"--trajectories={tmp_path / 'r.jsonl'}", "--recipe=mmsearch_r1", "--json", f"--agent={limits}"
    )
    released = json.loads(capsys.readouterr().out)
    assert released["reward"]["total"] == pytest.approx(0.91)
    for flags, message in (
        ((f"--trajectories={tmp_path / 'r.jsonl'}",), "--trajectories and --recipe go together"),
        ((), "give either --predictions or --trajectories"),
        (
            (f"--trajectories={tmp_path / 'r.jsonl'}", "--recipe=search_r1", "--tools=text"),
            "SearchAgent reads no recorded rounds",
        ),
        ((f"--trajectories={tmp_path / 'r.jsonl'}", "--recipe=mmsearch_r1", "--agent={"), "--agent={: not JSON"),
        ((f"--trajectories={tmp_path / 'r.jsonl'}", "--recipe=mmsearch_r1", '--agent={"rounds": 2}'), "--agent"),
    ):
        assert message in refusal("score", *flags)


def test_the_configuration_as_published_and_as_released() -> None:
    paper, released = (
        from_config_dict(TrainConfig, mmsearch_r1_qwen25_vl_7b.get_config(name)) for name in ("paper", "released")
    )
    agent = build_recipe(paper).agent
    assert isinstance(agent, MMSearchAgent)
    assert (agent.limits, agent.force_answer) == (Limits(), True)
    other = build_recipe(released).agent
    assert isinstance(other, MMSearchAgent)
    assert (other.limits, other.force_answer) == (Limits(text_searches=2, image_first=False), False)
    assert (paper.rollout.examples, paper.rollout.samples, paper.learner.minibatches) == (512, 8, 4)
    assert (released.rollout.examples, released.rollout.samples, released.learner.minibatches) == (32, 4, 1)
    rate = released.learner.optimizer.learning_rate(1000)
    assert [float(rate(t)) for t in (0, 45, 1000)] == pytest.approx([2e-6, 1.05e-6, 1e-7], rel=1e-3)
    with pytest.raises(ValueError, match="expected one of paper, released"):
        mmsearch_r1_qwen25_vl_7b.get_config("mine")


def test_bounds_of_pictures_are_the_model_s(tmp_path: pathlib.Path) -> None:
    model = seeing.model()
    save_pretrained(model, tmp_path / "seeing")
    mesh = single_device_mesh()

    def config(model: ModelConfig) -> TrainConfig:
        return TrainConfig(model=model, knowledge={"text": KnowledgeConfig(source="atlas/text")})

    def built(**fields: Any) -> Any:
        return build_policy(config(ModelConfig(path=str(tmp_path / "seeing"), **fields)), mesh)

    assert built().image_processor.max_pixels == model.image_processor.max_pixels
    bounded = built(max_pixels=1024, min_pixels=256).image_processor
    assert (bounded.min_pixels, bounded.max_pixels) == (256, 1024)
    with pytest.raises(
        ValueError, match=r"config\.model\.max_pixels=32: pictures would have at least 64 and at most 32"
    ):
        built(max_pixels=32)
    with pytest.raises(ValueError, match=r"config\.model\.max_pixels=32: a llama model sees no pictures"):
        build_policy(config(ModelConfig(path="atlas-warm-start", max_pixels=32)), mesh)
