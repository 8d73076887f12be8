"""Plans by chance: what is known is right, what is found is read, the rest is guessed."""

import collections
import dataclasses
import functools

import pytest

from routerl_jax.core.types import Example, Passage
from routerl_jax.data.atlas import known
from routerl_jax.data.atlas.sight import NEEDED, PLANS, UNKNOWN, Planned, planned, renamed, restated

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
