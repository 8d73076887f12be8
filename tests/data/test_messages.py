"""Conversations with pictures: questions, rounds and pictures at their marks; errors by row and message; the real rows."""

from __future__ import annotations

import gzip
import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from routerl_jax.core.types import Example, Shown
from routerl_jax.data.rounds import RecordedRounds, Round, message_row, read_messages, write_rounds
from tests.data.original_rows import as_json, png

ASKED = "Think first. For example, <answer> x </answer>. Question: Which mill is blue?"
SEARCH, BOX, ANSWER = "<search>blue mill</search>", "<bbox>[1, 2, 30, 40]</bbox>", "<answer>Tin Mill</answer>"


def row(*contents: str, images: Any = (), **fields: Any) -> dict[str, Any]:
    """A user and an assistant in turns."""
    roles = ("user", "assistant") * len(contents)
    said = [{"role": role, "content": content} for role, content in zip(roles, contents)]
    return {"messages": said, "images": list(images), **fields}


def read(path: pathlib.Path, **options: Any) -> list[RecordedRounds]:
    return [recorded for _, recorded in read_messages(path, **options)]


@pytest.fixture
def pages(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "images").mkdir()
    for name, colour in (("a.png", "red"), ("images/b.png", "blue")):
        (tmp_path / name).write_bytes(png(colour, 60))
    return tmp_path


def test_a_row(pages: pathlib.Path) -> None:
    """Two pictures in observations, one with words around it."""
    given = row(ASKED, SEARCH, "<image>", BOX, "Here: <image>!", ANSWER, images=["./a.png", "b.png"])
    (recorded,) = read(as_json(pages / "sft.json", given))
    a, b = pages / "./a.png", pages / "images" / "b.png"
    assert recorded == RecordedRounds(
        example=Example(id="1", question="Which mill is blue?", answers=()),
        rounds=(
            Round(text=SEARCH, observation="<image>", images=(a,)),
            Round(text=BOX, observation="Here: <image>!", images=(b,)),
            Round(text=ANSWER),
        ),
    )
    assert [item.pieces for item in recorded.rounds] == [[Shown(image=a)], ["Here: ", Shown(image=b), "!"], ""]
    with pytest.raises(ValueError, match="question '1': a round's observation shows a picture"):
        write_rounds(pages / "rounds.jsonl", [recorded])


def test_a_row_is_written_as_it_is_read(pages: pathlib.Path) -> None:
    """Question with a picture, answers, observations with and without pictures; marks in the question are no pictures."""
    a, b = pages / "a.png", pages / "images" / "b.png"
    recorded = RecordedRounds(
        example=Example(id="q 7", question="Which <image> is blue?", answers=("Tin Mill", "tin"), images=(a,)),
        rounds=(
            Round(text=SEARCH, observation="<image>", images=(b,)),
            Round(text=SEARCH, observation="No page is left."),
            Round(text=ANSWER),
        ),
    )
    given = message_row(recorded, str, "Find it.")
    assert [message["role"] for message in given["messages"]] == ["system", *("user", "assistant") * 3]
    assert read(as_json(pages / "rows.jsonl", given)) == [recorded]
    assert message_row(recorded, str)["messages"] == given["messages"][1:]
    with pytest.raises(ValueError, match="question 'q 7': picture 2 can't be written to a file"):
        message_row(recorded, lambda image: "" if image == b else str(image))


def test_what_else_a_row_may_hold(pages: pathlib.Path) -> None:
    """A system message, a picture of the question, an id, a question and answers of its own, replies that are text."""
    given = row(f"<image>\n{ASKED}", SEARCH, "nothing found", ANSWER, images=["a.png"], id="q7", golden_answers=["Tin"])
    given["messages"].insert(0, {"role": "system", "content": "You are helpful."})
    (recorded,) = read(as_json(pages / "sft.jsonl", given))
    expected = Example(id="q7", question="Which mill is blue?", answers=("Tin",), images=(pages / "a.png",))
    assert recorded.example == expected
    assert [item.pieces for item in recorded.rounds] == ["nothing found", ""]
    (own,) = read(as_json(pages / "own.jsonl", {**given, "question": "Which?"}))
    assert own.example.question == "Which?"
    (plain,) = read(as_json(pages / "plain.jsonl", row("Which mill is blue?", ANSWER)))
    assert plain.example.question == "Which mill is blue?"


def test_rows_without_a_picture_may_be_left_out(pages: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [
        row(ASKED, SEARCH, "<image>", ANSWER, images=["a.png"], id="shown"),
        row(ASKED, SEARCH, "<image>", ANSWER, images=["lost.png"], id="lost"),
        row(ASKED, ANSWER, id="none"),
    ]
    path = as_json(pages / "sft.jsonl", *rows)
    with pytest.raises(ValueError, match=r"line 2: image 'lost.png' is neither in"):
        read(path)
    with caplog.at_level("WARNING", logger="absl"):
        assert [recorded.example.id for recorded in read(path, pictures=True)] == ["shown"]
    assert "2 of 3 rows have no picture and are left out" in caplog.text


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"messages": []}, "key 'messages' must be a list of {role, content}, and not empty"),
        ({"conversations": [{"from": "human", "value": "?"}]}, "key 'messages' must be a list"),
        ({"messages": [{"from": "human", "value": "?"}]}, "message 1: expected {role, content}"),
        (
            {"messages": [{"role": "tool", "content": "?"}]},
            "message 1: expected {role, content} with one of system, user",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "message 1: expected {role, content}"),
        ({"messages": [{"role": "system", "content": "x"}]}, "the last one must be the assistant's"),
        (
            {"messages": [{"role": "assistant", "content": "x"}]},
            "message 1: expected the user's, found the assistant's",
        ),
        (row("?", ANSWER, "<image>", images=["a.png"]), "the last one must be the assistant's"),
        (row("?", "<image>", images=["a.png"]), "message 2: the assistant's holds <image>"),
        (row("?", " "), "message 2: the assistant's is empty"),
        (row("?", SEARCH, "<image>", ANSWER), "users' messages have 1 marks <image>, and 'images' 0 pictures"),
        (row("?", ANSWER, images=["a.png"]), "users' messages have 0 marks <image>, and 'images' 1 pictures"),
        (row("?", SEARCH, "<image>", ANSWER, images=[3]), "key 'images' must be a path or a list of paths"),
        (row("Question: ", ANSWER), "the question in 'messages' is empty"),
        (row("word " * 101, ANSWER), "no 'Question:' that says where its instructions end"),
    ],
)
def test_errors_name_row_and_message(pages: pathlib.Path, given: dict[str, Any], message: str) -> None:
    path = as_json(pages / "sft.jsonl", row(ASKED, ANSWER), given)
    with pytest.raises(ValueError) as error:
        read(path)
    assert str(error.value).startswith(f"{path}, line 2: ")
    assert message in str(error.value)


# --- real rows ---------------------------------------------------------------------------------------------------------


def test_the_real_rows(shared_data: Callable[[str], pathlib.Path], tmp_path: pathlib.Path) -> None:
    """VRAG-RL's three: which actions, and a picture after each but the answer. The pictures themselves are not released."""
    path = shared_data("vrag_demo_pages/sft_trajectories.jsonl.gz")
    with pytest.raises(ValueError, match=r"line 1: image '\./data/DataCollection/img/.*\.jpg' is neither in"):
        read(path)
    with gzip.open(path, "rt", encoding="utf-8") as file:
        names = [name for line in file for name in json.loads(line)["images"]]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(png("white", 60))
    (tmp_path / "sft.jsonl.gz").write_bytes(path.read_bytes())
    found = read(tmp_path / "sft.jsonl.gz")
    actions = [
        [next(tag for tag in ("search", "bbox", "answer") if f"</{tag}>" in item.text) for item in one.rounds]
        for one in found
    ]
    assert actions == [
        ["search", "bbox", "answer"],
        ["search", "bbox", "search", "answer"],
        ["search", "search", "bbox", "answer"],
    ]
    assert found[1].example.question == "What is David Cooperrider known for?"
    assert [image for one in found for item in one.rounds for image in item.images] == [
        tmp_path / name for name in names
    ]


def test_a_row_may_say_in_which_frame_its_boxes_are(pages: pathlib.Path) -> None:
    given = row(ASKED, SEARCH, "<image>", BOX, "", ANSWER, images=["a.png"])
    for said, expected in (({}, None), ({"frame_pixels": []}, ()), ({"frame_pixels": [784, 401408]}, (784, 401408))):
        (recorded,) = read(as_json(pages / "sft.json", {**given, **said}))
        assert recorded.frame_pixels == expected
        assert message_row(recorded, lambda _: "a.png").get("frame_pixels") == said.get("frame_pixels")
    for wrong in ([784], [784, 783], [0, 784], "784", [1.5, 784]):
        with pytest.raises(ValueError, match=r"item 1: key 'frame_pixels': expected \[least, most\] numbers"):
            read(as_json(pages / "sft.json", {**given, "frame_pixels": wrong}))
