"""Golden trajectories: the released file against a direct count of its JSON, round trips, steps as examples, and errors."""

import collections
import copy
import dataclasses
import gzip
import json
import re

import PIL.Image
import pytest

from routerl_jax.data.readers import open_dataset
from routerl_jax.data.trajectories import (
    AnswerStep,
    Document,
    FinalStep,
    RouteStep,
    Trajectory,
    golden_steps,
    read_trajectories,
    summarize_trajectories,
    write_trajectories,
)
from tests.data.trajectories import CAPITAL, RIVER, write

REAL = "r1router_trajectories/trajectories_dev.jsonl.gz"


@pytest.fixture
def file(tmp_path):
    PIL.Image.new("RGB", (8, 8)).save(tmp_path / "volta.png")
    return write(tmp_path / "golden.jsonl", CAPITAL, RIVER)


def read(path):
    return [trajectory for _, trajectory in read_trajectories(path)]


def raw_rows(path):
    return [json.loads(line) for line in gzip.open(path, "rt", encoding="utf-8")]


# --- the released file -------------------------------------------------------------------------------------------------


def test_counts_of_the_released_file_are_those_of_its_json(shared_data):
    path = shared_data(REAL)
    rows = raw_rows(path)
    steps = [step for row in rows for step in row["steps"]]
    kind = {dict: "route", str: "answer", list: "final"}
    summary = summarize_trajectories(read(path))
    assert summary.trajectories == len(rows) == 98
    assert summary.steps == collections.Counter(kind[type(step["answer"])] for step in steps)
    assert summary.steps == {"route": 287, "answer": 244, "final": 98}
    assert summary.patterns == collections.Counter(
        "".join({"ret": "R", "ans": "A"}[step["step_type"]] for step in row["steps"]) for row in rows
    )
    named = [name for step in steps if step["step_type"] == "ret" for name in step["answer"]["retriever"]]
    assert summary.retrievers == collections.Counter(named)
    assert summary.images == sum(len(row["image_names"]) for row in rows)
    assert summary.with_images == sum(bool(row["image_names"]) for row in rows) == 13


def test_documents_and_history_of_the_released_file(shared_data):
    """Five documents for every intermediate answer, from the retriever before it; the history is the problem's."""
    for row, trajectory in zip(raw_rows(shared_data(REAL)), read(shared_data(REAL)), strict=True):
        asked = ()
        for step, golden in zip(row["steps"], golden_steps(trajectory), strict=True):
            if golden.kind == "route":
                asked = golden.retrievers
            elif golden.kind == "answer":
                assert [d.retriever for d in golden.documents] == list(asked * 5)
                assert all(document.text in step["problem"] for document in golden.documents)
                assert golden.documents[0].text == re.split(r"-0: |\nt[aei]r-1: ", step["problem"])[1].strip()
            if golden.kind != "answer":
                assert len(golden.history) == len(re.findall(r"^Sub-question\d: ", step["problem"], re.MULTILINE))
                assert all(query in step["problem"] and answer in step["problem"] for query, answer in golden.history)


def test_the_released_file_is_written_as_it_was(shared_data, tmp_path):
    trajectories = read(shared_data(REAL))
    write_trajectories(tmp_path / "again.jsonl", trajectories)
    assert read(tmp_path / "again.jsonl") == trajectories
    written = [json.loads(line) for line in (tmp_path / "again.jsonl").open(encoding="utf-8")]
    for row, original in zip(written, raw_rows(shared_data(REAL)), strict=True):
        assert row["steps"] == original["steps"]
        assert (row["images"], row["question"]) == (original["image_names"], original["question"])


# --- a file of our own -------------------------------------------------------------------------------------------------


def test_the_released_schema_is_read(file):
    capital, river = read(file)
    assert (capital.id, capital.question) == ("1", "How many people live in the capital of Ghana?")
    assert (capital.pattern, river.pattern) == ("RARARA", "RAA")
    assert capital.steps[1].documents == (
        Document(retriever="text retriever", text="Accra is the capital."),
        Document(retriever="text retriever", text="Kumasi\n\nA city."),
    )
    assert river.images == ("volta.png",)
    route, answer, _, _, end, final = golden_steps(capital)
    assert (route.kind, route.query, route.retrievers, route.history) == (
        "route",
        "capital of ghana?",
        ("text retriever",),
        (),
    )
    assert (answer.kind, answer.query, answer.answers) == ("answer", "capital of ghana?", ("accra.",))
    assert (end.query, end.retrievers) == ("none", ("none",))
    assert final.history == end.history
    assert final.history[0] == ("capital of ghana?", "accra.")
    assert final.answers == ("2,514,000", "2.5 million")


def test_what_is_written_reads_equal(tmp_path):
    """Documents that no problem shows are kept beside it."""
    shown = (Document(retriever="elements retriever", text="Gold: symbol Au"),)
    steps = (
        RouteStep(query="symbol of gold?", retrievers=("elements retriever",), system="s", problem="p"),
        AnswerStep(answer="Au", documents=shown, system="s", problem="p"),
        FinalStep(answers=("Au", "au")),
    )
    made = [Trajectory(id="x/1", question="What is gold's symbol?", steps=steps, images=("a.png",))]
    write_trajectories(tmp_path / "made.jsonl", made)
    assert read(tmp_path / "made.jsonl") == made


def test_every_step_is_an_example(file):
    examples = open_dataset(f"trajectories:{file}")
    assert [examples[i].id for i in range(len(examples))] == [
        *(f"1/{i}" for i in range(1, 7)),
        *(f"2/{i}" for i in (1, 2, 3)),
    ]
    assert {examples[i].question for i in range(6)} == {"How many people live in the capital of Ghana?"}
    assert [examples[i].answers for i in (0, 1, 5)] == [
        ("capital of ghana?",),
        ("accra.",),
        ("2,514,000", "2.5 million"),
    ]
    assert examples[6].images == (file.parent / "volta.png",)
    assert len(open_dataset(f"trajectories/text:{file}")) == 6


# --- errors ------------------------------------------------------------------------------------------------------------


def _without(key, number=0):
    return lambda row: row["steps"][number].pop(key)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda row: row.pop("steps"), "key 'steps' must be a list"),
        (lambda row: row.update(images="a.png"), "key 'images' must be a list of paths"),
        (lambda row: row["steps"][0].update(problem="Why?"), "key 'question' is missing .* 'Origin question: '"),
        (_without("problem"), "step 1: key 'problem' must be a string"),
        (
            lambda row: row["steps"][0].update(step_type="route"),
            "step 1: key 'step_type' must be 'ret' or 'ans', found 'route'",
        ),
        (lambda row: row["steps"][0].update(answer={"query": "x"}), "step 1: key 'answer' must be {'query'"),
        (lambda row: row["steps"][1].update(answer=[]), "step 2: key 'answer' must be a string"),
        (lambda row: row["steps"][1].update(answer=["x"]), "step 2: the step before has no answer"),
        (lambda row: row["steps"][2]["answer"].update(retriever=["none"]), "step 3: .*'none' must be both or neither"),
        (lambda row: row["steps"].pop(2), "step 3: the step before has no sub-question"),
        (lambda row: row["steps"].pop(), "step 5: the last step, and no other"),
        (lambda row: row["steps"][1].update(documents=["x"]), "step 2: key 'documents'"),
    ],
)
def test_faults_are_named(tmp_path, spoil, message):
    row = copy.deepcopy(CAPITAL)
    spoil(row)
    path = write(tmp_path / "golden.jsonl", RIVER, row)
    with pytest.raises(ValueError, match=rf"golden.jsonl, line 2: {message}"):
        read(path)


def test_a_missing_image_and_a_repeated_id_are_named(tmp_path):
    path = write(tmp_path / "golden.jsonl", CAPITAL, RIVER)
    with pytest.raises(ValueError, match=r"line 2: image 'volta.png' is neither in .*trajectories/text:.*golden.jsonl"):
        open_dataset(f"trajectories:{path}")
    path = write(tmp_path / "twice.jsonl", CAPITAL | {"id": "a"}, CAPITAL | {"id": "a"})
    with pytest.raises(ValueError, match=r"line 2: id 'a' is that of line 1 too"):
        open_dataset(f"trajectories:{path}")
    with pytest.raises(ValueError, match="holds no trajectories without images"):
        open_dataset(f"trajectories/text:{write(tmp_path / 'pictures.jsonl', RIVER)}")


def test_a_trajectory_ends_in_a_final_answer():
    final = FinalStep(answers=("x",))
    whole = Trajectory(id="1", question="q", steps=(final,))
    with pytest.raises(ValueError, match="there are no steps"):
        dataclasses.replace(whole, steps=())
    with pytest.raises(ValueError, match="step 1: the last step"):
        dataclasses.replace(whole, steps=(final, final))
