r"""Shows recorded episodes of a run, or of any file that launch.train or launch.evaluate wrote.

python -m launch.view --workdir=runs/quickstart                 # the last logged step
python -m launch.view --workdir=runs/quickstart --step=0 --count=3
python -m launch.view --file=runs/quickstart/evaluation/trained.jsonl --wrong

Pictures that a policy was shown are drawn in looks/ beside the file, with boxes where it looked closer.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence

from absl import flags

from launch.command import start

FLAGS = flags.FLAGS


def define_flags() -> None:
    flags.DEFINE_string("workdir", None, "Directory of a run of launch.train.")
    flags.DEFINE_integer("step", None, "Training step; default: the last one logged.")
    flags.DEFINE_string("file", None, "A file of episode records instead of a workdir.")
    flags.DEFINE_integer("count", 5, "Episodes to show; 0: all.")
    flags.DEFINE_bool("wrong", False, "Only episodes whose answer matches no gold answer.")
    flags.DEFINE_bool("draw", True, "Draw what the policy was shown, in looks/ beside the file.")
    flags.DEFINE_string(
        "normalizer", None, "How answers are compared; default: the setting of the run that wrote the file."
    )


def main(_: Sequence[str]) -> None:
    from rich.console import Console
    from rich.rule import Rule
    from rich.text import Text

    from routerl_jax.evaluation.records import read_records
    from routerl_jax.evaluation.sheets import write_sheet
    from routerl_jax.evaluation.trajectory import render
    from routerl_jax.rewards.metrics import exact_match

    path = _file()
    normalizer = FLAGS.normalizer or _normalizer(path)
    console = Console()
    shown = 0
    for record in read_records(path):
        golds = record["golden_answers"]
        if FLAGS.wrong and (not golds or exact_match(record["prediction"], golds, normalizer) == 1):
            continue
        console.print(Rule(Text(f"{record['id']}, sample {record['sample']}"), style="dim"))
        drawn = write_sheet(record, path.parent, path.parent / "looks") if FLAGS.draw else None
        console.print(render(record, drawn))
        shown += 1
        if FLAGS.count and shown == FLAGS.count:
            break
    console.print(Text(f"\n{shown} episodes of {path}"), style="dim")


def _normalizer(path: pathlib.Path) -> str:
    """The normalizer that launch.evaluate recorded beside the file, else that of the run around it, else search_r1."""
    results = path.with_name("results.json")
    if results.is_file() and (recorded := json.loads(results.read_text()).get("normalizer")):
        return recorded
    for directory in path.resolve().parents:
        if (config := directory / "config.json").is_file():
            recorded = json.loads(config.read_text()).get("evaluation", {}).get("normalizer")
            return recorded or "search_r1"
    return "search_r1"


def _file() -> pathlib.Path:
    if bool(FLAGS.file) == bool(FLAGS.workdir):
        raise ValueError("give either --workdir or --file")
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
