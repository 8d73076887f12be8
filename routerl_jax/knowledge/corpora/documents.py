"""Reads documents as titled texts: .txt, .md, .html (.mhtml), .docx and the text layer of .pdf.

Markdown and Word become HTML (markdown-it-py, mammoth), so that all three are read by one walk over its elements. Of a web page
only what is around the text is dropped: scripts, menus, footers, what is hidden, and all outside <main> if there is one. Unlike
`knowledge.web.reader`, which reads strangers' pages by statistics, this drops no table and no short paragraph.
"""

from __future__ import annotations

import dataclasses
import email
import email.policy
import io
import pathlib
import re
from collections.abc import Iterator
from typing import Any

from absl import logging

from routerl_jax.core.packages import needs
from routerl_jax.core.rows import open_bytes, plain_name, plain_suffix
from routerl_jax.core.text import replace_surrogates
from routerl_jax.data.page_ids import page_id
from routerl_jax.knowledge.pages.reader import Page, Reader
from routerl_jax.knowledge.web.charset import encoding_of

_KINDS = {
    **dict.fromkeys((".txt", ".text"), "text"),
    **dict.fromkeys((".md", ".markdown"), "markdown"),
    **dict.fromkeys((".html", ".htm", ".xhtml"), "html"),
    **dict.fromkeys((".mhtml", ".mht"), "mhtml"),
    ".docx": "docx",
    ".pdf": "pdf",
}
# What browsers add to the name of a page for the folder of its pictures and scripts
_PAGE_FOLDERS = ("_files", ".files", "-Dateien", "_fichiers", "_archivos", "_arquivos", "_bestanden", "_file", "_pliki")
_NO_TEXT = "without text (scanned, or blank); a knowledge base of kind 'ocr' reads scanned pages"
_OLE = b"\xd0\xcf\x11\xe0"  # the container of old Word files, and of encrypted new ones
# YAML or TOML; a rule and text below it are none
_KEY = r"\s*(?:#.*\s+)*[\w\"'.-]+[ \t]*"
_FRONT_MATTER = re.compile(
    rf"\A(?:---[ \t]*\n(?={_KEY}:\s)(.*?\n)(?:---|\.\.\.)|\+\+\+[ \t]*\n(?={_KEY}=)(.*?\n)\+\+\+)[ \t]*(?:\n|\Z)",
    re.DOTALL,
)
_FRONT_TITLE = re.compile(r"^title[ \t]*[:=](?![ \t]*[|>])[ \t]*(.+?)[ \t]*$", re.MULTILINE)
_HYPHEN = re.compile("[\ufffe\x02]\\s*")  # PDFium's mark of a word that is divided at the end of a line

_HEADINGS = {f"h{level}": level for level in range(1, 7)}
_DROPPED = re.compile(
    "head|script|style|noscript|template|nav|button|select|textarea|svg|iframe|object|audio|video|canvas"
)
_OF_PAGE = ("header", "footer")  # dropped, unless they are a part's own
_PARTS = ("article", "main", "section")
_ROLES = frozenset(("navigation", "banner", "contentinfo", "search"))
_INLINE = re.compile(
    "a|abbr|b|bdi|bdo|big|cite|code|data|del|dfn|em|font|i|img|ins|kbd|label|mark|q|rp|rt|ruby|s|"
    "samp|small|span|strike|strong|sub|sup|time|tt|u|var|wbr"
)


class Unreadable(ValueError):
    """A document that can't be read, or holds no text. The message says why, without the file's name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """The text below one heading, or of one page.

    Attributes:
      title: the document's title and the headings above the text: `Handbook > Leave > Parents`.
      page: number of its page from 1; 0 for documents without pages.
    """

    title: str
    text: str
    page: int = 0

    def ids(self, name: str, first: int) -> Iterator[str]:
        """The ids of its passages: `NAME#7`, counted from `first` through the document, or `NAME.pdf#PAGE#0`."""
        while True:
            yield f"{page_id(name, self.page)}#{first}" if self.page else f"{name}#{first}"
            first += 1


def is_document(path: pathlib.Path) -> bool:
    """Whether the name is that of a document."""
    return _suffix(path) in _KINDS


def saved_with(folder: pathlib.Path) -> pathlib.Path | None:
    """The page with which a browser saved this folder; None if it is another folder."""
    for ending in _PAGE_FOLDERS:
        if folder.name.endswith(ending):
            stem = folder.name.removesuffix(ending)
            page = next((p for e in (".html", ".htm", ".xhtml") if (p := folder.with_name(stem + e)).is_file()), None)
            if page is not None:
                return page
    return None


def sections_of(path: pathlib.Path) -> Iterator[Section]:
    """The sections of a document with their text, in order. A page of a PDF without text is a section without text.

    Raises:
      Unreadable: the file is damaged, needs a password, or holds no text.
      ValueError: the package for it is not installed.
    """
    kind = _KINDS[_suffix(path)]
    try:
        sections = list(_pages(path) if kind == "pdf" else _sections(path, kind))
    except RecursionError as error:
        raise Unreadable("hundreds of lists, tables or quotations inside each other") from error
    if not any(section.text for section in sections):
        count = f"{len(sections)} pages {_NO_TEXT}" if kind == "pdf" else "holds no text"
        raise Unreadable(count)
    yield from sections


def without_text(section: Section) -> str:
    """What is to be said of a page without text."""
    return f"page {section.page} is {_NO_TEXT}"


def _pages(path: pathlib.Path) -> Iterator[Section]:
    with needs("reading PDFs", "documents"):
        import pypdfium2  # noqa: F401 - here, so that a missing package is not taken for a damaged file
    reader = Reader(dpi=72)
    try:
        for number in range(1, reader.count(path) + 1):
            title = f"{path.stem}, page {number}"
            text = reader.text(Page(id="", title=title, path=path, number=number))
            yield Section(title=_clean(title), text=_clean(_HYPHEN.sub("", text)), page=number)
    except ValueError as error:
        raise Unreadable(str(error).removeprefix(f"{path}: ").partition("; repair")[0]) from error


def _sections(path: pathlib.Path, kind: str) -> Iterator[Section]:
    try:
        with open_bytes(path) as file:
            content = file.read()
    except ValueError as error:
        raise Unreadable(str(error).removeprefix(f"{path}: ")) from error
    stem = pathlib.Path(plain_name(path)).stem
    if kind == "text":
        yield Section(title=_clean(stem), text=_clean(_decoded(path, content)))
        return
    title, blocks = stem, []
    if kind == "docx":
        blocks = _blocks(_word(content))[1]
    elif kind == "markdown":
        text = re.sub("\r\n?", "\n", _decoded(path, content))
        if front := _FRONT_MATTER.match(text):
            found = _FRONT_TITLE.search(front[1] or front[2])
            title, text = (found[1].strip("\"'") if found else stem), text[front.end() :]
        blocks = _blocks(_markdown(text))[1]
    else:
        content, declared = _page_of(content) if kind == "mhtml" else (content, None)
        named, blocks = _blocks(_decoded(path, content, declared))
        title = named or stem
    yield from _by_headings(_clean(title), blocks)


def _by_headings(title: str, blocks: list[tuple[int, str]]) -> Iterator[Section]:
    """One section for each heading with text, and for each that has neither text nor further headings below it."""
    path: list[tuple[int, str]] = []
    lines: list[str] = []

    def section(next_level: int) -> Iterator[Section]:
        text = _clean("\n".join(lines))
        if not text and path and next_level <= path[-1][0]:
            text = path[-1][1]
        if text:
            names = [title, *(name for _, name in path)]
            distinct = [name for i, name in enumerate(names) if not i or name.casefold() != names[i - 1].casefold()]
            yield Section(title=" > ".join(distinct), text=text)
        lines.clear()

    for level, text in blocks:
        if not level:
            lines.append(text)
            continue
        yield from section(level)
        while path and path[-1][0] >= level:
            path.pop()
        path.append((level, _clean(text)))
    yield from section(0)


def _decoded(path: pathlib.Path, content: bytes, declared: str | None = None) -> str:
    try:
        found = encoding_of(content, declared)
    except ValueError as error:
        raise Unreadable(str(error)) from error
    if found.guessed:
        logging.warning(
            "%s: neither UTF-8 nor marked, read as %s; save it as UTF-8 if letters are wrong", path, found.name
        )
    text = found.text(content)
    if "\0" in text:
        raise Unreadable("binary content, not text")
    return text


def _markdown(text: str) -> str:
    with needs("reading Markdown", "documents"):
        import markdown_it
    return (
        markdown_it.MarkdownIt("commonmark", {"html": True, "maxNesting": 10_000})
        .enable(["table", "strikethrough"])
        .render(text)
    )


def _word(content: bytes) -> str:
    with needs("reading .docx", "documents"):
        import mammoth
    if content.startswith(_OLE):
        raise Unreadable("needs a password, or is an old .doc; save it as .docx without a password")
    try:
        options: dict[str, Any] = {"convert_image": lambda image: []}
        styles = "p[style-name='Title'] => h1:fresh\np[style-name='Subtitle'] => p:fresh"
        return mammoth.convert_to_html(io.BytesIO(content), style_map=styles, **options).value
    except Exception as error:  # zipfile, XML and mammoth raise many classes
        raise Unreadable(f"not a Word document that can be read ({type(error).__name__}: {error})") from error


def _page_of(content: bytes) -> tuple[bytes, str | None]:
    """The page in a .mhtml file, and its encoding according to its header."""
    message = email.message_from_bytes(content, policy=email.policy.default)
    for part in message.walk():
        if part.get_content_type() in ("text/html", "application/xhtml+xml"):
            page = part.get_payload(decode=True)
            return (page if isinstance(page, bytes) else b""), part.get_content_charset()
    raise Unreadable("a web archive without a page")


def _blocks(page: str) -> tuple[str, list[tuple[int, str]]]:
    """Title of an HTML page ("" if it has none), and its (level of the heading, or 0; text)."""
    with needs("reading HTML", "documents"):
        import lxml.etree
        import lxml.html
    # as bytes, since lxml refuses a text that declares an encoding
    parser = lxml.html.HTMLParser(encoding="utf-8", remove_comments=True, remove_pis=True, huge_tree=True)
    try:
        root = lxml.html.document_fromstring(page.encode("utf-8", "replace"), parser=parser)
    except lxml.etree.ParserError:  # nothing but blanks
        return "", []
    title = " ".join((root.findtext(".//title") or "").split())
    mains = [main for main in root.iter("main") if main.text_content().strip()]
    blocks: list[tuple[int, str]] = []
    open_text: list[str] = []
    _walk(mains[0] if len(mains) == 1 else root, blocks, open_text)
    _close(blocks, open_text)
    return title, blocks


def _walk(element: Any, blocks: list[tuple[int, str]], open_text: list[str]) -> None:
    tag = element.tag.lower()
    style = (element.get("style") or "").replace(" ", "").lower()
    hidden = "hidden" in element.attrib or element.get("aria-hidden") == "true" or "display:none" in style
    frame = tag in _OF_PAGE and not any(True for _ in element.iterancestors(*_PARTS))
    if (
        _DROPPED.fullmatch(tag)
        or frame
        or hidden
        or element.get("role") in _ROLES
        or element.get("class") == "mw-editsection"
    ):
        return
    if tag in ("br", "math"):
        formula = element.get("alttext") or " ".join(element.text_content().split())  # "" for br
        open_text.append(formula or "\n")
        return
    inline = _INLINE.fullmatch(tag)
    if not inline:
        _close(blocks, open_text)
    if tag in _HEADINGS:
        inner: list[tuple[int, str]] = []
        _walk_inside(element, inner, open_text)
        _close(inner, open_text)
        blocks.append((_HEADINGS[tag], " ".join(" ".join(text for _, text in inner).split())))
    elif tag == "pre":
        blocks.append((0, element.text_content().strip("\n")))
    elif tag == "tr":
        cells = []
        for cell in element:
            inner = []
            _walk_inside(cell, inner, open_text)
            _close(inner, open_text)
            cells.append(inner)
        if any(level for cell in cells for level, _ in cell):  # a table that is there for the layout
            blocks += [block for cell in cells for block in cell]
        else:
            blocks.append((0, " | ".join(" ".join(text for _, text in cell) for cell in cells)))
    else:
        _walk_inside(element, blocks, open_text)
    if not inline:
        _close(blocks, open_text)


def _walk_inside(element: Any, blocks: list[tuple[int, str]], open_text: list[str]) -> None:
    open_text.append(" ".join(re.split(r"[ \t\r\n\f]+", element.text or "")))
    for child in element:
        if isinstance(child.tag, str):
            _walk(child, blocks, open_text)
        open_text.append(" ".join(re.split(r"[ \t\r\n\f]+", child.tail or "")))


def _close(blocks: list[tuple[int, str]], open_text: list[str]) -> None:
    """Ends a paragraph."""
    text = "\n".join(" ".join(line.split()) for line in "".join(open_text).split("\n")).strip()
    open_text.clear()
    if text:
        blocks.append((0, text))


def _clean(text: str) -> str:
    """A text that can be stored, without white space around it and without invisible marks."""
    return replace_surrogates(re.sub("\r\n?", "\n", re.sub("[\0\ufeff\u00ad\u200b]", "", text))).strip()


def _suffix(path: pathlib.Path) -> str:
    suffix = plain_suffix(path)
    # of these two, the libraries open the file itself
    return path.suffix.lower() if suffix in (".docx", ".pdf") else suffix
