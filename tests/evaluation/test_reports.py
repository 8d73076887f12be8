"""Tables, figures, records and trajectories: what a person sees of a run."""

import dataclasses
import json
import pathlib

import numpy as np
import pytest
from rich.console import Console

from routerl_jax.core.files import write_json_lines
from routerl_jax.core.rows import RowLocation
from routerl_jax.core.types import Passage
from routerl_jax.evaluation import figures, report
from routerl_jax.evaluation.metrics import summarize
from routerl_jax.evaluation.records import episode_of, episode_record, read_records
from routerl_jax.evaluation.trajectory import render
from tests.evaluation.episodes import call, episode


@pytest.fixture
def table() -> dict:
    good = [episode(call("table", "t1"), call("text", "x1"))] * 3
    bad = [episode(call("text", "x2"), answer="no"), *good[:1]]
    return {"warm_start": summarize(bad), "trained": summarize(good), "only_text": summarize(bad)}


def test_markdown_says_before_and_after(table: dict) -> None:
    lines = report.markdown(table).splitlines()
    assert lines[0] == "| agent | EM % | F1 % | CEM % | routing % | searches | invalid % | n |"
    assert lines[2].startswith("| before RL | 50.0 (")
    assert lines[3] == "| after RL | 100.0 (43.9-100.0) | 100.0 | 100.0 | 100.0 | 2.00 | 0.0 | 3 |"
    assert lines[4].startswith("| always text |")


def test_the_metrics_of_the_paper_lead(table: dict, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With their intervals; F1-recall and ANLS are in no other table."""
    assert report.markdown(table, ("anls",)).startswith("| agent | ANLS % | EM % | F1 % | CEM % | routing % |")
    lines = report.markdown(table, ("f1_recall", "cover_em")).splitlines()
    assert lines[0] == "| agent | F1-recall % | CEM % | EM % | F1 % | routing % | searches | invalid % | n |"
    assert lines[3].startswith("| after RL | 100.0 (43.9-100.0) | 100.0 (43.9-100.0) | 100.0 | 100.0 | 100.0 |")
    nq = {"n": 2, "em": 0.25, "cover_em": 0.5, "searches_per_question": 1.0}
    by = {"dataset": {"nq": nq, "wiki": {**nq, "n": 1}}}
    several = {"trained": {**table["trained"], "by": by}}
    assert "| after RL, nq | 50.0 | 25.0 | 1.00 | 2 |" in report.markdown(
        report.grouped(several, "dataset"), ("cover_em",)
    )
    report.print_table(several, tmp_path, "dataset", ("f1_recall",))
    assert "F1-recall %" in capsys.readouterr().out


def test_the_bars_are_of_the_paper_s_metric(table: dict, tmp_path: pathlib.Path) -> None:
    table["trained"] |= {"f1_recall": 0.2, "f1_recall_interval": [0.1, 0.3]}
    for name, metric in (("em", "em"), ("recall", "f1_recall")):
        figures.comparison_figure(table, tmp_path / f"{name}.png", metric)
    first, second = (_pixels(tmp_path / f"{name}.png") for name in ("em", "recall"))
    assert first.shape != second.shape or (np.abs(first - second).max(axis=-1) > 0.3).mean() > 0.01


def test_a_column_without_values_is_left_out(table: dict) -> None:
    for metrics in table.values():
        del metrics["routing_accuracy"]
    assert "routing" not in report.markdown(table)


def test_printed_table(table: dict, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    report.print_table(table, tmp_path)
    output = capsys.readouterr().out
    assert "before RL" in output
    assert "after RL" in output
    assert "results.json" in output


def test_a_narrow_terminal_cuts_nothing_off(
    table: dict, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    report.print_table(table, tmp_path)
    output = capsys.readouterr().out
    assert "\u2026" not in output
    assert "(43.9-100.0)" in output
    assert all(len(line) <= 70 for line in output.splitlines()[:-1])


def test_tables_of_groups(table: dict, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    by = {"dataset": {"nq": {"n": 2, "em": 0.5, "searches_per_question": 1.0}, "wiki": {"n": 1, "em": 1.0}}}
    several = {name: {**metrics, "by": by} for name, metrics in table.items()}
    lines = report.markdown(report.grouped(several, "dataset")).splitlines()
    assert lines[0] == "| agent | EM % | searches | n |"
    assert lines[2:4] == ["| before RL, nq | 50.0 | 1.00 | 2 |", "| before RL, wiki | 100.0 | - | 1 |"]
    assert len(lines) == 2 + 3 * 2
    report.print_table(several, tmp_path, "dataset")
    assert "always text, wiki" in capsys.readouterr().out


def _pixels(path: pathlib.Path) -> np.ndarray:
    import matplotlib.image

    return matplotlib.image.imread(path)[..., :3]


def test_a_notebooks_figures_stay(tmp_path: pathlib.Path) -> None:
    """pyplot's backend and open figures are the user's: in a notebook, plots after a run are still shown."""
    from matplotlib import pyplot

    earlier = pyplot.get_backend()
    pyplot.switch_backend("svg")
    try:
        pyplot.figure()
        opened = pyplot.get_fignums()  # another test of this process may have left some
        figures.difficulty_figure([1, 2, None], 2, 4, tmp_path / "x.png")
        assert (tmp_path / "x.png").is_file()
        assert pyplot.get_backend() == "svg"
        assert pyplot.get_fignums() == opened
    finally:
        pyplot.close("all")
        pyplot.switch_backend(earlier)


def test_figures_show_the_rows(tmp_path: pathlib.Path) -> None:
    def rows(slope: float) -> list[dict]:
        return [
            {
                "step": i,
                "rollout/em": slope * i,
                "rollout/routing_accuracy": slope * i,
                "rollout/searches_per_question": 1.5,
                "rollout/kb/text": 0.5,
                "rollout/kb/table": 0.5,
                "reward/total": slope * i,
                **({"validation/em": slope * i} if i % 5 == 4 else {}),
            }
            for i in range(20)
        ]

    figures.training_figures(rows(0.02), tmp_path / "a", ("text", "table"))
    figures.training_figures(rows(0.04), tmp_path / "b", ("text", "table"))
    for name in ("learning_curves.png", "kb_usage.png"):
        first, second = _pixels(tmp_path / "a" / name), _pixels(tmp_path / "b" / name)
        assert first.shape == second.shape
        assert first.shape[1] > 800
        assert (first.std(axis=(0, 1)) > 0.05).all()  # something is drawn
    first, second = (_pixels(tmp_path / d / "learning_curves.png") for d in "ab")
    assert (np.abs(first - second).max(axis=-1) > 0.3).mean() > 0.001  # other data, another picture


def test_curves_of_golden_steps_are_of_their_kinds(tmp_path: pathlib.Path) -> None:
    """What mixes sub-questions with answers is not drawn."""

    def curves(mixed: float, final: float) -> np.ndarray:
        row = {
            "rollout/em": mixed,
            "rollout/em/final": final,
            "rollout/em/answer": 0.5,
            "reward/total": 0.5,
            "rollout/routing_accuracy": 0.5,
        }
        figures.training_figures([{"step": i, **row} for i in range(20)], tmp_path, ("text",))
        return _pixels(tmp_path / "learning_curves.png")

    assert (curves(0.1, 0.3) == curves(0.9, 0.3)).all()
    assert np.abs(curves(0.1, 0.3) - curves(0.1, 0.9)).max() > 0.3


def test_every_knowledge_base_is_drawn(tmp_path: pathlib.Path) -> None:
    """Also where there are more of them than colours."""
    names = tuple(f"kb{i}" for i in range(len(figures.COLORS) + 1))

    def usage(last: float) -> np.ndarray:
        row = {**{f"rollout/kb/{name}": 0.1 for name in names[:-1]}, f"rollout/kb/{names[-1]}": last}
        figures.training_figures([{"step": i, **row} for i in range(20)], tmp_path, names)
        return _pixels(tmp_path / "kb_usage.png")

    assert np.abs(usage(0.2) - usage(0.9)).max() > 0.3


def test_where_nothing_is_searched_the_curves_are_of_tokens(tmp_path: pathlib.Path) -> None:
    def middle(searches: float, tokens: float) -> np.ndarray:
        rows = [
            {
                "step": i,
                "rollout/em": 0.5,
                "rollout/routing_accuracy": 0.5,
                "rollout/searches_per_question": searches,
                "rollout/tokens_per_question": 10 + tokens * i,
                "reward/total": 0.5,
            }
            for i in range(20)
        ]
        figures.training_figures(rows, tmp_path, ("text",))
        picture = _pixels(tmp_path / "learning_curves.png")
        return picture[:, picture.shape[1] // 3 : 2 * picture.shape[1] // 3]

    assert np.abs(middle(0.0, 1.0) - middle(0.0, 9.0)).max() > 0.3
    assert np.abs(middle(1.5, 1.0) - middle(1.5, 9.0)).max() == 0


def test_curves_show_what_searches_cost_where_some_cost_more(tmp_path: pathlib.Path) -> None:
    """A picture as before where each costs 1."""

    def middle(cost: float) -> np.ndarray:
        row = {
            "rollout/em": 0.5,
            "reward/total": 0.5,
            "rollout/searches_per_question": 1.5,
            "rollout/retrieval_cost": cost,
        }
        figures.training_figures([{"step": i, **row} for i in range(20)], tmp_path, ("text",))
        picture = _pixels(tmp_path / "learning_curves.png")
        return picture[:, picture.shape[1] // 3 : 2 * picture.shape[1] // 3]

    orange = np.array([0xDC, 0x76, 0x33]) / 255
    drawn = [(np.abs(middle(cost) - orange).max(axis=-1) < 0.02).sum() for cost in (1.5, 2.5)]
    assert drawn[0] == 0
    assert drawn[1] > 100


def test_a_line_stands_where_a_stage_begins(tmp_path: pathlib.Path) -> None:
    def picture(name: str, begins: int) -> np.ndarray:
        row = {"rollout/em": 0.5, "reward/total": 0.5, "rollout/searches_per_question": 1.5, "rollout/kb/text": 1.0}
        rows = [{"step": i, **row, "stage": "first" if i < begins else "second"} for i in range(20)]
        figures.training_figures(rows, tmp_path, ("text",))
        return _pixels(tmp_path / name)

    for name in ("learning_curves.png", "kb_usage.png"):
        without, early, late = (picture(name, begins) for begins in (0, 5, 15))
        assert np.abs(early - without).max() > 0.3
        assert np.abs(early - late).max() > 0.3


def test_no_rows_no_figures(tmp_path: pathlib.Path) -> None:
    figures.training_figures([], tmp_path / "none", ("text",))
    assert not (tmp_path / "none").exists()


def test_comparison_figure(table: dict, tmp_path: pathlib.Path) -> None:
    figures.comparison_figure(table, tmp_path / "deep" / "comparison.png")
    assert (_pixels(tmp_path / "deep" / "comparison.png").std(axis=(0, 1)) > 0.05).all()


def test_records_round_trip(tmp_path: pathlib.Path) -> None:
    done = episode(call("table", "t1"), answer="Côte d'Ivoire")
    told = {**done.example.metadata, "dataset": "nq", "level": "hard"}
    done = dataclasses.replace(done, example=dataclasses.replace(done.example, metadata=told))
    record = episode_record(done, step=3)
    path = tmp_path / "episodes" / "step.jsonl"
    write_json_lines(path, [record, record])
    found = list(read_records(path))
    assert len(found) == 2
    assert found[0] == json.loads(json.dumps(record))
    assert found[0]["prediction"] == "Côte d'Ivoire"
    assert found[0]["step"] == 3
    assert found[0]["metadata"] == {"dataset": "nq"}  # what groups need, and no more
    assert episode_of(found[0], RowLocation(path, "line", 1)).example.metadata == {"dataset": "nq"}
    assert list(path.parent.iterdir()) == [path]


def test_records_name_their_pictures(tmp_path: pathlib.Path) -> None:
    done = episode(call("table", "t1"), answer="Accra")
    images = (tmp_path / "a.png", "data:image/png;base64,AA==", b"bytes")
    record = episode_record(dataclasses.replace(done, example=dataclasses.replace(done.example, images=images)))
    again = episode_of(json.loads(json.dumps(record)), RowLocation(tmp_path, "line", 1)).example
    assert again.images == (str(tmp_path / "a.png"), images[1], "")


def test_a_broken_record_is_named(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "step.jsonl"
    path.write_text('{"id": 1}\n{"id": \n')
    with pytest.raises(ValueError, match=r"step\.jsonl, line 2: not JSON"):
        list(read_records(path))


def _shown(record: dict) -> str:
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render(json.loads(json.dumps(record))))
    return console.export_text()


def test_trajectory_shows_everything() -> None:
    shown = _shown(episode_record(episode(call("table", "t1"), call("text", error="KB is down"), invalid=1)))
    for part in ("Which?", "[table]", "text of t1", "0.50", "KB is down", "no tag", "answers   lion", "gold"):
        assert part in shown, part
    seen = call("text_image")
    given = {"f1": "data:image/png;base64,AAAA", "f2": "flags/mali.png"}
    pictures = tuple(Passage(id=name, title="", text=f"flag {name}", image=image) for name, image in given.items())
    shown = _shown(episode_record(episode(dataclasses.replace(seen, passages=pictures))))
    assert "(picture f1) flag f1" in shown
    assert "(picture flags/mali.png) flag f2" in shown
    assert "(no answer)" in _shown(episode_record(episode(answer=None)))


def test_a_turn_of_which_an_agent_says_nothing_is_shown_as_it_was_written() -> None:
    done = episode(call("table", "t1"), answer="lion")
    for turn in done.turns:
        turn.action, turn.text = None, "the lion of Togo"
    shown = _shown(episode_record(done))
    assert "writes    the lion of Togo" in shown
    assert "invalid" not in shown
