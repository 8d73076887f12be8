"""Numbers that are accepted because they lie in a range."""

import pathlib
from collections.abc import Callable

import pytest

from routerl_jax.core.types import Call, Episode, Example, Turn
from routerl_jax.data.readers import open_dataset
from routerl_jax.evaluation.metrics import averages
from routerl_jax.evaluation.records import episode_record
from routerl_jax.rewards.metrics import accepted_answers, exact_match
from routerl_jax.rewards.terms import RewardFunction

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
