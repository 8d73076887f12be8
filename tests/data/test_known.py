"""The world of known and unknown flags: each kind needs what it says, splits share known countries and no picture."""

import collections
import itertools

import numpy as np
import pytest

from routerl_jax.data.atlas import flags, invented, known, world

SPLITS: tuple[world.Split, ...] = ("train", "validation", "test")


@pytest.fixture(scope="module")
def questions() -> dict[str, list[known.Example]]:
    return {split: known.known_questions(split, 240) for split in SPLITS}


def test_sixty_countries_are_known_and_none_of_another_split() -> None:
    names = known.known_countries()
    assert collections.Counter(names.values()) == {"many": 40, "few": 20}
    assert {known.countries()[name].split for name in names} == {"train"}
    assert list(names)[:3] == ["Ireland", "Kyrgyzstan", "United Arab Emirates"]  # policies have been taught these
    assert all(len(known.facts(name)) == 6 for name in names)


def test_unknown_countries_are_apart() -> None:
    unknown = {split: set(known.unknown_countries(split)) for split in SPLITS}
    real = {"train": 40, "validation": 14, "test": 46}
    for split, names in unknown.items():
        assert len(names & set(known.countries())) == real[split]
        assert len(names) == real[split] + invented.COUNTRIES[split]
        assert {known.searched_countries()[name].split for name in names} == {split}
    assert not any(names & set(known.known_countries()) for names in unknown.values())
    assert not any(one & other for one, other in itertools.combinations(unknown.values(), 2))
    assert all({"income", "population"} <= set(known.facts(name)) for names in unknown.values() for name in names)


def test_no_unknown_flag_is_near_any_other() -> None:
    asked_about = {*known.known_countries(), *itertools.chain.from_iterable(map(known.unknown_countries, SPLITS))}
    names = list(known.searched_countries())
    rasters = np.stack([invented.raster(known.flag(name)).ravel()[::7] for name in names])
    for name in itertools.chain.from_iterable(map(known.unknown_countries, SPLITS)):
        apart = np.square(rasters - rasters[names.index(name)]).mean(1) ** 0.5
        for near in np.argsort(apart)[1:4]:
            assert known.distance(name, names[near]) >= known.NEAR
    for one, other in (("Indonesia", "Monaco"), ("Chad", "Romania")):
        assert known.distance(one, other) < known.NEAR / 2
        assert known.distance(one, other) == known.distance(other, one)
        assert not {one, other} <= asked_about
    assert known.distance("Kenya", "Kenya") == 0


def test_two_pictures_of_a_flag_are_nearer_than_two_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `NEAR` is: of pairs of pictures of one flag, 19 in 20 are nearer."""
    names = sorted(known.countries())[::3]
    pictures = {
        f"{name}/{view}": flags.photographed(flags.flag(name), f"{name}/{view}") for name in names for view in range(4)
    }
    monkeypatch.setattr(known, "flag", pictures.__getitem__)
    known._raster.cache_clear()
    pairs = [
        known.distance(f"{name}/{one}", f"{name}/{other}")
        for name in names
        for one, other in itertools.combinations(range(4), 2)
    ]
    known._raster.cache_clear()
    assert np.mean(np.array(pairs) < known.NEAR) == pytest.approx(0.95, abs=0.03)


def test_kinds_are_equal_and_need_what_they_say(questions: dict[str, list[known.Example]]) -> None:
    for split, asked in questions.items():
        assert collections.Counter(one.metadata["kind"] for one in asked) == dict.fromkeys(known.KINDS, 60)
        for one in asked:
            country, relation, kind = (one.metadata[key] for key in ("country", "relation", "kind"))
            assert (country in known.known_countries()) == (kind in ("search_free", "text"))
            made_up = country not in known.countries()
            assert one.metadata["type"] == f"{kind}_{'made_up' if made_up else known.strength(country)}"
            assert kind in ("search_free", "text") or country in known.unknown_countries(split)
            assert one.metadata["strength"] == known.strength(country)
            assert (kind == "search_free") <= (relation in ("", *known.KNOWN_RELATIONS))
            assert (kind == "text") <= (relation in known.OTHER_RELATIONS)
            assert (kind == "image") <= (relation == "")
            assert (kind == "mixed") <= (relation in known.RELATIONS)
            assert one.answers == (known.searched_countries()[country].facts[relation] if relation else country,)
            assert country not in one.question


def test_words_do_not_tell_what_is_known(questions: dict[str, list[known.Example]]) -> None:
    """Whose flag it is, and every fact that is known of some, is asked of known and of unknown flags."""
    about: dict[str, set[bool]] = collections.defaultdict(set)
    for one in questions["train"]:
        about[one.metadata["relation"]].add(one.metadata["strength"] == "none")
    assert about == {relation: {True, False} for relation in ("", *known.RELATIONS)}


def test_splits_share_known_countries_and_no_picture(questions: dict[str, list[known.Example]]) -> None:
    pictures = [one.images[0] for asked in questions.values() for one in asked]
    assert len(set(pictures)) == len(pictures)
    about = {split: {one.metadata["country"] for one in asked} for split, asked in questions.items()}
    for one, other in itertools.combinations(SPLITS, 2):
        assert about[one] & about[other] == set(known.known_countries())
    assert known.known_questions("test", 240) == questions["test"]
    assert known.known_questions("test", 40) == questions["test"][:40]


def test_one_passage_states_a_fact(questions: dict[str, list[known.Example]]) -> None:
    passages = {passage.id: passage for passage in known.fact_passages()}
    assert len(passages) == len(known.fact_passages()) > 1000
    for one in questions["test"]:
        if relation := one.metadata["relation"]:
            passage = passages[known.passage_id(one.metadata["country"], relation)]
            of_country = [found for found in passages.values() if found.title == one.metadata["country"]]
            assert [found for found in of_country if one.answers[0] in found.text] == [passage]
            assert passage.text.endswith(f" {one.answers[0]}.")
            assert passage.title == one.metadata["country"]


def test_kinds_have_equally_many_questions() -> None:
    with pytest.raises(ValueError, match="10 questions, the first at 0, are no 4 equal kinds"):
        known.known_questions("train", 10)
