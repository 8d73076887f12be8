r"""Tables as passages: rows are written as `Title | header: value | header: value` for a text encoder.

Within a cell or a name, `|` is written as `\|`, a backslash as `\\`, and any run of white space as one space. A colon at the
end of a word of a header is written as `\:`. So the text can be parsed again. Empty cells are left out.

Another format is Open-WikiTable's, for encoders that were trained on it:

    [Title]..[Section title]..[Caption]..[Table name]..[Header]a[sep]b[Rows][Row]1[sep]2[Row]3[sep]4

Source: the released tables of Kweon et al. 2023, which R1-Router's table retriever returns, too. As there, nothing is escaped.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from routerl_jax.core.rows import RowLocation, checked_path, plain_name, plain_suffix, read_rows
from routerl_jax.core.types import Passage
from routerl_jax.data.formats.tables import read_cells
from routerl_jax.knowledge.corpora.wikipedia import table_rows
from routerl_jax.knowledge.corpus import DistinctIds, corpus_files, string_field

FORMATS = ("compact", "open_wikitable")
SEPARATOR = " | "
CONTINUED = " (continued)"  # marks a header whose cell began in an earlier passage

_Cell = tuple[str, str]  # header and value
_Render = Callable[[Sequence[Sequence[_Cell]]], str]  # the text of some rows
_Count = Callable[[str], int]  # the length of a text


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """A table with a name for every column and the same number of cells in every row.

    `section` (from `section_title`, optional) distinguishes the tables of a page; it only appears in the rendered title.
    `caption` only appears in Open-WikiTable's format.
    """

    id: str
    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    section: str = ""
    caption: str = ""
    flattened: str = ""  # the whole table as text, if the file has it (Open-WikiTable's splitted_tables.json)


def count_words(text: str) -> int:
    """Number of words, the default unit of budgets."""
    return len(text.split())


def holds_tables(path: pathlib.Path) -> bool:
    """Whether a file holds tables and no passages: the first row of a .jsonl file has a header, or no column of a .csv file is
    called `text`."""
    if _is_csv(path) and path.is_file():
        return "text" not in next(iter(read_cells(path)), (None, ["text"]))[1]
    if not path.is_file() or plain_suffix(path) != ".jsonl":
        return False
    first = next(iter(read_rows(path)), None)
    return first is not None and "header" in first[1]


def read_tables(path: str | pathlib.Path) -> Iterator[Table]:
    """Tables `{id, title, header, rows, section_title?, caption?}` of a .jsonl or .json file, plain or compressed, or of a
    directory of such files. A .csv file is one table: its first line is the header, its name is the id and the title.

    Open-WikiTable's released files can be read: with their names (`original_table_id`, `page_title`), pandas' layout by
    columns, and in splitted_tables.json a `flattened` text, whose id is the index to which its questions refer. HybridQA's
    and OTT-QA's files can be read too, with a table per file or all in one (corpora.wikipedia).

    Columns without a name become `column 3`, repeated names `Year (2)`. Null cells are empty, and a null title is "".

    Raises:
      ValueError: an error of `read_corpus`; or a header is empty, a table has no rows, or rows are ragged or all empty.
    """
    path = pathlib.Path(path).expanduser()
    return _tables(path, table_files(path))


def table_files(path: str | pathlib.Path) -> list[pathlib.Path]:
    """The files that are read. Raises ValueError if there are none, or a file has no JSON rows."""
    path = pathlib.Path(path).expanduser()
    files = corpus_files(path) if path.is_dir() else [path]
    return [file for name in files for file in (corpus_files(name) if _is_csv(name) else [checked_path(name)])]


def table_passages(
    table: Table,
    *,
    rows_per_passage: int = 1,
    budget: int = 200,
    count: _Count = count_words,
    table_format: str = "compact",
) -> Iterator[Passage]:
    """Passages of a table: up to `rows_per_passage` rows each, one line per row, with the title on the first line.

    No passage is longer than `budget` in the unit of `count`. A row that is too long becomes several passages, which repeat the
    title and, if there is room, the row's first cell. A cell that is too long (or a single word, if necessary) is continued in
    the next passage, with its header marked `(continued)`. Ids are `table#row`, `table#first-last` or `table#row.part`; rows
    count from 0, parts from 1.

    Args:
      table_format: "compact", which is described here, or "open_wikitable" (the module). With the latter, a passage has as
        many rows as the budget allows unless `rows_per_passage` is above 1, and a table with a `flattened` text is that text.
        A row that is too long becomes several passages with some of its columns each, and a cell that is too long several
        with some of its words each.

    Raises:
      ValueError: rows_per_passage or budget is below 1, or not even one letter of a cell fits into the budget.
    """
    if rows_per_passage < 1 or budget < 1:
        raise ValueError(f"rows_per_passage={rows_per_passage} and budget={budget} must be at least 1")
    if table_format not in FORMATS:
        raise ValueError(f"table_format={table_format!r} is not one of {', '.join(FORMATS)}")
    most = rows_per_passage
    if table_format == "open_wikitable":
        if table.flattened:
            yield Passage(id=table.id, title=table.title, text=table.flattened)
            return
        most = len(table.rows) if rows_per_passage == 1 else rows_per_passage
        rows = [list(zip(table.header, row)) for row in table.rows]
        render, split = functools.partial(_open_wikitable_text, table), _columns_that_fit
    else:
        title = _clean(", ".join(part for part in (table.title, table.section) if part))
        rows = [_cells(table.header, row) for row in table.rows]
        render, split = functools.partial(_compact_text, title), _split_row
    start = 0
    while start < len(rows):
        end = start
        while end < min(start + most, len(rows)) and count(render(rows[start : end + 1])) <= budget:
            end += 1
        if end > start:
            name = f"{start}" if end == start + 1 else f"{start}-{end - 1}"
            yield Passage(id=f"{table.id}#{name}", title=table.title, text=render(rows[start:end]))
            start = end
            continue
        place = f"table {table.id!r}, row {start}"
        for part, cells in enumerate(split(rows[start], render, budget, count, place), 1):
            yield Passage(id=f"{table.id}#{start}.{part}", title=table.title, text=render([cells]))
        start += 1


def _open_wikitable_text(table: Table, rows: Sequence[Sequence[_Cell]]) -> str:
    """The text of some rows, with the columns of the first, and title, section, caption and name of the table."""
    about = f"[Title]{table.title}[Section title]{table.section}[Caption]{table.caption}[Table name]{table.id}"
    lines = "".join(f"[Row]{'[sep]'.join(value for _, value in row)}" for row in rows)
    return f"{about}[Header]{'[sep]'.join(header for header, _ in rows[0])}[Rows]{lines}"


def _columns_that_fit(
    cells: list[_Cell], render: _Render, budget: int, count: _Count, place: str
) -> Iterator[list[_Cell]]:
    """Groups of a row's cells, in order, each within the budget: some columns each, or some words of one that is too long."""
    group: list[_Cell] = []
    for column, cell in cells:
        if group and count(render([[*group, (column, cell)]])) > budget:
            yield group
            group = []
        group.append((column, cell))
        while count(render([group])) > budget:  # one cell alone
            words = group[-1][1].split(" ")
            fits = _number_that_fits(render, [], column, words, " ", budget, count)
            if not fits or fits == len(words):
                raise ValueError(
                    f"{place}, column {column!r}: a budget of {budget} does not hold the table's title, the column's name and "
                    f"the word {words[0][:40]!r}. Raise the budget"
                )
            yield [(column, " ".join(words[:fits]))]
            group = [(column, " ".join(words[fits:]))]
    if group:
        yield group


def _split_row(cells: list[_Cell], render: _Render, budget: int, count: _Count, place: str) -> list[list[_Cell]]:
    """Groups of a row's cells, or of parts of them, each within the budget."""
    parts: list[list[_Cell]] = []
    # identifies the row in every part
    key = [cells[0]] if count(render([cells[:1]])) <= budget // 2 else []
    current: list[_Cell] = []
    for header, value in cells:
        if count(render([[*current, (header, value)]])) <= budget:
            current.append((header, value))
            continue
        if current not in ([], key):
            parts.append(current)
            current = list(key)
        words, label = value.split(" "), header
        while words:
            fits = _number_that_fits(render, current, label, words, " ", budget, count)
            if not fits:
                letters = re.findall(r"\\.|.", words[0])  # keeps escapes of _clean together
                fits = _number_that_fits(render, current, label, letters, "", budget, count)
                if fits:
                    words[:1] = ["".join(letters[:fits]), "".join(letters[fits:])]
                    fits = 1
                elif current:  # the key, which leaves no room
                    if not parts:
                        parts.append(current)  # it has to stand somewhere
                    current = []
                    continue
                else:
                    raise ValueError(
                        f"{place}, column {header!r}: a budget of {budget} does not hold its title, header and the beginning "
                        f"of {words[0][:40]!r}. Raise the budget"
                    )
            current.append((label, " ".join(words[:fits])))
            words, label = words[fits:], header + CONTINUED
            if words:
                parts.append(current)
                current = list(key)
    return [*parts, current]


def _number_that_fits(
    render: _Render, before: list[_Cell], header: str, pieces: list[str], joint: str, budget: int, count: _Count
) -> int:
    """Number of pieces (words or letters) that fit into a passage after the cells before them."""

    def length(n: int) -> int:
        return count(render([[*before, (header, joint.join(pieces[:n]))]]))

    return bisect.bisect_right(range(1, len(pieces) + 1), budget, key=length)


def _compact_text(title: str, rows: Sequence[Sequence[_Cell]]) -> str:
    lines = [SEPARATOR.join(f"{header}: {value}" for header, value in cells) for cells in rows]
    return "\n".join([f"{title}{SEPARATOR}{lines[0]}" if title else lines[0], *lines[1:]])


def _cells(header: Sequence[str], row: Sequence[str]) -> list[_Cell]:
    names = [re.sub(r":(?= |$)", r"\\:", _clean(name)) for name in header]
    return [(name, _clean(value)) for name, value in zip(names, row) if value.strip()]


def _clean(text: str) -> str:
    return " ".join(text.replace("\\", "\\\\").replace("|", "\\|").split())


def _tables(path: pathlib.Path, files: Sequence[pathlib.Path]) -> Iterator[Table]:
    ids = DistinctIds()
    rows = (_csv_table(file) if _is_csv(file) else table_rows(file) or read_rows(file) for file in files)
    for location, row in itertools.chain.from_iterable(rows):
        title = "title" if "title" in row else "page_title"
        yield Table(
            id=ids.add(_id(row, location), location),
            title=string_field(row, title, location, default=""),
            header=_names(row.get("header"), location),
            rows=_rows(row.get("rows"), len(row["header"]), location),
            section=string_field(row, "section_title", location, default=""),
            caption=string_field(row, "caption", location, default=""),
            flattened=string_field(row, "flattened", location, default=""),
        )
    ids.finish()
    if not len(ids):
        raise ValueError(f"{path} holds no tables. Expected rows like {{id, title, header: [...], rows: [[...]]}}")


def _is_csv(path: pathlib.Path) -> bool:
    return plain_suffix(path) == ".csv"


def _csv_table(path: pathlib.Path) -> Iterator[tuple[RowLocation, dict[str, Any]]]:
    lines = list(read_cells(path))
    if not lines:
        raise ValueError(f"{path} is empty. Its first line must name the columns")
    name = pathlib.Path(plain_name(path)).stem
    location, header = lines[0]
    width = max(number for _, cells in lines for number, cell in enumerate(cells, 1) if cell.strip())
    yield location, {"id": name, "title": name, "header": header[:width], "rows": [c[:width] for _, c in lines[1:]]}


def _id(row: dict[str, Any], location: RowLocation) -> str:
    if "id" not in row and "flattened" in row:
        return str(row.get("index", location.number))
    return string_field(row, "original_table_id" if "id" not in row and "original_table_id" in row else "id", location)


def _names(header: Any, location: RowLocation) -> tuple[str, ...]:
    if not isinstance(header, list) or not any(str(name or "").strip() for name in header):
        raise location.error("key 'header' must be a list of column names, and it is empty or absent. Name the columns")
    names: list[str] = []
    for column, name in enumerate(header, 1):
        name = _cell(name, location, f"key 'header', column {column}").strip() or f"column {column}"
        repeats = 1
        while (unique := name if repeats == 1 else f"{name} ({repeats})") in names:
            repeats += 1
        names.append(unique)
    return tuple(names)


def _rows(rows: Any, width: int, location: RowLocation) -> tuple[tuple[str, ...], ...]:
    if not isinstance(rows, list) or not rows:
        raise location.error(
            "key 'rows' must be a list of rows, and it is empty or absent. Fill in or remove the table"
        )
    result = []
    for number, row in enumerate(rows):
        row_name = f"key 'rows', row {number}"
        if not isinstance(row, list) or len(row) != width:
            cells = f"{len(row)} cells" if isinstance(row, list) else type(row).__name__
            raise location.error(f"{row_name} has {cells}, but the header names {width} columns. Pad or repair the row")
        cells = tuple(_cell(value, location, f"{row_name}, column {column}") for column, value in enumerate(row, 1))
        if not any(cell.strip() for cell in cells):
            raise location.error(f"{row_name} is empty. Remove it")
        result.append(cells)
    return tuple(result)


def _cell(value: Any, location: RowLocation, cell_name: str) -> str:
    if value is None:
        return ""
    if isinstance(value, bool | str | int | float):
        return string_field({cell_name: str(value)}, cell_name, location)
    raise location.error(f"{cell_name} holds {type(value).__name__}, expected text or a number")
