"""Detects unreadable text, in any script: written by a policy that has collapsed, or the result of a wrong encoding."""

from __future__ import annotations

import re
import unicodedata

_REPLACED = re.compile("\ufffd|锟斤拷")  # replacement characters, and what two of them are when read as GBK
_UNREADABLE = ("Cc", "Cs", "Co")  # Unicode categories: control, surrogate and private-use characters
_LAYOUT = "\n\r\t"
_RUN = re.compile(r"[^\x00-\x7f]{2,}")
# UTF-8 that was decoded as a Western encoding: é, ü, .. become Ã and a sign, quotation marks become â€ and a sign. («, » and ·
# may also follow a real Ã.)
_WESTERN = re.compile("[ÃÂ][¡-ª¬-¶¸-º¼-¿€ƒˆ†‡‰ŠŒŽ˜™šœžŸ]|â€")
_FEWEST = {
    "cp1252": 2,
    "cp1251": 3,
}  # fewest characters that the decoded run must have, because shorter ones arise by chance: "ТІНІ" would be two


def garbled(text: str) -> bool:
    """True if a text has unreadable parts: replacement, control or private-use characters, or UTF-8 that was decoded with
    another encoding ("SÃ£o"). Letters of any script are fine ("São", "北京", "Київ").
    """
    if _REPLACED.search(text) or _WESTERN.search(text):
        return True
    if any(unicodedata.category(letter) in _UNREADABLE and letter not in _LAYOUT for letter in text):
        return True
    return any(_misread(run) for run in _RUN.findall(text))


def _misread(run: str) -> bool:
    """Whether characters beyond ASCII are really the UTF-8 bytes of fewer characters."""
    for encoding, fewest in _FEWEST.items():
        try:
            meant = run.encode(encoding).decode("utf-8")
        except UnicodeError:
            continue
        if len(meant) >= fewest:
            return True
    return False
