"""Pages by whatever name."""

from __future__ import annotations

import pytest

from routerl_jax.core.types import Passage
from routerl_jax.data.gold_paths import GoldHop, PageName, page_id, page_of


@pytest.mark.parametrize(
    ("name", "page"),
    [
        ("report.pdf#3", ("report", 3)),
        ("a/b/report.PDF#3", ("report", 3)),
        ("report_3.jpg#1", ("report", 3)),
        ("img/report_003.png", ("report", 3)),
        ("report_003", ("report", 3)),
        ("report.v1.2_3", ("report.v1.2", 3)),
        ("deck-phpapp02_95.pdf#7", ("deck-phpapp02_95", 7)),  # the document's own number is no page
        ("deck-phpapp02_95_7.jpg#1", ("deck-phpapp02_95", 7)),
        ("deck#5", ("deck", 5)),
        ("dev/my-deck/on-its-title-5-1024.jpg#1", ("my-deck", 5)),
        ("on-its-title-5-1024.jpg#1", None),  # of which deck?
        ("scan.tiff#2", ("scan", 2)),
        ("report.pdf", None),
        ("deck_95.pdf", None),
        ("photo.jpg#1", None),
        ("wiki#history", None),
        ("", None),
    ],
)
def test_what_an_id_says(name: str, page: tuple[str, int] | None) -> None:
    assert page_of(name) == (page and PageName(*page))


def test_a_made_id_says_what_it_was_made_of() -> None:
    assert page_of(page_id("a_2.pdf", 11)) == PageName("a_2", 11)


@pytest.mark.parametrize(
    ("gold", "found", "same"),
    [
        ("report.pdf#3", "report_3.jpg#1", True),
        ("report.pdf#3", "report_003", True),
        ("report.pdf#3", "report.pdf#3", True),
        ("report.pdf#3", "report.pdf#13", False),
        ("report.pdf#3", "other_3.jpg#1", False),
        ("report_3", "report_03", False),  # lists' own ids are what they are
        ("TABLE", "TABLE#3", True),
    ],
)
def test_a_gold_page_is_found_by_any_of_its_names(gold: str, found: str, same: bool) -> None:
    assert GoldHop(passage_id=gold).found_in((Passage(id=found, title="", text=""),)) is same
