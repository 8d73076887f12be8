"""Reads documents as titled texts (.txt, .md, .html, .mhtml, .docx, the text layer of .pdf), and pages of files as pictures.

Markdown and Word become HTML (markdown-it-py, mammoth), so that all three are read by one walk over its elements. Of a web page
only what is around the text is dropped: scripts, menus, footers, what is hidden, and all outside <main> if there is one. Unlike
`knowledge.web.reading`, which reads strangers' pages by statistics, this drops no table and no short paragraph.
"""

from __future__ import annotations

import codecs
import dataclasses
import email
import email.policy
import io
import pathlib
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from absl import logging
from PIL import Image

from routerl_jax.core.packages import needs
from routerl_jax.core.rows import open_bytes, plain_name, plain_suffix
from routerl_jax.core.text import replace_surrogates
from routerl_jax.data.gold_paths import page_id
from routerl_jax.models.images import check_aspect, decode_image

_META = re.compile(rb"""<meta[^>]{0,200}?charset\s*=\s*["']?\s*([a-zA-Z0-9_:.\-]{2,40})""", re.IGNORECASE)
_BOMS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),  # before UTF-16's, with which it begins
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_AS_BROWSERS = {"iso8859-1": "cp1252", "ascii": "cp1252"}  # what these names mean on the web (WHATWG Encoding)
_WESTERN = 0.4  # share of letters beyond ASCII up to which a text of unknown encoding is taken for a Western one


class Encoding(NamedTuple):
    """An encoding by Python's name, the bytes of its mark at the start, and whether nothing but the letters says so."""

    name: str
    skip: int = 0
    guessed: bool = False

    def text(self, content: bytes) -> str:
        """The content as text: replacement characters for bytes that are not valid, and no cut last letter."""
        return codecs.getincrementaldecoder(self.name)("replace").decode(content[self.skip :], final=False)


def decode(content: bytes, declared: str | None = None) -> str:
    """A page's text, by `encoding_of`.

    Raises:
      ValueError: the bytes are not text.
    """
    return encoding_of(content, declared).text(content)


def encoding_of(content: bytes, declared: str | None = None) -> Encoding:
    """The encoding of a text.

    These are tried in order: a byte order mark; UTF-8 if the bytes are valid; the encoding in the header, then the one in the
    page, if the bytes are valid; UTF-16 without a mark; the most likely encoding by its letters.

    Args:
      declared: charset of the Content-Type header.

    Raises:
      ValueError: the bytes are not text.
    """
    for bom, name in _BOMS:
        if content.startswith(bom):
            return Encoding(name, len(bom))
    inside = _META.search(content[:4096])
    header, page = (_codec(name) if name else None for name in (declared, inside and inside.group(1).decode()))
    wide = [header] if header and header.startswith(("utf-16", "utf-32")) else []
    # a page in which letters of one byte say so is not in UTF-16
    names = [name for name in (header, page) if name and not name.startswith(("utf-16", "utf-32"))]
    if b"\0" in content[:4096] and not wide:
        if name := _unmarked(content[:4096]):
            return Encoding(name)
        raise ValueError("binary content, which is not read here")
    escaped = [name for name in names if name.startswith(("iso2022", "hz"))] if b"\x1b" in content else []
    for name in (*wide, *escaped, "utf-8", *names):
        if _is_valid(content, name):
            return Encoding(name)
    return Encoding(_likely(content), guessed=True)


def _codec(name: str) -> str | None:
    """Python's name of a text encoding; None if it is unknown."""
    try:
        info = codecs.lookup(name)
    except (LookupError, ValueError):
        return None
    return _AS_BROWSERS.get(info.name, info.name) if info._is_text_encoding else None


def _is_valid(content: bytes, name: str) -> bool:
    """Whether all bytes are valid in the encoding; a cut last letter is allowed."""
    try:
        codecs.getincrementaldecoder(name)("strict").decode(content, final=False)
    except (UnicodeError, LookupError):
        return False
    return True


def _unmarked(content: bytes) -> str | None:
    """UTF-16 of mostly Western letters: every second byte is zero, the others are not."""
    even, odd = content[::2], content[1::2]
    for name, zeros, others in (("utf-16-le", odd, even), ("utf-16-be", even, odd)):
        if zeros.count(0) > 0.7 * len(zeros) and not others.count(0) and _is_valid(content, name):
            return name
    return None


def _likely(content: bytes) -> str:
    """Letter statistics fail on short texts and on few letters: such texts are read as browsers do."""
    from charset_normalizer import from_bytes

    shown = re.sub(rb"<[^<>]*>", b"", content[:20_000])
    beyond = sum(byte >= 0x80 for byte in shown)
    letters = beyond + sum(65 <= byte <= 122 for byte in shown)
    if beyond <= _WESTERN * letters and _is_valid(content, "cp1252"):
        return "cp1252"
    best = from_bytes(content[:20_000]).best()
    return best.encoding if best else "utf-8"


_SCANS = (".tif", ".tiff")  # files whose frames are pages
_MOST_PIXELS = 2**25  # most pixels of a rendered page; a larger page (a poster) gets a lower resolution
_POINTS = 72  # PDF points per inch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Page:
    """One page of a document, not yet read.

    Attributes:
      number: number of the page in the file, from 1.
      text: the page's text according to a list of pages; for PDFs see `Reader.text`.
    """

    id: str
    title: str
    path: pathlib.Path
    number: int = 1
    text: str = ""


class Reader:
    """Reads pages. Keeps the last document open. Safe to use from several threads; only one at a time reads PDFs.

    Args:
      dpi: resolution of PDF pages in dots per inch.
    """

    def __init__(self, dpi: int) -> None:
        self.dpi = dpi
        self._lock = threading.Lock()  # PDFium may not be called by two threads at once
        self._open: tuple[pathlib.Path, Any] | None = None

    def count(self, path: pathlib.Path) -> int:
        """Number of pages of a file.

        Raises:
          ValueError: the file is no readable PDF or picture, or needs a password; names the file.
        """
        if path.suffix.lower() == ".pdf":
            with self._lock:
                pages = len(self._document(path))
            if not pages:
                raise ValueError(f"{path}: a PDF without pages; repair or remove it")
            return pages
        if path.suffix.lower() in _SCANS:
            try:
                with Image.open(path) as scan:
                    return getattr(scan, "n_frames", 1)
            except Exception as error:  # decoders raise many classes
                raise ValueError(f"{path}: not a picture that can be read ({error}); repair or remove it") from error
        return 1

    def picture(self, page: Page) -> Image.Image:
        """The page as a picture, RGB. Raises ValueError that names file and page if it is damaged, or if no model can read a
        picture of its shape."""
        name, suffix = f"{page.path}, page {page.number}", page.path.suffix.lower()
        if suffix == ".pdf":
            picture = self._pdf(page, name, self._render)
        elif suffix not in _SCANS:
            picture = decode_image(page.path)
        else:
            try:
                with Image.open(page.path) as scan:
                    scan.seek(page.number - 1)
                    picture = decode_image(scan.copy(), name=name)
            except (OSError, EOFError, SyntaxError) as error:
                raise ValueError(f"{name}: damaged or incomplete ({error}); repair or remove it") from error
        width, height = picture.size
        check_aspect(width, height, name)
        return picture

    def text(self, page: Page) -> str:
        """The text of a page in the file itself (a PDF's text layer); "" if there is none."""
        if page.path.suffix.lower() != ".pdf":
            return page.text
        return self._pdf(
            page, f"{page.path}, page {page.number}", lambda pdf_page: pdf_page.get_textpage().get_text_range()
        )

    def _pdf(self, page: Page, name: str, use: Callable[[Any], Any]) -> Any:
        with self._lock:
            document = self._document(page.path)
            try:
                return use(document[page.number - 1])
            except Exception as error:  # PdfiumError, and IndexError for a page that is not there
                raise ValueError(f"{name}: can't be read ({error}); repair the file or remove it") from error

    def _render(self, page: Any) -> Image.Image:
        width, height = page.get_size()
        scale = self.dpi / _POINTS
        scale *= min(1.0, (_MOST_PIXELS / max(1.0, width * height * scale**2)) ** 0.5)
        return page.render(scale=scale).to_pil().convert("RGB")

    def _document(self, path: pathlib.Path) -> Any:
        if self._open is not None and self._open[0] == path:
            return self._open[1]
        with needs("reading PDFs", "pages"):
            import pypdfium2 as pdfium
        try:
            document = pdfium.PdfDocument(path)
        except (pdfium.PdfiumError, OSError) as error:
            locked = "password" in str(error).lower()
            problem = "needs a password; save it without one" if locked else "not a PDF that can be read"
            raise ValueError(f"{path}: {problem} ({error}); repair or remove it, or set on_error='skip'") from error
        if self._open is not None:
            self._open[1].close()
        self._open = path, document
        return document


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
