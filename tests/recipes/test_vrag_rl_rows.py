"""Boxes of VRAG-RL's supervised rows, pixels of a resized copy, in the frame of the model that learns them: geometry by hand,
random boxes, the real rows, and what can't be mapped."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image

from routerl_jax.agents.observation import Viewer, demonstrated
from routerl_jax.core.files import write_json_lines
from routerl_jax.core.rows import read_rows
from routerl_jax.core.types import Shown
from routerl_jax.data.rounds import read_messages
from routerl_jax.models.images import image_size, smart_resize
from routerl_jax.models.regions import RegionRule, View, read_box, reframed, region
from routerl_jax.recipes.vrag_rl.agents import VRAGAgent
from routerl_jax.training.demonstrations import open_demonstrations
from routerl_jax.training.sections import WarmStartConfig
from tests import seeing
from tests.training.small_run import make_sft_config

AGENT = VRAGAgent(tool="pages", regions=RegionRule(least=4))
TURNS = (
    "<think>which, [1, 2]?</think>\n<search>blue mill</search>",
    "<think>see [7, 7]</think>\n<bbox>[182, 133, 364, 399]</bbox>",
    "<think>so</think>\n<answer>Tin Mill</answer>",
)


def write_row(path: pathlib.Path, *turns: str, images: int = 2) -> pathlib.Path:
    """A row of these turns with a picture after each but the last one; pages are 1024 x 768, seen at 728 x 532 there, and at
    40 x 32 here."""
    for number in range(images):
        Image.new("RGB", (1024, 768), "white").save(path.parent / f"{number}.png")
    said: list[dict[str, str]] = [{"role": "user", "content": "Question: Which mill is blue?"}]
    for number, text in enumerate(turns):
        said += [{"role": "assistant", "content": text}]
        if number + 1 < len(turns):
            said += [{"role": "user", "content": "<image>" if number < images else "nothing"}]
    write_json_lines(path, [{"messages": said, "images": [f"{n}.png" for n in range(images)]}])
    return path


def learnt(path: pathlib.Path, agent: VRAGAgent = AGENT) -> list[str]:
    """What is learnt of each row of a file."""
    found = []
    for _, recorded in read_messages(path):
        sequence = demonstrated([1], agent.recorded_pieces(recorded), seeing.tokenizer(), seeing.image_tokens(1024))
        found.append(seeing.tokenizer().decode(sequence.tokens[sequence.loss_mask]))
    return found


def test_a_box_is_written_in_the_models_own_frame(tmp_path: pathlib.Path) -> None:
    """By hand: a quarter of the page's width from a quarter on, half of its height. All else stays, to the letter."""
    path = write_row(tmp_path / "sft.jsonl", TURNS[0], TURNS[1], TURNS[2])
    assert learnt(path) == ["".join(TURNS).replace("[182, 133, 364, 399]", "[10, 8, 20, 24]")]
    scaled = dataclasses.replace(AGENT, regions=RegionRule(box_scale=1000, least=4))
    assert learnt(path, scaled) == ["".join(TURNS).replace("[182, 133, 364, 399]", "[250, 250, 500, 750]")]
    kept = dataclasses.replace(AGENT, recorded_pixels=())
    assert learnt(path, kept) == ["".join(TURNS)]


def test_a_row_may_say_in_which_frame_its_boxes_are(tmp_path: pathlib.Path) -> None:
    """Its own bounds come before the agent's: at most 256 x 28 x 28 pixels show the page at 504 x 364."""
    assert smart_resize(768, 1024, 28, 784, 256 * 784) == (364, 504)
    path = write_row(
        tmp_path / "sft.jsonl", TURNS[0], TURNS[1].replace("[182, 133, 364, 399]", "[126, 91, 252, 273]"), TURNS[2]
    )
    (_, row), *_ = read_rows(path)
    for pixels, box in (([784, 256 * 784], "[10, 8, 20, 24]"), ([], "[126, 91, 252, 273]")):
        write_json_lines(path, [{**row, "frame_pixels": pixels}])
        assert learnt(path) == ["".join(TURNS).replace("[182, 133, 364, 399]", box)]


def test_a_box_in_the_models_own_frame_stays_as_it_is_if_it_may_be_looked_at() -> None:
    images = seeing.image_tokens(1024)
    viewer = Viewer(images)
    page = Image.new("RGB", (1024, 768), "white")
    viewer.see([Shown(image=page)])
    assert viewer.frame == (40, 32)
    rule = RegionRule(least=4)
    assert viewer.reframed((3, 5, 9, 10), (40, 32), rule) == (3, 5, 9, 10)
    left, top, right, bottom = viewer.reframed((3, 5, 4, 6), (40, 32), rule)
    assert right - left >= 4
    assert bottom - top >= 4


def test_the_models_that_rows_were_made_with_learn_them_as_they_are() -> None:
    """Qwen2.5-VL with at most 512 x 28 x 28 pixels: a whole box comes back, rounded by at most one pixel outwards."""
    rng = np.random.default_rng(0)
    for _ in range(500):
        page: Any = tuple(int(side) for side in rng.integers(300, 3000, 2))
        high, wide = smart_resize(page[1], page[0], 28, 4 * 28 * 28, 512 * 28 * 28)
        left, top = int(rng.integers(0, wide - 40)), int(rng.integers(0, high - 40))
        box = (left, top, int(rng.integers(left + 28, wide + 1)), int(rng.integers(top + 28, high + 1)))
        found = reframed(box, page, (wide, high), (wide, high))
        outwards = np.asarray(found) - box
        coarse = max(1, *(side / raw for side, raw in zip((wide, high), page)))  # pixels of the frame for a raw one
        assert (np.abs(outwards) <= np.ceil(coarse)).all(), (page, box, found)
        assert (outwards[:2] <= 0).all()
        assert (outwards[2:] >= 0).all()


def test_what_was_marked_is_seen_and_little_else() -> None:
    """Any two frames: a look at the box in ours cuts all that the row's box marks, and at most a pixel of a frame more."""
    rng = np.random.default_rng(1)
    for _ in range(500):
        page: Any = tuple(int(side) for side in rng.integers(400, 2500, 2))
        written: Any = tuple(int(side) for side in rng.integers(200, 900, 2))
        frame: Any = tuple(int(28 * side) for side in rng.integers(4, 30, 2))
        rule = RegionRule(box_scale=float(rng.choice([0, 1000])), least=28)
        start = [float(rng.uniform(0, 0.6)) for _ in written]
        size = [float(rng.uniform(0.02, 0.4)) for _ in written]
        box = [a * side for a, side in zip(start, written)] + [(a + b) * s for a, b, s in zip(start, size, written)]
        found = reframed(box, page, written, frame, rule)
        cut = region(found, View(page=page, part=(0, 0, *page), frame=frame), rule)
        meant = [value / side * raw for value, side, raw in zip(box, written * 2, page * 2)]
        assert cut[0] <= meant[0] + 1e-6
        assert cut[1] <= meant[1] + 1e-6
        assert cut[2] >= meant[2] - 1e-6
        assert cut[3] >= meant[3] - 1e-6
        for axis, (raw, side) in enumerate(zip(page, frame)):
            step = raw / min(side, rule.box_scale or side)
            widest = max(meant[axis + 2] - meant[axis] + 2 * (step + 2), 28 * raw / side + step + 3)
            assert cut[axis + 2] - cut[axis] <= widest


def test_small_boxes_are_widened_to_what_may_be_looked_at(tmp_path: pathlib.Path) -> None:
    """At least 4 x 4 of our 40 x 32, in a corner and in the middle."""
    corner = TURNS[1].replace("[182, 133, 364, 399]", "[720, 528, 728, 532]")
    path = write_row(tmp_path / "sft.jsonl", TURNS[0], corner, TURNS[2])
    assert read_box(learnt(path)[0].partition("<bbox>")[2].partition("</bbox>")[0]) == (36, 28, 40, 32)
    frames = {"page": (1024, 768), "written": (728, 532), "frame": (40, 32)}
    left, top, right, bottom = reframed((364, 266, 365, 267), **frames, rule=RegionRule(least=4))  # type: ignore[arg-type]
    assert {right - left, bottom - top} <= {4, 5}  # rounded outwards
    assert left <= 20 < right
    assert top <= 16 < bottom


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        ((TURNS[1], TURNS[2]), "turn 1 of the assistant: no picture has been shown yet to look closer at"),
        ((TURNS[0], "<think>a</think><bbox>[9, 9, 5, 20]</bbox>", TURNS[2]), "turn 2 .*right must be more than left"),
        ((TURNS[0], "<think>a</think><bbox>[800, 9, 900, 20]</bbox>", TURNS[2]), "turn 2 .*lies outside the picture"),
        ((TURNS[0], "<think>a</think><bbox>[1, 2, 3]</bbox>", TURNS[2]), "turn 2 .*3 numbers"),
        ((TURNS[0], "<think>a</think><region>the mill</region>", TURNS[2]), "turn 2 .*no list in brackets"),
    ],
)
def test_what_can_t_be_mapped_names_file_row_and_fix(
    tmp_path: pathlib.Path, turns: tuple[str, ...], message: str
) -> None:
    path = write_row(tmp_path / "sft.jsonl", *turns, images=len(turns) - 1)
    config = make_sft_config(warm_start=WarmStartConfig(demonstrations=f"messages:{path}", examples=2))
    with pytest.raises(
        ValueError, match=rf"sft.jsonl, line 1: key 'messages': {message}.*mend the row, or leave it out"
    ):
        open_demonstrations(config, AGENT)


def test_bounds_that_are_none() -> None:
    for bounds in ((5,), (0, 10), (20, 10)):
        with pytest.raises(ValueError, match="must be a least and a most number of pixels, or"):
            VRAGAgent(tool="pages", recorded_pixels=bounds)


def test_the_real_rows(shared_data: Callable[[str], pathlib.Path], tmp_path: pathlib.Path) -> None:
    """VRAG-RL's three, whose pictures are not released: on slides of 1024 x 768 their boxes lie inside the copies, and a look
    at the mapped box cuts what the box marks."""
    rows = [row for _, row in read_rows(shared_data("vrag_demo_pages/sft_trajectories.jsonl.gz"))]
    for name in {name for row in rows for name in row["images"]}:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (1024, 768), "white").save(tmp_path / name)
    write_json_lines(tmp_path / "sft.jsonl", rows)
    texts = learnt(tmp_path / "sft.jsonl")
    boxes = {0: (437, 276, 719, 495), 1: (555, 108, 727, 432), 2: (68, 127, 666, 470)}
    for number, (text, box) in enumerate(zip(texts, boxes.values(), strict=True)):
        written = [said["content"] for said in rows[number]["messages"] if said["role"] == "assistant"]
        mapped = read_box(text.partition("<bbox>")[2].partition("</bbox>")[0])
        assert text.replace(json.dumps(list(map(int, mapped))), json.dumps(list(box))) == "".join(written)
        cut = region(mapped, View(page=(1024, 768), part=(0, 0, 1024, 768), frame=(40, 32)), AGENT.regions)
        meant = np.asarray(box) * np.asarray([1024 / 728, 768 / 532] * 2)
        assert (cut[:2] <= meant[:2] + 1e-6).all()
        assert (cut[2:] >= meant[2:] - 1e-6).all()
        assert (np.abs(np.asarray(cut) - meant) <= [1024 / 40 + 2, 768 / 32 + 2] * 2).all()


def test_sizes_are_those_of_upright_pictures(tmp_path: pathlib.Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (300, 200)).save(tmp_path / "turned.jpg", exif=exif)
    assert image_size(tmp_path / "turned.jpg") == (200, 300)
    assert image_size(np.zeros((20, 30, 3), np.uint8)) == (30, 20)
    with pytest.raises(ValueError, match=r"lost.jpg: can't be read"):
        image_size(tmp_path / "lost.jpg")
