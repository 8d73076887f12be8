"""VRAG-RL's agents: what may be done when, what is shown and said; scripted policies."""

import dataclasses
import io
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from routerl_jax.agents.driver import run
from routerl_jax.agents.observation import Reply, demonstrated
from routerl_jax.core.types import Action, Demonstration, DemonstrationStep, Episode, Example, Passage, Shown
from routerl_jax.data.formats.verl import PICTURE
from routerl_jax.data.rounds import RecordedRounds, Round
from routerl_jax.engine.engine import Engine
from routerl_jax.evaluation.metrics import summarize
from routerl_jax.evaluation.records import episode_record
from routerl_jax.evaluation.trajectory import render
from routerl_jax.models.images import decode_image
from routerl_jax.models.regions import RegionRule
from routerl_jax.recipes.vrag_rl import protocol
from routerl_jax.recipes.vrag_rl.agents import MovedBoxes, VanillaRAG, VRAGAgent, moved
from routerl_jax.recipes.vrag_rl.protocol import VRAGTags
from tests import seeing
from tests.agents.scripted import SeeingScript, spelled

EXAMPLE = Example(id="q", question="How many people?", answers=("32.6M",))
SEARCH = "<think>which page?</think>\n<search>population of Ghana</search>"
LOOK = "<think>too small</think>\n<bbox>[10, 8, 30, 24]</bbox>"
CLOSER = "<think>still</think>\n<region>[0, 4, 20, 20]</region>"
ANSWER = "<think>so</think>\n<answer>32.6M</answer>"
BAD = "<think>hm</think>"
AGENT = VRAGAgent(tool="pages", k=3, max_turn_tokens=200, answer_tokens=40, regions=RegionRule(least=4), instruct=False)
TAGS = VRAGTags(tools=("pages",))


def page(number: int) -> np.ndarray:
    """Seen at 40 x 32: a pixel of the frame is 8 x 7.5 raw ones."""
    return seeing.picture(number, 240, 320)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    directory = tmp_path_factory.mktemp("pages")
    paths = [directory / f"{number}.png" for number in range(5)]
    for number, path in enumerate(paths):
        Image.fromarray(page(number)).save(path)
    return [str(path) for path in paths]


class Pages:
    """Finds the same pages, best first, whatever is asked, and keeps what that was."""

    def __init__(self, images: Sequence[str], fails: bool = False) -> None:
        self.asked: list[tuple[Any, int]] = []
        self.fails = fails
        self.found = [
            Passage(id=f"p{i}", title=f"Page {i}", text=f"words of <answer>{i}</answer>", image=image)
            for i, image in enumerate(images)
        ]

    def search(self, queries: Sequence[Any], k: int) -> list[list[Passage]]:
        self.asked += [(query, k) for query in queries]
        if self.fails:
            raise ConnectionError("the engine is down")
        return [self.found[:k] for _ in queries]


@pytest.fixture
def play(files: list[str]):
    def playing(*turns: str, agent: VRAGAgent = AGENT, tool: Pages | None = None, **settings: Any) -> Episode:
        engine = SeeingScript(lambda _e, _s, turn: turns[turn], **{"max_length": 1500, **settings})
        (episode,) = run(agent, [EXAMPLE], engine, {"pages": tool or Pages(files)})
        return episode

    return playing


def kinds(episode: Episode) -> list[str]:
    return [turn.action.kind for turn in episode.turns if turn.action is not None]


def pages_of(episode: Episode) -> list[list[str]]:
    return [[item.passage for item in turn.shown] for turn in episode.turns]


# --- turns and limits ---


def test_coarse_to_fine(play, files: list[str]) -> None:
    """A page, a region of it, a region of that, an answer: by hand in raw pixels, of which a pixel of the first frame is
    8 x 7.5 and one of the second 4 x 3.75."""
    tool = Pages(files)
    episode = play(SEARCH, LOOK, CLOSER, ANSWER, tool=tool)
    assert (episode.answer, kinds(episode)) == ("32.6M", ["search", "region", "region", "answer"])
    assert tool.asked == [("population of Ghana", 3)]
    assert pages_of(episode) == [["p0"], ["p0"], ["p0"], []]
    shown, first, second = (turn.shown[0] for turn in episode.turns[:3])
    assert (shown.parent, shown.box) == ("", ())
    assert (first.parent, first.box) == (shown.digest, (80, 60, 240, 180))
    assert (second.parent, second.box) == (shown.digest, (80, 75, 160, 135))
    np.testing.assert_array_equal(np.asarray(decode_image(second.image)), page(0)[75:135, 80:160])
    assert all(turn.well_formed for turn in episode.turns)
    assert [turn.observation for turn in episode.turns[:2]] == [f"\n{seeing.MARKER}\n"] * 2
    found = summarize([episode])
    assert [found[name] for name in ("em", "forced_rate", "invalid_action_rate")] == [1, 0, 0]


def test_one_page_a_search_the_best_not_shown_yet(play) -> None:
    """Until none is left among those found, which the policy is told."""
    agent = dataclasses.replace(AGENT, max_turns=5)
    episode = play(SEARCH, SEARCH, SEARCH, SEARCH, ANSWER, agent=agent)
    assert pages_of(episode) == [["p0"], ["p1"], ["p2"], [], []]
    assert "No page is left" in episode.turns[3].observation
    assert (episode.answer, episode.invalid_actions) == ("32.6M", 0)
    two = play(SEARCH, SEARCH, ANSWER, agent=dataclasses.replace(AGENT, pages=2))
    assert pages_of(two) == [["p0", "p1"], ["p2"], []]


def test_searches_are_bounded_apart_from_turns(play) -> None:
    """As a comparison does that gives all agents as many searches: looks and the answer need turns of their own."""
    agent = AGENT.with_searches(1)
    assert (agent.max_turns, agent.search_budget) == (4, 1)
    episode = play(SEARCH, LOOK, SEARCH, ANSWER, agent=agent)
    assert (pages_of(episode), len(episode.calls)) == ([["p0"], ["p0"], [], []], 1)
    assert protocol.NO_SEARCHES in episode.turns[2].observation
    assert (episode.answer, episode.invalid_actions) == ("32.6M", 1)
    assert AGENT.with_searches(9).search_budget == AGENT.max_turns
    assert pages_of(play("32.6M</answer>", agent=agent.vanilla_rag(["pages"])["vanilla_rag"])) == [["p0"], []]


def test_a_look_is_at_the_latest_page(play) -> None:
    episode = play(SEARCH, LOOK, SEARCH, LOOK, "32.6M</answer>")
    assert pages_of(episode) == [["p0"], ["p0"], ["p1"], ["p1"], []]
    crops = [episode.turns[i].shown[0] for i in (1, 3)]
    assert {crop.box for crop in crops} == {(80, 60, 240, 180)}
    assert [crop.parent for crop in crops] == [episode.turns[i].shown[0].digest for i in (0, 2)]
    np.testing.assert_array_equal(np.asarray(decode_image(crops[1].image)), page(1)[60:180, 80:240])


def test_after_four_turns_the_answer_is_begun(play) -> None:
    episode = play(SEARCH, LOOK, SEARCH, BAD, "32.6M</answer>")
    assert (episode.answer, kinds(episode)) == ("32.6M", ["search", "region", "search", "invalid", "answer"])
    assert episode.turns[-1].forced == "<answer>"
    found = summarize([episode], budget=AGENT.search_budget)
    rates = ("forced_rate", "answered_rate", "truncated_rate", "invalid_action_rate", "search_ratio")
    assert [found[name] for name in rates] == [1, 1, 0, 0.2, 0.5]
    ended = play(SEARCH, LOOK, SEARCH, BAD, agent=dataclasses.replace(AGENT, force_answer=False))
    assert (ended.answer, len(ended.turns), ended.truncated) == (None, 4, False)


def test_thoughts_before_an_answer_that_is_begun(play) -> None:
    agent = dataclasses.replace(AGENT, max_turns=1, thoughts=True)
    episode = play(SEARCH, "it says</think>", "32.6M</answer>", agent=agent)
    assert [turn.forced for turn in episode.turns] == ["", "<think>", "\n<answer>"]
    assert episode.answer == "32.6M"


def test_an_answer_before_any_search_is_taken_and_counts_as_invalid(play) -> None:
    """One that follows a search that failed does not: that is not the policy's fault."""
    early = play(ANSWER)
    assert (early.answer, kinds(early), early.invalid_actions) == ("32.6M", ["answer"], 1)
    assert summarize([early])["invalid_action_rate"] == 1
    console = Console(width=150, record=True, file=io.StringIO())
    console.print(render(episode_record(early)))
    assert f"though  {protocol.UNSEARCHED}" in console.export_text()
    console.print(render(episode_record(play(SEARCH, ANSWER))))
    assert " more found, not shown to the policy" in console.export_text()
    late = play(SEARCH, ANSWER, tool=Pages([], fails=True))
    assert (late.answer, late.invalid_actions) == ("32.6M", 0)
    assert "The search failed: ConnectionError: the engine is down" in late.turns[0].observation


INVALID = {
    (LOOK,): "no picture has been shown yet",
    (SEARCH, "<think>a</think><bbox>[30, 8, 10, 24]</bbox>"): "right must be more than left",
    (SEARCH, "<think>a</think><bbox>[0, 0, 1e9, 1e9]</bbox>"): "far outside the picture",
    (SEARCH, "<think>a</think><bbox>[0, 0, 3, 3]</bbox>"): "3 x 3 pixels is too small; it needs 4 x 4",
    (SEARCH, "<think>a</think><bbox>[1, 2, 3]</bbox>"): "3 numbers",
    (SEARCH, "<think>a</think><bbox>the table</bbox>"): "no list in brackets",
    (SEARCH, '<think>a</think><bbox>{"bbox_2d": [1, 2, 3, 4]}</bbox>'): "object of JSON",
    (BAD,): "neither a complete search nor a box nor an answer",
    ("<think>a</think><search> </search>",): "nothing between <search> and </search>",
    ("<think>a</think><answer></answer>",): "nothing between <answer> and </answer>",
    ("<think>a</think><search>x<answer>y</answer>",): "several actions",
    ("<think>a</think><search>x<search>y</search>",): "several actions",
}


@pytest.mark.parametrize("plan", INVALID, ids=lambda plan: INVALID[plan][:20])
def test_what_can_t_be_done_is_said_and_spends_a_turn(play, plan: tuple[str, ...]) -> None:
    episode = play(*plan, SEARCH, ANSWER)
    last = episode.turns[len(plan) - 1]
    assert last.action is not None
    assert (last.action.kind, last.well_formed, last.shown) == ("invalid", False, [])
    assert INVALID[plan] in last.action.error
    assert last.action.error in last.observation
    assert (episode.answer, episode.invalid_actions, len(episode.turns)) == ("32.6M", 1, len(plan) + 2)


def test_nothing_that_the_policy_sampled_is_rewritten(play) -> None:
    """Words outside of tags, odd boxes and spaces stay, token by token."""
    odd = "Well. <think>a</think> hm <bbox> [10,8, 3e1,24.0] </bbox>"
    episode = play(f"  {SEARCH}", odd, ANSWER)
    (sequence,) = episode.sequences
    sampled = [id for text in (f"  {SEARCH}", odd, ANSWER) for id in spelled(seeing.tokenizer(), text)]
    np.testing.assert_array_equal(sequence.tokens[sequence.loss_mask], sampled)
    assert episode.turns[1].shown[0].box == (80, 60, 240, 180)
    assert not episode.turns[1].well_formed


def test_without_regions(play) -> None:
    agent = dataclasses.replace(AGENT, looks=False)
    episode = play(SEARCH, LOOK, ANSWER, agent=agent)
    assert kinds(episode) == ["search", "invalid", "answer"]
    assert protocol.NO_REGIONS in episode.turns[1].observation
    assert "<bbox>" not in episode.turns[1].observation


def test_scaled_boxes(play) -> None:
    agent = dataclasses.replace(AGENT, regions=RegionRule(box_scale=1000, least=4))
    episode = play(SEARCH, "<think>a</think><bbox>[250, 250, 750, 750]</bbox>", ANSWER, agent=agent)
    assert episode.turns[1].shown[0].box == (80, 60, 240, 180)


# --- what goes wrong around it ---


@pytest.mark.parametrize("size", [None, (20, 20_000)])
def test_a_page_that_can_t_be_shown_counts_as_shown(
    files: list[str], play, tmp_path: pathlib.Path, size: tuple[int, int] | None
) -> None:
    """Else the next search would bring it again. Its file is gone, or no model sees such a strip."""
    path = tmp_path / "page.png"
    if size:
        Image.fromarray(seeing.picture(0, *size)).save(path)
    episode = play(SEARCH, SEARCH, ANSWER, tool=Pages([str(path), *files]))
    assert "a picture that can't be shown" in episode.turns[0].observation
    assert episode.turns[0].shown[0].error
    assert pages_of(episode)[:2] == [["p0"], ["p1"]]


def test_nothing_is_found(play) -> None:
    episode = play(SEARCH, ANSWER, tool=Pages([]))
    assert "Nothing was found." in episode.turns[0].observation


def test_what_does_not_fit_is_left_out_whole(play) -> None:
    """A page takes 20 tokens and its marks; less room, and it is said to be too long; still less, and the answer is begun."""
    shown, forced = [], []
    for room in (400, 150, 143, 137, 115, 100):
        episode = play(SEARCH, ANSWER, "32.6M</answer>", "32.6M</answer>", max_length=room)
        shown.append(len(episode.sequences[0].images))
        forced.append(bool(episode.turns[-1].forced))
        assert all(item.digest for turn in episode.turns for item in turn.shown)
    assert shown == sorted(shown, reverse=True)
    assert (shown[0], shown[-1]) == (1, 0)
    assert forced == sorted(forced)
    assert (forced[0], forced[-1]) == (False, True)


def test_a_very_long_query_is_cut() -> None:
    action = TAGS.parse(f"<think>a</think><search>{'capital  of Ghana ' * 6000}</search>")
    assert action.query == ("capital of Ghana " * 120)[:2000]


@pytest.mark.slow
def test_a_policy_that_babbles_ends_in_a_forced_answer(files: list[str]) -> None:
    """The engine's own conversations: four invalid turns, four reminders, and what was sampled is what is trained on."""
    agent = dataclasses.replace(AGENT, max_turn_tokens=6, answer_tokens=6)
    engine = Engine(seeing.model(context=1024), rows=2, max_length=1000)
    episodes = run(agent, [EXAMPLE], engine, {"pages": Pages(files)}, samples=2)
    for episode in episodes:
        assert [bool(turn.forced) for turn in episode.turns] == [False] * 4 + [True]
        assert episode.invalid_actions >= 4
        (sequence,) = episode.sequences
        assert sequence.loss_mask.sum() == sum(turn.tokens for turn in episode.turns)
    assert episodes[0].turns[0].text != episodes[1].turns[0].text


# --- other forms ---


def test_pages_as_text(play) -> None:
    """The paper's OCR form: titles and words, in which tags are text, cut where they are long."""
    agent = dataclasses.replace(AGENT, shows="text", looks=False)
    episode = play(SEARCH, ANSWER, agent=agent)
    assert episode.turns[0].observation == "\nPage 0: words of < answer>0< /answer>\n"
    assert episode.turns[0].shown == [Shown(passage="p0")]
    assert episode.sequences[0].images == ()
    tool = Pages([""])
    tool.found = [dataclasses.replace(tool.found[0], text="word " * 900)]
    short = dataclasses.replace(agent, max_observation_tokens=60)
    long = play(SEARCH, ANSWER, agent=short, tool=tool)
    assert long.turns[1].start - long.turns[0].start - long.turns[0].tokens <= 60
    assert long.turns[0].observation.endswith("word ..\n")
    assert long.answer == "32.6M"


def test_an_instructed_model_is_answered_in_messages(play) -> None:
    """Without a chat template as text, in the form of the prompt. A page is a message of its own."""
    episode = play(SEARCH, BAD, ANSWER, agent=dataclasses.replace(AGENT, instruct=True), max_length=3000)
    assert episode.prompt.startswith("Find the answer to the question in a collection of pages.")
    assert episode.prompt.endswith("User: Question: How many people?\nAssistant: ")
    assert episode.turns[0].observation == f"\nUser: {seeing.MARKER}\nAssistant: "
    assert episode.turns[1].observation.startswith("\nUser: That could not be done: ")


def test_what_is_said_follows_the_settings() -> None:
    told = TAGS.instructions()
    assert "<bbox>[left, top, right, bottom]</bbox>, in pixels" in told
    assert "You have 4 turns" in told
    assert "on a scale from 0 to 1000" in dataclasses.replace(TAGS, regions=RegionRule(box_scale=1000)).instructions()
    assert "bbox" not in dataclasses.replace(TAGS, looks=False).instructions()
    assert "best text of the page" in dataclasses.replace(TAGS, shows="text").instructions()


@pytest.mark.parametrize("instruct", [False, True])
@pytest.mark.parametrize("forced", [False, True])
def test_demonstrations_are_what_a_rollout_records(play, files: list[str], instruct: bool, forced: bool) -> None:
    """Two searches that find the same pages, a look at the second page, a look at that; an answer of its own, or begun for it
    after thoughts."""
    agent = dataclasses.replace(AGENT, instruct=instruct, thoughts=True, max_turns=4 if forced else 5)
    found = tuple(Pages(files).found[:3])
    step = DemonstrationStep(thought="which page?", query="population of Ghana", tool="pages", passages=found)
    look = DemonstrationStep(thought="too small", box=(10, 8, 30, 24))
    steps = (step, step, look, look)
    demonstration = Demonstration(example=EXAMPLE, steps=steps, thought="so", answer="32.6M", forced=forced)
    end = ("so</think>", "32.6M</answer>") if forced else (ANSWER,)
    episode = play(SEARCH, SEARCH, LOOK, LOOK, *end, agent=agent, canonical=True, max_length=3000)
    tokenizer, images = seeing.tokenizer(), seeing.image_tokens(1024)
    written = demonstrated(
        agent.opening(EXAMPLE, tokenizer, seeing.MARKER), agent.pieces(demonstration), tokenizer, images
    )
    (sequence,) = episode.sequences
    np.testing.assert_array_equal(written.tokens, sequence.tokens)
    np.testing.assert_array_equal(written.loss_mask, sequence.loss_mask)
    np.testing.assert_array_equal(written.positions, sequence.positions)
    digests = [image.digest for _, image in written.images]
    assert digests == [image.digest for _, image in sequence.images]
    assert len(set(digests)) == 4


@pytest.mark.parametrize("instruct", [False, True])
def test_recorded_conversations_go_on_as_its_own_do(files: list[str], instruct: bool) -> None:
    """What follows a turn is framed as in a rollout: text for a policy that has no chats, else a user's message."""
    rounds = (
        Round(text=SEARCH, observation=f"seen: {PICTURE}.", images=(files[0],)),
        Round(text=BAD, observation="Go on."),
        Round(text=ANSWER),
    )
    agent = dataclasses.replace(AGENT, instruct=instruct)
    pieces = agent.recorded_pieces(RecordedRounds(example=EXAMPLE, rounds=rounds))
    assert [piece for piece, learnt in pieces if learnt] == [SEARCH, BAD, ANSWER]
    page = ["seen: ", Shown(image=files[0]), "."]
    framed = [Reply(page), Reply("Go on.")] if instruct else [["\n", *page, "\n"], ["\n", "Go on.", "\n"]]
    assert [piece for piece, learnt in pieces if not learnt] == framed


# --- what it is compared with ---


def test_baselines(play) -> None:
    assert list(AGENT.baselines(["pages"])) == ["vanilla_rag", "react", "random_box", "centre_box"]
    assert list(dataclasses.replace(AGENT, looks=False).baselines(["pages"])) == ["vanilla_rag", "react"]
    vanilla = AGENT.vanilla_rag(["pages"])["vanilla_rag"]
    assert isinstance(vanilla, VanillaRAG)
    episode = play("32.6M</answer>", agent=vanilla)
    assert [turn.forced for turn in episode.turns] == [f"<search>{EXAMPLE.question}</search>", "<answer>"]
    assert pages_of(episode)[0] == ["p0", "p1", "p2"]
    assert (episode.answer, [call.query for call in episode.calls]) == ("32.6M", [EXAMPLE.question])


def test_baselines_of_pages_as_text(play) -> None:
    """The paper's OCR rows: texts at once, or one a search, and never a picture."""
    reader = dataclasses.replace(AGENT, shows="text", looks=False)
    baselines = reader.baselines(["pages"])
    assert list(baselines) == ["vanilla_rag", "react"]
    at_once = play("32.6M</answer>", agent=baselines["vanilla_rag"])
    one_by_one = play(SEARCH, SEARCH, ANSWER, agent=baselines["react"])
    assert pages_of(at_once) == [["p0", "p1", "p2"], []]
    assert pages_of(one_by_one) == [["p0"], ["p1"], []]
    for episode in (at_once, one_by_one):
        assert (episode.answer, episode.sequences[0].images) == ("32.6M", ())
        assert "Page 0: words of < answer>0< /answer>" in episode.turns[0].observation


def test_moved_boxes_keep_their_size_and_what_was_written(play) -> None:
    boxes = {}
    for name in ("centre_box", "random_box"):
        agent = AGENT.baselines(["pages"])[name]
        assert isinstance(agent, MovedBoxes)
        corner = "<think>a</think><bbox>[0, 0, 20, 16]</bbox>"
        episode = play(SEARCH, corner, corner, ANSWER, agent=agent)
        assert episode.turns[1].action == Action(kind="region", box=(0, 0, 20, 16), thought="a")
        assert corner in episode.turns[1].text
        boxes[name] = [turn.shown[0].box for turn in episode.turns[1:3]]
        again = play(SEARCH, corner, corner, ANSWER, agent=agent)
        assert [turn.shown[0].box for turn in again.turns[1:3]] == boxes[name]
    assert boxes["centre_box"][0] == pytest.approx((80, 60, 240, 180), abs=1)  # rounded outwards
    left, top, right, bottom = boxes["random_box"][0]
    assert (right - left, bottom - top) == pytest.approx((160, 120), abs=2)
    assert boxes["random_box"][0] != boxes["centre_box"][0]
    wrong = play(
        SEARCH, "<think>a</think><bbox>[9, 9, 9, 9]</bbox>", ANSWER, agent=AGENT.baselines(["pages"])["random_box"]
    )
    assert kinds(wrong) == ["search", "invalid", "answer"]  # what marks nothing is not moved


def test_where_boxes_are_moved_to() -> None:
    assert moved((-5, 8, 15, 24), 0, (40, 32), (0, 1)) == pytest.approx((0, 16, 15, 32))
    assert moved((100, 100, 300, 200), 1000, (40, 32), (0.5, 0.5)) == pytest.approx((400, 450, 600, 550))
    assert moved((0, 0, 40, 32), 0, (40, 32), (0.3, 0.9)) == pytest.approx((0, 0, 40, 32))


# --- the parser ---


@pytest.mark.parametrize(
    ("text", "kind", "kept"),
    [
        (SEARCH, "search", True),
        (LOOK, "region", True),
        (CLOSER, "region", True),
        (ANSWER, "answer", True),
        (f"\n{ANSWER}\n", "answer", True),
        ("<answer>x</answer>", "answer", False),
        ("<think>I could <search> more</think><answer>x</answer>", "answer", False),
        ("<think>a</think> so <answer>x</answer>", "answer", False),
        ("<think>a</think><answer>x</answer><answer>y</answer>", "invalid", False),
        ("<think>a</think><search>x", "invalid", False),
        ("<think>a</think><bbox>[1, 2, 3, 4]</region>", "invalid", False),
        ("<think>a<bbox>[1, 2, 3, 4]</bbox>", "invalid", False),
        ("", "invalid", False),
    ],
)
def test_turns(text: str, kind: str, kept: bool) -> None:
    assert TAGS.parse(text).kind == kind
    assert TAGS.well_formed(text) is kept


def test_choices_can_be_told_apart() -> None:
    names = AGENT.choices.names
    assert names == {"answer": "<answer>", "pages": "<search>", "region": "<bbox>"}
    assert "region" not in dataclasses.replace(AGENT, looks=False).choices.names
