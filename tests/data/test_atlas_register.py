"""The register: what its pages show at which size, what its questions ask for, and that lessons only say what was shown."""

import collections
import dataclasses
import re

import numpy as np
import pytest
from PIL import Image

from routerl_jax.core.types import DemonstrationStep
from routerl_jax.data.atlas import known, register, register_lessons
from routerl_jax.data.atlas.pages import PAPER
from routerl_jax.models.images import decode_image
from routerl_jax.models.regions import RegionRule, View, region

SEEN = (84, 84)
WHOLE = View(page=register.SIZE, part=(0, 0, *register.SIZE), frame=SEEN)
RULE = RegionRule(box_scale=3)


def inked(picture: Image.Image, side: int) -> set[int]:
    """Cells of so many pixels with ink, numbered row by row."""
    rows, columns = picture.height // side, picture.width // side
    ink = (np.abs(np.asarray(picture, int) - PAPER).max(-1) > 60).reshape(rows, side, columns, side)
    return set(np.flatnonzero(ink.any((1, 3))).tolist())


def test_pages_are_functions_of_country_and_topic() -> None:
    every = list(register.register_pages())
    assert len(every) == 3 * len(known.countries()) == len({page.file for page in every})
    for page in every:
        assert set(page.marks) == set(register.TOPICS[page.topic])
        assert len(set(page.cells)) == len(set(page.codes)) == 4
    assert not set(register.CODES) & set(register.MARKS)
    assert 0.5 < np.mean([page.print == "small" for page in every]) < 0.7
    places = collections.Counter(page.entry("W")[0] for page in every if page.topic == "sea")
    assert len(places) == 9
    assert max(places.values()) < len(known.countries()) / 5  # the topic says nothing about the place
    with pytest.raises(ValueError, match="no pages about 'war'; it has post, rail, sea"):
        register.register_page("Kenya", "war")


@pytest.mark.parametrize("size", ["small", "large"])
def test_what_a_token_shows(size: register.Print) -> None:
    """A cell of the page is an image token. In its crop, a code in small print has a token of its own."""
    page = dataclasses.replace(register.register_page("Kenya", "sea"), print=size)
    picture = register.draw(page)
    assert inked(picture, 84) == set(page.cells)
    for mark, cell in zip(page.marks, page.cells):
        cut = region(register_lessons.cell_box(cell), WHOLE, RULE)
        assert cut == page.box(mark)
        crop = picture.crop(cut)
        assert crop.size == SEEN  # seen as it is
        assert np.array_equal(np.asarray(crop), np.asarray(register_lessons.crop(page, cell)))
        if size == "small":
            assert inked(crop, 28) - {0, 1, 2, 3, 4, 5} == {6}  # mark and number are above
            high = np.flatnonzero((np.abs(np.asarray(crop, int)[56:] - PAPER).max(-1) > 60).any(1))
            assert np.ptp(high) < 8  # 2 to 3 pixels of the page as it is seen


def test_questions_are_borne_out_by_their_pages() -> None:
    asked = {split: register.register_questions(split, 400) for split in ("train", "validation", "test")}
    for split, questions in asked.items():
        types = collections.Counter(one.metadata["type"] for one in questions)
        assert types["coarse"] == types["two_page"] == 100
        assert types["fine"] > types["headline"] > 40
        assert len({one.question for one in questions}) == 400
        for one in questions:
            countries, mark, kind = one.metadata["entities"], one.metadata["mark"], one.metadata["type"]
            assert len(set(countries)) == (2 if kind == "two_page" else 1)
            said = one.answers[0].split()
            assert len(said) == len(countries)
            for country, answer in zip(countries, said):
                assert known.countries()[country].split == split
                assert country in one.question
                page = register.register_page(country, register.MARKS[mark])
                assert page.id in one.metadata["supporting"]
                assert one.metadata["print"] == page.print
                assert register.TOPICS[page.topic][mark] in one.question
                place = page.cells.index(int(answer)) if kind == "coarse" else page.codes.index(answer)
                assert page.marks[place] == mark
                left, top, right, bottom = one.metadata["boxes"][page.id]
                assert (left // 84 + top // 84 * 3, right - left, bottom - top) == (page.cells[place], 84, 84)
    assert register.register_questions("test", 40, 60) == asked["test"][60:100]
    with pytest.raises(ValueError, match="the register has 1056 questions of the validation split, fewer than 1057"):
        register.register_questions("validation", 3, 1054)


def test_sheets_say_what_each_token_shows() -> None:
    rng = np.random.default_rng(0)
    kinds = collections.Counter()
    for _ in range(40):
        picture, signs = register_lessons.sheet(rng)
        assert len(signs) == 9
        assert set("".join(signs)) <= set(register_lessons.SIGNS)
        kinds[picture.size] += 1
        if picture.size == SEEN:
            assert signs[6] in register.CODES
            continue
        assert inked(picture, 84) == {cell for cell, on in enumerate(signs) if on != register_lessons.PAPER}
        assert all(on[1] == str(cell) for cell, on in enumerate(signs) if on != register_lessons.PAPER)
    assert set(kinds) == {register.SIZE, SEEN}


def opened(step: DemonstrationStep) -> Image.Image:
    return decode_image(step.passages[0].image)


def test_plans_that_look_at_the_right_place_say_what_is_there() -> None:
    """The answer is on the picture that was shown, in the box that was looked at."""
    best = register_lessons.Shares(titled=1, looks=1, tight=1, astray=0)
    prints = collections.Counter()
    for seed in range(30):
        plan = register_lessons.plan(np.random.default_rng(seed), "pages", best, asked="code")
        search, look = plan.steps
        assert plan.thought == plan.answer
        mark, topic = search.thought.split()
        country = search.query.removesuffix(f": {topic}")
        assert register.TOPICS[topic][mark] in plan.example.question
        assert country in plan.example.question
        assert country not in known.countries() or known.countries()[country].split == "train"
        assert look.thought[0] == mark
        cell = int(look.thought[1])
        size: register.Print = "small" if look.thought.endswith("=?") else "large"
        prints[size] += 1
        assert size == "small" or look.thought.endswith(f"={plan.answer}")
        shown = register.RegisterPage(
            country=country, topic=topic, marks=(mark,), cells=(cell,), codes=(plan.answer,), print=size
        )
        read = opened(search).crop(region(look.box, WHOLE, RULE))
        assert np.array_equal(np.asarray(read), np.asarray(register_lessons.crop(shown, cell)))
    assert min(prints.values()) > 3


def test_two_countries_take_two_searches_and_the_answer_is_begun_after_two_looks() -> None:
    best = register_lessons.Shares(titled=1, looks=1, tight=1, astray=0)
    for seed in range(300):
        plan = register_lessons.plan(np.random.default_rng(seed), "pages", best, asked="codes")
        first, look, second, _ = plan.steps
        codes = plan.answer.split()
        assert (first.query in plan.example.question, plan.forced) == (False, True)
        assert second.thought == codes[0]
        assert len({first.query, second.query}) == 2
        assert look.thought.endswith((f"={codes[0]}", "=?"))


def test_plans_by_chance_search_again_look_elsewhere_and_guess() -> None:
    plans = [register_lessons.plan(np.random.default_rng(seed), "pages") for seed in range(300)]
    kinds = collections.Counter("".join("b" if step.box else "s" for step in plan.steps) for plan in plans)
    assert set(kinds) == {"s", "sb", "ss", "ssb", "sbs", "sbsb"}
    assert min(kinds.values()) > 5
    assert all(plan.forced == (len(plan.steps) == 4) for plan in plans)
    boxes = collections.Counter(step.box[2] - step.box[0] for plan in plans for step in plan.steps if step.box)
    assert boxes[1] > boxes[3] > 15
    assert sum(step.thought.startswith("no ") for plan in plans for step in plan.steps) > 20


def test_bare_lessons() -> None:
    rng = np.random.default_rng(0)
    lessons = [register_lessons.finding(rng) for _ in range(90)]
    cells = [text for example, text in lessons if example.question.startswith("Cell:") and "no " not in text]
    assert len(cells) > 5
    assert all(re.fullmatch(r"<think>.(\d)=.</think>\n<answer>\1</answer>", text) for text in cells)
    found = [text for example, text in lessons if example.question.startswith("Find:")]
    for begins, ends in (("<think>no ", ""), ("=?</think>\n<bbox>[", "]</bbox>"), ("</think>\n<answer>", "</answer>")):
        assert sum(begins in text and text.endswith(ends) for text in found) > 5
    example, text = register_lessons.reading(rng)
    assert example.images[0].shape == (84, 84, 3)
    assert re.fullmatch(r"<think>(.)</think>\n<answer>\1</answer>", text)


def test_at_full_size_every_sign_has_a_token_and_small_print_can_be_read() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        picture, signs = register_lessons.raw_sheet(rng)
        assert len(signs) == 81
        blank = {token for token, sign in enumerate(signs) if sign == register_lessons.PAPER}
        assert blank == set(range(81)) - inked(picture, 28)
        written = [
            (token // 27 * 3 + token % 9 // 3, sign) for token, sign in enumerate(signs) if sign not in ("", ".")
        ]
        for cell in {cell for cell, _ in written}:
            mark, number, code = (sign for at, sign in written if at == cell)
            assert (mark in register.MARKS, number, code in register.CODES) == (True, str(cell), True)
        _, text = register_lessons.finding(rng, raw=True)
        assert "?" not in text
        assert "bbox" not in text
        plan = register_lessons.plan(rng, "pages", register_lessons.Shares(looks=0), asked="code", raw=True)
        assert not any(step.box for step in plan.steps)
        assert plan.thought.startswith("no ") or plan.thought.endswith(f"={plan.answer}")
