"""Tables as passages: the rendering can be taken apart again, nothing is lost, and no passage passes its budget."""

import json
import pathlib
import re

import numpy as np
import pytest

from routerl_jax.core.types import Passage
from routerl_jax.knowledge.tables import Table, count_words, holds_tables, read_tables, table_passages

PLANETS = Table(
    id="t",
    title="Planets",
    header=("Name", "Moons", "Note"),
    rows=(("Mars", "2", "red planet"), ("Venus", "0", ""), ("Earth", "1", "home")),
)


def parse(text: str, title: str) -> list[list[tuple[str, str]]]:
    """Takes a passage apart by the rules in the module's docstring (written independently of the renderer)."""
    assert text.startswith(title + " | ")
    rows = []
    for line in text.removeprefix(title + " | ").split("\n"):
        cells = [re.fullmatch(r"((?:\\.|[^\\])*?): (.*)", cell).groups() for cell in line.split(" | ")]
        rows.append([tuple(re.sub(r"\\(.)", r"\1", part) for part in cell) for cell in cells])
    return rows


def test_rendering() -> None:
    assert list(table_passages(PLANETS)) == [
        Passage(id="t#0", title="Planets", text="Planets | Name: Mars | Moons: 2 | Note: red planet"),
        Passage(id="t#1", title="Planets", text="Planets | Name: Venus | Moons: 0"),
        Passage(id="t#2", title="Planets", text="Planets | Name: Earth | Moons: 1 | Note: home"),
    ]


def test_several_rows_in_a_passage() -> None:
    first, second = table_passages(PLANETS, rows_per_passage=2)
    assert (first.id, second.id) == ("t#0-1", "t#2")
    assert first.text == "Planets | Name: Mars | Moons: 2 | Note: red planet\nName: Venus | Moons: 0"
    # a budget that holds only one row at a time wins over rows_per_passage
    assert [p.id for p in table_passages(PLANETS, rows_per_passage=3, budget=11)] == ["t#0", "t#1", "t#2"]


def test_a_long_row_becomes_several_passages() -> None:
    text = " ".join(f"w{i}" for i in range(20))
    table = Table(id="t", title="T", header=("Name", "Story", "End"), rows=(("Ann", text, "ok"),))
    passages = list(table_passages(table, budget=12))
    assert [p.id for p in passages] == ["t#0.1", "t#0.2", "t#0.3", "t#0.4", "t#0.5"]
    assert passages[0].text == "T | Name: Ann | Story: w0 w1 w2 w3 w4 w5"
    assert passages[1].text == "T | Name: Ann | Story (continued): w6 w7 w8 w9 w10"
    assert passages[3].text == "T | Name: Ann | Story (continued): w16 w17 w18 w19"
    assert passages[4].text == "T | Name: Ann | End: ok"


def test_names_and_values_with_separators_come_back() -> None:
    header = ("a|b", "c: d", "e\\", "f:", "g \\| h")
    row = ("x | y", "p: q", "\\", "\\|", "1\n2\t 3")
    table = Table(id="t", title="A | B", header=header, rows=(row,))
    (passage,) = table_passages(table)
    assert "\n" not in passage.text
    assert parse(passage.text, "A \\| B") == [list(zip(header, (*row[:4], "1 2 3")))]


def test_a_csv_file_is_a_table(tmp_path: pathlib.Path) -> None:
    """Named after the file; blank lines are no rows. For BM25, which takes passages too, a column `text` makes it a corpus."""
    path = tmp_path / "cities.csv"
    path.write_text('name,"area, km2",\nAccra,"1,2",x\n\nHo,3,\n')
    assert list(read_tables(tmp_path)) == list(read_tables(path))
    (table,) = read_tables(path)
    assert table == Table(
        id="cities",
        title="cities",
        header=("name", "area, km2", "column 3"),
        rows=(("Accra", "1,2", "x"), ("Ho", "3", "")),
    )
    assert holds_tables(path)
    path.write_text("id,text\n1,a\n")
    assert not holds_tables(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a,b\n1,2\n3\n", ", line 3: 1 columns, but line 1 names 2 (a, b)"),
        ("a,b\n", ", line 1: key 'rows' must be a list of rows, and it is empty"),
        ("", " is empty. Its first line must name the columns"),
    ],
)
def test_bad_csv_tables(tmp_path: pathlib.Path, content: str, message: str) -> None:
    path = tmp_path / "cities.csv"
    path.write_text(content)
    with pytest.raises(ValueError, match=re.escape(f"{path}{message}")):
        list(read_tables(path))


@pytest.mark.parametrize("seed", range(30))
def test_random_tables_lose_nothing(seed: int) -> None:
    rng = np.random.default_rng(seed)
    alphabet = np.array([*"ab\\|: \n", "xyz ", "word "])

    def text(length: int) -> str:
        return "".join(rng.choice(alphabet, size=rng.integers(length)))

    width = int(rng.integers(1, 6))
    header = tuple(f"h{i} {text(6)}".strip() for i in range(width))
    rows = tuple(tuple(f"v{r}" + text(60) if c == 0 else text(60) for c in range(width)) for r in range(5))
    table = Table(id="t", title="T", header=header, rows=rows)
    budget = int(rng.integers(14, 60))
    found: dict[int, dict[str, str]] = {}
    for passage in table_passages(table, rows_per_passage=int(rng.integers(1, 4)), budget=budget):
        assert count_words(passage.text) <= budget
        number, _, part = passage.id.removeprefix("t#").partition(".")
        start = int(number.partition("-")[0])
        for offset, cells in enumerate(parse(passage.text, "T")):
            row = found.setdefault(start + offset, {})
            for name, value in cells:
                base = name.removesuffix(" (continued)")
                if name != base:
                    row[base] += " " + value
                else:
                    assert row.setdefault(base, value) == value  # the first cell is repeated in every part
            assert part or len(cells) == len(row)
    names = [" ".join(name.split()) for name in header]
    expected = [{n: " ".join(v.split()) for n, v in zip(names, row) if v.strip()} for row in rows]
    assert [found[i] for i in range(5)] == expected


def count_letters(text: str) -> int:
    return len(text)


@pytest.mark.parametrize("word", ["火" * 300, "https://example.org/" + "a/b?c=%20" * 40, "\\|" * 90])
def test_a_word_that_is_too_long_is_split(word: str) -> None:
    table = Table(id="t", title="T", header=("Name", "Link", "End"), rows=(("Ann", f"see {word} there", "ok"),))
    passages = list(table_passages(table, budget=60, count=count_letters))
    assert all(len(passage.text) <= 60 for passage in passages)
    cells = [cell for passage in passages for row in parse(passage.text, "T") for cell in row]
    assert cells.count(("Name", "Ann")) == len(passages)
    assert "".join(value for name, value in cells if name.startswith("Link")).replace(" ", "") == f"see{word}there"
    assert {name for name, _ in cells} == {"Name", "Link", "Link (continued)", "End"}


def test_the_first_cell_is_not_repeated_where_it_leaves_no_room() -> None:
    header, row = ("Name", "A header of some length"), ("Ann of the Hills", "x" * 30)
    table = Table(id="t", title="T", header=header, rows=(row,))
    texts = [passage.text for passage in table_passages(table, budget=54, count=count_letters)]
    assert texts[:2] == ["T | Name: Ann of the Hills", f"T | A header of some length: {'x' * 25}"]
    assert texts[2] == "T | A header of some length (continued): xxxxx"


def test_a_budget_without_room_for_a_word() -> None:
    with pytest.raises(ValueError, match=r"table 't', row 0, column 'Name'.* budget of 2 .*Raise the budget"):
        list(table_passages(PLANETS, budget=2))
    for options in ({"budget": 0}, {"rows_per_passage": 0}):
        with pytest.raises(ValueError, match="at least 1"):
            list(table_passages(PLANETS, **options))


def test_reading(tmp_path: pathlib.Path) -> None:
    rows = [
        {"id": "a", "title": "A", "header": ["", "Year", "Year", None], "rows": [[1, 2.5, None, True]]},
        {"id": "b", "title": None, "section_title": "S", "header": ["x"], "rows": [["1"], ["2"]]},
    ]
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    first, second = read_tables(path)
    assert first.header == ("column 1", "Year", "Year (2)", "column 4")
    assert first.rows == (("1", "2.5", "", "True"),)
    assert (second.title, second.section) == ("", "S")
    assert [p.text for p in table_passages(second)] == ["S | x: 1", "S | x: 2"]
    assert [p.text for p in table_passages(first)] == ["A | column 1: 1 | Year: 2.5 | column 4: True"]


BAD = {
    "ragged": ({"header": ["x", "y"], "rows": [["1", "2"], ["1"]]}, ["row 1", "1 cells", "2 columns"]),
    "row is no list": ({"header": ["x"], "rows": ["1"]}, ["row 0", "str"]),
    "no header": ({"rows": [["1"]]}, ["'header'", "empty or absent"]),
    "empty header": ({"header": [], "rows": [[]]}, ["'header'", "empty or absent"]),
    "blank header": ({"header": ["", " "], "rows": [["1", "2"]]}, ["'header'", "Name the columns"]),
    "header is a string": ({"header": "x", "rows": [["1"]]}, ["'header'", "list of column names"]),
    "no rows": ({"header": ["x"], "rows": []}, ["'rows'", "empty or absent"]),
    "empty row": ({"header": ["x"], "rows": [["1"], [" "]]}, ["row 1", "is empty"]),
    "nested cell": ({"header": ["x"], "rows": [[["1"]]]}, ["row 0, column 1", "list", "text or a number"]),
    "no id": ({"id": None, "header": ["x"], "rows": [["1"]]}, ["'id'", "missing"]),
}


@pytest.mark.parametrize("case", BAD)
def test_malformed_tables(tmp_path: pathlib.Path, case: str) -> None:
    fields, expected = BAD[case]
    path = tmp_path / "t.jsonl"
    good = {"id": "ok", "title": "T", "header": ["x"], "rows": [["1"]]}
    path.write_text(json.dumps(good) + "\n" + json.dumps({"id": "bad", "title": "T", **fields}) + "\n")
    with pytest.raises(ValueError) as caught:
        list(read_tables(path))
    for part in [f"{path}, line 2", *expected]:
        assert part in str(caught.value)


@pytest.mark.parametrize("name", ["wikitablequestions/tables", "ottqa/tables", "tabfact/tables"])
def test_real_tables(shared_data, name: str) -> None:
    checked = 0
    for table in read_tables(shared_data(f"{name}.jsonl.gz")):
        if checked > 4000:
            break
        words = {word for row in table.rows for cell in row for word in cell.split()}
        rendered = set()
        for passage in table_passages(table, budget=120):
            assert count_words(passage.text) <= 120
            rendered |= set(re.sub(r"\\(.)", r"\1", passage.text).split())
            checked += 1
        assert words <= rendered
    assert checked > 4000
