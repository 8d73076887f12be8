"""Parses the replies of policies: sentences, conclusions, short answers."""

from __future__ import annotations

import re

CONCLUSION = "So the answer is:"  # the end of a chain of thought (IRCoT, arXiv 2212.10509)

# Ends of sentences. There are only four, because endpoints take no more stop strings.
SENTENCE_ENDS = (". ", ".\n", "? ", "\n")

_CONCLUDED = re.compile(r"\banswer is\b[ \t]*:?[ \t]*(.*)", re.IGNORECASE)


def concluded(text: str) -> str | None:
    """The text after the last "answer is" on its line, without its full stop; None if there is none."""
    conclusions = _CONCLUDED.findall(text)
    return (tidied(conclusions[-1]) or None) if conclusions else None


def short(text: str, *labels: str) -> str | None:
    """The first line that is not empty, without its label (by default `Answer:`); None if there is none."""
    for line in text.splitlines():
        for label in labels or ("Answer:",):
            line = line.strip().removeprefix(label)
        if line := tidied(line):
            return line
    return None


def tidied(text: str) -> str:
    """An answer without surrounding space, emphasis marks and quotes, and without a full stop."""
    text = text.strip().strip("*").strip()
    text = text.removesuffix(".").rstrip().strip("*")
    for mark in ('"', "'", "`"):
        if len(text) > 1 and text[0] == text[-1] == mark:
            text = text[1:-1]
    return text.strip()


def first_sentence(text: str) -> str:
    """The text up to the first end of a sentence, including its stop; the whole text if there is none."""
    ends = [at + len(end.rstrip()) for end in SENTENCE_ENDS if (at := text.strip().find(end)) >= 0]
    return text.strip()[: min(ends)].strip() if ends else text.strip()


def is_reasoning(sentence: str) -> bool:
    """True if a sentence draws a conclusion or calculates, and states no new fact. IRCoT's code does not search for these."""
    begins = sentence.lower().startswith(("thus ", "thus,", "so ", "so,", "that is,", "therefore", "hence"))
    return begins or re.search(r"\d [+-] \d[\d,.]* = \d", sentence) is not None


def last_line(text: str, label: str) -> str | None:
    """The text after a label, from the last line that has the label; None if no line has it."""
    contents = re.findall(rf"{re.escape(label)}[ \t]*(.*)", text)
    return contents[-1].strip() if contents else None
