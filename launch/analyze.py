r"""Shows what a run has changed in how its policy works: one command, one JSON file, one picture.

    python -m launch.analyze --workdir=runs/routerag_small
    python -m launch.analyze --workdir=RUN --limit=128 --top_k=1,2,3,5 --retrievers=bm25

Turns before and after, use of modes, accuracy against turns, tokens and cost, and the policy with each single mode come from
the episodes that the run left in WORKDIR/evaluation and its controls. Then the policy answers again with other numbers of
passages per search, and with other retrievers: an encoder's name puts it in the place of all others, `bm25` searches
passages by words. Writes analysis.json and analysis.png.
"""

from __future__ import annotations

from routerl_jax.parallel.platform import split_cpu, tune_process

if __name__ == "__main__":
    tune_process()

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from absl import flags

from launch.command import start

if TYPE_CHECKING:
    from routerl_jax.training.config import TrainConfig

FLAGS = flags.FLAGS


def define_flags() -> None:
    flags.DEFINE_string("workdir", None, "Directory of a finished run of launch.train.", required=True)
    flags.DEFINE_list("top_k", ["1", "2", "3", "5"], "Passages per search to try; empty: none.")
    flags.DEFINE_list("retrievers", [], "Encoders, or bm25, to try in the place of the run's.")
    flags.DEFINE_integer("limit", 128, "Questions of these trials; 0: all.")
    flags.DEFINE_string("output", None, "Directory of the results; default: WORKDIR/analysis.")


def main(_: Sequence[str]) -> None:
    from routerl_jax.evaluation.analysis import analyse, behaviour
    from routerl_jax.evaluation.analysis_figure import analysis_figure
    from routerl_jax.evaluation.records import read_records
    from routerl_jax.training.load import load_config

    workdir = pathlib.Path(FLAGS.workdir)
    config = load_config(workdir)
    normalizer = config.evaluation.normalizer
    places = {name: workdir / "evaluation" / f"{name}.jsonl" for name in ("warm_start", "trained")}
    places |= {name: workdir / "controls" / name / "evaluation" / "trained.jsonl" for name in config.controls}
    if not places["trained"].is_file():
        raise ValueError(f"{places['trained']} is not there: the run is not finished. Continue it with --resume")
    policies = {name: list(read_records(path)) for name, path in places.items() if path.is_file()}
    single = {path.stem: list(read_records(path)) for path in sorted((workdir / "evaluation").glob("only_*.jsonl"))}
    analysis: dict[str, Any] = {
        "policies": analyse(policies, normalizer),
        "single_mode": {name: behaviour(rows, normalizer) for name, rows in single.items()},
        **_trials(config, workdir),
    }
    output = pathlib.Path(FLAGS.output or workdir / "analysis")
    output.mkdir(parents=True, exist_ok=True)
    (output / "analysis.json").write_text(json.dumps(analysis, indent=2) + "\n")
    analysis_figure(analysis, output / "analysis.png")
    for section, rows in analysis.items():
        for name, row in rows.items():
            usage = ", ".join(f"{mode} {share:.2f}" for mode, share in row["mode_usage"].items())
            print(
                f"{section:<12} {name:<16} EM {row['em']:.3f}  turns {row['turns']:.2f}  searches {row['searches']:.2f}  "
                f"cost {row['retrieval_cost']:.2f}  tokens {row['tokens']:.0f}  {usage}"
            )
    print(f"{output / 'analysis.json'}   {output / 'analysis.png'}")


def _trials(config: TrainConfig, workdir: pathlib.Path) -> dict[str, Any]:
    """The trained policy with other numbers of passages, and with other retrievers."""
    ks, retrievers = [int(k) for k in FLAGS.top_k if k], [name for name in FLAGS.retrievers if name]
    if not ks and not retrievers:
        return {}
    from routerl_jax.evaluation.analysis import behaviour
    from routerl_jax.evaluation.benchmark import score
    from routerl_jax.evaluation.records import episode_record
    from routerl_jax.training.load import load_policy
    from routerl_jax.training.rl import make_engine, take_examples
    from routerl_jax.training.setup import build_mesh, build_recipe, open_knowledge

    split_cpu(config.mesh.cpu_devices)
    agent = build_recipe(config).agent
    questions = take_examples(config.data.test or config.data.train, config.data.test_range, "test", FLAGS.limit)
    engine = make_engine(config, load_policy(workdir, config, build_mesh(config.mesh)))
    tools = open_knowledge(config)

    def tried(agent: Any, tools: Any, progress: str) -> dict[str, Any]:
        _, episodes = score(agent, questions, engine, tools, config.evaluation.normalizer, progress=progress)
        return behaviour([episode_record(episode) for episode in episodes], config.evaluation.normalizer)

    return {
        "top_k": {str(k): tried(agent.with_passages(k), tools, f"k = {k}") for k in ks},
        "retrievers": {name: tried(agent, open_knowledge(with_retriever(config, name)), name) for name in retrievers},
    }


def with_retriever(config: TrainConfig, name: str) -> TrainConfig:
    """The configuration with another encoder in all its knowledge bases, or with BM25 (`bm25`) in the place of dense passages.

    Raises:
      ValueError: a knowledge base is not built by the run: only its directory is named.
    """
    changed = {}
    for key, spec in config.knowledge.items():
        if spec.kind != "hybrid" and not spec.source:
            raise ValueError(
                f"config.knowledge.{key} has no source to build it anew from, so no other retriever can be tried"
            )
        if name == "bm25":
            spec = dataclasses.replace(spec, kind="bm25", directory="") if spec.kind == "dense_text" else spec
        elif spec.kind != "hybrid":
            spec = dataclasses.replace(spec, encoder=name, directory="")
        changed[key] = spec
    return dataclasses.replace(config, knowledge=changed)


if __name__ == "__main__":
    start(main, define_flags)
