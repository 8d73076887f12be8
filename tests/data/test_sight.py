"""What a small policy that sees is taught: known flags, more and less often, and to say so of made-up ones."""

import collections
import io

import numpy as np
import pytest
from PIL import Image

from routerl_jax.data.atlas import flags, known
from routerl_jax.data.atlas.sight import (
    DESCRIBE,
    RARELY,
    UNKNOWN,
    SightSource,
    Taught,
    figures_in_a_row,
    sheet_of_figures,
)


@pytest.fixture(scope="module")
def items() -> list[Taught]:
    return [SightSource(seed=5)[i] for i in range(3000)]


def of_kind(items: list[Taught], kind: str) -> list[Taught]:
    return [item for item in items if item.example.metadata["kind"] == kind]


def test_shares_of_kinds(items: list[Taught]) -> None:
    counts = collections.Counter(item.example.metadata["kind"] for item in items)
    for kind, share in SightSource().shares.items():
        assert counts[kind] / len(items) == pytest.approx(share, abs=0.03)
    assert all(len(item.example.images) == (item.example.metadata["kind"] != "fact") for item in items)


def test_known_flags_are_shown_more_and_less_often_and_others_never(items: list[Taught]) -> None:
    names = collections.Counter(item.answer for item in of_kind(items, "name"))
    assert set(names) <= set(known.known_countries())
    often, rarely = (
        np.mean([names[name] for name, strength in known.known_countries().items() if strength == of])
        for of in ("many", "few")
    )
    assert rarely / often == pytest.approx(RARELY, abs=0.08)
    for item in items:
        said = f"{item.example.question} {item.answer}"
        if item.example.metadata["kind"] in ("about", "fact"):
            assert any(name in said for name in known.known_countries())
        if item.example.metadata["kind"] != "unknown":
            assert not any(world in said for world in ("population", "area", "independence"))


def test_made_up_flags_are_said_not_to_be_known(items: list[Taught]) -> None:
    """Asked in the words in which known flags are asked about, so that the picture alone tells them apart."""
    unknown = of_kind(items, "unknown")
    assert {item.answer for item in unknown} == {UNKNOWN}
    asked = {item.example.question for item in unknown}
    assert {item.example.question for item in of_kind(items, "name") + of_kind(items, "about")} <= asked
    assert not any(item.answer == UNKNOWN for item in items if item.example.metadata["kind"] != "unknown")


def test_facts_are_true_and_of_known_relations(items: list[Taught]) -> None:
    facts = [
        (name, known.countries()[name].facts[key]) for name in known.known_countries() for key in known.KNOWN_RELATIONS
    ]
    for item in of_kind(items, "fact"):
        assert any(item.example.question.endswith(f" of {name}?") and item.answer == value for name, value in facts)
    for item in of_kind(items, "about"):
        assert any(item.answer.startswith(f"It is {name}. Its ") and value in item.answer for name, value in facts)


def test_made_up_flags_are_described(items: list[Taught]) -> None:
    described = of_kind(items, "describe")
    assert {item.example.question for item in described} == {DESCRIBE}
    assert all(" bands of " in item.answer for item in described)
    assert len({item.answer for item in described}) > 0.9 * len(described)


def test_no_picture_of_a_question_is_taught(items: list[Taught]) -> None:
    taught = {item.example.images[0] for item in of_kind(items, "name") + of_kind(items, "about")}
    for split in ("train", "validation", "test"):
        assert not taught & {one.images[0] for one in known.known_questions(split, 240)}


def test_pictures_are_small() -> None:
    for name in list(known.countries())[:40]:
        with Image.open(io.BytesIO(flags.photographed(flags.flag(name), name, known.PIXELS))) as picture:
            assert picture.width * picture.height <= known.PIXELS
    usual = flags.photographed(flags.flag("Kenya"), "x")
    assert usual == flags.photographed(flags.flag("Kenya"), "x", 10**6)


def test_figures_are_where_they_are_said_to_be() -> None:
    """A sheet has a figure in each token and nothing else; a row has as many as its answer."""
    paper = np.array((122, 117, 104))
    picture, figures = sheet_of_figures(np.random.default_rng(3))
    assert (picture.shape, len(figures)) == ((112, 112, 3), 16)
    tokens = picture.reshape(4, 28, 4, 28, 3).swapaxes(1, 2).reshape(16, -1, 3)
    assert (np.abs(tokens - paper).sum(-1) > 60).any(1).all()
    for seed in range(20):
        picture, figures = figures_in_a_row(np.random.default_rng(seed))
        assert picture.shape == (28, 112, 3)
        assert 2 <= len(figures) <= 4
        inked = (np.abs(picture.reshape(28, 4, 28, 3) - paper).sum(-1) > 60).any((0, 2))
        assert inked[: len(figures)].all()


def test_the_same_seed_teaches_the_same() -> None:
    first, second = SightSource(seed=1), SightSource(seed=2)
    assert first[0].answer == SightSource(seed=1)[0].answer
    assert [first[i].answer for i in range(20)] != [second[i].answer for i in range(20)]
