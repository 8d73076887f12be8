"""Decodes the bytes of a page to text, even if its headers are wrong."""

from __future__ import annotations

import codecs
import re

_META = re.compile(rb"""<meta[^>]{0,200}?charset\s*=\s*["']?\s*([a-zA-Z0-9_:.\-]{2,40})""", re.IGNORECASE)
_BOMS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))
_AS_BROWSERS = {"iso8859-1": "cp1252", "ascii": "cp1252"}  # what these names mean on the web (WHATWG Encoding)


def decode(content: bytes, declared: str | None = None) -> str:
    """A page's text.

    Encodings are tried in this order: a byte order mark; UTF-8 if the bytes are valid; the encoding in the header, then the
    one in the page, if the bytes are valid; the most likely encoding by letter statistics; UTF-8 with replacement characters.

    Args:
      declared: charset of the Content-Type header.

    Raises:
      ValueError: the bytes are not text.
    """
    for bom, name in _BOMS:
        if content.startswith(bom):
            return content[len(bom) :].decode(name, errors="replace")
    inside = _META.search(content[:4096])
    names = [_codec(name) for name in (declared, inside.group(1).decode() if inside else None) if name]
    wide = [name for name in names if name and name.startswith(("utf-16", "utf-32"))]
    if b"\0" in content[:4096] and not wide:
        raise ValueError("binary content, which is not read here")
    escaped = [name for name in names if name and name.startswith(("iso2022", "hz"))] if b"\x1b" in content else []
    for name in (*wide, *escaped, "utf-8", *names):
        text = _strictly(content, name) if name else None
        if text is not None:
            return text
    return _likely(content)


def _codec(name: str) -> str | None:
    """Python's name of a text encoding; None if it is unknown."""
    try:
        info = codecs.lookup(name)
    except (LookupError, ValueError):
        return None
    return _AS_BROWSERS.get(info.name, info.name) if info._is_text_encoding else None


def _strictly(content: bytes, name: str) -> str | None:
    """The text if all bytes are valid in the encoding; a cut last letter is allowed."""
    try:
        return codecs.getincrementaldecoder(name)("strict").decode(content, final=False)
    except (UnicodeError, LookupError):
        return None


def _likely(content: bytes) -> str:
    from charset_normalizer import from_bytes

    best = from_bytes(content[:20_000]).best()
    return content.decode(best.encoding if best else "utf-8", errors="replace")
