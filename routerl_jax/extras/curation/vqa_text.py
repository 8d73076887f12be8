"""Prompts that ask a model for questions about pictures, and the rules for its replies (MMSearch-R1, arXiv 2506.20670,
section 3.1 and appendix D.1). The wording is ours."""

from __future__ import annotations

import dataclasses
import re

from routerl_jax.agents.grammar import between
from routerl_jax.extras.curation.attempts import AttemptFailed
from routerl_jax.rewards.metrics import NORMALIZERS

# Kinds of knowledge that a question may ask for, each with its description in the prompt.
TAXONOMY = {
    "Arts": "paintings, music, film, books, design",
    "Place": "cities, landmarks, landscapes, buildings",
    "People": "persons, peoples, professions",
    "Industry": "products, vehicles, machines, companies, food",
    "Science": "instruments, substances, theories, medicine",
    "Nature": "animals, plants, minerals, weather",
    "Entities": "organisations, symbols, objects of daily life, whatever is none of the others",
    "Events": "happenings, sports, festivals, wars",
}
QUESTION_WORDS = ("who", "whom", "whose", "what", "which", "where", "when", "how", "why")
_MOST_WORDS = 40  # most words of a question
_SHORTEST = 3  # fewest letters of a word that can give the answer away
_COMMON = frozenset(["and", "for", "from", "with", "into", "its", "his", "her", "this", "that", "was", "are"])
# Words that somebody who only sees the picture would not use.
_SOURCE = re.compile(
    r"\b(web ?page|page|article|website|text|passage|caption|document|according to|mentioned|described above|concept)\b",
    re.I,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuestionAnswer:
    """A question about a picture, and its answer."""

    question: str
    answer: str


def question_prompt(concept: str, title: str, page: str) -> str:
    """The prompt that asks for a question. The picture stands before it."""
    return (
        f"The picture and the text below were found for: {concept}\n\n"
        f"Title: {title}\nText: {page}\n\n"
        "Write one question about what the picture shows, and its answer.\n"
        f'1. The answer names "{concept}", in as few words as possible.\n'
        f"2. The question begins with one of: {', '.join(word.capitalize() for word in QUESTION_WORDS)}.\n"
        "3. The question gives the answer away in no way: it says neither the name nor a part of it.\n"
        "4. Somebody who sees the picture and nothing else would like to know it. Ask of the picture alone, in one plain "
        "sentence, and never of the text.\n"
        "Write the question inside <question> and </question>, then the answer inside <answer> and </answer>. If picture and "
        f'text do not show "{concept}", write <none/> alone.'
    )


def kind_prompt(question: str, answer: str) -> str:
    """The prompt that asks for the kind of knowledge."""
    kinds = "\n".join(f"{name}: {description}" for name, description in TAXONOMY.items())
    return (
        "Which kind of knowledge does this question about a picture ask for?\n\n"
        f"{kinds}\n\nQuestion: {question}\nAnswer: {answer}\n\nWrite one name inside <kind> and </kind>."
    )


def retry_prompt(why: str) -> str:
    """The prompt after a reply that could not be used."""
    return f"That could not be used: {why}. Write another question and answer in the same form."


def read_question(reply: str, names: tuple[str, ...]) -> QuestionAnswer:
    """The question and answer in a reply.

    Args:
      names: names of the concept. The answer must contain one of them.

    Raises:
      AttemptFailed: the reply breaks a rule, which the message names.
    """
    if "<none/>" in reply:
        raise AttemptFailed("not shown", "the model says that picture and text do not show it")
    question, answer = (between(reply, f"<{tag}>", f"</{tag}>") for tag in ("question", "answer"))
    if not question or not answer:
        raise AttemptFailed("unreadable reply", "there is no question and answer in their tags")
    question, answer = " ".join(question.split()), " ".join(answer.split())
    if not any(_holds(answer, name) for name in names):
        raise AttemptFailed("answer without the concept", f"the answer {answer!r} does not name {names[0]!r}")
    if not re.match(rf"({'|'.join(QUESTION_WORDS)})\b", question, re.IGNORECASE):
        raise AttemptFailed("no question word", f"the question begins with {question.split()[0]!r}")
    if leaked := _given_away(question, (*names, answer)):
        raise AttemptFailed("given away", f"the question says {leaked!r}")
    if not question.endswith("?") or "?" in question[:-1] or len(question.split()) > _MOST_WORDS:
        raise AttemptFailed("not as one would ask", f"it must be one question of at most {_MOST_WORDS} words")
    if match := _SOURCE.search(question):
        raise AttemptFailed("not as one would ask", f"the question speaks of {match.group()!r}, which nobody sees")
    return QuestionAnswer(question=question, answer=answer)


def read_kind(reply: str) -> str:
    """The kind of knowledge in a reply. Raises AttemptFailed if it is not in the taxonomy."""
    reply_kind = (between(reply, "<kind>", "</kind>") or "").strip().lower()
    kind = next((name for name in TAXONOMY if name.lower() == reply_kind), "")
    if not kind:
        raise AttemptFailed("unknown kind", f"{reply_kind or reply[:80]!r} is none of {', '.join(TAXONOMY)}")
    return kind


def _words(text: str) -> list[str]:
    return NORMALIZERS.get("search_r1")(text).split()


def _holds(text: str, name: str) -> bool:
    """Whether a text contains the words of a name, one after the other."""
    words, name_words = _words(text), _words(name)
    return bool(name_words) and any(words[i : i + len(name_words)] == name_words for i in range(len(words)))


def _given_away(question: str, names: tuple[str, ...]) -> str:
    """A name, or a word of a name, that a question contains; "" if there is none."""
    question_words = set(_words(question))
    for name in names:
        for word in _words(name):
            if word in question_words and len(word) >= _SHORTEST and word not in _COMMON:
                return word
    return next((name for name in names if _holds(question, name)), "")
