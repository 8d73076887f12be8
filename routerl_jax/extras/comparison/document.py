"""A report as a list of headings, paragraphs, tables and pictures. It is written as Markdown or as one HTML file."""

from __future__ import annotations

import base64
import dataclasses
import html
import pathlib
from collections.abc import Collection, Sequence

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1b1f24; max-width: 72rem; margin: 2rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.25rem; margin-top: 2.4rem; } h3 { font-size: 1.05rem; margin-top: 1.6rem; }
div.table { overflow-x: auto; margin: .8rem 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem; }
th, td { padding: .28rem .6rem; border-bottom: 1px solid #d8dee4; text-align: right; vertical-align: top; white-space: nowrap; }
th { border-bottom: 2px solid #8c959f; white-space: normal; vertical-align: bottom; } tbody tr:hover { background: #f3f6f9; }
th.text, td.text { text-align: left; }
table.words td { white-space: normal; overflow-wrap: break-word; max-width: 48rem; }
img { max-width: 100%; }
"""


@dataclasses.dataclass(frozen=True)
class Heading:
    """A heading of level 1 to 3."""

    text: str
    level: int = 2


@dataclasses.dataclass(frozen=True)
class Paragraph:
    """Plain text."""

    text: str


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of cells under headings.

    Attributes:
      bold: (row, column) of the cells in bold.
      texts: number of leading columns with text; the other columns have numbers.
    """

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    bold: frozenset[tuple[int, int]] = frozenset()
    texts: int = 1


@dataclasses.dataclass(frozen=True)
class Picture:
    """A PNG file."""

    path: pathlib.Path
    text: str


Block = Heading | Paragraph | Table | Picture


def markdown(blocks: Sequence[Block], directory: pathlib.Path) -> str:
    """The blocks as Markdown. Pictures are named by their path relative to `directory`."""
    return "\n\n".join(_markdown(block, directory) for block in blocks) + "\n"


def page(blocks: Sequence[Block], title: str) -> str:
    """The blocks as one HTML page, with the pictures inside."""
    body = "\n".join(map(_html, blocks))
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{_STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def _markdown(block: Block, directory: pathlib.Path) -> str:
    if isinstance(block, Heading):
        return f"{'#' * block.level} {block.text}"
    if isinstance(block, Paragraph):
        return block.text
    if isinstance(block, Picture):
        return f"![{block.text}]({block.path.relative_to(directory).as_posix()})"
    sides = ["---" if i < block.texts else "---:" for i in range(len(block.headings))]
    lines = [list(block.headings), sides]
    for i, row in enumerate(block.rows):
        lines.append([f"**{_cell(text)}**" if (i, j) in block.bold else _cell(text) for j, text in enumerate(row)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _html(block: Block) -> str:
    if isinstance(block, Heading):
        return f"<h{block.level}>{html.escape(block.text)}</h{block.level}>"
    if isinstance(block, Paragraph):
        return f"<p>{html.escape(block.text)}</p>"
    if isinstance(block, Picture):
        data = base64.b64encode(block.path.read_bytes()).decode()
        return f'<p><img src="data:image/png;base64,{data}" alt="{html.escape(block.text, quote=True)}"></p>'
    cells = [_html_row("th", block.headings, block.texts)]
    for i, row in enumerate(block.rows):
        cells.append(_html_row("td", row, block.texts, {j for j in range(len(row)) if (i, j) in block.bold}))
    kind = ' class="words"' if block.texts >= len(block.headings) else ""
    head, *body = cells
    rows = "\n".join(body)
    return f'<div class="table"><table{kind}><thead>{head}</thead><tbody>\n{rows}\n</tbody></table></div>'


def _html_row(tag: str, cells: Sequence[str], texts: int, bold: Collection[int] = ()) -> str:
    parts = []
    for i, cell in enumerate(cells):
        text = f"<strong>{html.escape(cell)}</strong>" if i in bold else html.escape(cell)
        parts.append(f'<{tag} class="text">{text}</{tag}>' if i < texts else f"<{tag}>{text}</{tag}>")
    return f"<tr>{''.join(parts)}</tr>"
