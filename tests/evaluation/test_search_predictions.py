"""What a search gains by arithmetic, against what policies do."""

import pathlib

import pytest

from benchmarks.search_predictions import PRICES, picture, points, table
from benchmarks.seeds import Run, numbers_of


def agent(free: float, mixed: float, searched: tuple[float, float] = (0.0, 0.0)) -> dict[str, float]:
    kinds = {"search_free_many": (free, searched[0]), "mixed_none": (mixed, searched[1])}
    by = {kind: {"em": em, "searched_rate": rate, "n": 50, "f1": 1.0} for kind, (em, rate) in kinds.items()}
    return numbers_of({"em": 0.5, "by": {"type": by}, "breakdown": {"correct_with_search": 0.5}})


def run(**changed: dict[str, float]) -> Run:
    agents = {
        "warm_start_direct": agent(0.9, 0.02),
        "warm_start_rag_workflow": agent(0.95, 0.9),
        "no_penalty": agent(0.95, 0.9, (0.9, 1.0)),
        "mmsearch_r1": agent(0.95, 0.9, (0.1, 1.0)),
        "high_penalty": agent(0.95, 0.9, (0.0, 0.4)),
        **changed,
    }
    return Run(seed=3, isa="native", settings="", agents=agents, seconds={}, tokens=0, curves={}, machine="")


def test_a_search_pays_where_it_earns_more_than_it_costs() -> None:
    found = {(one.type, one.price): one for one in points([run()])}
    assert [found["search_free_many", price].pays for price in PRICES.values()] == [True, False, False]
    assert [found["mixed_none", price].pays for price in PRICES.values()] == [True, True, True]
    assert found["search_free_many", 0.1].gain == pytest.approx(0.9 * 0.95 - 0.9)
    assert {key for key, one in found.items() if not one.foretold} == {("mixed_none", 0.3)}
    assert found["mixed_none", 0.1].n == 50


def test_the_table_and_the_picture(tmp_path: pathlib.Path) -> None:
    found = points([run(), run(mmsearch_r1=agent(0.9, 0.9, (0.7, 1.0)))])
    said = table(found)
    assert "| search_free_many | 50 | 90.0 | 95.0 | 0.1 | 0 of 2 | 40.0 | 1 of 2 |" in said
    assert "As foretold: 9 of 12 points." in said
    assert said.endswith(": 9.")  # by any price: wrong where search is free at a tenth, and for `mixed` at three tenths
    picture(found, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 10_000


def test_what_a_run_lacks_is_named() -> None:
    lacking = run()
    del lacking.agents["high_penalty"]
    assert {one.price for one in points([lacking])} == {0.0, 0.1}
    del lacking.agents["warm_start_direct"]
    with pytest.raises(SystemExit, match="run 3 has no agent 'warm_start_direct'"):
        points([lacking])
    with pytest.raises(SystemExit, match="tells no types of questions apart"):
        points([run(warm_start_direct={"em": 1.0})])
