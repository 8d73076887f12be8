r"""Shows a run, live or finished, in the browser: curves, health, and its episodes, to filter, read and compare.

python -m launch.view --workdir=runs/quickstart                 # a local page; its address is printed
python -m launch.view --runs=runs/a,runs/b                      # several runs on one page
python -m launch.view --workdir=runs/quickstart --terminal      # episodes of the last logged step, in the terminal
python -m launch.view --workdir=runs/quickstart --terminal --step=0 --count=3
python -m launch.view --file=runs/quickstart/evaluation/trained.jsonl --wrong     # any file of records, in the terminal

In the terminal, what a policy was shown is drawn, with boxes where it looked closer, in looks/ beside the file.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence

from absl import flags

from launch.command import define_amount, start

FLAGS = flags.FLAGS
_OF_TERMINAL = ("step", "count", "wrong", "draw", "normalizer")
_OF_PAGE = ("host", "port")
_OF_A_RECORD = ("id", "sample", "question", "golden_answers", "prediction", "turns")


def define_flags() -> None:
    flags.DEFINE_string("workdir", None, "Directory of a run of launch.train, or --output of launch.evaluate.")
    flags.DEFINE_list("runs", None, "Several such directories for one page, with commas between.")
    flags.DEFINE_string("file", None, "A file of episode records instead, in the terminal.")
    flags.DEFINE_string("host", "127.0.0.1", "Where the page listens. Anybody who can reach it can read the records.")
    flags.DEFINE_integer("port", 8765, "Its port; 0: any that is free.", lower_bound=0, upper_bound=65535)
    flags.DEFINE_bool("terminal", False, "Episodes in the terminal instead of the page.")
    flags.DEFINE_integer("step", None, "Terminal: training step; default: the last one logged.")
    define_amount("count", 5, "Terminal: episodes to show; -1: all.")
    flags.DEFINE_bool("wrong", False, "Terminal: only episodes whose answer matches no gold answer.")
    flags.DEFINE_bool("draw", True, "Terminal: draw what the policy was shown, in looks/ beside the file.")
    flags.DEFINE_string("normalizer", None, "Terminal: how answers are compared; default: as the run of the file says.")


def main(_: Sequence[str]) -> None:
    sources = [name for name in ("workdir", "runs", "file") if FLAGS[name].value]
    if len(sources) != 1:
        raise ValueError("give one of --workdir, --runs and --file")
    terminal = FLAGS.terminal or bool(FLAGS.file)
    stray = next((name for name in (_OF_PAGE if terminal else _OF_TERMINAL) if FLAGS[name].present), None)
    if stray is not None:
        raise ValueError(f"--{stray} is of {'the page' if terminal else 'the terminal: add --terminal'}")
    if terminal and FLAGS.runs:
        raise ValueError("--terminal shows one run: give --workdir")
    if terminal:
        _print_episodes()
        return
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the accelerators are the run's
    from routerl_jax.core.packages import needs
    from routerl_jax.extras.viewer.runs import find_runs

    runs = find_runs(FLAGS.runs or [FLAGS.workdir])
    with needs("the page", "serve"):
        from routerl_jax.extras.viewer.app import serve
    serve(runs, FLAGS.host, FLAGS.port)


def _print_episodes() -> None:
    from rich.console import Console
    from rich.rule import Rule
    from rich.text import Text

    from routerl_jax.core.text import counted
    from routerl_jax.evaluation.records import read_records
    from routerl_jax.evaluation.trajectory import render, write_sheet
    from routerl_jax.extras.viewer.runs import normalizer_of
    from routerl_jax.rewards.metrics import exact_match

    path = _file()
    normalizer = FLAGS.normalizer or normalizer_of(path.parent)
    console = Console()
    shown = 0
    for record in read_records(path):
        if missing := [key for key in _OF_A_RECORD if key not in record]:
            raise ValueError(
                f"{path} holds no records of episodes: a line has no {missing[0]!r}; give a file below episodes/ or "
                "evaluation/ of a run"
            )
        golds = record["golden_answers"]
        if FLAGS.wrong and (not golds or exact_match(record["prediction"], golds, normalizer) == 1):
            continue
        console.print(Rule(Text(f"{record['id']}, sample {record['sample']}"), style="dim"))
        drawn = write_sheet(record, path.parent, path.parent / "looks") if FLAGS.draw else None
        console.print(render(record, drawn))
        shown += 1
        if shown == FLAGS.count:
            break
    console.print(Text(f"\n{counted(shown, 'episode')} of {path}"), style="dim")


def _file() -> pathlib.Path:
    if FLAGS.file:
        path = pathlib.Path(FLAGS.file)
        if not path.is_file():
            raise ValueError(f"{path} does not exist")
        return path
    files = sorted((pathlib.Path(FLAGS.workdir) / "episodes").glob("step-*.jsonl"))
    if not files:
        raise ValueError(f"{FLAGS.workdir} has no recorded episodes")
    if FLAGS.step is None:
        return files[-1]
    wanted = files[0].with_name(f"step-{FLAGS.step:06d}.jsonl")
    if wanted not in files:
        raise ValueError(f"step {FLAGS.step} was not logged; the last one is {files[-1].stem}")
    return wanted


if __name__ == "__main__":
    start(main, define_flags)
