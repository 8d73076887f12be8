"""Whether text can be read at all, in whatever script: what a policy writes when it goes astray, or a wrong encoding makes."""

from __future__ import annotations

import re
import unicodedata

_REPLACED = re.compile("\ufffd|锟斤拷")  # replacement characters, and what two of them are when read as GBK
_UNREADABLE = ("Cc", "Cs", "Co")  # controls, surrogates, characters of nobody's script
_LAYOUT = "\n\r\t"
_RUN = re.compile(r"[^\x00-\x7f]{2,}")
# UTF-8 that was read as Western: é, ü, .. are Ã and a sign, quotation marks â€ and a sign. («, » and · may follow an Ã.)
_WESTERN = re.compile("[ÃÂ][¡-ª¬-¶¸-º¼-¿€ƒˆ†‡‰ŠŒŽ˜™šœžŸ]|â€")
_FEWEST = {
    "cp1252": 2,
    "cp1251": 3,
}  # so many characters that a run would be in UTF-8 are no chance: "ТІНІ" would be two


def garbled(text: str) -> bool:
    """True if text holds what no reader could make out: replacement, control or private characters, or UTF-8 that was read
    in another encoding ("SÃ£o"). Letters of any script are fine ("São", "北京", "Київ").
    """
    if _REPLACED.search(text) or _WESTERN.search(text):
        return True
    if any(unicodedata.category(letter) in _UNREADABLE and letter not in _LAYOUT for letter in text):
        return True
    return any(_misread(run) for run in _RUN.findall(text))


def _misread(run: str) -> bool:
    """Whether characters beyond ASCII are the bytes of fewer in UTF-8."""
    for encoding, fewest in _FEWEST.items():
        try:
            meant = run.encode(encoding).decode("utf-8")
        except UnicodeError:
            continue
        if len(meant) >= fewest:
            return True
    return False
