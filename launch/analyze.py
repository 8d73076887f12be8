r"""Shows how training changed the behaviour of a policy: one command, one JSON file, one picture.

    python -m launch.analyze --workdir=runs/routerag_small
    python -m launch.analyze --workdir=RUN --limit=128 --top_k=1,2,3,5 --retrievers=bm25

The first part reads the files of the run:

- For its policies on the test questions (WORKDIR/evaluation, and its controls): right and wrong answers with and without a
  search, turns, use of modes (in all, and search by search), searches of right answers, and accuracy against turns, tokens and
  cost; all this by kind of question too.
- For the start and the trained policy: EM of both as the same baseline (config.evaluation.before_baselines), and what a price
  on searches can decide (config.evaluation.calibration).
- For training, and the training of controls: reward, length and searches over the steps.

In the second part the policy answers the first --limit test questions again: with every search sent to one mode, with other
numbers of passages per search, and with other retrievers (an encoder's name replaces all others; `bm25` searches passages by
words). Writes analysis.json and analysis.png.

    python -m launch.analyze --workdir=runs/vrag_rl_small --figures=vrag_rl.figure4,vrag_rl.figure5
    python -m launch.analyze --figures=r1_searcher.figure3 --rows=em=runs/a,f1=runs/b
    python -m launch.analyze --figures=help

draws figures of papers alone instead, each as NAME.png, and marks what was not run. --workdir may be the directory of a
comparison (launch.evaluate), too; --rows names runs of a figure's methods. For figures by the number of documents (or of pages
at once), a run's policy answers the first --limit questions with each of --top_k.
"""

from __future__ import annotations

from routerl_jax.parallel.platform import split_cpu, tune_process

if __name__ == "__main__":
    tune_process()

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from absl import flags

from launch.command import check_writable, define_amount, start

if TYPE_CHECKING:
    from routerl_jax.training.config import TrainConfig

FLAGS = flags.FLAGS


def define_flags() -> None:
    flags.DEFINE_string("workdir", None, "Directory of a finished run of launch.train.")
    flags.DEFINE_list(
        "figures", [], "Only these figures of papers, such as vrag_rl.figure4, or help; of a comparison, too."
    )
    flags.DEFINE_list(
        "rows", [], "Of figures: runs by the keys that --figures=help lists, such as em=runs/a,f1=runs/b."
    )
    flags.DEFINE_bool("single_modes", True, "Try the policy with each mode alone, where it has several.")
    flags.DEFINE_list("top_k", ["1", "2", "3", "5"], "Passages per search to try; empty: none.")
    flags.DEFINE_list("retrievers", [], "Encoders, or bm25, to try in the place of the run's.")
    define_amount("limit", 128, "Questions of these trials; -1: all.")
    flags.DEFINE_string("output", None, "Directory of the results; default: WORKDIR/analysis.")


def main(_: Sequence[str]) -> None:
    from routerl_jax.core.console import print_listing
    from routerl_jax.extras.analysis.figure import analysis_figure
    from routerl_jax.extras.analysis.numbers import analyse, analyse_calibration, analyse_workflows, training_curves
    from routerl_jax.extras.analysis.trials import Trials
    from routerl_jax.extras.comparison.papers.figure import FIGURE_HEADINGS, listing
    from routerl_jax.training import load

    if "help" in FLAGS.figures:
        print_listing("figures", FIGURE_HEADINGS, listing())
        return
    if FLAGS.figures:
        _draw()
        return
    if FLAGS.rows:
        raise ValueError("--rows are of --figures: name the figures")
    if FLAGS.workdir is None:
        raise ValueError(
            "--workdir is missing: give the directory of a finished run (--figures=help: what else there is)"
        )
    ks, retrievers = [_number(k) for k in FLAGS.top_k if k], [name for name in FLAGS.retrievers if name]
    workdir = pathlib.Path(FLAGS.workdir)
    config = load.load_config(workdir)
    split_cpu(config.mesh.cpu_devices)
    output = pathlib.Path(FLAGS.output or workdir / "analysis")
    check_writable("--output" if FLAGS.output else "--workdir", output)
    normalizer, budgets = config.evaluation.normalizer, load.search_budgets(config)
    policies = load.policy_records(config, workdir)
    policy_table = analyse(policies, normalizer, budgets[load.TRAINED])
    workflows = analyse_workflows(load.workflow_records(config, workdir), normalizer, budgets)
    rows = load.training_rows(config, workdir)
    trials = Trials(config, workdir, policies[load.TRAINED], FLAGS.limit)
    analysis: dict[str, Any] = {
        "policies": _named(policy_table, config),
        "workflows": {name: _named(table_of_policy, config) for name, table_of_policy in workflows.items()},
        "calibration": analyse_calibration(
            load.kept_calibration(workdir), config.evaluation.calibration.penalty, policy_table[load.TRAINED]
        ),
        "training": _named(training_curves(rows), config),
        "retrievers": trials.retrievers(retrievers),
        "top_k": trials.top_k(ks),
        "single_mode": trials.single_modes() if FLAGS.single_modes else {},
    }
    output.mkdir(parents=True, exist_ok=True)
    (output / "analysis.json").write_text(json.dumps(analysis, indent=2) + "\n")
    before, after = (config.evaluation.names.get(name, name) for name in (load.START, load.TRAINED))
    analysis_figure(analysis, output / "analysis.png", rows[load.TRAINED], policy=after, start=before)
    sections = {name: analysis[name] for name in ("policies", "retrievers", "top_k", "single_mode")}
    _print(sections | analysis["workflows"])
    print(f"numbers: {output / 'analysis.json'}   figures: {output / 'analysis.png'}")


def _draw() -> None:
    """Draws figures of papers, each alone."""
    from routerl_jax.core.config import naming
    from routerl_jax.extras.comparison.papers.drawn import draw_figures

    if FLAGS.output is None and FLAGS.workdir is None:
        raise ValueError("--output is missing: figures of --rows alone need a directory")
    workdir = FLAGS.workdir and pathlib.Path(FLAGS.workdir)
    output = pathlib.Path(FLAGS.output or workdir / "analysis")
    check_writable("--output" if FLAGS.output else "--workdir", output)
    rows = dict(_row(text) for text in FLAGS.rows)
    ks = [_number(k) for k in FLAGS.top_k if k]
    with naming("--figures"):
        drawn = draw_figures(FLAGS.figures, workdir, output, rows=rows, ks=ks, limit=FLAGS.limit)
    for name, path in drawn.items():
        print(f"{name}: {path}")


def _row(text: str) -> tuple[str, pathlib.Path]:
    key, equals, directory = text.partition("=")
    if not (key and equals and directory):
        raise ValueError(f"--rows: {text!r} is no KEY=DIRECTORY; expected such as --rows=em=runs/a,f1=runs/b")
    return key, pathlib.Path(directory)


def _print(sections: Mapping[str, Mapping[str, Any]]) -> None:
    """Prints a row for each agent of each section: its answers and their cost."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from routerl_jax.core.console import open_console
    from routerl_jax.evaluation.report import title

    printed = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    printed.add_column("")
    printed.add_column("")
    for heading in ("EM %", "turns", "searches", "cost", "tokens", "n"):
        printed.add_column(heading, justify="right")
    printed.add_column("searches went to")
    for section, table in sections.items():
        for i, (name, row) in enumerate(table.items()):
            cells = (
                "" if i else section,
                title(name),
                f"{row['em'] * 100:.1f}",
                *(f"{row[key]:.2f}" for key in ("turns", "searches", "retrieval_cost")),
                *(f"{row['tokens']:.0f}", str(row["n"])),
                ", ".join(f"{mode} {share * 100:.0f} %" for mode, share in row["mode_usage"].items()),
            )
            printed.add_row(*map(Text, cells), end_section=i + 1 == len(table))
    open_console().print(printed)


def _named(rows: Mapping[str, Any], config: TrainConfig) -> dict[str, Any]:
    """The rows under the names that config.evaluation.names gives to policies."""
    return {config.evaluation.names.get(name, name): row for name, row in rows.items()}


def _number(text: str) -> int:
    if not text.strip().isdecimal() or not int(text):
        raise ValueError(f"--top_k: {text!r} is no number of passages; expected such as --top_k=1,2,3,5")
    return int(text)


if __name__ == "__main__":
    start(main, define_flags)
