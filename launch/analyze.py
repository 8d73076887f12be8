r"""Shows what a run has changed in how its policy works: one command, one JSON file, one picture.

    python -m launch.analyze --workdir=runs/routerag_small
    python -m launch.analyze --workdir=RUN --limit=128 --top_k=1,2,3,5 --retrievers=bm25

Turns before and after, use of modes (in all, and search by search), searches of right answers, and accuracy against turns,
tokens and cost come from the episodes that the run left in WORKDIR/evaluation and its controls, reward and length over training
from metrics.jsonl. Then the policy answers the first --limit test questions again: with every search sent to one mode, with
other numbers of passages per search, and with other retrievers (an encoder's name puts it in the place of all others, `bm25`
searches passages by words). Writes analysis.json and analysis.png.
"""

from __future__ import annotations

from routerl_jax.parallel.platform import split_cpu, tune_process

if __name__ == "__main__":
    tune_process()

import json
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from absl import flags

from launch.command import check_writable, start

if TYPE_CHECKING:
    from routerl_jax.training.config import TrainConfig

FLAGS = flags.FLAGS


def define_flags() -> None:
    flags.DEFINE_string("workdir", None, "Directory of a finished run of launch.train.", required=True)
    flags.DEFINE_bool("single_modes", True, "Try the policy with each mode alone, where it has several.")
    flags.DEFINE_list("top_k", ["1", "2", "3", "5"], "Passages per search to try; empty: none.")
    flags.DEFINE_list("retrievers", [], "Encoders, or bm25, to try in the place of the run's.")
    flags.DEFINE_integer("limit", 128, "Questions of these trials; 0: all.", lower_bound=0)
    flags.DEFINE_string("output", None, "Directory of the results; default: WORKDIR/analysis.")


def main(_: Sequence[str]) -> None:
    from routerl_jax.evaluation.analysis import analyse
    from routerl_jax.evaluation.analysis_figure import analysis_figure
    from routerl_jax.training.load import load_config
    from routerl_jax.training.trials import Trials
    from routerl_jax.training.writer import read_metrics

    ks, retrievers = [_number(k) for k in FLAGS.top_k if k], [name for name in FLAGS.retrievers if name]
    workdir = pathlib.Path(FLAGS.workdir)
    config = load_config(workdir)
    output = pathlib.Path(FLAGS.output or workdir / "analysis")
    check_writable("--output" if FLAGS.output else "--workdir", output)
    policies = _policies(config, workdir)
    analysis: dict[str, Any] = {"policies": analyse(policies, config.evaluation.normalizer)}
    split_cpu(config.mesh.cpu_devices)
    trials = Trials(config, workdir, policies["trained"], FLAGS.limit)
    analysis["retrievers"] = trials.retrievers(retrievers)
    analysis["top_k"] = trials.top_k(ks)
    analysis["single_mode"] = trials.single_modes() if FLAGS.single_modes else {}
    names = config.evaluation.names
    analysis["policies"] = {names.get(name, name): row for name, row in analysis["policies"].items()}
    output.mkdir(parents=True, exist_ok=True)
    (output / "analysis.json").write_text(json.dumps(analysis, indent=2) + "\n")
    policy = names.get("trained", "trained")
    analysis_figure(analysis, output / "analysis.png", read_metrics(workdir), policy=policy)
    for section, rows in analysis.items():
        for name, row in rows.items():
            usage = ", ".join(f"{mode} {share:.2f}" for mode, share in row["mode_usage"].items())
            print(
                f"{section:<12} {name:<18} EM {row['em']:.3f}  turns {row['turns']:.2f}  searches {row['searches']:.2f}  "
                f"cost {row['retrieval_cost']:.2f}  tokens {row['tokens']:.0f}  {usage}"
            )
    print(f"{output / 'analysis.json'}   {output / 'analysis.png'}")


def _policies(config: TrainConfig, workdir: pathlib.Path) -> dict[str, list[dict[str, Any]]]:
    """The episodes of the run's policies on its test questions: at its start, after its stages, at its end, of its controls."""
    from routerl_jax.evaluation.records import read_records
    from routerl_jax.training.controls import control_directory

    stages = sorted(config.stages, key=lambda name: config.stages[name].start)
    places = {name: workdir / "evaluation" / f"{name}.jsonl" for name in ("warm_start", *stages, "trained")}
    places |= {name: control_directory(workdir, name) / "evaluation" / "trained.jsonl" for name in config.controls}
    if not places["trained"].is_file():
        raise ValueError(f"{places['trained']} is not there: the run is not finished. Continue it with --resume")
    return {name: list(read_records(path)) for name, path in places.items() if path.is_file()}


def _number(text: str) -> int:
    if not text.strip().isdecimal() or not int(text):
        raise ValueError(f"--top_k: {text!r} is no number of passages; expected such as --top_k=1,2,3,5")
    return int(text)


if __name__ == "__main__":
    start(main, define_flags)
