"""Worked questions about pages of documents, in searches, closer looks and answers. They are ours, and about made-up documents.

The content of pages is described in words, because pictures in eight worked chats would need more tokens than the question.
"""

from __future__ import annotations

import dataclasses

SIZE = (896, 1148)  # pixels of the pages, wide and high: multiples of 28, as Qwen2.5-VL's image tokens need


@dataclasses.dataclass(frozen=True)
class PageSearch:
    """A search, and what the page shows that it finds."""

    thought: str
    query: str
    shows: str


@dataclasses.dataclass(frozen=True)
class PageLook:
    """A closer look at the page shown last. `box` is left, top, right, bottom as shares of its sides."""

    thought: str
    box: tuple[float, float, float, float]
    shows: str


@dataclasses.dataclass(frozen=True)
class WorkedPages:
    """A question with its steps, and the thought before its answer."""

    question: str
    steps: tuple[PageSearch | PageLook, ...]
    thought: str
    answer: str


WORKED_PAGES = (
    WorkedPages(
        "In which year did Norvale Water open its second treatment plant?",
        (
            PageSearch(
                "I do not know this company. Its history should say it.",
                "Norvale Water second treatment plant opened",
                "page 4 of a report, Our history: the first plant was opened in 1961, the second one in 1987.",
            ),
        ),
        "The page says that the second plant was opened in 1987.",
        "1987",
    ),
    WorkedPages(
        "According to the chart, which ferry line had the fewest passengers in June?",
        (
            PageSearch(
                "I need the chart of passengers by line.",
                "ferry passengers by line June chart",
                "page 12, a bar chart of passengers by month and line; the numbers over the bars are small.",
            ),
            PageLook(
                "The bars of June are right of the middle, too small to be read.",
                (0.5, 0.3, 0.75, 0.7),
                "the bars of June: North line 8,400, Harbour line 5,100, Island line 2,900.",
            ),
        ),
        "Of the three lines, the Island line has the lowest bar in June, 2,900.",
        "the Island line",
    ),
    WorkedPages(
        "How many members does the board of the Aster Foundation have?",
        (
            PageSearch(
                "The board must be looked up.",
                "Aster Foundation board members",
                "page 2, a letter of the chair about the past year; it does not name the board.",
            ),
            PageSearch(
                "This page does not list the board. Another one may.",
                "Aster Foundation organisation who is on the board",
                "page 9, a diagram: a chair, a treasurer and five further members of the board.",
            ),
        ),
        "One chair, one treasurer and five further members make seven.",
        "7",
    ),
    WorkedPages(
        "What was the operating margin of the company that bought Tessel Optics?",
        (
            PageSearch(
                "First I need to know who bought Tessel Optics.",
                "Tessel Optics acquired by",
                "page 3, News of the year: in May, Brandt Instruments bought all shares of Tessel Optics.",
            ),
            PageSearch(
                "Brandt Instruments bought it. Now its margin.",
                "Brandt Instruments operating margin",
                "page 21, a table of key figures of Brandt Instruments in small print.",
            ),
            PageLook(
                "The row of the margin is in the lower half of the table.",
                (0.1, 0.55, 0.9, 0.7),
                "three rows: revenue 412 million, operating profit 49 million, operating margin 11.9 %.",
            ),
        ),
        "The row of the operating margin says 11.9 %.",
        "11.9 %",
    ),
    WorkedPages(
        "What colour is the warning lamp in the drawing of the control panel?",
        (
            PageSearch(
                "A manual should have the drawing.",
                "drawing of the control panel warning lamp",
                "page 17 of a manual, a drawing of the panel with numbered parts, and a list: 4 is the warning lamp.",
            ),
            PageLook(
                "Part 4 is near the top right corner; I look closer to see its colour.",
                (0.65, 0.1, 0.9, 0.25),
                "part 4, a round lamp that is drawn in amber.",
            ),
        ),
        "The lamp with the number 4 is amber.",
        "amber",
    ),
    WorkedPages(
        "Which of the two schools in the survey has more teachers per pupil?",
        (
            PageSearch(
                "I need teachers and pupils of both schools.",
                "survey schools teachers pupils table",
                "page 6, a table: Elm School, 20 teachers, 400 pupils; Park School, 18 teachers, 270 pupils.",
            ),
        ),
        "Elm School has one teacher for 20 pupils, Park School one for 15, which is more.",
        "Park School",
    ),
    WorkedPages(
        "What is the title of the slide that follows the timeline of the project?",
        (
            PageSearch(
                "The slide with the timeline shows where to look.",
                "project timeline slide",
                "slide 7, Timeline: four phases from March to November.",
            ),
            PageSearch(
                "The timeline is slide 7, so I need slide 8.",
                "slide 8 after the timeline",
                "slide 8, Risks and how we meet them: three columns.",
            ),
        ),
        "Slide 8 follows slide 7, and its title is Risks and how we meet them.",
        "Risks and how we meet them",
    ),
    WorkedPages(
        "How much does an annual pass for a child cost?",
        (
            PageSearch(
                "The list of prices should have it.",
                "prices annual pass child",
                "page 1 of a leaflet, with opening hours at the top and prices in a box at the bottom.",
            ),
            PageLook(
                "The prices are in the box at the bottom.",
                (0.05, 0.75, 0.95, 0.97),
                "annual pass: adult 60 euros, child 24 euros, family 110 euros.",
            ),
        ),
        "The annual pass of a child costs 24 euros.",
        "24 euros",
    ),
)
