"""What a policy looked at as one picture: boxes where they belong on the raw page, crops beside them, on scripted episodes."""

import pathlib
from typing import Any

import numpy as np
import pytest
from PIL import Image

from routerl_jax.agents.driver import run
from routerl_jax.core.types import Example, Passage
from routerl_jax.evaluation.records import read_records, write_records
from routerl_jax.evaluation.trajectory import _COLOURS, pictures_shown, sheet, write_sheet
from routerl_jax.models.regions import RegionRule
from routerl_jax.recipes.vrag_rl.agents import VRAGAgent
from routerl_jax.training.config import KnowledgeConfig, ModelConfig, TrainConfig
from routerl_jax.training.knowledge import open_knowledge, with_knowledge
from tests.agents.scripted import SeeingScript
from tests.knowledge import late
from tests.programs import launch_here

TURNS = (
    "<search>population</search>",
    "<bbox>[10, 8, 30, 24]</bbox>",  # of 40 x 32: raw (80, 60) to (240, 180)
    "<bbox>[0, 8, 20, 16]</bbox>",  # of the crop, seen at 40 x 32: raw (80, 90) to (160, 120)
    "<bbox>[5, 5, 1, 1]</bbox>",
    "<answer>32.6M</answer>",
)
EXAMPLE = Example(id="q", question="How many people?", answers=("32.6M",))
AGENT = VRAGAgent(tool="pages", k=3, max_turns=5, max_turn_tokens=200, answer_tokens=40, regions=RegionRule(least=4))


class Pages:
    def __init__(self, image: str) -> None:
        self.image = image

    def search(self, queries, k):
        return [[Passage(id="deck#1", title="Deck", text="", image=self.image)] for _ in queries]


@pytest.fixture
def page(tmp_path: pathlib.Path) -> pathlib.Path:
    """240 x 320, grey, with the middle of the nested look in green."""
    pixels = np.full((240, 320, 3), 128, np.uint8)
    pixels[90:120, 80:160] = (0, 255, 0)
    path = tmp_path / "page.png"
    Image.fromarray(pixels).save(path)
    return path


@pytest.fixture
def records(tmp_path: pathlib.Path, page: pathlib.Path) -> pathlib.Path:
    """A file of one episode: a search, a look, a look into that, a box that marks nothing, an answer."""
    engine: Any = SeeingScript(lambda _e, _s, turn: TURNS[turn], max_length=1500)
    path = tmp_path / "episodes" / "step-000000.jsonl"
    write_records(path, run(AGENT, [EXAMPLE], engine, {"pages": Pages(str(page))}))
    return path


def test_boxes_lie_on_the_raw_page(records: pathlib.Path) -> None:
    (record,) = read_records(records)
    assert [tuple(item["box"]) for item in pictures_shown(record)] == [(), (80, 60, 240, 180), (80, 90, 160, 120)]
    pixels = np.asarray(sheet(record, records.parent))
    green = (pixels == (0, 255, 0)).all(-1)
    rows, columns = np.nonzero(green[:, :340])  # the page, which is drawn in its own size
    left, top = int(columns.min()), int(rows.min())  # within the outline of the nested look
    corner = (left - 3 - 80, top - 3 - 90)
    for number, box in ((2, (80, 60, 240, 180)), (3, (80, 90, 160, 120))):
        colour = tuple(bytes.fromhex(_COLOURS[number - 2][1:]))
        x, y = corner[0] + box[2], corner[1] + box[3]
        assert tuple(pixels[y, x]) == colour  # the outline's right bottom corner
        assert tuple(pixels[y + 1, x + 1]) == (128, 128, 128)
    assert green[:, 340:].sum() > 4 * 80 * 30  # the crop of the crop, enlarged


def test_a_page_that_is_gone_is_said(records: pathlib.Path, page: pathlib.Path) -> None:
    (record,) = read_records(records)
    whole = np.asarray(sheet(record, records.parent))
    page.unlink()
    without = np.asarray(sheet(record, records.parent))
    grey = [(pixels == 128).all(-1).sum() for pixels in (whole, without)]
    assert grey[0] - grey[1] > 200 * 300  # a line in the page's place
    assert (without == (0, 255, 0)).all(-1).sum() > 4 * 80 * 30  # and its crops


def test_a_look_at_the_questions_own_picture(tmp_path: pathlib.Path, page: pathlib.Path) -> None:
    engine: Any = SeeingScript(lambda _e, _s, turn: [TURNS[1], TURNS[4]][turn], max_length=1500)
    example = Example(id="q", question="How many?", answers=("32.6M",), images=(str(page),))
    path = tmp_path / "episodes.jsonl"
    write_records(path, run(AGENT, [example], engine, {"pages": Pages("")}))
    (record,) = read_records(path)
    assert len(pictures_shown(record)) == 1
    drawn = np.asarray(sheet(record, tmp_path))
    colour = bytes.fromhex(_COLOURS[-1][1:])  # of the first picture
    assert (drawn[:, :340] == tuple(colour)).all(-1).sum() > 2 * (160 + 120)  # the box on the question's picture
    assert (drawn[:, 340:] == tuple(colour)).all(-1).any()  # and its crop


def test_a_directory_of_pdfs_in_the_place_of_a_runs_pages(tmp_path: pathlib.Path, monkeypatch: Any) -> None:
    """Built as the run's own, by the text of the pages; the best page is shown, and drawn."""
    monkeypatch.setenv("ROUTERL_CACHE", str(tmp_path / "cache"))
    for name, pages in (("old", ["nothing here"]), ("new", ["The harvest of Ghana", "The railways of Togo"])):
        late.write_pdf(tmp_path / name / f"{name}.pdf", pages)
    settings = {"retriever": "bm25", "pages": {"text": "layer"}}
    spec = KnowledgeConfig(kind="ocr", source=str(tmp_path / "old"), settings=settings)
    config = TrainConfig(knowledge={"pages": spec}, model=ModelConfig(path="atlas-warm-start"))
    tools = open_knowledge(with_knowledge(config, [f"pages={tmp_path / 'new'}"]), progress=False)
    engine: Any = SeeingScript(lambda _e, _s, turn: ["<search>railways</search>", TURNS[4]][turn], max_length=1500)
    path = tmp_path / "episodes.jsonl"
    write_records(path, run(AGENT, [EXAMPLE], engine, tools))
    (record,) = read_records(path)
    assert [item["passage"] for item in pictures_shown(record)] == ["new.pdf#2"]
    assert write_sheet(record, tmp_path, tmp_path / "looks") is not None
    built = with_knowledge(config, [f"pages={pathlib.Path(record['turns'][0]['shown'][0]['image']).parents[2]}"])
    assert open_knowledge(built, progress=False)["pages"].search(["harvest"], 1)[0][0].id == "new.pdf#1"
    with pytest.raises(ValueError, match="'wiki=x' is not NAME=PLACE with a knowledge base of the run: pages"):
        with_knowledge(config, ["wiki=x"])
    with pytest.raises(ValueError, match="nowhere does not exist"):
        with_knowledge(config, [f"pages={tmp_path}/nowhere"])


def test_an_episode_without_pictures_has_none(tmp_path: pathlib.Path) -> None:
    engine: Any = SeeingScript(lambda _e, _s, turn: [TURNS[0], TURNS[4]][turn], max_length=1500)
    path = tmp_path / "episodes.jsonl"
    write_records(path, run(AGENT, [EXAMPLE], engine, {"pages": Pages("")}))
    (record,) = read_records(path)
    assert write_sheet(record, tmp_path, tmp_path / "looks") is None
    assert not (tmp_path / "looks").exists()


def test_launch_view_names_it(records: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not launch_here("view", f"--file={records}")
    said = " ".join(capsys.readouterr().out.split())
    (drawn,) = (records.parent / "looks").iterdir()
    assert drawn.name in said.replace(" ", "")
    assert "(80, 90, 160, 120)" in said
    assert Image.open(drawn).size[0] > 600
    drawn.unlink()
    assert not launch_here("view", f"--file={records}", "--nodraw")
    assert not list((records.parent / "looks").iterdir())
