"""Open-WikiTable's format of a table as text, for encoders that were trained on it.

    [Title]..[Section title]..[Caption]..[Table name]..[Header]a[sep]b[Rows][Row]1[sep]2[Row]3[sep]4

Source: the released tables of Kweon et al. 2023, which R1-Router's table retriever returns, too. As there, nothing is escaped.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from routerl_jax.core.types import Passage

_Pieces = list[tuple[str, str]]  # columns and cells, or parts of cells, of one row


class AnyTable(Protocol):
    """The fields of a `tables.Table` that are read here."""

    @property
    def id(self) -> str: ...
    @property
    def title(self) -> str: ...
    @property
    def section(self) -> str: ...
    @property
    def caption(self) -> str: ...
    @property
    def header(self) -> Sequence[str]: ...
    @property
    def rows(self) -> Sequence[Sequence[str]]: ...


def open_wikitable_text(table: AnyTable, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The text of some columns and rows of a table, with title, section, caption and name of the table."""
    about = f"[Title]{table.title}[Section title]{table.section}[Caption]{table.caption}[Table name]{table.id}"
    lines = "".join(f"[Row]{'[sep]'.join(row)}" for row in rows)
    return f"{about}[Header]{'[sep]'.join(header)}[Rows]{lines}"


def open_wikitable_passages(
    table: AnyTable, *, rows_per_passage: int, budget: int, count: Callable[[str], int]
) -> Iterator[Passage]:
    """Passages with as many rows as the budget allows, at most `rows_per_passage` (0: no limit), as in Open-WikiTable.

    A row that is too long becomes several passages with some of its columns each. A cell that is too long becomes several
    passages with some of its words each. For ids see `tables.table_passages`.

    Raises:
      ValueError: the budget is too small for the table's title and one word.
    """
    start = 0
    while start < len(table.rows):
        end = start
        most = min(len(table.rows), start + rows_per_passage) if rows_per_passage else len(table.rows)
        while end < most and count(open_wikitable_text(table, table.header, table.rows[start : end + 1])) <= budget:
            end += 1
        if end > start:
            name = f"{start}" if end == start + 1 else f"{start}-{end - 1}"
            text = open_wikitable_text(table, table.header, table.rows[start:end])
            yield Passage(id=f"{table.id}#{name}", title=table.title, text=text)
            start = end
            continue
        for part, pieces in enumerate(_columns_that_fit(table, start, budget, count), 1):
            text = _text_of(table, pieces)
            yield Passage(id=f"{table.id}#{start}.{part}", title=table.title, text=text)
        start += 1


def _columns_that_fit(table: AnyTable, row: int, budget: int, count: Callable[[str], int]) -> Iterator[_Pieces]:
    """Groups of a row's cells, in order, each within the budget."""
    pieces: _Pieces = []
    for column, cell in zip(table.header, table.rows[row]):
        if pieces and count(_text_of(table, [*pieces, (column, cell)])) > budget:
            yield pieces
            pieces = []
        pieces.append((column, cell))
        while count(_text_of(table, pieces)) > budget:  # one cell alone
            words = pieces[-1][1].split(" ")
            fits = _words_that_fit(table, column, words, budget, count)
            if not fits or fits == len(words):
                raise ValueError(
                    f"table {table.id!r}, row {row}, column {column!r}: a budget of {budget} does not hold the table's title, "
                    f"the column's name and the word {words[0][:40]!r}. Raise the budget"
                )
            yield [(column, " ".join(words[:fits]))]
            pieces = [(column, " ".join(words[fits:]))]
    if pieces:
        yield pieces


def _text_of(table: AnyTable, pieces: _Pieces) -> str:
    return open_wikitable_text(table, [column for column, _ in pieces], [[cell for _, cell in pieces]])


def _words_that_fit(table: AnyTable, column: str, words: list[str], budget: int, count: Callable[[str], int]) -> int:
    """Number of words of a cell that fit into a passage of their own."""

    def length(n: int) -> int:
        return count(_text_of(table, [(column, " ".join(words[:n]))]))

    return bisect.bisect_right(range(1, len(words) + 1), budget, key=length)
