"""Open-WikiTable's format against what its retriever really returned, its released layouts, and budgets."""

import json
import pathlib
import re

import pytest

from routerl_jax.core.rows import read_rows
from routerl_jax.knowledge.tables import Table, count_words, read_tables, table_passages

TALL = Table(
    id="t1",
    title="Peaks",
    section="Asia",
    caption="By height",
    header=("Peak", "Height"),
    rows=tuple((f"peak {i}", f"{8000 - i} m") for i in range(30)),
)


def test_as_the_real_retriever_wrote_it(shared_data) -> None:
    """R1-Router's trajectories quote passages of Open-WikiTable's index; ours of the same tables hold the same text."""
    said = "".join(json.dumps(row, ensure_ascii=False) for _, row in read_rows(next(iter(_files(shared_data)))))
    tables = {table.id: table for table in read_tables(shared_data("open_wikitable/tables_partial.jsonl.gz"))}
    quoted = [text for text in re.findall(r"\[Title\][^\\\"]*", said) if re.search(r"\[Rows\]\[Row\]", text)]
    assert len(quoted) > 20
    compared = 0
    for text in quoted:
        name = re.search(r"\[Table name\](.*?)\[Header\]", text)
        if name is None or name[1] not in tables:
            continue
        [whole] = table_passages(tables[name[1]], budget=10**6, table_format="open_wikitable")
        head, _, rows = text.partition("[Rows]")
        assert whole.text.startswith(head + "[Rows]")
        compared += all(f"[Row]{row}" in whole.text for row in rows.strip().split("[Row]")[1:-1])
    assert compared > 10


def _files(shared_data) -> list[pathlib.Path]:
    return sorted(shared_data("r1router_trajectories").glob("*.gz"))


def test_rows_and_budget() -> None:
    passages = list(table_passages(TALL, budget=40, table_format="open_wikitable"))
    assert passages[0].text.startswith(
        "[Title]Peaks[Section title]Asia[Caption]By height[Table name]t1[Header]Peak[sep]Height[Rows]"
        "[Row]peak 0[sep]8000 m[Row]peak 1[sep]7999 m"
    )
    assert all(count_words(p.text) <= 40 for p in passages)
    assert re.findall(r"\[Row\](.*?)\[sep\]", "".join(p.text for p in passages)) == [row[0] for row in TALL.rows]
    assert passages[0].id.startswith("t1#0-")
    few = list(table_passages(TALL, rows_per_passage=2, budget=40, table_format="open_wikitable"))
    assert [p.id for p in few[:2]] == ["t1#0-1", "t1#2-3"]


def test_long_rows_are_split_by_columns() -> None:
    story = " ".join(f"w{i}" for i in range(50))
    table = Table(id="t", title="T", header=("Name", "Story", "End"), rows=(("Ann", story, "ok"), ("Bob", "x", "y")))
    passages = list(table_passages(table, budget=12, table_format="open_wikitable"))
    assert all(count_words(p.text) <= 12 for p in passages)
    assert [p.id for p in passages[:2]] == ["t#0.1", "t#0.2"]
    assert passages[-1].id == "t#1"
    assert " ".join(re.findall(r"\bw\d+", " ".join(p.text for p in passages))) == story
    assert all("Story" in p.text.partition("[Rows]")[0] for p in passages if re.search(r"\bw\d+", p.text))
    with pytest.raises(ValueError, match=r"table 't', row 0, column 'Name': a budget of 2 does not hold"):
        list(table_passages(table, budget=2, count=len, table_format="open_wikitable"))
    with pytest.raises(ValueError, match="is not one of compact, open_wikitable"):
        list(table_passages(table, table_format="html"))


def test_released_layouts(tmp_path: pathlib.Path) -> None:
    """tables.json with its own names; splitted_tables.json by columns, whose texts stay as they are."""
    row = {
        "original_table_id": "t1",
        "page_title": "Peaks",
        "section_title": "Asia",
        "caption": "By height",
        "header": ["Peak", "Height"],
        "rows": [list(cells) for cells in TALL.rows],
    }
    (tmp_path / "tables.json").write_text(json.dumps([row]))
    assert list(read_tables(tmp_path / "tables.json")) == [TALL]
    parts = [{**row, "flattened": "[Title]Peaks.. 1"}, {**row, "flattened": "[Title]Peaks.. 2"}]
    columns = {key: {str(i): part[key] for i, part in enumerate(parts, 1)} for key in parts[0]}
    (tmp_path / "splitted_tables.json").write_text(json.dumps(columns))
    tables = list(read_tables(tmp_path / "splitted_tables.json"))
    assert [table.id for table in tables] == ["1", "2"]
    found = [p for table in tables for p in table_passages(table, table_format="open_wikitable")]
    assert [(p.id, p.text) for p in found] == [("1", "[Title]Peaks.. 1"), ("2", "[Title]Peaks.. 2")]
    (tmp_path / "bad.json").write_text('{"a": {"1": 2}, "b": [1]}')
    with pytest.raises(ValueError, match="expected a JSON list, found dict"):
        list(read_tables(tmp_path / "bad.json"))
