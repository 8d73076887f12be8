"""Worked questions that baselines put into their prompts. They are ours, and the same for all baselines.

The papers have other ones for each data set: IRCoT up to 20, Self-Ask 4, ReAct 6, chain of thought 8.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from routerl_jax.extras.baselines.forms import CONCLUSION


@dataclasses.dataclass(frozen=True)
class Hop:
    """A step: a question, a sentence that answers it, the answer alone, and a page (title, text) that says so."""

    question: str
    fact: str
    answer: str
    title: str
    text: str


@dataclasses.dataclass(frozen=True)
class WorkedExample:
    """A question with its steps and its answer."""

    question: str
    hops: tuple[Hop, ...]
    answer: str

    @property
    def chain(self) -> str:
        """The chain of thought."""
        return " ".join([*(hop.fact for hop in self.hops), f"{CONCLUSION} {self.answer}."])


WORKED = (
    WorkedExample(
        "Which philosopher was the mother of the author of Frankenstein?",
        (
            Hop(
                *("Who wrote Frankenstein?", "Frankenstein was written by Mary Shelley.", "Mary Shelley"),
                *("Frankenstein", "Frankenstein is a novel of 1818 by the English author Mary Shelley."),
            ),
            Hop(
                *("Who was the mother of Mary Shelley?", "Mary Shelley's mother was Mary Wollstonecraft."),
                *("Mary Wollstonecraft", "Mary Wollstonecraft"),
                "Mary Wollstonecraft was an English philosopher. Her daughter was the novelist Mary Shelley.",
            ),
        ),
        "Mary Wollstonecraft",
    ),
    WorkedExample(
        "In which country was the architect of the Sydney Opera House born?",
        (
            Hop(
                *("Who designed the Sydney Opera House?", "The Sydney Opera House was designed by Jørn Utzon."),
                *("Jørn Utzon", "Sydney Opera House"),
                "The Sydney Opera House is a centre for the performing arts, designed by the architect Jørn Utzon.",
            ),
            Hop(
                *("Where was Jørn Utzon born?", "Jørn Utzon was born in Copenhagen, in Denmark.", "Copenhagen"),
                *("Jørn Utzon", "Jørn Utzon was an architect, born in Copenhagen, the capital of Denmark."),
            ),
        ),
        "Denmark",
    ),
    WorkedExample(
        "Was the Eiffel Tower finished before the Brooklyn Bridge?",
        (
            Hop(
                *("When was the Eiffel Tower finished?", "The Eiffel Tower was finished in 1889.", "1889"),
                *("Eiffel Tower", "The Eiffel Tower in Paris was built from 1887 to 1889 for the World's Fair."),
            ),
            Hop(
                *("When was the Brooklyn Bridge finished?", "The Brooklyn Bridge was finished in 1883.", "1883"),
                *("Brooklyn Bridge", "The Brooklyn Bridge in New York was opened on May 24, 1883."),
            ),
        ),
        "no",
    ),
    WorkedExample(
        "Which river flows through the capital of Hungary?",
        (
            Hop(
                *("What is the capital of Hungary?", "The capital of Hungary is Budapest.", "Budapest"),
                *("Hungary", "Hungary is a country in Central Europe. Its capital and largest city is Budapest."),
            ),
            Hop(
                *("Which river flows through Budapest?", "The river that flows through Budapest is the Danube."),
                *("the Danube", "Budapest", "Budapest lies on both banks of the Danube."),
            ),
        ),
        "the Danube",
    ),
    WorkedExample(
        "In which year was the discoverer of penicillin born?",
        (
            Hop(
                *("Who discovered penicillin?", "Penicillin was discovered by Alexander Fleming.", "Alexander Fleming"),
                *("Penicillin", "Penicillin was discovered in 1928 by the Scottish physician Alexander Fleming."),
            ),
            Hop(
                *("When was Alexander Fleming born?", "Alexander Fleming was born on 6 August 1881.", "6 August 1881"),
                *("Alexander Fleming", "Sir Alexander Fleming (6 August 1881 - 11 March 1955) was a physician."),
            ),
        ),
        "1881",
    ),
    WorkedExample(
        "What is the currency of the country whose capital is Hanoi?",
        (
            Hop(
                *("Which country has Hanoi as its capital?", "Hanoi is the capital of Vietnam.", "Vietnam"),
                *("Hanoi", "Hanoi is the capital of Vietnam and its second largest city."),
            ),
            Hop(
                *("What is the currency of Vietnam?", "The currency of Vietnam is the đồng.", "the đồng"),
                *("Vietnam", "Vietnam is a country in Southeast Asia. Its currency is the đồng."),
            ),
        ),
        "đồng",
    ),
    WorkedExample(
        "Which ocean borders the country in which most of the Atacama Desert lies?",
        (
            Hop(
                *("In which country does most of the Atacama Desert lie?", "Most of the Atacama Desert lies in Chile."),
                *("Chile", "Atacama Desert", "The Atacama is a desert on a plateau, most of it in the north of Chile."),
            ),
            Hop(
                *("Which ocean borders Chile?", "Chile lies along the Pacific Ocean.", "the Pacific Ocean"),
                *("Chile", "Chile is a long, narrow country between the Andes and the Pacific Ocean."),
            ),
        ),
        "the Pacific Ocean",
    ),
    WorkedExample(
        "Who directed the film that won the first Academy Award for Best Picture?",
        (
            Hop(
                *("Which film won the first Academy Award for Best Picture?", "Wings won the first one.", "Wings"),
                *("1st Academy Awards", "The first Academy Awards were given in 1929. Wings won the highest award."),
            ),
            Hop(
                *("Who directed Wings?", "Wings was directed by William A. Wellman.", "William A. Wellman"),
                *("Wings (1927 film)", "Wings is a silent film of 1927, directed by William A. Wellman."),
            ),
        ),
        "William A. Wellman",
    ),
)


def chains(count: int) -> str:
    """The first `count` worked questions with their chains of thought, as text; "" for none."""
    return examples([f"Question: {worked.question}\nAnswer: {worked.chain}" for worked in WORKED[:count]])


def examples(texts: Sequence[str]) -> str:
    """Worked examples in the form in which they end a task; "" for none."""
    return "\n\nExamples:\n\n" + "\n\n".join(texts) if texts else ""
