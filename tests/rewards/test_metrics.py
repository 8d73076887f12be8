"""Metrics against hand-computed values, algebraic properties and independent scores of real R1-Searcher rollouts."""

import itertools
import pathlib
from collections.abc import Callable

import numpy as np
import pytest

from routerl_jax.core.text import folded
from routerl_jax.rewards import metrics, scoring
from routerl_jax.rewards.metrics import NORMALIZERS


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
