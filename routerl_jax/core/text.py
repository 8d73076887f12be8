"""Cleans texts so that every tokenizer, encoder and file takes them, and strangers may read them."""

from __future__ import annotations

import re

from routerl_jax.core.types import Passage


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
    blanked, at = "", 0
    for begin, end in said:
        blanked += " " * (begin - at) + text[begin:end]
        at = end
    return thought, blanked + " " * (len(text) - at)


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
