"""Decodes the bytes of a page or a text file, even if its headers are wrong."""

from __future__ import annotations

import codecs
import re
from typing import NamedTuple

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
