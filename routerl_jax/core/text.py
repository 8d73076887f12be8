"""Texts: cleaned for tokenizers and files, compared as they look and by their words in any script, or garbled."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import unicodedata

from routerl_jax.core.types import Passage

# --- clean texts -------------------------------------------------------------------------------------------------------


def replace_surrogates(text: str) -> str:
    """The text with "?" for each half of a surrogate pair.

    JSON may contain such halves, from services that cut texts, and no tokenizer takes them.
    """
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def split_thoughts(text: str, *names: str) -> tuple[str, str]:
    """The thoughts of a reply, and the reply with a space in the place of each of their letters, so that positions stay.

    A thought stands between `<NAME>` and `</NAME>`, in upper or lower case. Everything before a closing tag that nothing
    opened is a thought, because the prompt may have opened it; so is everything behind an opening tag that nothing closes.

    Args:
      names: further tags of thoughts, beside `think`, `thinking` and `reasoning`.
    """
    tags = re.compile(rf"<(/?)(?:{'|'.join(('think', 'thinking', 'reasoning', *names))})\s*>", re.IGNORECASE)
    thoughts: list[tuple[int, int]] = []
    said: list[tuple[int, int]] = []
    start, inside = 0, False
    for tag in tags.finditer(text):
        closes = bool(tag[1])
        if closes and not inside:
            thoughts, said = [(0, tag.start())], []
        elif closes or not inside:
            (thoughts if inside else said).append((start, tag.start()))
        else:
            continue
        start, inside = tag.end(), not closes
    (thoughts if inside else said).append((start, len(text)))
    thought = " ".join(tags.sub(" ", text[begin:end]).strip() for begin, end in thoughts).strip()
    blanked: list[str] = []
    at = 0
    for begin, end in said:
        blanked += [" " * (begin - at), text[begin:end]]
        at = end
    return thought, "".join(blanked) + " " * (len(text) - at)


# A URL, which stays; or an absolute path, or one of a home directory, whose last part stays.
_PATH = re.compile(r"""https?://[^\s"']+|(?:(?<=^)|(?<=[\s"',:(]))~?/(?:[^\s"',:()]*/)?([^\s"',:()/]+)""")


def without_directories(text: str) -> str:
    """The text without the directories of this machine: `/home/me/corpus.jsonl` is `corpus.jsonl`."""
    return _PATH.sub(lambda match: match[0] if match[1] is None else match[1], text)


def markdown_cell(text: str) -> str:
    """The text as a cell of a Markdown table, where it can neither end the cell nor begin HTML."""
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


def counted(number: float, noun: str) -> str:
    """A number with what it counts: `1 question`, `2,000 questions`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def one_line(passage: Passage) -> str:
    """Title and text on one line, without the title if the text contains it."""
    text = " ".join(passage.text.split())
    return text if passage.title in text else f"{passage.title}: {text}"


# --- sentences ---------------------------------------------------------------------------------------------------------

_NEAR = 80  # letters before a mark that are looked at
_MARK = re.compile(r"(?<![.?!…])([.?!…]++)[\"'”’»)\]*]*+(?=\s|$)|[。！？]+[”’」』）]*")
_NEXT = re.compile(r"[\s\"'“‘«(\[*]*(\w+)(\.?)")
# Abbreviations (without their last full stop) before more of the same sentence; before a number alone; and before either.
_INSIDE = re.compile(
    "mrs?|ms|mx|dr|prof|mme|mlle|messrs|rev|hon|gen|col|lt|sgt|capt|cmdr|adm|maj|gov|sen|rep|pres|mt|vs?|cf|viz|approx|ca|feat"
    r"|tr|lit|i\.e|e\.g"
)
_BEFORE_NUMBERS = re.compile("nos?|vols?|figs?|pp|eds|op|jan|feb|mar|apr|jun|jul|aug|sept?|oct|nov|dec")
_EITHER = re.compile("jr|sr|inc|ltd|co|corp|bros|st|dept|univ|assn|etc|al|ave|blvd|esq|est|intl")
# Words that begin a sentence, and no name behind an abbreviation or an initial.
_BEGINS = re.compile(
    "The|This|That|These|Those|An?|Its?|He|She|They|We|You|I|His|Her|Their|Our|My|In|On|At|By|For|From|With|After|Before|During"
    "|Since|Until|When|While|Where|Who|What|Which|Why|How|As|Although|Though|Because|But|And|Or|Nor|So|Yet|If|However|Then|There"
    "|Here|Also|Both|Each|Some|Many|Most|Other|Several|All|No|Not|One|Two|Thus|Therefore|Hence|To|Is|Was|Are|Were|Did|Do|Does"
    "|Later|Today|Meanwhile|Moreover|Furthermore|Additionally|Finally|First|Second|Next|Now|Let|Please|Note|Sources?|Yes"
)
_INITIALS = re.compile(r"[^\W\d_]|[^\W\d_]{1,3}(?:\.[^\W\d_]{1,3})+")


def sentence_ends(text: str) -> list[int]:
    """The positions behind the sentences of a text, before the space that follows: behind "wrote it." and "(in 1818)?".

    By rules, for text in Latin letters and in Chinese or Japanese. A full stop ends no sentence after a title ("Dr. Lee"), nor
    in a number of a list or of a thing ("No. 5"). After an initial or an abbreviation that may stand at an end ("J. Lee", "the
    U.S. Army", "Smith Jr. ran") it ends one if the next word begins sentences ("in the U.S. He"), and not at the end of the
    text, where the next word is missing. Line breaks are spaces.
    """
    return [match.end() for match in _MARK.finditer(text) if match[1] is None or _ends(text, match)]


def _ends(text: str, match: re.Match[str]) -> bool:
    """Whether a mark in a text ends a sentence."""
    following = _NEXT.match(text, match.end())
    word, dot = following.groups() if following else ("", "")
    number = following is not None and word[0].isdigit() and "\n" not in following[0]
    if match[1] != ".":
        return not word[:1].islower()
    near = text[max(match.start() - _NEAR, 0) : match.start()]
    word_before = near.split()[-1] if near and not near[-1].isspace() else ""
    before = word_before.lstrip("\"'“‘«([*_")
    name = before.casefold()
    _, line, at_line = near[: len(near) - len(word_before)].rpartition("\n")
    if before.isdigit() and not at_line.strip() and (line or match.start() <= _NEAR):
        return False  # the number of a list's entry
    if (number and before.isalpha() and len(before) <= 4) or (not word and _BEFORE_NUMBERS.fullmatch(name)):
        return False
    if _INSIDE.fullmatch(name):
        return False
    if _INITIALS.fullmatch(name) or _EITHER.fullmatch(name):
        return _BEGINS.fullmatch(word) is not None and not (len(word) == 1 and dot)  # "A." is one more initial
    return True


def sentences(text: str) -> list[str]:
    """The sentences of a text (`sentence_ends`), without the space around them."""
    ends = [0, *sentence_ends(text), len(text)]
    return [sentence for start, end in itertools.pairwise(ends) if (sentence := text[start:end].strip())]


# --- comparing texts ---------------------------------------------------------------------------------------------------

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
        letter = chr(code)
        category = unicodedata.category(letter)
        form, *parts = unicodedata.decomposition(letter).split()[:2] or [""]
        if letter in _SIGN:
            plain = _SIGN[letter]
        elif category == "Cf" and unicodedata.bidirectional(letter) != "AN":  # (Arabic signs of numbers are seen)
            plain = ""
        elif category in ("Zs", "Pd"):
            plain = " " if category == "Zs" else "-"
        elif form not in _SAME_LOOK or parts == ["0020"]:  # an accent that stands alone
            plain = letter
        else:
            plain = "".join(_SIGN.get(part, part) for part in unicodedata.normalize("NFKC", letter))
        return self.setdefault(code, plain)


_PLAIN = _PlainForms()


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


# --- garbled texts -----------------------------------------------------------------------------------------------------

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
    for run in _RUN.findall(text):  # are characters beyond ASCII really the UTF-8 bytes of fewer characters?
        for encoding, fewest in _FEWEST.items():
            with contextlib.suppress(UnicodeError):
                if len(run.encode(encoding).decode("utf-8")) >= fewest:
                    return True
    return False
