"""Recorded rounds and conversations with pictures: schema, round trips, errors by row and key, the real rows by hand."""

from __future__ import annotations

import collections
import gzip
import json
import pathlib
import re
from collections.abc import Callable
from typing import Any

import pytest

from routerl_jax.core.types import Example, Shown
from routerl_jax.data.rounds import RecordedRounds, Round, message_row, read_messages, read_rounds, write_rounds
from routerl_jax.rewards.metrics import exact_match
from routerl_jax.rewards.retrieval import gold_passages_of
from tests.data.mmsearch_traces import FILE, traces, write_recorded
from tests.data.original_rows import as_json, png

ROW: dict[str, Any] = {
    "id": "q1",
    "question": "Where is this?",
    "golden_answers": ["Azores", "Açores"],
    "images": ["a.png"],
    "category": "search_required",
    "rounds": [
        {"text": "<search><img></search>", "tool": "image_search", "observation": "1. title: Pico", "error": None},
        {"text": "<text_search>Pico</text_search>", "tool": "text_search", "error": "timed out"},
        {"text": "<answer>Azores</answer>"},
    ],
}


def read(path: pathlib.Path) -> list[RecordedRounds]:
    return [recorded for _, recorded in read_rounds(path)]


def test_rows_of_any_format_keep_their_gold_passages(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    question = {key: ROW[key] for key in ("id", "question", "golden_answers", "rounds", "images")}
    by_document = {"doc_id": "mills.pdf", "evidence_pages": "[3, 5]"}
    by_deck = {"deck_name": "mills", "evidence_pages": [3, 5]}
    for number, fields in enumerate((by_document, by_deck)):
        (recorded,) = read(as_json(tmp_path / f"r{number}.jsonl", {**question, **fields}))
        name = fields.get("doc_id", "mills")
        assert [hop.passage_id for hop in gold_passages_of(recorded.example)] == [f"{name}#3", f"{name}#5"]
        assert recorded.example.answers == ("Azores", "Açores")
        assert recorded.example.images == (tmp_path / "a.png",)
        write_rounds(tmp_path / "again.jsonl", [recorded])
        assert read(tmp_path / "again.jsonl") == [recorded]
    with pytest.raises(ValueError, match=r"line 1: key 'evidence_pages' .* without 'doc_id'"):
        read(as_json(tmp_path / "alone.jsonl", {**question, "evidence_pages": [3]}))


def test_rows_and_back(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    (recorded,) = read(as_json(tmp_path / "rounds.jsonl", ROW))
    assert recorded == RecordedRounds(
        example=Example(
            id="q1",
            question="Where is this?",
            answers=("Azores", "Açores"),
            images=(tmp_path / "a.png",),
            metadata={"kind": "search_required"},
        ),
        rounds=(
            Round(text="<search><img></search>", tool="image_search", observation="1. title: Pico"),
            Round(text="<text_search>Pico</text_search>", tool="text_search", error="timed out"),
            Round(text="<answer>Azores</answer>"),
        ),
    )
    write_rounds(tmp_path / "again.jsonl", [recorded])
    assert read(tmp_path / "again.jsonl") == [recorded]
    (plain,) = read(as_json(tmp_path / "plain.jsonl", {**ROW, "images": [], "category": None}))
    write_rounds(tmp_path / "again.jsonl", [plain])
    assert read(tmp_path / "again.jsonl") == [plain]
    assert plain.example.images == ()


def test_pictures_in_memory_are_not_written(tmp_path: pathlib.Path) -> None:
    example = Example(id="a", question="?", answers=("x",), images=(png(),))
    with pytest.raises(ValueError, match="question 'a': picture 1 is in memory alone"):
        write_rounds(tmp_path / "a.jsonl", [RecordedRounds(example=example, rounds=(Round(text="x"),))])
    assert not (tmp_path / "a.jsonl").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rounds": []}, "key 'rounds' must be a list of {text, tool, observation, error}, and not empty"),
        ({"rounds": None}, "key 'rounds' must be a list"),
        ({"rounds": ["x"]}, "key 'rounds', round 1: expected an object, found str"),
        ({"rounds": [{"text": "a"}, {"tool": "b"}]}, "key 'rounds', round 2: 'text' must be a string"),
        ({"rounds": [{"text": "a", "observation": ["b"]}]}, "round 1: 'observation' must be a string"),
        ({"rounds": [{"text": "a", "error": True}]}, "round 1: 'error' must say why the call failed, or be null"),
        ({"rounds": [{"text": "a", "error": ""}]}, "round 1: 'error' must say why the call failed, or be null"),
        (
            {"rounds": [{"text": "a", "result": "b"}]},
            "round 1: no key 'result'; there are: text, tool, observation, passages, error",
        ),
        ({"golden_answers": []}, "no answers; give them under 'golden_answers'"),
        ({"images": ["b.png"]}, "image 'b.png' is neither in "),
    ],
)
def test_errors_name_file_row_and_round(tmp_path: pathlib.Path, change: dict[str, Any], message: str) -> None:
    path = as_json(tmp_path / "rounds.jsonl", {**ROW, "images": []}, {**ROW, "images": [], **change})
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        read(path)
    assert str(error.value).startswith(f"{path}, line 2: ")


def test_real_traces(shared_data: Callable[[str], pathlib.Path], tmp_path: pathlib.Path) -> None:
    """35 traces of MMSearch-R1-7B. The expected numbers were counted over the original file."""
    path = shared_data(FILE)
    originals = traces(path)
    recorded = read(write_recorded(path, tmp_path / "rounds.jsonl"))
    assert [item.example.id for item in recorded] == [trace["id"] for trace in originals]
    assert len(recorded) == 35
    assert collections.Counter(item.example.metadata["kind"] for item in recorded) == {
        "search_free": 20,
        "search_required": 15,
    }
    assert collections.Counter(tuple(turn.tool for turn in item.rounds) for item in recorded) == {
        ("",): 8,
        ("image_search", ""): 4,
        ("image_search", "text_search", ""): 15,
        ("image_search",): 3,
        ("image_search", "text_search"): 5,
    }
    failed = [item for item in recorded if item.rounds[-1].error]
    assert collections.Counter(item.rounds[-1].tool for item in failed) == {"image_search": 3, "text_search": 5}
    assert not any(turn.error for item in recorded for turn in item.rounds[:-1])
    assert all(turn.observation for item in recorded for turn in item.rounds if turn.tool and not turn.error)
    assert all(item.example.images[0].is_file() for item in recorded)
    right: dict[str, set[str]] = {"any": set(), "first": set(), "recorded": set()}
    for item, trace in zip(recorded, originals):
        answers = re.findall(r"<answer>(.*?)</answer>", item.rounds[-1].text, re.DOTALL)
        answer = answers[-1].strip() if answers else None
        assert answer == trace["final"]["final_answer"]
        name, golds = item.example.id, item.example.answers
        right["any"] |= {name} if exact_match(answer, golds, "search_r1") else set()
        right["first"] |= {name} if exact_match(answer, golds[:1], "search_r1") else set()
        right["recorded"] |= {name} if trace["final"]["exact_match"] else set()
    assert {key: len(names) for key, names in right.items()} == {"any": 13, "first": 12, "recorded": 12}
    # Its answer, "September 26, 2003", is an alias once the comma is gone, which the run's own score takes for wrong.
    assert right["any"] - right["recorded"] == right["any"] - right["first"] == {"fvqa_train_3112"}


ASKED = "Think first. For example, <answer> x </answer>. Question: Which mill is blue?"
SEARCH, BOX, ANSWER = "<search>blue mill</search>", "<bbox>[1, 2, 30, 40]</bbox>", "<answer>Tin Mill</answer>"


def row(*contents: str, images: Any = (), **fields: Any) -> dict[str, Any]:
    """A user and an assistant in turns."""
    roles = ("user", "assistant") * len(contents)
    said = [{"role": role, "content": content} for role, content in zip(roles, contents)]
    return {"messages": said, "images": list(images), **fields}


def read_chats(path: pathlib.Path, **options: Any) -> list[RecordedRounds]:
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
    (recorded,) = read_chats(as_json(pages / "sft.json", given))
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
    assert read_chats(as_json(pages / "rows.jsonl", given)) == [recorded]
    assert message_row(recorded, str)["messages"] == given["messages"][1:]
    with pytest.raises(ValueError, match="question 'q 7': picture 2 can't be written to a file"):
        message_row(recorded, lambda image: "" if image == b else str(image))


def test_what_else_a_row_may_hold(pages: pathlib.Path) -> None:
    """A system message, a picture of the question, an id, a question and answers of its own, replies that are text."""
    given = row(f"<image>\n{ASKED}", SEARCH, "nothing found", ANSWER, images=["a.png"], id="q7", golden_answers=["Tin"])
    given["messages"].insert(0, {"role": "system", "content": "You are helpful."})
    (recorded,) = read_chats(as_json(pages / "sft.jsonl", given))
    expected = Example(id="q7", question="Which mill is blue?", answers=("Tin",), images=(pages / "a.png",))
    assert recorded.example == expected
    assert [item.pieces for item in recorded.rounds] == ["nothing found", ""]
    (own,) = read_chats(as_json(pages / "own.jsonl", {**given, "question": "Which?"}))
    assert own.example.question == "Which?"
    (plain,) = read_chats(as_json(pages / "plain.jsonl", row("Which mill is blue?", ANSWER)))
    assert plain.example.question == "Which mill is blue?"


def test_rows_without_a_picture_may_be_left_out(pages: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [
        row(ASKED, SEARCH, "<image>", ANSWER, images=["a.png"], id="shown"),
        row(ASKED, SEARCH, "<image>", ANSWER, images=["lost.png"], id="lost"),
        row(ASKED, ANSWER, id="none"),
    ]
    path = as_json(pages / "sft.jsonl", *rows)
    with pytest.raises(ValueError, match=r"line 2: image 'lost.png' is neither in"):
        read_chats(path)
    with caplog.at_level("WARNING", logger="absl"):
        assert [recorded.example.id for recorded in read_chats(path, pictures=True)] == ["shown"]
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
        read_chats(path)
    assert str(error.value).startswith(f"{path}, line 2: ")
    assert message in str(error.value)


# --- real rows ---------------------------------------------------------------------------------------------------------


def test_the_real_rows(shared_data: Callable[[str], pathlib.Path], tmp_path: pathlib.Path) -> None:
    """VRAG-RL's three: which actions, and a picture after each but the answer. The pictures themselves are not released."""
    path = shared_data("vrag_demo_pages/sft_trajectories.jsonl.gz")
    with pytest.raises(ValueError, match=r"line 1: image '\./data/DataCollection/img/.*\.jpg' is neither in"):
        read_chats(path)
    with gzip.open(path, "rt", encoding="utf-8") as file:
        names = [name for line in file for name in json.loads(line)["images"]]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(png("white", 60))
    (tmp_path / "sft.jsonl.gz").write_bytes(path.read_bytes())
    found = read_chats(tmp_path / "sft.jsonl.gz")
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
        (recorded,) = read_chats(as_json(pages / "sft.json", {**given, **said}))
        assert recorded.frame_pixels == expected
        assert message_row(recorded, lambda _: "a.png").get("frame_pixels") == said.get("frame_pixels")
    for wrong in ([784], [784, 783], [0, 784], "784", [1.5, 784]):
        with pytest.raises(ValueError, match=r"item 1: key 'frame_pixels': expected \[least, most\] numbers"):
            read_chats(as_json(pages / "sft.json", {**given, "frame_pixels": wrong}))
