"""Agents that see: images of the question, images that come back as observations."""

import base64
import io
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from routerl_jax.agents.agent import LLM, Agent, Tools
from routerl_jax.agents.driver import run
from routerl_jax.agents.search_agent import SearchAgent
from routerl_jax.core.rows import RowLocation
from routerl_jax.core.types import Call, Episode, Example, Observation, Passage, Shown
from routerl_jax.engine.engine import Engine
from routerl_jax.evaluation.metrics import averages
from routerl_jax.evaluation.records import episode_of, read_records, write_records
from routerl_jax.evaluation.trajectory import render
from routerl_jax.recipes.r1_router.grammar import R1RouterGrammar
from routerl_jax.training.demonstrations import Worked, _pieces
from tests import seeing, tiny

EXAMPLES = [
    Example(id="flag", question="whose flag?", answers=("Ghana",), images=(seeing.picture(0),)),
    Example(id="text", question="no picture", answers=("none",)),
]


class Looker(Agent):
    """Writes a few tokens, is shown a picture, writes again."""

    async def run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        chat = llm.conversation(llm.image_marker * len(example.images) + example.question, example.images)
        await chat.generate(max_tokens=4)
        page = Shown(passage="p1", image=seeing.picture(llm.sample + 5))
        said = ["page: ", page, " "]
        before = chat.room
        expected = chat.tokens_of(said)
        chat.observe(said, ["p1", "p2"])
        assert before - chat.room == expected > len(page.image) // 8
        await chat.generate(max_tokens=4)
        return chat.episode(answer=None)


def test_images_reach_the_sequences() -> None:
    episodes = run(Looker(), EXAMPLES, Engine(seeing.model(), rows=4, max_length=128), {}, samples=2)
    assert [len(episode.sequences[0].images) for episode in episodes] == [2, 2, 1, 1]
    for episode in episodes:
        (sequence,) = episode.sequences
        assert sequence.loss_mask.sum() == sum(turn.tokens for turn in episode.turns) > 4
        for first, image in sequence.images:
            assert not sequence.loss_mask[first : first + image.tokens].any()
    first, second = (episode.sequences[0] for episode in episodes[:2])
    assert first.images[0][1].digest == second.images[0][1].digest
    assert first.images[1][1].digest != second.images[1][1].digest


def test_the_search_agent_shows_the_question_s_image() -> None:
    agent = SearchAgent(grammar=R1RouterGrammar(tools=("text",)), max_searches=1, max_turn_tokens=8, answer_tokens=8)
    engine = Engine(seeing.model(), rows=4, max_length=200)
    episodes = run(agent, EXAMPLES, engine, {"text": tiny.ScriptedKB()})
    assert [len(episode.sequences[0].images) for episode in episodes] == [1, 0]
    again = run(agent, EXAMPLES, Engine(seeing.model(), rows=4, max_length=200), {"text": tiny.ScriptedKB()})
    for one, other in zip(episodes, again):
        np.testing.assert_array_equal(one.sequences[0].tokens, other.sequences[0].tokens)
    with pytest.raises(RuntimeError, match=r"example 'flag', sample 0: .* sees no images; use a vision-language model"):
        run(agent, EXAMPLES, Engine(tiny.model(), rows=4, max_length=200), {"text": tiny.ScriptedKB()})


class Pictures(R1RouterGrammar):
    """Shows the pictures of passages before their texts."""

    def observation(self, call: Call, passages: Sequence[Passage]) -> Observation:
        pieces: list[str | Shown] = ["<information>\n"]
        for passage in passages:
            pieces += [Shown(passage=passage.id, image=passage.image), f" {passage.title}\n"]
        return [*pieces, "</information>"]


class Thumbnails(SearchAgent):
    """Searches in the policy's place, then lets it answer."""

    async def run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        chat = self.begin(example, llm)
        chat.write(self.grammar.write_search("", example.question, "text"))
        await chat.show(await tools["text"].search(example.question, self.k))
        return await chat.final_answer()


def png(picture: np.ndarray) -> str:
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


class Album:
    """Finds four thumbnails: a sound one, a damaged one, one too long, and one whose title holds a mark."""

    found = (
        Passage(id="sound", title="Mali", text="", image=png(seeing.picture(3))),
        Passage(id="damaged", title="Chad", text="", image="data:image/png;base64,iVBORw0KGgo="),
        Passage(id="long", title="Peru", text="", image=png(seeing.picture(4, 1, 300))),
        Passage(id="marked", title=f"Cuba {seeing.MARKER}", text="", image=png(seeing.picture(5))),
    )

    def search(self, queries: Sequence[Any], k: int) -> list[list[Passage]]:
        return [list(self.found[:k]) for _ in queries]


@pytest.fixture(scope="module")
def seen() -> Episode:
    agent = Thumbnails(grammar=Pictures(tools=("text",)), k=4, answer_tokens=8)
    (episode,) = run(agent, EXAMPLES[:1], Engine(seeing.model(context=1024), rows=2, max_length=700), {"text": Album()})
    return episode


def test_pictures_of_an_observation(seen: Episode) -> None:
    """What can't be used is said in words, a mark in a title is text, and the run goes on."""
    turn = seen.turns[0]
    assert [item.passage for item in turn.shown] == ["sound", "damaged", "long", "marked"]
    assert [bool(item.error) for item in turn.shown] == [False, True, True, False]
    assert turn.observation.count(seeing.MARKER) == 2
    assert turn.observation.count("a picture that can't be shown") == 2
    assert "300x1 pixels; one side may be at most 200 times the other" in turn.observation
    (sequence,) = seen.sequences
    assert [image.digest for _, image in sequence.images][1:] == [turn.shown[0].digest, turn.shown[3].digest]
    assert averages([seen])["unusable_picture_rate"] == 0.5


@pytest.mark.slow
def test_fewer_thumbnails_where_there_is_no_room() -> None:
    """A result is shown with its picture, or not at all."""
    agent = Thumbnails(grammar=Pictures(tools=("text",)), k=4, answer_tokens=8)
    lengths = {}
    for room in (110, 150, 350, 450, 600):
        (episode,) = run(
            agent, EXAMPLES[:1], Engine(seeing.model(context=1024), rows=2, max_length=room), {"text": Album()}
        )
        shown = [item.passage for item in episode.turns[0].shown]
        assert shown == ["sound", "damaged", "long", "marked"][: len(shown)]
        lengths[room] = len(shown)
    assert sorted(lengths.values()) == list(lengths.values())
    assert 0 in lengths.values()
    assert 4 in lengths.values()


def test_a_record_keeps_what_was_seen(seen: Episode, tmp_path: pathlib.Path) -> None:
    """Pictures lie beside the file, each once, and a supervised run sees what the policy saw, token by token."""
    path = tmp_path / "episodes" / "step-000000.jsonl"
    write_records(path, [seen, seen])
    row, _ = read_records(path)
    again = episode_of(row, RowLocation(path, "line", 1))
    files = list((path.parent / "pictures").iterdir())
    assert len(files) == 4  # the question's, and three thumbnails that are pictures
    turn = row["turns"][0]
    assert [item["image"][:9] for item in turn["shown"]] == ["pictures/", "", "pictures/", "pictures/"]
    assert not any(passage["image"].startswith("data:") for passage in turn["calls"][0]["passages"])
    agent = Thumbnails(grammar=Pictures(tools=("text",)), k=4, answer_tokens=8)
    sequence = Worked(again.example, _pieces(again)).sequence(agent, seeing.model())
    (recorded,) = seen.sequences
    fed = seen.turns[-1].start  # what a random policy samples is seldom the tokenizer's own spelling
    np.testing.assert_array_equal(sequence.tokens[:fed], recorded.tokens[:fed])
    np.testing.assert_array_equal(sequence.positions[:, :fed], recorded.positions[:, :fed])
    assert [(at, image.digest) for at, image in sequence.images] == [(at, i.digest) for at, i in recorded.images]
    shown = Console(width=120, record=True, file=io.StringIO())
    shown.print(render(row))
    text = shown.export_text()
    assert f"sees    {turn['shown'][0]['image']} of sound" in text
    assert "unseen  a picture of damaged: " in text
