"""Reading what baselines' policies write: sentences, conclusions, short answers."""

from __future__ import annotations

import re

CONCLUSION = "So the answer is:"  # how a chain of thought ends (IRCoT, arXiv 2212.10509)

# Where a sentence ends. At most four: endpoints take no more stop strings.
SENTENCE_ENDS = (". ", ".\n", "? ", "\n")

_CONCLUDED = re.compile(r"\banswer is\b[ \t]*:?[ \t]*(.*)", re.IGNORECASE)
_THINKING = re.compile(r"<think>.*?</think>\s*|^.*</think>\s*", re.DOTALL)  # of models that think before they write


def concluded(text: str) -> str | None:
    """What follows the last "answer is" on its line, without its full stop; None where there is none or nothing follows."""
    found = _CONCLUDED.findall(text)
    return (tidied(found[-1]) or None) if found else None


def short(text: str, *labels: str) -> str | None:
    """The first line with something on it, without a label (`Answer:`, by default) before it; None where there is none."""
    for line in text.splitlines():
        for label in labels or ("Answer:",):
            line = line.strip().removeprefix(label)
        if line := tidied(line):
            return line
    return None


def tidied(text: str) -> str:
    """An answer without what stands around it: space, marks of emphasis, quotes, one full stop."""
    text = text.strip().strip("*").strip()
    text = text.removesuffix(".").rstrip().strip("*")
    for mark in ('"', "'", "`"):
        if len(text) > 1 and text[0] == text[-1] == mark:
            text = text[1:-1]
    return text.strip()


def first_sentence(text: str) -> str:
    """Up to the first end of a sentence, with its stop; "" where there is none."""
    ends = [at + len(end.rstrip()) for end in SENTENCE_ENDS if (at := text.strip().find(end)) >= 0]
    return text.strip()[: min(ends)].strip() if ends else text.strip()


def is_reasoning(sentence: str) -> bool:
    """A sentence that draws a conclusion, or calculates, and states no new fact: IRCoT's code does not search for one."""
    begins = sentence.lower().startswith(("thus ", "thus,", "so ", "so,", "that is,", "therefore", "hence"))
    return begins or re.search(r"\d [+-] \d[\d,.]* = \d", sentence) is not None


def without_thinking(text: str) -> str:
    """A reply without what a reasoning model thought before it."""
    return _THINKING.sub("", text)


def last_line(text: str, label: str) -> str | None:
    """What stands behind a label on the last line that has it; None where none has it."""
    found = re.findall(rf"{re.escape(label)}[ \t]*(.*)", text)
    return found[-1].strip() if found else None
