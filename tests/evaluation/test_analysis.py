"""What a run has changed, counted by hand, and the picture of it, read off its artists."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import matplotlib.image
import numpy as np
import pytest
from matplotlib.collections import PathCollection
from matplotlib.container import BarContainer

from routerl_jax.evaluation.metrics import summarize
from routerl_jax.evaluation.records import episode_record
from routerl_jax.extras.analysis import figure as analysis_module
from routerl_jax.extras.analysis.figure import analysis_figure
from routerl_jax.extras.analysis.numbers import (
    analyse,
    analyse_calibration,
    analyse_workflows,
    behaviour,
    training_curves,
)
from tests.evaluation.episodes import call, episode, record

BEFORE = [record(0, False, 2.0, 2.0), record(1, True, 1.0, tool="passage"), record(2, True)]
AFTER = [record(0, True, 1.0, tool="passage"), record(1, True, 1.0, tool="passage"), record(2, True)]
KINDS = ("known", "known", "unknown", "unknown")


def of_kinds(right: str, searches: Sequence[int]) -> list[dict[str, Any]]:
    """Four questions, of `KINDS`: which are answered rightly, after how many searches."""
    return [
        record(i, c == "1", *[1.0] * count, kind=kind) for i, (c, count, kind) in enumerate(zip(right, searches, KINDS))
    ]


def panels(analysis: Mapping[str, Any], *training: Any, **names: str) -> dict[str, Any]:
    """The axes of the picture, by the panel's title; groups' panels of a title that there is already are `TITLE *`."""
    figures: list[Any] = []
    with mock.patch.object(analysis_module, "save_figure", lambda figure, _: figures.append(figure)):
        analysis_figure(analysis, pathlib.Path("unused.png"), *training, **names)
    found: dict[str, Any] = {}
    for axis in figures[0].axes:
        if title := axis.get_title():
            found[f"{title} *" if title in found else title] = axis
    return found


def bars(axis: Any) -> list[list[float]]:
    """Widths of horizontal bars, by colour."""
    drawn = [container for container in axis.containers if isinstance(container, BarContainer)]
    return [[round(bar.get_width(), 6) for bar in container] for container in drawn]


def said(axis: Any) -> list[str]:
    return [text.get_text() for text in axis.texts]


def labels(axis: Any) -> list[str]:
    return [text.get_text() for text in axis.get_legend().get_texts()]


def test_policies_by_hand() -> None:
    found = analyse({"warm_start": BEFORE, "trained": AFTER}, budget=4)
    assert found["warm_start"]["turns"] == pytest.approx(2)  # 3, 2 and 1
    assert found["warm_start"]["searches"] == pytest.approx(1)
    assert found["warm_start"]["searched_rate"] == pytest.approx(2 / 3)
    assert found["warm_start"]["search_ratio"] == pytest.approx(3 / 12)
    assert found["warm_start"]["breakdown"] == pytest.approx(
        {
            "correct_with_search": 1 / 3,
            "correct_without_search": 1 / 3,
            "wrong_with_search": 1 / 3,
            "wrong_without_search": 0,
        }
    )
    assert found["warm_start"]["retrieval_cost"] == pytest.approx(5 / 3)
    assert found["warm_start"]["mode_usage"] == pytest.approx({"graph": 2 / 3, "passage": 1 / 3})
    assert found["warm_start"]["tokens"] == pytest.approx(4)  # two sampled tokens a turn
    assert found["warm_start"]["em_by_turns"] == [
        {"turns": 1, "em": 1.0, "n": 1},
        {"turns": 2, "em": 1.0, "n": 1},
        {"turns": 3, "em": 0.0, "n": 1},
    ]
    assert found["trained"]["em_by_turns"] == [{"turns": 1, "em": 1.0, "n": 1}, {"turns": 2, "em": 1.0, "n": 2}]
    assert found["trained"]["mode_usage"] == {"passage": 1.0}
    assert found["warm_start"]["mode_by_step"] == [
        {"step": 1, "mode_usage": pytest.approx({"graph": 0.5, "passage": 0.5}), "n": 2},
        {"step": 2, "mode_usage": {"graph": 1.0}, "n": 1},
    ]
    assert found["warm_start"]["searches_of_correct"] == {"mean": 0.5, "share": {"0": 0.5, "1": 0.5}}
    for rows in found.values():  # every episode is in one bin
        assert sum(row["n"] for row in rows["em_by_tokens"]) == 3
    assert found["trained"]["by"] == {}
    with pytest.raises(ValueError, match="trained has no episodes"):
        analyse({"warm_start": BEFORE, "trained": []})
    with pytest.raises(ValueError, match=r"warm_start and trained were not asked the same questions; .*\['2'\]"):
        analyse({"warm_start": BEFORE, "trained": AFTER[:2]})


def test_groups_by_hand() -> None:
    kinds = [{**row, "metadata": {"kind": kind}} for row, kind in zip(BEFORE, ("table", "text", "text"))]
    by = analyse({"trained": kinds}, budget=2)["trained"]["by"]["kind"]
    assert (by["table"]["n"], by["table"]["em"], by["text"]["n"], by["text"]["em"]) == (1, 0, 2, 1)
    assert (by["table"]["searched_rate"], by["text"]["searched_rate"]) == (1, 0.5)
    assert (by["table"]["search_ratio"], by["text"]["search_ratio"]) == (1, 0.25)
    assert by["text"]["breakdown"]["correct_without_search"] == 0.5
    assert [step["mode_usage"] for step in by["table"]["mode_by_step"]] == [{"graph": 1.0}] * 2
    assert by["text"]["searches_of_correct"] == {"mean": 0.5, "share": {"0": 0.5, "1": 0.5}}


def test_records_come_to_what_the_runs_table_says() -> None:
    """What launch.analyze finds in records is what results.json was made of."""
    episodes = [
        episode(call("text", "x1"), call("table", "t1")),
        episode(answer="cat"),
        episode(call("text", "x1"), answer=None),
        episode(),
    ]
    found, table = behaviour([episode_record(one) for one in episodes], budget=3), summarize(episodes, budget=3)
    shared = ("em", "em_interval", "f1", "searched_rate", "search_ratio", "breakdown", "mode_usage", "retrieval_cost")
    assert {key: found[key] for key in shared} == {key: table[key] for key in shared}
    assert "search_ratio" not in behaviour([episode_record(one) for one in episodes])


def test_workflows_by_hand() -> None:
    always = {"warm_start": of_kinds("1100", [2] * 4), "trained": of_kinds("1110", [2] * 4)}
    found = analyse_workflows(
        {"always": always, "never": {"trained": of_kinds("1000", [0] * 4)}}, budgets={"always": 2, "never": 0}
    )
    assert {name: list(rows) for name, rows in found.items()} == {
        "always": ["warm_start", "trained"],
        "never": ["trained"],
    }
    assert [found["always"][name]["em"] for name in always] == [0.5, 0.75]
    assert [found["always"][name]["by"]["kind"]["unknown"]["em"] for name in always] == [0, 0.5]
    assert (found["always"]["trained"]["search_ratio"], found["never"]["trained"]["search_ratio"]) == (1, 0)
    with pytest.raises(
        ValueError, match="warm_start as always and trained as always were not asked the same questions"
    ):
        analyse_workflows({"always": {"warm_start": always["warm_start"], "trained": always["trained"][:3]}})


def test_curves_are_of_runs_with_a_reward() -> None:
    row = {"reward/total": 0.5, "rollout/searched_rate": 0.25, "actor/loss": 1.0}
    found = training_curves({"trained": [{"step": 0, **row}], "sft": [{"step": 0, "actor/loss": 1.0}], "none": []})
    assert found == {"trained": [{"step": 0, "reward/total": 0.5, "rollout/searched_rate": 0.25}]}
    old = training_curves({"trained": [{"step": 3, "reward/total": 0.5}]})  # of a run from before it was measured
    assert old == {"trained": [{"step": 3, "reward/total": 0.5, "rollout/searched_rate": None}]}


def test_calibration_has_what_training_made_of_it() -> None:
    trained = analyse({"trained": of_kinds("1101", [0, 0, 2, 2])})["trained"]
    measured = {"known": {"closed_book": 0.7, "open_book": 0.75, "n": 2}}
    assert analyse_calibration(measured, 0.1, trained) == {
        "penalty": 0.1,
        "kinds": {"known": {"closed_book": 0.7, "open_book": 0.75, "n": 2, "em": 1.0, "searched_rate": 0.0}},
    }
    assert analyse_calibration({}, 0.1, trained) == {}


def test_panels_are_there_for_what_there_is() -> None:
    found = analyse({"warm_start": BEFORE, "trained": AFTER})
    alone = list(panels({"policies": found}))
    assert alone == [
        "Answers and searches, %",
        "Right and wrong, with and without a search, %",
        "EM by number of turns",
        "EM by sampled tokens, in quartiles",
        "Turns and searches per question",
        "EM (95 %) against retrieval cost",
        "Share of searches by mode",
        "Each search by mode (searches)",
        "Searches of questions answered rightly",
    ]
    trials = {"top_k": {"1": found["trained"], "2": found["trained"]}, "single_mode": found, "retrievers": found}
    training = [
        {"step": i, "reward/total": 0.1 * i, "reward/std": 0.1, "rollout/tokens_per_question": 30.0} for i in range(4)
    ]
    more = list(panels({"policies": found, **trials, "training": training_curves({"trained": training})}, training))
    assert more == [
        *alone,
        "Reward of sampled attempts",
        "Sampled tokens per attempt",
        "EM with one mode alone",
        "EM with other retrievers",
        "Passages per search",
    ]
    nothing = analyse({"trained": [record(0, False)]})  # no search, no right answer
    assert not {
        "Share of searches by mode",
        "Each search by mode (searches)",
        "Searches of questions answered rightly",
    } & set(panels({"policies": nothing}))
    kinds = list(panels({"policies": analyse({"trained": of_kinds("1101", [0, 1, 1, 1])}, budget=2)}))
    assert kinds[len(alone) :] == [
        "EM, %",
        "Questions with a search, %",
        "Searches made of those allowed, %",
        "Right and wrong, with and without a search, % *",
        "Each search by mode (searches), after RL",
        "Searches of questions answered rightly, after RL",
    ]


def test_answers_and_searches_are_told_and_drawn() -> None:
    """Figures 4b and 5a of MMSearch-R1."""
    policies = analyse(
        {
            "prompt": of_kinds("1000", [2, 2, 2, 0]),
            "better": of_kinds("1101", [0, 0, 2, 1]),
            "sft": of_kinds("0000", [2] * 4),
        },
        budget=2,
    )
    drawn = panels({"policies": policies}, policy="better", start="prompt")
    assert said(drawn["Answers and searches, %"]) == [
        *("25.0", "75.0", "75.0"),
        *("75.0", "50.0", "37.5"),
        *("0.0", "100.0", "100.0"),
    ]
    assert bars(drawn["Right and wrong, with and without a search, %"]) == [
        [0, 0.5, 0],  # right, no search
        [0.25, 0.25, 0],
        [0.5, 0.25, 1],
        [0.25, 0, 0],  # wrong, no search
    ]
    assert said(drawn["EM, %"]) == ["50.0", "100.0", "0.0", "0.0", "50.0", "0.0"]  # by kind, then policy
    assert said(drawn["Questions with a search, %"]) == ["100.0", "0.0", "100.0", "50.0", "100.0", "100.0"]
    assert said(drawn["Searches made of those allowed, %"])[3:] == ["50.0", "75.0", "100.0"]
    of_kind = drawn["Right and wrong, with and without a search, % *"]
    names = [text.get_text() for text in of_kind.get_yticklabels()]
    assert names == ["known, prompt", "known, better", "unknown, prompt", "unknown, better"]
    assert bars(of_kind)[0] == [0, 1, 0, 0]  # only the trained policy is right without a search
    assert "search_ratio" not in analyse({"trained": BEFORE})["trained"]
    assert said(panels({"policies": analyse({"trained": BEFORE})})["Answers and searches, %"]) == ["66.7", "66.7"]


def test_very_many_groups_stay_readable() -> None:
    """Twenty kinds: a bar of the trained policy for each, under the other, with what its right answers took."""
    made = [record(i, True, *[1.0] * (i % 2), kind=f"kind {i // 2:02}") for i in range(40)]
    drawn = panels({"policies": analyse({"warm_start": made, "trained": made})})
    few = panels({"policies": analyse({"warm_start": made[:8], "trained": made[:8]})})
    bar = "Right and wrong, with and without a search, % *"
    assert [name.get_text() for name in few[bar].get_yticklabels()][:2] == ["kind 00, before RL", "kind 00, after RL"]
    assert [name.get_text() for name in drawn[bar].get_yticklabels()][:2] == ["kind 00, after RL", "kind 01, after RL"]
    right = drawn["Searches of questions answered rightly, after RL"]
    assert bars(right) == [[0.5] * 20] * 2
    assert right.get_yticklabels()[0].get_text() == "kind 00: 0.50"
    for name in (bar, "Each search by mode (searches), after RL", "Searches of questions answered rightly, after RL"):
        rows = drawn[name].get_yticklabels()
        inches = drawn[name].get_position().height * drawn[name].figure.get_figure().get_size_inches()[1]
        assert rows[0].get_fontsize() / 72 < inches / len(rows)  # no name on another


def test_workflows_are_drawn_where_start_and_trained_policy_have_them() -> None:
    """Figure 4a of MMSearch-R1."""
    trained = of_kinds("1110", [2] * 4)
    workflows = analyse_workflows(
        {"always": {"warm_start": of_kinds("1000", [2] * 4), "trained": trained}, "never": {"trained": trained}}
    )
    policies = analyse({"warm_start": trained, "trained": trained})
    drawn = panels({"policies": policies, "workflows": workflows})
    assert bars(drawn["EM in the same workflow"]) == [[0.25], [0.75]]  # always alone
    assert labels(drawn["EM in the same workflow"]) == ["before RL", "after RL"]
    assert bars(drawn["EM in always, by kind (questions)"]) == [[0.5, 0.0], [1.0, 0.5]]
    assert not any("never" in name for name in drawn)
    after = [one for one in drawn["EM in the same workflow"].containers if isinstance(one, BarContainer)][1]
    assert after.errorbar is not None
    (segment,) = after.errorbar.lines[2][0].get_segments()
    np.testing.assert_allclose(np.asarray(segment)[:, 0], workflows["always"]["trained"]["em_interval"])


def test_runs_are_drawn_beside_each_other() -> None:
    """Figure 5b of MMSearch-R1."""
    runs = {
        name: [{"step": i, "reward/total": reward, "rollout/searched_rate": rate} for i in range(3)]
        for name, reward, rate in (("trained", 0.5, 0.25), ("no_penalty", 0.75, 1.0))
    }
    policies = analyse({"warm_start": BEFORE, "trained": AFTER, "no_penalty": AFTER})
    drawn = panels({"policies": policies, "training": training_curves(runs)}, runs["trained"])
    searched, reward = drawn["Share of sampled attempts with a search"], drawn["Each run's own reward"]
    assert labels(searched) == labels(reward) == ["after RL", "no_penalty"]
    for axis, values in ((searched, [0.25, 1.0]), (reward, [0.5, 0.75])):
        lines = [line for line in axis.lines if not line.get_label().startswith("_")]
        assert [set(line.get_ydata()) for line in lines] == [{value} for value in values]
        assert [line.get_color() for line in lines] == [analysis_module.color_of(1), analysis_module.color_of(2)]
    never = {name: [{**row, "rollout/searched_rate": 0.0} for row in rows] for name, rows in runs.items()}
    assert "Share of sampled attempts with a search" not in panels({"policies": policies, "training": never})


def test_calibration_is_drawn() -> None:
    policies = analyse({"trained": of_kinds("1101", [0, 1, 2, 2])})
    measured = {
        "known": {"closed_book": 0.7, "open_book": 0.75, "n": 2},
        "unknown": {"closed_book": 0.1, "open_book": 0.9, "n": 2},
    }
    found = analyse_calibration(measured, 0.2, policies["trained"])
    axis = panels({"policies": policies, "calibration": found})["What the start knows and finds; a search costs 20 %"]
    points = [artist for artist in axis.collections if isinstance(artist, PathCollection)]
    offsets = np.concatenate([artist.get_offsets() for artist in points])
    np.testing.assert_allclose(offsets, [[0.75, 0.7], [0.9, 0.1]])  # P_s, P_c
    assert [np.asarray(artist.get_array()).tolist() for artist in points] == [[0.5], [1.0]]  # searched after training
    assert [line.get_ydata()[-1] for line in axis.lines] == [1, 0.8]
    assert labels(axis)[1:] == ["known (2): 50 %", "unknown (2): 100 %"]


def test_markers_at_the_edge_are_whole_and_every_panel_is_painted(tmp_path: pathlib.Path) -> None:
    found = analyse({"warm_start": BEFORE, "trained": AFTER})
    trials = {"top_k": {"1": found["trained"], "2": found["trained"]}, "single_mode": found, "retrievers": found}
    drawn = panels({"policies": found, **trials}).values()
    artists = [artist for axis in drawn for artist in [*axis.lines, *axis.collections]]
    marked = [a for a in artists if isinstance(a, PathCollection) or getattr(a, "get_marker", str)() in ("o", "s")]
    assert len(marked) >= 8
    assert not any(artist.get_clip_on() for artist in marked)
    path = tmp_path / "figures" / "analysis.png"
    analysis_figure({"policies": found}, path)
    picture = matplotlib.image.imread(path)
    height, width = picture.shape[0] // 2, picture.shape[1]
    for row, columns in ((0, 4), (1, 5)):  # answers, then searches
        for column in range(columns):
            left = column * width // columns
            panel = picture[row * height : (row + 1) * height, left : left + width // columns]
            assert panel[height // 4 : 3 * height // 4].std(axis=(0, 1)).max() > 0
