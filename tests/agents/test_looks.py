"""Closer looks at a region of the latest picture: any agent's, cut from the raw picture, recorded with parent and box."""

import dataclasses
import io
import math
import pathlib
import re
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from routerl_jax.agents.agent import LLM, Agent, Tools
from routerl_jax.agents.driver import run
from routerl_jax.agents.observation import Look, Viewer, demonstrated
from routerl_jax.agents.search_agent import SearchAgent
from routerl_jax.core.rows import RowLocation
from routerl_jax.core.types import Action, Episode, Example, Shown
from routerl_jax.evaluation.records import episode_of, read_records, write_records
from routerl_jax.evaluation.trajectory import render
from routerl_jax.models.image_tokens import ImageTokens
from routerl_jax.models.images import ImageProcessor, decode_image
from routerl_jax.models.regions import RefusedRegion, RegionRule, View, read_box
from routerl_jax.recipes.search_r1 import SearchR1Grammar
from tests import seeing, tiny
from tests.agents.scripted import ScriptedEngine, SeeingScript

PAGE = seeing.picture(7, 240, 320)  # seen at 40 x 32: a pixel of the frame is 8 x 7.5 raw ones
RULE = RegionRule(least=4)
EXAMPLE = Example(id="q", question="what is on it?", answers=("42",), images=(PAGE,))
ANSWER = "<think>so</think><answer>42</answer>"


class Framed(Agent):
    """Answers with the frame of the question's picture."""

    async def run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        chat = llm.conversation("hm")
        await chat.generate(max_tokens=1)
        return chat.episode(answer=str(llm.frame(example.images[0])))


@pytest.mark.parametrize(("high", "wide"), [(24, 32), (240, 320), (5, 900), (8, 8)])
def test_the_frame_is_the_size_that_the_model_sees(high: int, wide: int) -> None:
    """As many pixels as the patches that the tower gets."""
    example = dataclasses.replace(EXAMPLE, images=(seeing.picture(0, high, wide),))
    (episode,) = run(Framed(), [example], SeeingScript(lambda *_: "x"), {})
    patches = seeing.image_tokens().process(example.images[0])
    _, rows, columns = patches.grid
    assert episode.answer == str((columns * 4, rows * 4))
    assert rows * columns == patches.tokens * 4


def test_a_model_that_sees_none_has_no_frame() -> None:
    with pytest.raises(RuntimeError, match="sees no images; use a vision-language model"):
        run(Framed(), [EXAMPLE], ScriptedEngine(lambda *_: "x"), {})


class Closer(SearchR1Grammar):
    """Search-R1's, with boxes."""

    @property
    def stops(self) -> tuple[str, ...]:
        return (*super().stops, "</bbox>")

    def parse(self, text: str) -> Action:
        if found := re.search("<bbox>(.*)</bbox>", text):
            try:
                return Action(kind="region", box=read_box(found[1]))
            except RefusedRegion as error:
                return Action(kind="invalid", error=str(error))
        return super().parse(text)


AGENT = SearchAgent(
    grammar=Closer(tools=("text",)), max_searches=3, k=1, max_turn_tokens=100, answer_tokens=30, regions=RULE
)


def play(*turns: str, example: Example = EXAMPLE, agent: Agent = AGENT, **settings) -> Episode:
    engine = SeeingScript(lambda _e, _s, turn: turns[turn], max_length=1500, **settings)
    (episode,) = run(agent, [example], engine, {"text": tiny.ScriptedKB("text")})
    return episode


def pixels(shown: Shown) -> np.ndarray:
    return np.asarray(decode_image(shown.image))


FIRST, SECOND = "<bbox>[10, 8, 30, 24]</bbox>", "<bbox>[0, 4, 20, 20]</bbox>"


@pytest.fixture(scope="module")
def looked() -> Episode:
    return play(FIRST, SECOND, ANSWER)


def test_crops_are_cut_from_the_raw_picture(looked: Episode) -> None:
    """By hand: 8 x 7.5 raw pixels each; the crop of 160 x 120 is seen at 40 x 32, so 4 x 3.75 each."""
    assert looked.answer == "42"
    first, second = (turn.shown[0] for turn in looked.turns[:2])
    assert first.box == (80, 60, 240, 180)
    np.testing.assert_array_equal(pixels(first), PAGE[60:180, 80:240])
    assert second.box == (80, 75, 160, 135)
    np.testing.assert_array_equal(pixels(second), PAGE[75:135, 80:160])


def test_crops_are_recorded_and_masked(looked: Episode) -> None:
    (sequence,) = looked.sequences
    page, *crops = [image.digest for _, image in sequence.images]
    shown = [item for turn in looked.turns for item in turn.shown]
    assert [item.digest for item in shown] == crops
    assert {item.parent for item in shown} == {page}
    assert [turn.observation.count(seeing.MARKER) for turn in looked.turns] == [1, 1, 0]
    assert [turn.action.box for turn in looked.turns[:2] if turn.action] == [(10, 8, 30, 24), (0, 4, 20, 20)]
    for start, image in sequence.images:
        assert not sequence.loss_mask[start : start + image.tokens].any()
    assert sequence.loss_mask.sum() == sum(turn.tokens for turn in looked.turns)


def test_a_record_keeps_crops(looked: Episode, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "episodes.jsonl"
    write_records(path, [looked])
    (row,) = read_records(path)
    (kept, _) = (item for turn in episode_of(row, RowLocation(path, "line", 1)).turns for item in turn.shown)
    assert (kept.box, kept.parent) == ((80, 60, 240, 180), looked.turns[0].shown[0].parent)
    np.testing.assert_array_equal(pixels(kept), PAGE[60:180, 80:240])
    console = Console(width=150, record=True, file=io.StringIO())
    console.print(render(row))
    text = console.export_text()
    assert "looks at  (10, 8, 30, 24)" in text
    assert "the part (80, 60, 240, 180) of it" in text


@pytest.mark.parametrize(
    ("written", "why"),
    [
        ("[30, 8, 10, 24]", "right must be more than left"),
        ("[50, 8, 60, 24]", "outside the picture, whose coordinates end at 40 x 32"),
        ("[0, 0, 1e9, 1e9]", "reaches far outside"),
        ("[1, 1, 3, 24]", "is too small; it needs 4 x 4"),
        ("[1, 2, 3, 4, 5]", "5 numbers"),
        ("the corner", "no list in brackets"),
        ('{"box": [1, 2, 3, 4]}', "object of JSON"),
    ],
)
def test_a_box_that_marks_nothing_is_an_invalid_action(written: str, why: str) -> None:
    """The policy is told why, and what it wrote stays as it was sampled."""
    episode = play(f"<bbox>{written}</bbox>", ANSWER)
    first = episode.turns[0]
    assert first.action is not None
    assert (first.action.kind, first.shown, first.well_formed) == ("invalid", [], False)
    assert why in first.action.error
    assert why in first.observation
    assert f"<bbox>{written}</bbox>" in first.text
    assert (episode.answer, episode.invalid_actions) == ("42", 1)


def test_there_is_nothing_to_look_at_before_a_picture() -> None:
    episode = play(FIRST, ANSWER, example=dataclasses.replace(EXAMPLE, images=()))
    assert "no picture has been shown yet" in episode.turns[0].observation
    assert episode.invalid_actions == 1


def test_an_agent_that_ends_on_invalid_turns_ends_on_wrong_boxes() -> None:
    episode = play("<bbox>[0, 0, 0, 0]</bbox>", agent=dataclasses.replace(AGENT, on_invalid="end"))
    assert (episode.answer, len(episode.turns)) == (None, 1)


def test_a_picture_whose_file_is_gone(tmp_path: pathlib.Path) -> None:
    """It was seen, and can't be cut any more: words in its place, an error in the record, and the run goes on."""
    path = tmp_path / "page.png"
    Image.fromarray(PAGE).save(path)

    def script(_example: str, _sample: int, turn: int) -> str:
        path.unlink(missing_ok=True)
        return (FIRST, ANSWER)[turn]

    engine = SeeingScript(script, max_length=1500)
    example = dataclasses.replace(EXAMPLE, images=(str(path),))
    (episode,) = run(AGENT, [example], engine, {"text": tiny.ScriptedKB("text")})
    (shown,) = episode.turns[0].shown
    assert "can't be read" in shown.error
    assert shown.parent == episode.sequences[0].images[0][1].digest
    assert "a picture that can't be shown" in episode.turns[0].observation
    assert (episode.answer, len(episode.sequences[0].images)) == ("42", 1)


def test_the_released_rule_cuts_the_page_after_a_crop() -> None:
    """In frames of a truncating resize to at most 1600 pixels: 46 x 34 of the page, 44 x 36 of the crop of 139 x 113."""
    agent = dataclasses.replace(AGENT, regions=RegionRule(released=True))
    episode = play(FIRST, SECOND, ANSWER, agent=agent)
    first, second = (turn.shown[0].box for turn in episode.turns[:2])
    assert first == (69, 56, 208, 169)  # 320 * 10 / 46, 240 * 8 / 34, ..
    assert second == (0, 26, 145, 133)  # 320 * 20 / 44, 240 * 4 / 36, ..


@pytest.mark.parametrize("rule", [RULE, RegionRule(least=4, box_scale=1000), RegionRule(released=True)])
def test_a_part_of_the_page_as_the_model_writes_it(rule: RegionRule) -> None:
    """In the frame of the latest picture, a crop too, of which the released rule takes boxes of the whole page; what is shown
    then holds the part, and at most a pixel of the frame more."""
    viewer = Viewer(seeing.image_tokens())
    with pytest.raises(RefusedRegion, match="no picture has been shown yet"):
        viewer.written((0, 0, 10, 10), rule)
    viewer.see([Shown(passage="p", image=PAGE)])
    assert viewer.view() == View(page=(320, 240), part=(0, 0, 320, 240), frame=(40, 32))
    outer, inner = (70, 50, 250, 200), (100, 80, 180, 140)
    for part in (outer, inner):
        before = viewer.view()
        crop = viewer.region(viewer.written(part, rule), rule)
        left, top, right, bottom = crop.box
        assert left <= part[0] <= left + 9
        assert top <= part[1] <= top + 9
        assert right - 9 <= part[2] <= right
        assert bottom - 9 <= part[3] <= bottom
        viewer.see([crop])
        assert viewer.view().part == crop.box
        assert viewer.view().page == before.page
    with pytest.raises(RefusedRegion, match="outside"):
        viewer.written((400, 300, 410, 310), rule)


def test_a_demonstration_with_looks_is_what_a_rollout_records() -> None:
    episode = play(FIRST, SECOND, ANSWER, canonical=True)
    tokenizer, images = seeing.tokenizer(), seeing.image_tokens(1024)
    prompt = images.fed(AGENT.opening(EXAMPLE, tokenizer, seeing.MARKER), [PAGE])
    closer = AGENT.grammar.closer
    pieces = [
        (FIRST, True),
        (Look(box=(10, 8, 30, 24), rule=RULE, render=closer), False),
        (SECOND, True),
        (Look(box=(0, 4, 20, 20), rule=RULE, render=closer), False),
        (ANSWER, True),
    ]
    written = demonstrated(prompt, pieces, tokenizer, images, pictures=[PAGE])
    (sequence,) = episode.sequences
    np.testing.assert_array_equal(written.tokens, sequence.tokens)
    np.testing.assert_array_equal(written.loss_mask, sequence.loss_mask)
    np.testing.assert_array_equal(written.positions, sequence.positions)
    assert [image.digest for _, image in written.images] == [image.digest for _, image in sequence.images]
    with pytest.raises(RefusedRegion, match="no picture has been shown yet"):
        demonstrated([1], pieces, tokenizer, images)


def test_real_pages(shared_data: Callable[[str], pathlib.Path]) -> None:
    """VRAG-RL's demonstration pages in Qwen's frames: a look and a look into it are crops of the page, pixel by pixel."""
    processor = ImageProcessor(min_pixels=256 * 28 * 28, max_pixels=512 * 28 * 28)
    images = ImageTokens(seeing.config(), processor)
    paths = sorted(shared_data("vrag_demo_pages/pages").glob("*.jpg"))[::12]
    assert len(paths) > 4
    for path in paths:
        viewer = Viewer(images)
        viewer.see([Shown(passage=path.stem, image=str(path))])
        page = np.asarray(decode_image(path))
        high, wide = page.shape[:2]
        left, top = 0, 0
        for _ in range(2):
            assert viewer.frame is not None
            across, down = viewer.frame
            crop = viewer.region((across / 4, down / 4, across * 3 / 4, down * 3 / 4), RegionRule())
            x, y = math.floor(left + wide / 4), math.floor(top + high / 4)
            right, bottom = math.ceil(left + wide * 3 / 4), math.ceil(top + high * 3 / 4)
            assert crop.box == (x, y, right, bottom)
            np.testing.assert_array_equal(pixels(crop), page[y:bottom, x:right])
            viewer.see([crop])
            left, top, wide, high = x, y, right - x, bottom - y
