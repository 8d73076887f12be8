r"""Asks a trained policy, or a chat model in its place, one question and shows what it does.

python -m launch.ask --workdir=runs/quickstart "What is the capital of the country that produces the most Ruthenium?"
python -m launch.ask --workdir=runs/quickstart --temperature=1 --samples=3 "When did Ghana become independent?"
python -m launch.ask --workdir=runs/r1_router --image=flag.png "What is the capital of the country with this flag?"
python -m launch.ask --workdir=runs/vrag_rl --knowledge=pages=DIRECTORY_OF_PDFS "Which region grew fastest?"
python -m launch.ask --config=configs/smollm2_search.py --config.agent.instruct=True --config.chat_model.model=NAME \
    --config.chat_model.base_url=URL "..."

Pictures that the policy was shown are drawn in WORKDIR/asked, with boxes where it looked closer.
"""

from __future__ import annotations

from routerl_jax.parallel.platform import split_cpu, tune_process

if __name__ == "__main__":
    tune_process()

import contextlib
import json
import pathlib
import tempfile
from collections.abc import Sequence

from absl import flags
from ml_collections import config_flags

from launch.command import read_config, start
from launch.command import run_schemas as schemas

FLAGS = flags.FLAGS


def define_flags() -> None:
    flags.DEFINE_string("workdir", None, "Directory of a run of launch.train.")
    config_flags.DEFINE_config_file("config", None, "Agent and knowledge bases for config.chat_model, instead.")
    flags.DEFINE_multi_string("image", [], "A file with a picture that the question is about; may be given again.")
    flags.DEFINE_multi_string(
        "knowledge",
        [],
        "NAME=PLACE: replaces the run's knowledge base NAME by another (a directory or URL), or by one built from documents.",
    )
    flags.DEFINE_float("temperature", 0.0, "Sampling temperature; 0 is greedy.")
    flags.DEFINE_integer("samples", 1, "Attempts to show.", lower_bound=1)
    flags.DEFINE_integer("seed", 0, "Of the sampling.")
    flags.DEFINE_bool("json", False, "Print one JSON object per attempt instead.")


def main(argv: Sequence[str]) -> None:
    if len(argv) != 2 or not argv[1].strip():
        raise ValueError('give exactly one question, in quotes: python -m launch.ask --workdir=DIR "..."')
    from rich.console import Console
    from rich.rule import Rule

    from routerl_jax.agents.driver import run
    from routerl_jax.core.config import naming
    from routerl_jax.core.types import Example
    from routerl_jax.engine.sampling import Sampling
    from routerl_jax.evaluation.records import PictureFiles, episode_record
    from routerl_jax.evaluation.trajectory import render, write_sheet
    from routerl_jax.models.images import decode_image
    from routerl_jax.services.policy import ChatModel
    from routerl_jax.training.knowledge import with_knowledge
    from routerl_jax.training.load import load_config, load_policy
    from routerl_jax.training.setup import build_recipe, evaluated_agent, make_engine, open_knowledge

    images = tuple(map(pathlib.Path, FLAGS.image))
    for image in images:
        decode_image(image)  # an error here names the file
    if bool(FLAGS.workdir) == (FLAGS.config is not None):
        raise ValueError("give either --workdir or --config with a config.chat_model.model")
    if FLAGS.workdir:
        workdir = pathlib.Path(FLAGS.workdir)
        config = with_knowledge(load_config(workdir), FLAGS.knowledge)
        split_cpu(config.mesh.cpu_devices)
        engine = make_engine(config, load_policy(workdir, config), rows=FLAGS.samples)
        described = f"the policy of {workdir}, a {engine.config.model_type} model,"
    else:
        config = with_knowledge(read_config(), FLAGS.knowledge)
        with naming("config.chat_model"):
            engine = ChatModel(config.chat_model)
        workdir = pathlib.Path(tempfile.mkdtemp(prefix="routerl-ask-"))  # for pictures that were shown
        described = f"the chat model {engine.name}, as config.chat_model.pictures says,"
    if FLAGS.image and engine.images is None:
        raise ValueError(f"--image={FLAGS.image[0]}: {described} sees no pictures")
    example = Example(id="question", question=argv[1].strip(), answers=(), images=images)
    with contextlib.ExitStack() as stack:
        if isinstance(engine, ChatModel):
            stack.callback(engine.end)
        episodes = run(
            evaluated_agent(config, build_recipe(config)),
            [example],
            engine,
            open_knowledge(config, workdir, progress=not FLAGS.json),
            samples=FLAGS.samples,
            seed=FLAGS.seed,
            tool_timeout=config.rollout.tool_timeout,
            sampling=Sampling(temperature=FLAGS.temperature),
        )
    console, pictures = Console(), PictureFiles(workdir)
    for episode in episodes:
        record = episode_record(episode, pictures)
        if FLAGS.json:
            print(json.dumps(record, ensure_ascii=False))
            continue
        if FLAGS.samples > 1:
            console.print(Rule(f"attempt {episode.sample + 1}", style="dim"))
        console.print(render(record, write_sheet(record, workdir, workdir / "asked")))


if __name__ == "__main__":
    start(main, define_flags, schemas, arguments=True)
