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

draws figures of a paper alone instead, each as NAME.png (launch.evaluate --report=help lists them). --workdir may be the
directory of a comparison (launch.evaluate), too. For vrag_rl.figure3 a run's policy answers the first --limit questions as
vanilla RAG with --top_k pages at once.
"""

from __future__ import annotations

from routerl_jax.parallel.platform import split_cpu, tune_process

if __name__ == "__main__":
    tune_process()

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from absl import flags

from launch.command import check_writable, start

if TYPE_CHECKING:
    from routerl_jax.training.config import TrainConfig

FLAGS = flags.FLAGS


def define_flags() -> None:
    flags.DEFINE_string("workdir", None, "Directory of a finished run of launch.train.", required=True)
    flags.DEFINE_list("figures", [], "Only these figures of papers, such as vrag_rl.figure4; of a comparison, too.")
    flags.DEFINE_bool("single_modes", True, "Try the policy with each mode alone, where it has several.")
    flags.DEFINE_list("top_k", ["1", "2", "3", "5"], "Passages per search to try; empty: none.")
    flags.DEFINE_list("retrievers", [], "Encoders, or bm25, to try in the place of the run's.")
    flags.DEFINE_integer("limit", 128, "Questions of these trials; 0: all.", lower_bound=0)
    flags.DEFINE_string("output", None, "Directory of the results; default: WORKDIR/analysis.")


def main(_: Sequence[str]) -> None:
    from routerl_jax.evaluation.analysis import analyse, analyse_calibration, analyse_workflows, training_curves
    from routerl_jax.evaluation.analysis_figure import analysis_figure
    from routerl_jax.training import run_files
    from routerl_jax.training.load import load_config
    from routerl_jax.training.trials import Trials

    if FLAGS.figures:
        _draw()
        return
    ks, retrievers = [_number(k) for k in FLAGS.top_k if k], [name for name in FLAGS.retrievers if name]
    workdir = pathlib.Path(FLAGS.workdir)
    config = load_config(workdir)
    split_cpu(config.mesh.cpu_devices)
    output = pathlib.Path(FLAGS.output or workdir / "analysis")
    check_writable("--output" if FLAGS.output else "--workdir", output)
    normalizer, budgets = config.evaluation.normalizer, run_files.search_budgets(config)
    policies = run_files.policy_records(config, workdir)
    policy_table = analyse(policies, normalizer, budgets[run_files.TRAINED])
    workflows = analyse_workflows(run_files.workflow_records(config, workdir), normalizer, budgets)
    rows = run_files.training_rows(config, workdir)
    trials = Trials(config, workdir, policies[run_files.TRAINED], FLAGS.limit)
    analysis: dict[str, Any] = {
        "policies": _named(policy_table, config),
        "workflows": {name: _named(table_of_policy, config) for name, table_of_policy in workflows.items()},
        "calibration": analyse_calibration(
            run_files.kept_calibration(workdir), config.evaluation.calibration.penalty, policy_table[run_files.TRAINED]
        ),
        "training": _named(training_curves(rows), config),
        "retrievers": trials.retrievers(retrievers),
        "top_k": trials.top_k(ks),
        "single_mode": trials.single_modes() if FLAGS.single_modes else {},
    }
    output.mkdir(parents=True, exist_ok=True)
    (output / "analysis.json").write_text(json.dumps(analysis, indent=2) + "\n")
    before, after = (config.evaluation.names.get(name, name) for name in (run_files.START, run_files.TRAINED))
    analysis_figure(analysis, output / "analysis.png", rows[run_files.TRAINED], policy=after, start=before)
    sections = {name: analysis[name] for name in ("policies", "retrievers", "top_k", "single_mode")}
    _print(sections | analysis["workflows"])
    print(f"numbers: {output / 'analysis.json'}   figures: {output / 'analysis.png'}")


def _draw() -> None:
    """Draws figures of papers, each alone."""
    from routerl_jax.comparison.papers import known as papers  # noqa: F401 - they register themselves
    from routerl_jax.comparison.papers.figure import drawing
    from routerl_jax.comparison.papers.measured import TEST, read_measured
    from routerl_jax.core.config import naming
    from routerl_jax.evaluation.figures import save_figure

    with naming("--figures"):
        drawings = {name: drawing(name) for name in FLAGS.figures}
    workdir, ks = pathlib.Path(FLAGS.workdir), [_number(k) for k in FLAGS.top_k if k]
    output = pathlib.Path(FLAGS.output or workdir / "analysis")
    check_writable("--output" if FLAGS.output else "--workdir", output)
    for name, figure in drawings.items():
        with naming(name):
            measured = read_measured(workdir, figure.recipe, figure.methods)
        output.mkdir(parents=True, exist_ok=True)
        if figure.tries and TEST in measured.benchmarks:
            tried = _pages_at_once(workdir, ks)
            (output / f"{name}.json").write_text(json.dumps(tried, indent=2) + "\n")
            measured = dataclasses.replace(measured, at_once={TEST: tried})
        save_figure(figure.draw(measured), output / f"{name}.png")
        print(f"{name}: {output / f'{name}.png'}")


def _pages_at_once(workdir: pathlib.Path, ks: Sequence[int]) -> dict[int, Any]:
    """A run's policy as vanilla RAG, by number of pages at once."""
    from routerl_jax.training import run_files
    from routerl_jax.training.load import load_config
    from routerl_jax.training.trials import Trials

    config = load_config(workdir)
    split_cpu(config.mesh.cpu_devices)
    trained = run_files.policy_records(config, workdir)[run_files.TRAINED]
    return Trials(config, workdir, trained, FLAGS.limit).pages_at_once(ks)


def _print(sections: Mapping[str, Mapping[str, Any]]) -> None:
    """Prints a row for each agent of each section: what it answered, and what that took."""
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
