"""Questions from files: both formats, real files, errors that lead to the line, and short names of data sets."""

import gzip
import itertools
import json
import pathlib
import re
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

from launch.evaluate import _file_name
from routerl_jax.core.types import Example
from routerl_jax.data.readers import DATASETS, FileExamples, Subset, in_turns, open_dataset, short_names
from tests.data.original_rows import png

ROWS = [
    {"id": "dev_0", "question": "Who wrote 1984?", "golden_answers": ["George Orwell", "Eric Blair"], "hops": 1},
    {"id": 7, "question": "Où est Lomé ?", "answers": ["Togo"], "metadata": {"type": "bridge"}},
    {"question": "Yes or no?", "answer": "yes", "supporting_facts": [["Title", 0]]},
]
EXAMPLES = [
    Example(id="dev_0", question="Who wrote 1984?", answers=("George Orwell", "Eric Blair"), metadata={"hops": 1}),
    Example(id="7", question="Où est Lomé ?", answers=("Togo",), metadata={"type": "bridge"}),
    Example(id="3", question="Yes or no?", answers=("yes",), metadata={"supporting_facts": [["Title", 0]]}),
]


def write(path: pathlib.Path, content: str | bytes) -> pathlib.Path:
    data = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def jsonl(*rows: Any) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


@pytest.mark.parametrize("name", ["q.jsonl", "q.jsonl.gz", "q.json", "q.json.gz", "q.txt"])
def test_formats(tmp_path: pathlib.Path, name: str) -> None:
    content = json.dumps(ROWS, indent=1) if ".json" in name and ".jsonl" not in name else jsonl(*ROWS)
    examples = FileExamples(write(tmp_path / name, content))
    assert len(examples) == 3
    assert [examples[i] for i in range(3)] == EXAMPLES


def test_blank_lines_count_as_lines(tmp_path: pathlib.Path) -> None:
    """A row without an id is known by its line, so that the line can be found."""
    row = {"question": "?", "answer": "x"}
    examples = FileExamples(write(tmp_path / "q.jsonl", "\n" + jsonl(row) + "  \n\n" + jsonl(row | {"id": None})))
    assert [examples[i].id for i in range(2)] == ["2", "5"]


GOOD = jsonl(ROWS[0])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (GOOD + "[1]\n", ", line 2: expected an object, found list"),
        (GOOD + '{"answer": "x"}', ", line 2: key 'question' is missing or empty"),
        (GOOD + '{"question": " ", "answer": "x"}', ", line 2: key 'question' is missing or empty"),
        (GOOD + '{"question": 5, "answer": "x"}', ", line 2: key 'question' is missing or empty"),
        (GOOD + '{"question": "?"}', ", line 2: no answers; give them under 'golden_answers'"),
        (GOOD + '{"question": "?", "golden_answers": []}', ", line 2: no answers; give them under 'golden_answers'"),
        (
            GOOD + '{"question": "?", "answer": true}',
            ", line 2: key 'answer' must be a string, a number or a list of these",
        ),
        (GOOD + '{"question": "?", "answer": Infinity}', ", line 2: key 'answer' must be a string, a number or"),
        (GOOD + '{"question": "?", "answer": NaN}', ", line 2: key 'answer' holds no answer"),
        (GOOD + '{"question": "?", "answer": "x", "answer": "y"}', ", line 2: key 'answer' occurs twice"),
        (GOOD + '{"question": "? \\ud83d", "answer": "x"}', ", line 2: key 'question' holds half of a surrogate pair"),
        (
            GOOD + '{"question": "?", "answer": "x", "options": {"B": ["\\uDE00"]}}',
            ", line 2: key 'options.B[0]' holds half of a surrogate pair",
        ),
        (GOOD + "\n" + GOOD, ", line 3: id 'dev_0' was used in line 1 already; ids must be distinct"),
    ],
)
def test_errors_name_file_line_and_key(tmp_path: pathlib.Path, content: str, message: str) -> None:
    for name in ("q.jsonl", "q.jsonl.gz"):
        path = write(tmp_path / name, content)
        with pytest.raises(ValueError) as error:
            FileExamples(path)
        assert str(error.value).startswith(f"{path}{message}")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[{"question": "?", "answer": "x"},\n {"question": "?"}]', ", item 2: no answers; give them under"),
        (
            '[{"id": 1, "question": "?", "answer": "x"},{"id": "1", "question": "?", "answer": "x"}]',
            ", item 2: id '1' was used in item 1 already",
        ),
    ],
)
def test_errors_in_lists_name_the_item(tmp_path: pathlib.Path, content: str, message: str) -> None:
    path = write(tmp_path / "q.json", content)
    with pytest.raises(ValueError) as error:
        FileExamples(path)
    assert str(error.value).startswith(f"{path}{message}")


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_empty_files(tmp_path: pathlib.Path, content: str) -> None:
    path = write(tmp_path / "q.jsonl", content)
    with pytest.raises(ValueError, match=rf"^questions file {path} holds no questions$"):
        FileExamples(path)


@pytest.mark.parametrize("name", ["hotpotqa", "musique", "popqa", "bamboogle"])
def test_real_files(shared_data: Callable[[str], pathlib.Path], name: str) -> None:
    path = shared_data(f"{name}/questions_dev.jsonl.gz")
    with gzip.open(path, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    examples = open_dataset(str(path))
    assert len(examples) == len(rows)
    assert len({examples[i].id for i in range(len(rows))}) == len(rows)
    for i, row in enumerate(rows):
        assert examples[i].question == row["question"]
        assert list(examples[i].answers) == list(dict.fromkeys(row["golden_answers"]))


def test_subset(tmp_path: pathlib.Path) -> None:
    source = FileExamples(write(tmp_path / "q.jsonl", jsonl(*({"question": f"{i}?", "answer": "x"} for i in range(5)))))
    middle = Subset(source, 1, 4)
    assert [middle[i].question for i in range(len(middle))] == ["1?", "2?", "3?"]
    assert [Subset(source, 2)[i].question for i in range(3)] == ["2?", "3?", "4?"]
    assert [Subset(middle, 1)[i].question for i in range(2)] == ["2?", "3?"]  # of a subset
    for index in (-1, 3):  # the source has such items, the subset has not
        with pytest.raises(IndexError):
            middle[index]
    for limits in [(3, 3), (4, 2), (0, 6), (-1, 3), (5, None)]:
        with pytest.raises(ValueError, match=r"items .* were asked for, but the source has 5"):
            Subset(source, *limits)


def numbered(path: pathlib.Path, count: int) -> pathlib.Path:
    return write(path, jsonl(*({"id": i, "question": f"{i}?", "answer": "x"} for i in range(count))))


def ids(name: str) -> list[str]:
    source = open_dataset(name)
    return [source[i].id for i in range(len(source))]


def test_joined_sources_take_turns(tmp_path: pathlib.Path) -> None:
    """The first few of a mix are of all its data sets: those are what an evaluation takes."""
    long, short, one = (numbered(tmp_path / f"{name}.jsonl", n) for name, n in (("long", 4), ("short", 2), ("one", 1)))
    mixed = ["long/0", "short/0", "one/0", "long/1", "short/1", "long/2", "long/3"]
    assert ids(f"{long},{short}, {one}") == mixed
    joined = open_dataset(f"{long},{short},{one}")
    assert [joined[i].metadata["dataset"] for i in range(3)] == ["long", "short", "one"]
    for index in (-1, 7):
        with pytest.raises(IndexError):
            joined[index]


@pytest.mark.parametrize("sizes", [(), (3,), (0, 2), (2, 0, 5), (1, 1, 1), (4, 6, 1, 3)])
def test_turns(sizes: tuple[int, ...]) -> None:
    """Beside the standard library's way of dealing out."""
    piles = [[(number, item) for item in range(size)] for number, size in enumerate(sizes)]
    expected = [card for turn in itertools.zip_longest(*piles) for card in turn if card is not None]
    assert list(map(tuple, in_turns(sizes).tolist())) == expected


def test_parts_by_name(tmp_path: pathlib.Path) -> None:
    path, other = numbered(tmp_path / "q.jsonl", 5), numbered(tmp_path / "r.jsonl", 3)
    assert ids(f"{path}[1:3]") == ids(f"flashrag:{path}[1:3]") == ["1", "2"]
    assert ids(f"{path}[:2]") == ["0", "1"]
    assert ids(f"{path}[3:]") == ["3", "4"]
    assert ids(f"{path}[:2],{other}[2:]") == ["q/0", "r/2", "q/1"]
    atlas = open_dataset("atlas/test")
    assert open_dataset("atlas/test/single+multi+none[7:9]")[1] == open_dataset("atlas/test/single+multi+none")[8]
    assert len(open_dataset("atlas/test[10:]")) == len(atlas) - 10
    odd = numbered(tmp_path / "q[0:1]", 2)  # a file of that name
    assert ids(str(odd)) == ["0", "1"]


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("[0:9]", r"items 0:9 were asked for, but the source has 5"),
        ("[3:3]", r"items 3:3 were asked for"),
        ("[5:]", r"items 5:5 were asked for"),
        ("[-2:]", r"a part is written \[0:200\], \[200:\] or \[:200\]"),
        ("[2]", r"a part is written"),
        ("[0:4:2]", r"a part is written"),
    ],
)
def test_bad_parts(tmp_path: pathlib.Path, part: str, message: str) -> None:
    path = numbered(tmp_path / "q.jsonl", 5)
    for name in (f"{path}{part}", f"atlas/test,{path}{part}"):
        with pytest.raises(ValueError, match=rf"^data set '{re.escape(f'{path}{part}')}': {message}"):
            open_dataset(name)


def test_questions_with_pictures(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """Rows without a picture, or whose picture is not there, are left out and counted."""
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.png").write_bytes(png())
    row = {"question": "?", "answer": "x"}
    given = [
        {**row, "image": "a.png"},
        row,
        {**row, "image": "lost.png"},
        {**row, "image": None},
        {**row, "image": "a.png"},
    ]
    path = write(tmp_path / "q.jsonl", jsonl(*({"id": i, **one} for i, one in enumerate(given))))
    with pytest.raises(
        ValueError, match=r"line 3: image 'lost.png' is neither .* leave out such rows: .*q.jsonl\[pictures\]"
    ):
        open_dataset(str(path))
    with caplog.at_level("WARNING"):
        assert ids(f"{path}[pictures]") == ids(f"flashrag:{path}[pictures]") == ["0", "4"]
    assert "3 of 5 rows have no picture and are left out" in caplog.text
    assert ids(f"{path}[pictures][1:]") == ["4"]
    other = numbered(tmp_path / "r.jsonl", 2)
    assert ids(f"{path}[pictures],{other}") == ["q/0", "r/0", "q/4", "r/1"]
    with pytest.raises(ValueError, match=r"r.jsonl holds no questions \(2 rows have no picture\)"):
        open_dataset(f"{other}[pictures]")
    assert len(open_dataset("atlas/test/none+visual[pictures]")) == len(open_dataset("atlas/test/visual"))
    with pytest.raises(
        ValueError, match=r"^data set 'atlas/test/none\[pictures\]': none of the .* examples has a picture"
    ):
        open_dataset("atlas/test/none[pictures]")


def test_real_files_that_need_no_name(
    shared_data: Callable[[str], pathlib.Path], caplog: pytest.LogCaptureFixture
) -> None:
    """Questions to retrieve for that have no answer are left out; InfoSeek's rows with their picture are few."""
    with caplog.at_level("WARNING"):
        assert len(open_dataset(str(shared_data("2wikimultihopqa/questions_dev.jsonl.gz")))) == 557
    assert "53 of 610 rows have no answer" in caplog.text
    pictured = open_dataset(f"{shared_data('infoseek/questions_dev.jsonl.gz')}[pictures]")
    assert len(pictured) == 4
    assert "700 of 704 rows have no picture" in caplog.text


class ThreeQuestions:
    """A dataset of another package, as it would be named in a configuration."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Example:
        return Example(id=str(index), question="?", answers=("x",))


def test_open_dataset(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "q.jsonl", jsonl(*ROWS))
    assert [open_dataset(str(path))[i] for i in range(3)] == EXAMPLES
    assert len(open_dataset(f"{__name__}:ThreeQuestions")) == 3
    monkeypatch.setitem(DATASETS._entries, "three", ThreeQuestions)
    assert isinstance(open_dataset("three"), ThreeQuestions)
    odd = write(tmp_path / "a:b.jsonl", jsonl(*ROWS))  # a file whose name looks like a dotted path
    assert len(open_dataset(str(odd))) == 3
    splits = [open_dataset(f"atlas/{split}") for split in ("train", "validation", "test")]
    ids = [{split[i].id for i in range(len(split))} for split in splits]
    assert len(set.union(*ids)) == sum(map(len, ids)) > 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("atlas/test/single+many", r"no questions of Atlas are 'many'; there are: none, single, multi"),
        ("atlas/dev", r"dataset 'atlas/dev': Atlas has the splits train, validation and test"),
        ("hotpotqa", r"^hotpotqa: No such file or directory"),
        ("no.such.module:Data", r"cannot load dataset 'no\.such\.module:Data': No module named 'no'"),
        ("json:Nothing", r"cannot load dataset 'json:Nothing': module 'json' has no attribute 'Nothing'"),
    ],
)
def test_unknown_datasets(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_dataset(name)


def test_a_function_s_data_set_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a stranger's function may return: a list, a generator, rows."""
    module = types.ModuleType("strange_questions")
    example = Example(id="1", question="?", answers=("x",))
    module.listed, module.lazy, module.rows = lambda: [example], lambda: iter([example]), lambda: [{"id": "1"}]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "strange_questions", module)
    assert open_dataset("strange_questions:listed")[0] == example
    with pytest.raises(
        ValueError, match="'strange_questions:lazy' is a list_iterator; its function must return a list of"
    ):
        open_dataset("strange_questions:lazy")
    with pytest.raises(ValueError, match="'strange_questions:rows' holds a dict instead of an Example"):
        open_dataset("strange_questions:rows")


def test_answers_are_no_string() -> None:
    with pytest.raises(ValueError, match=r"example '1': answers='Accra' is a string; .*: \('Accra',\)"):
        Example(id="1", question="?", answers="Accra")  # type: ignore[arg-type]


def test_names_tell_data_sets_apart() -> None:
    assert short_names(["a/dev.jsonl.gz", "musique:b/test.json"]) == ["dev", "test"]
    assert short_names(["a/dev.json[0:50]", "musique:b/test.json[50:]"]) == ["dev", "test"]
    assert short_names(["a/dev.json", "b/dev.json"]) == ["a-dev", "b-dev"]
    assert short_names(["configs.r1_router_small:train_questions", "configs.r1_router_small:test_questions"]) == [
        "train_questions",
        "test_questions",
    ]


def test_a_benchmark_has_a_directory_of_its_own() -> None:
    assert _file_name("atlas/test/visual") == "atlas-test-visual"
    assert _file_name("a/questions_dev.jsonl.gz") == "questions_dev"
    assert _file_name("configs.r1_router_small:test_questions") == "test_questions"
    assert _file_name("..") == "questions"
