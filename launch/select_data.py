r"""Sorts questions by how many attempts a policy needs, and makes training sets from them (R1-Searcher's data selection).

    python -m launch.select_data --config=configs/smollm2_search.py --workdir=runs/selection --config.data.train=questions.jsonl
    python -m launch.select_data --config=.. --workdir=.. --stage1=hotpotqa/medium:200,2wiki/medium:150 --resume

The configuration's policy and agent answer the questions of config.data.train, with its knowledge bases and sampling. The
program writes difficulty.jsonl (every question), stage_1.jsonl and stage_2.jsonl (FlashRAG rows), difficulty.png, and rounds/
with every attempt. --resume continues a killed job where it was.
"""

from __future__ import annotations

from routerl_jax.parallel.platform import split_cpu, tune_process

if __name__ == "__main__":
    tune_process()

import dataclasses
import functools
import pathlib
from collections.abc import Sequence

from absl import flags
from ml_collections import config_flags

from launch.command import check_writable, read_config, start
from launch.command import run_schemas as schemas

FLAGS = flags.FLAGS


def define_flags() -> None:
    config_flags.DEFINE_config_file("config", None, "Configuration file, e.g. configs/smollm2_search.py.")
    flags.DEFINE_string("workdir", None, "Directory of the job.", required=True)
    flags.DEFINE_bool("resume", False, "Continue the job in --workdir.")
    flags.DEFINE_integer("easy_below", 10, "Answered in fewer attempts than this: easy.")
    flags.DEFINE_integer("hard_above", 20, "Not answered in so many attempts: hard.")
    flags.DEFINE_integer(
        "per_round", 5, "Attempts per question and round; only unanswered questions go on to the next."
    )
    flags.DEFINE_integer("portion", 256, "Questions whose results are written at a time.")
    flags.DEFINE_string("metric", "em", "An attempt is right where this is 1: em, cover_em, substring_em, f1.")
    flags.DEFINE_list("stage1", ["medium:350"], "[DATASET/]LEVEL:COUNT, with commas between; COUNT may be `all`.")
    flags.DEFINE_list("stage2", ["medium:all", "hard:all"], "As --stage1; without what is in stage 1.")
    flags.mark_flag_as_required("config")


def main(_: Sequence[str]) -> None:
    from routerl_jax.core.files import check_same
    from routerl_jax.core.text import counted
    from routerl_jax.extras.curation.questions import counts_of
    from routerl_jax.extras.curation.selection import SelectionConfig, policy_attempts, select
    from routerl_jax.parallel.workdir import directory_lock
    from routerl_jax.training.setup import build_policy, build_recipe, open_examples

    config = read_config()
    check_writable("--workdir", FLAGS.workdir)
    split_cpu(config.mesh.cpu_devices)
    selection = SelectionConfig(
        easy_below=FLAGS.easy_below,
        hard_above=FLAGS.hard_above,
        per_round=FLAGS.per_round,
        portion=FLAGS.portion,
        metric=FLAGS.metric,
        normalizer=config.evaluation.normalizer,
        seed=config.seed,
        stage1=counts_of(FLAGS.stage1, "--stage1"),
        stage2=counts_of(FLAGS.stage2, "--stage2"),
    )
    # opened before the workdir is locked: a missing file or a bad setting leaves no lock behind
    source = open_examples(config.data.train, config.data.train_range, "config.data.train")
    recipe = build_recipe(config)
    workdir = pathlib.Path(FLAGS.workdir)
    parts = ("seed", "recipe", "model", "agent", "knowledge", "data", "rollout")
    attempted = {key: value for key, value in dataclasses.asdict(selection).items() if key not in ("stage1", "stage2")}
    made_of = {**attempted, **{key: dataclasses.asdict(config)[key] for key in parts}}
    made_of["max_length"] = config.engine.max_length
    other = "use another --workdir"
    if check_same(made_of, workdir / "selection.json", f"resume with the same ones, or {other}") and not FLAGS.resume:
        raise ValueError(f"{workdir} holds a selection already; pass --resume to continue it, or {other}")

    attempt = policy_attempts(config, functools.partial(build_policy, config), lambda _: recipe.agent, workdir)
    with directory_lock(workdir):
        report = select(source, attempt, selection, workdir)
    shares = ", ".join(f"{count} {level}" for level, count in report.counts.items())
    print(f"{counted(len(source), 'question')}: {shares}")
    print(f"stage 1: {counted(report.stage1, 'question')}, stage 2: {report.stage2}, in {workdir}")
    if report.failed_searches:
        print(f"searches that failed, which counts against their questions: {report.failed_searches}")
    for line in report.missing:
        print(f"{line}; the set is smaller")


if __name__ == "__main__":
    start(main, define_flags, schemas)
