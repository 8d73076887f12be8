"""Metrics against hand-computed values, algebraic properties and independent scores of real R1-Searcher rollouts."""

import itertools
import pathlib
from collections.abc import Callable

import numpy as np
import pytest

from routerl_jax.core.text import folded
from routerl_jax.core.types import Call, Episode, Example, Turn
from routerl_jax.data.readers import open_dataset
from routerl_jax.evaluation.metrics import averages
from routerl_jax.evaluation.records import episode_record
from routerl_jax.rewards import metrics, scoring
from routerl_jax.rewards.metrics import NORMALIZERS, accepted_answers, exact_match
from routerl_jax.rewards.terms import RewardFunction


@pytest.mark.parametrize(
    ("prediction", "golds", "expected"),
    [
        ("The Eiffel Tower!", "eiffel tower", 1.0),
        ("Eiffel", "eiffel tower", 0.0),
        ("NYC", ["New York City", "nyc"], 1.0),
        ("Beyoncé", ["beyoncé"], 1.0),
        ("Beyonce", ["beyoncé"], 0.0),
        (None, ["x"], 0.0),
        ("", ["x"], 0.0),
        ("", ["the"], 0.0),
        ("", [""], 0.0),
        ("a", ["the"], 0.0),
        ("The", ["the"], 1.0),
    ],
)
def test_exact_match(prediction: str | None, golds: str | list[str], expected: float) -> None:
    assert metrics.exact_match(prediction, golds) == expected


def test_exact_match_depends_on_the_normalizer() -> None:
    values = {name: metrics.exact_match("well known", "well-known", name) for name in NORMALIZERS}
    assert values == {"search_r1": 0.0, "r1_searcher": 1.0, "vqa": 1.0}
    values = {name: metrics.exact_match("2", "two", name) for name in NORMALIZERS}
    assert values == {"search_r1": 0.0, "r1_searcher": 0.0, "vqa": 1.0}
    values = {name: metrics.exact_match("True", "yes", name) for name in NORMALIZERS}
    assert values == {"search_r1": 0.0, "r1_searcher": 1.0, "vqa": 0.0}


@pytest.mark.parametrize(
    ("prediction", "golds", "expected"),
    [
        ("Nidal Malik Hasan", "Nidal Hasan", 0.8),  # precision 2/3, recall 1
        ("new york new york", "new york", 2 / 3),  # a repeated word counts once per repetition of the gold answer
        ("york new", "new york", 1.0),
        ("Paris", ["London", "Paris, France", "paris"], 1.0),
        ("Berlin", ["Paris"], 0.0),
        (None, ["Paris"], 0.0),
        ("the", ["a"], 0.0),
        ("", [""], 0.0),
    ],
)
def test_f1(prediction: str | None, golds: str | list[str], expected: float) -> None:
    assert metrics.f1(prediction, golds) == pytest.approx(expected)


@pytest.mark.parametrize("normalizer", list(NORMALIZERS))
@pytest.mark.parametrize(
    ("prediction", "gold"),
    [
        ("Zoe\u0308 Kazan", "Zo\u00eb Kazan"),
        ("Ly\u200bon\ufeff", "Lyon"),
        ("D\u2019Arcy", "D'Arcy"),
        ("1914\u20131918", "1914-1918"),
        ("\uff14\uff12", "42"),
        ("\u2212\u00a07 degrees", "- 7 degrees"),
        ("\u4e1c\u4eac\u3002", "\u4e1c\u4eac"),
        ("\u300a\u4e09\u4f53\u300b", "\u4e09\u4f53"),
        ("\u0130zmir", "izmir"),
    ],
)
def test_texts_that_look_the_same_are_equal(prediction: str, gold: str, normalizer: str) -> None:
    for metric in ALL:
        assert metric is metrics.anls or metric(prediction, gold, normalizer) == 1.0


@pytest.mark.parametrize("normalizer", list(NORMALIZERS))
@pytest.mark.parametrize(
    ("prediction", "gold"),
    [
        ("\u22125", "5"),
        ("5", "\u22125"),
        ("\u2212 5", "5"),
        ("\u2212$5", "$5"),
        ("10\u201315", "1015"),
        ("3\u20444", "34"),
        ("\uff11\uff0e\uff15", "15"),
        ("Caf\u00e9 10\u201315", "Cafe\u0301 1015"),
    ],
)
def test_a_sign_of_a_number_is_not_lost_because_it_looks_like_punctuation(
    prediction: str, gold: str, normalizer: str
) -> None:
    assert metrics.exact_match(prediction, gold, normalizer) == 0
    assert metrics.exact_match(prediction, folded(prediction), normalizer) == 1


def test_text_without_spaces_has_characters_for_words() -> None:
    said, gold = "法国的首都是巴黎", "巴黎"
    assert metrics.f1(said, gold) == pytest.approx(2 * 2 / (8 + 2))
    assert [metrics.cover_em(said, name) for name in ("巴黎", "黎巴", "伦敦")] == [1, 0, 0]
    assert metrics.cover_em("它是 iPhone 15 手机", "手机 iPhone") == 1
    assert metrics.substring_em(said, gold) == 1
    assert metrics.exact_match("巴 黎", gold) == 1
    assert metrics.f1("กรุงเทพ", "กรุงเทพฯ") == pytest.approx(2 * 6 / 13)
    assert metrics.f1("한국의 수도", "수도") == pytest.approx(2 / 3)  # Korean has spaces


@pytest.mark.parametrize(
    ("prediction", "gold", "guarded", "unguarded"),
    [
        ("yes it is", "yes", 0.0, 0.5),
        ("no", "no way", 0.0, 2 / 3),
        ("noanswer", "noanswer given", 0.0, 2 / 3),
        ("yes", "yes", 1.0, 1.0),
        ("True", "yes", 1.0, 0.0),
        ("no", "False", 1.0, 0.0),
        ("yes sir", "yes madam", 0.5, 0.5),  # neither side is a bare yes
    ],
)
def test_f1_yes_no_guard(prediction: str, gold: str, guarded: float, unguarded: float) -> None:
    assert metrics.f1(prediction, gold, "r1_searcher") == pytest.approx(guarded)
    assert metrics.f1(prediction, gold, "search_r1") == pytest.approx(unguarded)


@pytest.mark.parametrize(
    ("prediction", "golds", "bag", "substring"),
    [
        ("It was Barack Obama.", "Barack Obama", 1.0, 1.0),
        ("Obama, Barack", "Barack Obama", 1.0, 0.0),  # order doesn't count in the bag
        ("Barack Hussein Obama", "Barack Obama", 1.0, 0.0),  # nor does adjacency
        ("New York", "New York New York", 1.0, 0.0),  # nor does repetition
        ("party", "art", 0.0, 1.0),  # the substring is one of characters
        ("Paris", ["London", "paris"], 1.0, 1.0),
        ("anything at all", "the", 0.0, 0.0),
        ("anything at all", "", 0.0, 0.0),
        ("the", "a", 0.0, 0.0),
        ("", "the", 0.0, 0.0),
        (None, "x", 0.0, 0.0),
    ],
)
def test_cover_and_substring(prediction: str | None, golds: str | list[str], bag: float, substring: float) -> None:
    assert metrics.cover_em(prediction, golds) == bag
    assert metrics.substring_em(prediction, golds) == substring


@pytest.mark.parametrize(
    ("prediction", "golds", "expected"),
    [
        ("Paris in France", "Paris", 1.0),
        ("Paris", "Paris in France", 1 / 3),
        # F1 is 2/3 against the first gold answer (recall 1/2) and 2/5 against the second (recall 1): best F1 decides.
        ("red blue green pink", ["red blue green pink " * 2, "red"], 0.5),
        # F1 is 1/2 against either; the first counts: one of its two words, or two of its six.
        ("red blue", ["red x", "red blue x x x x"], 1 / 2),
        ("red blue", ["red blue x x x x", "red x"], 1 / 3),
        (None, "Paris", 0.0),
    ],
)
def test_f1_recall(prediction: str | None, golds: str | list[str], expected: float) -> None:
    assert metrics.f1_recall(prediction, golds) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("prediction", "golds", "expected"),
    [
        ("it is Paris of course", "Paris", 1.0),
        ("Paris", "Paris in France", 0.0),  # up to five words: all or nothing
        ("one two three", "one two three four five six", 0.5),  # a single long gold answer is graded
        ("one two three", ["one two three four five six", "seven"], 0.0),  # several are not
        ("1", ["one", "uno"], 1.0),
        (None, "Paris", 0.0),
    ],
)
def test_accuracy(prediction: str | None, golds: str | list[str], expected: float) -> None:
    assert metrics.accuracy(prediction, golds, "vqa") == pytest.approx(expected)


ALL = [*metrics.ANSWER_METRICS.values(), metrics.accuracy]
TEXTS = ["Paris", "the Paris of 1,000 nights", "yes", "True", "nights of paris", "A", "", "São Paulo’s 10-year plan"]
PAIRS = list(itertools.product(TEXTS, TEXTS))


@pytest.mark.parametrize("normalizer", list(NORMALIZERS))
def test_exact_match_implies_every_other_metric(normalizer: str) -> None:
    for prediction, gold in PAIRS:
        values = {metric: metric(prediction, gold, normalizer) for metric in ALL}
        assert all(0.0 <= value <= 1.0 and isinstance(value, float) for value in values.values())
        if metrics.exact_match(prediction, gold, normalizer) == 1.0:
            values.pop(metrics.anls, None)  # it counts what normalisers take away
            assert set(values.values()) == {1.0}


@pytest.mark.parametrize("normalizer", list(NORMALIZERS))
def test_f1_is_symmetric(normalizer: str) -> None:
    for prediction, gold in PAIRS:
        assert metrics.f1(prediction, gold, normalizer) == metrics.f1(gold, prediction, normalizer)


@pytest.mark.parametrize(
    "metric", [metrics.exact_match, metrics.f1, metrics.cover_em, metrics.substring_em, metrics.anls]
)
def test_more_gold_answers_never_hurt_and_their_order_does_not_count(metric: Callable[..., float]) -> None:
    for prediction, (first, second) in itertools.product(TEXTS, PAIRS):
        both = metric(prediction, [first, second])
        assert both == metric(prediction, [second, first]) == max(metric(prediction, first), metric(prediction, second))


@pytest.mark.parametrize("metric", ALL)
def test_bad_gold_answers_are_errors(metric: Callable[..., float]) -> None:
    with pytest.raises(ValueError, match="golds is empty"):
        metric("x", [])
    with pytest.raises(TypeError, match="golds must be strings, got 3"):
        metric("x", [3])
    with pytest.raises(ValueError, match="unknown normalizer"):
        metric("x", ["x"], "squad")


# EM, CEM and F1 in percent of 1,194 real rollouts, as an independent implementation gives them.
TRACE_SCORES = {
    "2wiki/qwen": (342, 57.02, 64.91, 65.05),
    "bamboogle/llama": (88, 42.05, 47.73, 54.02),
    "bamboogle/qwen": (88, 45.45, 52.27, 58.38),
    "hotpotqa/llama": (338, 58.88, 63.02, 69.94),
    "hotpotqa/qwen": (338, 58.58, 63.91, 71.45),
}


def test_r1_searcher_traces(shared_data: Callable[[str], pathlib.Path]) -> None:
    rows = scoring.read_predictions(shared_data("r1searcher_traces/traces_dev.jsonl.gz"), group=("dataset", "model"))
    reports = scoring.summarize_groups(rows, scoring.score_rows(rows, "r1_searcher"))
    assert reports.keys() == TRACE_SCORES.keys()
    for name, (n, *expected) in TRACE_SCORES.items():
        report = reports[name]
        assert report.n == n
        measured = [100 * report.means[metric] for metric in ("em", "cover_em", "f1")]
        np.testing.assert_allclose(measured, expected, atol=0.006)  # the expected values are rounded to 0.01


@pytest.mark.parametrize(
    ("prediction", "golds", "expected"),
    [
        ("Kitten", "sitting", 1 - 3 / 7),  # two replacements, one insertion
        ("flaw", "lawn", 0.0),  # two of four characters: a half is too much
        ("12.5 bn", ["12.5bn", "13 bn"], 6 / 7),
        ("  The\nKING ", "the king", 1.0),
        ("king", "the king", 0.0),  # articles are characters like others; half of them are missing
        ("a very long answer with the word lion in it", "lion", 0.0),
        ("24%", ["26%"], 2 / 3),
        ("\ud800bcd", "\ud800bcx", 3 / 4),  # half a character, as broken JSON has it
        ("", ["x"], 0.0),
        ("", [""], 0.0),
        (None, ["x"], 0.0),
    ],
)
def test_anls(prediction: str | None, golds: str | list[str], expected: float) -> None:
    assert metrics.anls(prediction, golds) == pytest.approx(expected)


def test_anls_beside_edits_counted_by_recursion() -> None:
    """Over all pairs of short words of two letters; the distance by its definition."""

    def distance(first: str, second: str) -> int:
        if not first or not second:
            return len(first) + len(second)
        kept = distance(first[1:], second[1:]) + (first[0] != second[0])
        return min(kept, distance(first[1:], second) + 1, distance(first, second[1:]) + 1)

    words = ["".join(letters) for length in (3, 4, 5) for letters in itertools.product("ab", repeat=length)]
    for first, second in itertools.product(words[::3], words):
        share = distance(first, second) / max(len(first), len(second))
        assert metrics.anls(first, second) == pytest.approx(1 - share if share < 0.5 else 0.0)


# --- the three normalisers on hand-computed cases; where they differ is the point ---


# Worked out by hand from the definitions: text, search_r1, r1_searcher, vqa.
CASES = [
    ("The Eiffel Tower", "eiffel tower", "eiffel tower", "eiffel tower"),
    ("An apple a day", "apple day", "apple day", "apple a day"),
    ("well-known", "wellknown", "well known", "well known"),
    ("U.S.A.", "usa", "u s", "usa"),
    ("a.k.a.", "aka", "k", "aka"),
    ("the_beatles", "thebeatles", "beatles", "beatles"),
    ("Jackson, Mississippi", "jackson mississippi", "jackson mississippi", "jackson mississippi"),
    ("1,000", "1000", "1 000", "1000"),
    ("3.14", "314", "3 14", "3.14"),
    ("born in 1990.", "born in 1990", "born in 1990", "born in 1990"),
    ("three", "three", "three", "3"),
    ("ten or eleven", "ten or eleven", "ten or eleven", "10 or eleven"),
    ("none", "none", "none", "none"),
    ("dont", "dont", "dont", "don't"),
    ("don't", "dont", "don t", "don't"),
    ("O'Brien's", "obriens", "o brien s", "o'brien's"),
    ("Beyoncé Knowles", "beyoncé knowles", "beyoncé knowles", "beyoncé knowles"),
    ("São Paulo’s", "são paulo’s", "são paulo s", "são paulo’s"),
    ("`Quoted´", "quoted´", "quoted", "quoted´"),
    ("東京", "東京", "東京", "東京"),
    ("  two\n\tspaces ", "two spaces", "two spaces", "2 spaces"),
    ("the", "", "", ""),
    ("A an The", "", "", "a"),
    ("!?", "", "", ""),
    ("", "", "", ""),
    ("True", "true", "yes", "true"),
    (" False ", "false", "no", "false"),
    ("true", "true", "true", "true"),
    ("True story", "true story", "true story", "true story"),
]


@pytest.mark.parametrize(("text", "search_r1", "r1_searcher", "vqa"), CASES)
def test_hand_computed(text: str, search_r1: str, r1_searcher: str, vqa: str) -> None:
    assert NORMALIZERS.get("search_r1")(text) == search_r1
    assert NORMALIZERS.get("r1_searcher")(text) == r1_searcher
    assert NORMALIZERS.get("vqa")(text) == vqa


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # A hyphen that touches a space anywhere is deleted everywhere, else it is a space.
        ("Anglo-Saxon king", "anglo saxon king"),
        ("Anglo-Saxon king - first", "anglosaxon king first"),
        # A comma between digits deletes every mark.
        ("1,000 (one-way) tickets", "1000 oneway tickets"),
        ("red;green/blue", "red green blue"),
        ("version 2.5. Done.", "version 2.5 done"),
        ("at 10:30", "at 10:30"),
        ("Alien: Covenant", "alien covenant"),
        ("the film 'The Salt Path'", "film salt path"),
        ("'twas couldnt've somebodyd", "'twas couldn't've somebody'd"),
        ("shell im lets", "shell im lets"),
        ("zero, Five. nine", "0 5 9"),
    ],
)
def test_vqa_details(text: str, expected: str) -> None:
    assert NORMALIZERS.get("vqa")(text) == expected


def test_vqa_removes_every_period() -> None:
    # The released scorer passes a regex flag as the count and so stops after 32.
    assert NORMALIZERS.get("vqa")("x. " * 40) == " ".join(["x"] * 40)


@pytest.mark.parametrize("name", list(NORMALIZERS))
@pytest.mark.parametrize("text", [case[0] for case in CASES])
def test_idempotent(name: str, text: str) -> None:
    normalize = NORMALIZERS.get(name)
    assert normalize(normalize(text)) == normalize(text)


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="r1_searcher, search_r1, vqa"):
        NORMALIZERS.get("squad")


# --- numbers that are accepted because they lie in a range ---


LENGTH = Example(id="q", question="?", answers=("51.97",), metadata={"answer_ranges": [[46.773, 57.167]]})


@pytest.mark.parametrize(
    ("prediction", "more"),
    [
        (None, ()),
        ("no idea", ()),
        ("about 52 metres", ("52", "about 52 metres")),
        ("at −52 metres", ()),
        ("minus 52", ()),
        ("５２ m", ("52", "５２ m")),
        ("46.773", ("46.773",)),
        ("46.772", ()),
        ("-50", ()),
        ("48-58", ("48", "48-58")),  # 9.2 of the 11.2 that both cover
        ("48–50 m", ("48", "50", "48–50 m")),
        ("between 58 and 48", ("48", "between 58 and 48")),
        ("48 to 90", ("48",)),
        ("built in 1952, 50 m tall", ("50",)),
        ("50 km2", ("50", "50 km2")),
        ("5,0.7", ()),
        ("51.97", ()),  # it is accepted already
        ("50 or 51.5, at most 60", ("50", "51.5")),
    ],
)
def test_numbers_in_the_range_are_accepted(prediction: str | None, more: tuple[str, ...]) -> None:
    assert accepted_answers(LENGTH, prediction) == ("51.97", *more)


def test_a_number_may_begin_with_its_point() -> None:
    example = Example(id="q", question="?", answers=("0.52",), metadata={"answer_ranges": [[0.5, 0.6]]})
    assert accepted_answers(example, ".55 m") == ("0.52", ".55", ".55 m")
    assert accepted_answers(example, "1.55 m") == accepted_answers(example, "-.55 m") == ("0.52",)


def test_thousands() -> None:
    example = Example(id="q", question="?", answers=("4020",), metadata={"answer_ranges": [[3618.0, 4422.0]]})
    assert accepted_answers(example, "3,900") == ("4020", "3,900")
    assert accepted_answers(example, "3.9") == ("4020",)
    assert accepted_answers(Example(id="q", question="?", answers=("4020",)), "3900") == ("4020",)


@pytest.mark.parametrize("right", ["11 million", "about 11.2 Million people", "10.5-12 million", "11 500 000", "1.1e7"])
def test_large_numbers(right: str) -> None:
    example = Example(id="q", question="?", answers=("11200000",), metadata={"answer_ranges": [[10080000, 12320000]]})
    for wrong in ("11", "11 thousand", "1 to 12 million"):
        assert exact_match(wrong, accepted_answers(example, wrong)) == 0
    assert exact_match(right, accepted_answers(example, right)) == 1


def test_rewards_of_recipes_know_ranges() -> None:
    """R1-Searcher's answer, which must stand in tags, and RouteRAG's saving, which right answers alone earn."""
    answers = ("about 52 metres", "40 metres")

    def episode(answer: str, cost: float) -> Episode:
        call = Call(tool="text", query="?", passages=(), cost=cost)
        turn = Turn(text=f"<think>so</think><answer>{answer}</answer>", stop_reason="stop", tokens=1, calls=[call])
        return Episode(example=LENGTH, sample=0, answer=answer, turns=[turn], sequences=[])

    near, far = (episode(answer, cost) for answer, cost in zip(answers, (0.0, 2.0)))
    searcher = RewardFunction({"r1_searcher.answer": {"metric": "cover_em", "signed": True}})
    assert [terms["total"] for terms in searcher([near, far])] == [1, -1]
    plain = episode("52", 0.0)
    saving = RewardFunction({"routerag.efficiency": {"scale": 4.0}})  # costs are 0, 1/2 and 0 of it
    assert [terms["total"] for terms in saving([plain, far, near])] == pytest.approx([0.5 / 3, 0, 0.5 / 3])


def test_every_score_knows_ranges(shared_data: Callable[[str], pathlib.Path]) -> None:
    """A real row: in what is measured, rewarded and written down. Without its range the answer would be wrong."""
    source = open_dataset(str(shared_data("infoseek/questions_dev.jsonl.gz")))
    examples = {source[i].id: source[i] for i in range(len(source))}
    assert sum("answer_ranges" in example.metadata for example in examples.values()) == 171
    lake = examples["infoseek_val_00000646"]
    assert lake.answers == ("1831",)
    near, far = (
        Episode(example=lake, sample=0, answer=answer, turns=[], sequences=[]) for answer in ("1,650", "1,600")
    )
    for normalizer in ("vqa", "search_r1"):
        assert [averages([one], normalizer)["em"] for one in (near, far)] == [1, 0]
        assert [terms["total"] for terms in RewardFunction({"f1": 1.0}, normalizer)([near, far])] == [1, 0]
    assert [episode_record(one)["golden_answers"] for one in (near, far)] == [["1831", "1,650"], ["1831"]]
