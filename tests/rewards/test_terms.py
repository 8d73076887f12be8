"""Format checks, reward terms and their weighted sum on hand-made episodes."""

import json
import re
from collections.abc import Sequence

import numpy as np
import pytest

from routerl_jax.core.types import Action, Call, Episode, Example, Turn
from routerl_jax.rewards.terms import REWARD_TERMS, RewardFunction, StepTerm, TurnTerm


def turn(kind: str = "search", *, well_formed: bool = True, calls: tuple[Call, ...] = ()) -> Turn:
    action = Action(kind=kind)  # pyright: ignore[reportArgumentType]
    return Turn(text="...", stop_reason="stop", tokens=3, action=action, well_formed=well_formed, calls=list(calls))


def episode(answer: str | None, *turns: Turn, golds: tuple[str, ...] = ("Paris",)) -> Episode:
    example = Example(id="1", question="Where?", answers=golds)
    return Episode(example=example, sample=0, answer=answer, turns=list(turns), sequences=[])


GOOD = Call(tool="wiki", query="paris")
FAILED = Call(tool="wiki", query="paris", error="timeout")


@pytest.mark.parametrize(
    ("candidate", "expected"),
    [
        (episode("Paris", turn(calls=(GOOD,)), turn("answer")), True),
        (episode("Paris", turn("answer")), True),
        (episode(None, turn(), turn()), False),
        (episode("  ", turn("answer")), False),
        (episode("Paris", turn(well_formed=False), turn("answer")), False),
        (episode("Paris", turn("invalid"), turn("answer")), False),
    ],
)
def test_well_formed(candidate: Episode, expected: bool) -> None:
    assert REWARD_TERMS.get("format")(candidate) == float(expected)


@pytest.mark.parametrize(("answer", "answered"), [(None, False), ("", False), (" a  b\nc ", True)])
def test_answer(answer: str | None, answered: bool) -> None:
    assert REWARD_TERMS.get("answered")(episode(answer)) == answered


OF_STEPS = ("judge", "found", "answer_found")


def test_every_term_by_hand() -> None:
    candidate = episode(
        "in Paris, France",
        turn(calls=(GOOD, FAILED)),
        turn("invalid", well_formed=False),
        turn(calls=(GOOD,)),
        turn("answer"),
        golds=("Paris", "paris texas"),
    )
    assert {
        name: REWARD_TERMS.get(name)(candidate) for name in REWARD_TERMS if name.isidentifier() and name not in OF_STEPS
    } == {
        "em": 0.0,
        "searched": 1.0,
        "f1": 0.5,  # precision 1/3, recall 1
        "cover_em": 1.0,
        "substring_em": 1.0,
        "f1_recall": 1.0,
        "anls": 0.0,  # 10 of 16 characters are edited
        "format": 0.0,
        "answered": 1.0,
        "searches": 3.0,
        "search_failures": 1.0,
        "invalid_actions": 1.0,
    }


def test_reward_is_the_weighted_sum_of_its_terms() -> None:
    reward = RewardFunction(terms={"em": 1.0, "format": 0.1, "searches": -0.05})
    (rewards,) = reward([episode("paris", turn(calls=(GOOD, GOOD)), turn("answer"))])
    assert rewards == pytest.approx({"em": 1.0, "format": 0.1, "searches": -0.1, "total": 1.0})


def test_reward_without_an_answer() -> None:
    reward = RewardFunction(terms={"f1": 1.0, "answered": 0.5, "invalid_actions": -0.2})
    (rewards,) = reward([episode(None, turn("invalid"))])
    assert rewards == pytest.approx({"f1": 0.0, "answered": 0.0, "invalid_actions": -0.2, "total": -0.2})


def test_normalizer_reaches_the_answer_terms() -> None:
    candidate = episode("well known", golds=("well-known",))
    assert RewardFunction(terms={"em": 1.0}, normalizer="search_r1")([candidate])[0]["total"] == 0.0
    assert RewardFunction(terms={"em": 1.0}, normalizer="r1_searcher")([candidate])[0]["total"] == 1.0


def answer_length(candidate: Episode) -> float:
    """A third-party term: any function of an episode, named by its dotted path."""
    return float(len((candidate.answer or "").split()))


def test_term_by_dotted_path() -> None:
    name = f"{__name__}:answer_length"
    assert RewardFunction(terms={name: -1.0})([episode("two words")]) == [{name: -2.0, "total": -2.0}]


def fewer_calls(episodes: Sequence[Episode], per_call: float = 1.0) -> list[float]:
    """How much less than the mean of the step was called."""
    counts = [per_call * len(candidate.calls) for candidate in episodes]
    return [sum(counts) / len(counts) - count for count in counts]


FEWER_CALLS = StepTerm(fewer_calls)


def test_a_term_that_compares_the_episodes_of_a_step_and_has_options() -> None:
    name = f"{__name__}:FEWER_CALLS"
    episodes = [episode("Paris", turn(calls=(GOOD,) * n)) for n in (0, 3)]
    assert RewardFunction(terms={"em": 1.0, name: 0.1})(episodes) == [
        pytest.approx({"em": 1.0, name: 0.15, "total": 1.15}),
        pytest.approx({"em": 1.0, name: -0.15, "total": 0.85}),
    ]
    (few, many) = RewardFunction(terms={name: {"per_call": 2.0}})(episodes)
    assert (few["total"], many["total"]) == (3.0, -3.0)
    with pytest.raises(ValueError, match=r"FEWER_CALLS.*per_cal; did you mean .*per_call"):
        RewardFunction(terms={name: {"per_cal": 2.0}})


def answered_alone(episodes: Sequence[Episode]) -> list[float]:
    return [1.0 for candidate in episodes if candidate.answer]


ANSWERED_ALONE = StepTerm(answered_alone)
SCORES = StepTerm(lambda episodes: np.full(len(episodes), 0.5, np.float32))


def test_a_term_gives_a_number_for_each_episode() -> None:
    """Else one's would be another's; numpy's become ones that can be written down."""
    name = f"{__name__}:ANSWERED_ALONE"
    with pytest.raises(ValueError, match=r"reward term '.*ANSWERED_ALONE' gave 1 values for 2 episodes"):
        RewardFunction(terms={name: 1.0, "em": 1.0})([episode(None), episode("Paris")])
    [row] = RewardFunction(terms={f"{__name__}:SCORES": 2.0})([episode("Paris")])
    assert json.loads(json.dumps(row))["total"] == 1.0


def test_no_terms_are_no_reward() -> None:
    assert RewardFunction(terms={})([episode("Paris")]) == [{"total": 0.0}]


def test_unknown_names_are_errors_that_list_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'formats'.*'format'.*cover_em, em, f1, f1_recall, format"):
        RewardFunction(terms={"formats": 1.0})
    with pytest.raises(ValueError, match=r"'squad'.*r1_searcher, search_r1, vqa"):
        RewardFunction(terms={"em": 1.0}, normalizer="squad")


def nothing(candidate: Episode) -> None:
    """A term without a `return`."""


def words(candidate: Episode) -> str:
    return "many"


def text_of_a_number(candidate: Episode) -> str:
    return "1.0"


def array_of_a_text(candidate: Episode) -> np.ndarray:
    return np.array("1.0")


def missing_key(candidate: Episode) -> float:
    return candidate.example.metadata["gold"]


MISSING_KEY = StepTerm(lambda episodes: [missing_key(candidate) for candidate in episodes])
LATE_KEY = TurnTerm(lambda episodes: ([missing_key(candidate)] for candidate in episodes))  # type: ignore[arg-type, return-value]
NOTHING_AT_ALL = StepTerm(lambda episodes: None)  # type: ignore[arg-type, return-value]
NOTHING_OF_TURNS = TurnTerm(lambda episodes: None)  # type: ignore[arg-type, return-value]
NO_TURN = TurnTerm(lambda episodes: [None for _ in episodes])  # type: ignore[misc]
HALF_A_TURN = TurnTerm(lambda episodes: [["half" for _ in one.turns] for one in episodes])  # type: ignore[misc]


@pytest.mark.parametrize(
    ("term", "message"),
    [
        ("nothing", "gave None (does a `return` lack?) for attempt 0 at question '1': it must give a number"),
        ("text_of_a_number", "gave '1.0' for attempt 0 at question '1': it must give a number"),
        ("array_of_a_text", "gave array('1.0', dtype='<U3') for attempt 0 at question '1': it must give a number"),
        ("words", "gave 'many' for attempt 0 at question '1': it must give a number"),
        (
            "NOTHING_AT_ALL",
            "gave None (does a `return` lack?) for the episodes of a step: it must give a list, one for each",
        ),
        (
            "NOTHING_OF_TURNS",
            "gave None (does a `return` lack?) for the episodes of a step: it must give a list, one for each",
        ),
        ("NO_TURN", "gave None (does a `return` lack?) values for the 1 turns of attempt 0 at question '1'"),
        ("HALF_A_TURN", "gave 'half' for attempt 0 at question '1': it must give a number"),
    ],
)
def test_terms_that_give_no_number_are_named(term: str, message: str) -> None:
    reward = RewardFunction({f"{__name__}:{term}": 0.5})
    with pytest.raises(ValueError, match=f"reward term '{__name__}:{term}' {re.escape(message)}"):
        reward([episode("Paris", turn("answer"))])


@pytest.mark.parametrize("term", ["missing_key", "MISSING_KEY", "LATE_KEY"])
def test_what_a_term_raises_names_the_term(term: str) -> None:
    with pytest.raises(RuntimeError, match=f"reward term '{__name__}:{term}' raised KeyError for .*: 'gold'"):
        RewardFunction({f"{__name__}:{term}": 0.5})([episode("Paris", turn("answer"))])


def test_a_weight_is_a_number() -> None:
    with pytest.raises(ValueError, match=r"reward term 'em' has the weight '1\.0': it must be a number"):
        RewardFunction(terms={"em": "1.0"})  # type: ignore[dict-item]
