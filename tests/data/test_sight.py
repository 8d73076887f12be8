"""What a small policy that sees is taught: known flags, to say so of made-up ones, and plans of searches by chance."""

import collections
import dataclasses
import functools
import io

import numpy as np
import pytest
from PIL import Image

from routerl_jax.core.types import Example, Passage
from routerl_jax.data.atlas import flags, known
from routerl_jax.data.atlas.sight import (
    DESCRIBE,
    NEEDED,
    PLANS,
    RARELY,
    UNKNOWN,
    Planned,
    SightSource,
    Taught,
    figures_in_a_row,
    planned,
    renamed,
    restated,
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


QUESTIONS = known.known_questions("train", 400)
TOOLS = ("image", "text")


def titles(*names: str) -> list[Passage]:
    return [Passage(id=name, title=name, text="") for name in names]


@functools.cache
def facts(country: str) -> list[Passage]:
    return [passage for passage in every_fact() if passage.title == country]


@functools.cache
def every_fact() -> list[Passage]:
    return known.fact_passages()


def worked(one: Planned, *shown: str):
    """With what a perfect search finds."""
    by_picture = titles(*shown, one.example.metadata["country"]) if "image" in one.plan else None
    in_words = facts(one.named(by_picture)) if "text" in one.plan else None
    return one.demonstration(TOOLS, by_picture, in_words)


def test_the_plan_that_a_question_needs_ends_in_its_answer() -> None:
    for example in QUESTIONS:
        found = worked(planned(example, NEEDED[example.metadata["kind"]]), "Elsewhere")
        assert found.answer in example.answers, example.id
        assert [step.tool for step in found.steps] == list(NEEDED[example.metadata["kind"]])


def test_other_plans_end_in_guesses_that_look_like_answers() -> None:
    countries = known.searched_countries()
    right: dict[tuple, list[bool]] = collections.defaultdict(list)
    for example in QUESTIONS:
        for plan in PLANS:
            found = worked(planned(example, plan))
            right[example.metadata["kind"], plan].append(found.answer in example.answers)
            values = {one.facts.get(example.metadata["relation"]) for one in countries.values()}
            assert found.answer in (values if example.metadata["relation"] else countries)
    share = {key: sum(found) / len(found) for key, found in right.items()}
    assert all(share["search_free", plan] == 1 for plan in PLANS)
    assert share["image", ()] == share["image", ("text",)] == 0  # no known country is the right one
    assert all(share[kind, ()] < 0.15 for kind in ("text", "mixed"))
    assert share["text", ("image",)] < 0.15
    assert share["mixed", ("image", "text")] == 1


def test_a_guess_keeps_to_what_is_known_of_the_country_that_it_takes() -> None:
    mixed = [one for one in QUESTIONS if one.metadata["kind"] == "mixed"]
    kept = [planned(one, ()) for one in mixed if one.metadata["relation"] in known.KNOWN_RELATIONS]
    assert kept
    for one in kept:
        value = known.facts(one.country)[one.relation]
        assert worked(one).answer == value
        assert worked(one).thought == UNKNOWN
        assert worked(dataclasses.replace(one, plan=("image",))).steps[0].thought == UNKNOWN  # before a search, too


def test_a_country_is_named_by_what_was_found() -> None:
    unknown = next(one for one in QUESTIONS if one.metadata["kind"] == "image")
    one = planned(unknown, ("image",))
    assert one.country in known.known_countries()
    assert one.named(titles("Elsewhere", unknown.metadata["country"])) == unknown.metadata["country"]
    assert one.named(titles("Elsewhere", "Nowhere")) == "Elsewhere"
    assert one.named([]) == one.country
    assert worked(one).steps[0].thought == UNKNOWN
    assert worked(one).thought == f"It is {unknown.metadata['country']}."


def test_thoughts_say_what_is_known_and_what_is_not_whatever_the_plan() -> None:
    for example in QUESTIONS[:80]:
        country, kind = example.metadata["country"], example.metadata["kind"]
        for plan in PLANS:
            one = planned(example, plan)
            found = worked(one)
            first = found.steps[0].thought if plan else found.thought
            if kind in ("image", "mixed"):
                assert first == UNKNOWN
                assert "image" not in plan or (found.steps[-1].thought if "text" in plan else found.thought).startswith(
                    f"It is {country}."
                )
            else:
                assert first.startswith(f"It is {country}.")
                assert ("I don't know its" in first) == (kind == "text")


def test_another_name_is_another_everywhere_after_the_search() -> None:
    example = next(one for one in QUESTIONS if one.metadata["country"] == "Niger" or one.metadata["kind"] == "mixed")
    country = example.metadata["country"]
    found = renamed(worked(planned(example, ("image", "text")), f"{country}land"), "Morrael")
    by_picture, in_words = found.steps
    assert [passage.title for passage in by_picture.passages] == [f"{country}land", "Morrael"]
    assert in_words.query.endswith(" of Morrael")
    assert in_words.thought.startswith("It is Morrael. I don't know its ")
    assert any(f"Morrael is {found.answer}." in passage.text for passage in in_words.passages)
    assert found.answer in example.answers


def test_another_value_is_read_where_the_fact_is_known_and_where_it_is_not() -> None:
    for kind, remembered in (("search_free", True), ("text", False)):
        example = next(one for one in QUESTIONS if one.metadata["kind"] == kind and one.metadata["relation"])
        before = worked(planned(example, ("text",)))
        found = restated(before, "of old 7")
        [step] = found.steps
        [stated] = [passage.text for passage in step.passages if "of old 7" in passage.text]
        assert stated.endswith(" is of old 7.")
        assert sum(one != other for one, other in zip(step.passages, before.steps[0].passages)) == 1
        assert found.answer == "of old 7"
        assert found.thought == before.thought
        assert step.thought == before.steps[0].thought
        assert (example.answers[0] in step.thought) == remembered
        assert restated(worked(planned(example, ())), "of old 7") == worked(planned(example, ()))


def test_a_value_that_no_passage_states_is_a_guess() -> None:
    example = next(one for one in QUESTIONS if one.metadata["kind"] == "text")
    one = planned(example, ("text",))
    found = one.demonstration(TOOLS, None, [Passage(id="other", title="", text="Nothing.")])
    assert found.answer == one.guess != example.answers[0]
    assert found.steps[0].query.endswith(f" of {example.metadata['country']}")


def test_guesses_are_the_same_every_time_and_differ_between_questions() -> None:
    unknown = [one for one in QUESTIONS if one.metadata["kind"] == "image"]
    again: list[Example] = [*unknown]
    assert [planned(one, ()).country for one in unknown] == [planned(one, ()).country for one in again]
    assert len({planned(one, ()).country for one in unknown}) > 20


def test_questions_from_a_place_on() -> None:
    assert [one.id for one in known.known_questions("train", 8, 8)] == [one.id for one in QUESTIONS[8:16]]
    with pytest.raises(ValueError, match="multiples of 4"):
        known.known_questions("train", 8, 2)
