"""How texts are compared: as they look, whatever code points they are written in, and by their words, in any script."""

from __future__ import annotations

import functools
import re
import unicodedata

# Signs that look alike, or do the same in another script, and the ASCII character that stands for all of them.
_SIGNS = {
    "'": "‘’‚‛‹›′ʻʼ´",
    '"': "“”„‟″«»「」『』《》〈〉〝〞",
    "-": "−",  # dashes (Pd) too
    "~": "〜∼",
    ".": "。।۔",
    ",": "、،",
    ";": "؛",
    "?": "؟",
    "[": "【〔",
    "]": "】〕",
    "/": "⁄∕",
    "·": "‧•・∙⋅",
    "I": "İ",  # whose lower case would be i and a second dot
    "": "\u034f\u115f\u1160\u3164" + "".join(map(chr, range(0xFE00, 0xFE10))),  # fillers and variation selectors
}
_SIGN = {sign: plain for plain, signs in _SIGNS.items() for sign in signs}
# Compatibility forms that a reader takes for the plain character. The others say something else: 10² is not 102.
_SAME_LOOK = ("<wide>", "<narrow>", "<font>", "<compat>", "<noBreak>", "<small>", "<vertical>")
_SAME_LOOK += ("<initial>", "<medial>", "<final>", "<isolated>")
_BEYOND_ASCII = re.compile(r"[^\x00-\x7f]+")

# Scripts without spaces between words: Thai, Lao, Burmese, Khmer, kana, Chinese characters. (Korean has spaces.)
UNSPACED = (
    "\u0e01-\u0e4e\u0e80-\u0ece\u1000-\u103f\u1050-\u109f\u1780-\u17d3"
    "\u3005-\u3007\u3040-\u30fa\u30fc-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U000323af"
)
_CHARACTER = re.compile(f"[{UNSPACED}]")
# A single letter after an apostrophe (Smith's, don't) is no word.
_ENDING = r"(?:\+\+|#)?"  # of C++ and C#
_ASCII_WORD = re.compile(rf"(?<!\w')\w+{_ENDING}|(?<=\w')\w\w+{_ENDING}", re.ASCII)


def states(plain_text: str, plain_answer: str) -> bool:
    """Whether a normalised text holds a normalised answer: its words, one after the other; where a script has no spaces
    between words (Chinese, Japanese, Thai), its characters."""
    if _CHARACTER.search(plain_answer):
        return plain_answer.replace(" ", "") in plain_text.replace(" ", "")
    return bool(plain_answer) and f" {plain_answer} " in f" {plain_text} "


def folded(text: str) -> str:
    """The text in the code points that stand for all that look the same, for comparisons.

    Accents are composed (NFC). Wide and narrow forms, ligatures, and letters in another font become plain ones. Quotation
    marks, dashes, minus signs, full stops and commas of any script become those of ASCII, and any space a blank. Characters
    without width are removed. Superscripts and fractions stay, as do letters of other scripts that look like Latin ones.
    """
    if text.isascii():
        return text
    text = _BEYOND_ASCII.sub(lambda match: match[0].translate(_PLAIN), unicodedata.normalize("NFC", text))
    return unicodedata.normalize("NFC", text)


class _PlainForms(dict[int, str]):
    """The plain form of each character, by its code, as `str.translate` takes them."""

    def __missing__(self, code: int) -> str:
        return self.setdefault(code, _plain_form(chr(code)))


_PLAIN = _PlainForms()


def _plain_form(letter: str) -> str:
    if letter in _SIGN:
        return _SIGN[letter]
    category = unicodedata.category(letter)
    if category == "Cf" and unicodedata.bidirectional(letter) != "AN":  # (Arabic signs of numbers are seen)
        return ""
    if category in ("Zs", "Pd"):
        return " " if category == "Zs" else "-"
    form, *parts = unicodedata.decomposition(letter).split()[:2] or [""]
    if form not in _SAME_LOOK or parts == ["0020"]:  # an accent that stands alone
        return letter
    return "".join(_SIGN.get(part, part) for part in unicodedata.normalize("NFKC", letter))


def words(text: str, *, pairs: bool = False) -> list[str]:
    """The words of a text, in order and in their own case, of its `folded` form.

    A word is a run of letters, digits and combining marks, of any length, with the signs of C++ and C#. A letter alone after
    an apostrophe (Smith's, don't) is left out. Text in scripts without spaces between words (`UNSPACED`) gives its
    characters, each with its marks.

    Args:
      pairs: each two neighbouring characters of such text are a word too, as search engines have it.
    """
    text = folded(text)
    if text.isascii():
        return _ASCII_WORD.findall(text)
    found = _patterns()[0].findall(text)
    if not pairs or not _CHARACTER.search(text):
        return [piece for run in found for piece in split(run)]
    pieces: list[str] = []
    for run in found:
        before = ""
        for piece in split(run):
            character = piece if is_unspaced(piece) else ""
            pieces += [before + character, piece] if before and character else [piece]
            before = character
    return pieces


def split(text: str) -> list[str]:
    """The parts of a text between spaces; each character of text without spaces between words is a part of its own."""
    parts = text.split()
    if text.isascii() or not _CHARACTER.search(text):
        return parts
    return [piece for part in parts for piece in _patterns()[1].findall(part)]


def is_unspaced(word: str) -> bool:
    """Whether a word of `words` is a character of text without spaces."""
    return _CHARACTER.match(word) is not None


@functools.cache
def _patterns() -> tuple[re.Pattern[str], re.Pattern[str]]:
    """A run of letters, digits and marks of any script; in such a run, a character of text without spaces, or what is none."""
    # The basic plane alone: with characters beyond it, re would go through the marks one by one.
    marks = "".join(chr(i) for i in range(0x10000) if unicodedata.category(chr(i)) in ("Mn", "Mc", "Me"))
    letter = rf"[\w{marks}]"
    any_word = re.compile(rf"(?<!{letter}'){letter}+{_ENDING}|(?<={letter}'){letter}{letter}+{_ENDING}")
    return any_word, re.compile(rf"[{UNSPACED}][{marks}]*|[^{UNSPACED}]+")
