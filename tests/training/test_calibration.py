"""Whether a price on searches can decide anything."""

import pytest

from routerl_jax.training.config import CalibrationConfig, EvaluationConfig
from routerl_jax.training.evaluation import calibration, check_calibration

ASKED = CalibrationConfig(kind="search_free", penalty=0.1)


def found(closed: float, opened: float) -> dict:
    return {"search_free": {"closed_book": closed, "open_book": opened, "n": 100}}


def test_what_is_known_and_what_is_found_by_kind() -> None:
    rows = {
        "warm_start_direct": {"by": {"kind": {"search_free": {"em": 0.9, "n": 4}, "image": {"em": 0.0, "n": 5}}}},
        "warm_start_rag_workflow": {
            "by": {"kind": {"search_free": {"em": 0.95, "n": 4}, "image": {"em": 0.8, "n": 5}}}
        },
    }
    assert calibration(rows, ASKED) == {
        "search_free": {"closed_book": 0.9, "open_book": 0.95, "n": 4},
        "image": {"closed_book": 0.0, "open_book": 0.8, "n": 5},
    }
    assert calibration(rows, CalibrationConfig()) == {}
    assert calibration({"warm_start_direct": rows["warm_start_direct"]}, ASKED) == {}


def test_a_start_is_refused_where_searches_always_pay_or_never() -> None:
    check_calibration(found(0.9, 0.95), ASKED)
    check_calibration({}, CalibrationConfig())
    with pytest.raises(
        ValueError, match=r"85\.0 % without a search and 95\.0 % with all searches, so every search pays"
    ):
        check_calibration(found(0.85, 0.95), ASKED)
    with pytest.raises(ValueError, match="so that no search pays"):
        check_calibration(found(0.95, 0.95), ASKED)
    with pytest.raises(ValueError, match="the test questions have search_free"):
        check_calibration(found(0.9, 0.95), CalibrationConfig(kind="text"))


def test_its_baselines_must_be_scored_before() -> None:
    with pytest.raises(ValueError, match=r"'rag_workflow': name it in config\.evaluation\.before_baselines"):
        EvaluationConfig(calibration=ASKED, before_baselines=("direct",))
    with pytest.raises(ValueError, match=r"set config\.evaluation\.before"):
        EvaluationConfig(before=False, before_baselines=("direct",))
