r"""Talks with a policy that searches, in the terminal or on a local page.

    python -m launch.chat --workdir=runs/quickstart
    python -m launch.chat --workdir=runs/quickstart --page                           # prints the address of a page
    python -m launch.chat --workdir=runs/mine --policy=exported                      # another model, the run's knowledge bases
    python -m launch.chat --policy=Qwen/Qwen2.5-1.5B-Instruct --config=configs/smollm2_search.py
    python -m launch.chat --workdir=runs/vrag_rl --knowledge=pages=DIRECTORY_OF_PDFS

Thoughts, searches, passages with their sources and the answer are shown as they come. /help lists commands: pictures, the
knowledge bases, a new conversation. Ctrl-C stops a reply. docs/viewer.md#chat
"""

from __future__ import annotations

from routerl_jax.parallel.platform import tune_process

if __name__ == "__main__":
    tune_process()

import contextlib
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
    flags.DEFINE_integer("step", None, "Of its checkpoints; default: the finished policy, or the newest checkpoint.")
    flags.DEFINE_string(
        "policy", None, "A model in the run's place, or with --config: a directory, hub id or packaged model."
    )
    config_flags.DEFINE_config_file("config", None, "Agent and knowledge bases for --policy, without a run.")
    flags.DEFINE_multi_string(
        "knowledge", [], "NAME=PLACE: another knowledge base in the place of the run's NAME, as in launch.ask."
    )
    flags.DEFINE_integer(
        "earlier",
        None,
        "Earlier questions with their answers that the policy is shown; default: 8 with a chat template, else 0.",
        lower_bound=0,
    )
    flags.DEFINE_float("temperature", 0.0, "Sampling temperature; 0 is greedy.", lower_bound=0)
    flags.DEFINE_integer("seed", 0, "Of the sampling.")
    flags.DEFINE_bool("page", False, "Talk on a local page instead.")
    flags.DEFINE_string("host", "127.0.0.1", "Page: interface to listen at.")
    flags.DEFINE_integer("port", 8766, "Page: port; 0 takes a free one.")
    flags.DEFINE_integer("rows", None, "Page: replies that are written at once (4).", lower_bound=1)


def main(_: Sequence[str]) -> None:
    from rich.console import Console

    from routerl_jax.extras.chat.session import open_chat
    from routerl_jax.extras.chat.terminal import Terminal
    from routerl_jax.services.asgi import check_port
    from routerl_jax.training.knowledge import with_knowledge
    from routerl_jax.training.load import load_config

    if bool(FLAGS.workdir) == (FLAGS.config is not None):
        raise ValueError("give either --workdir, the directory of a run, or --policy with a --config")
    if FLAGS.config is not None and not FLAGS.policy:
        raise ValueError("--config says how to search, and not who: give --policy, too")
    if FLAGS.policy and FLAGS.step is not None:
        raise ValueError("--step is of the run's checkpoints: give it without --policy")
    if not FLAGS.page and (stray := next((name for name in ("host", "port", "rows") if FLAGS[name].present), None)):
        raise ValueError(f"--{stray} is of the page: add --page")
    if FLAGS.page:
        check_port(FLAGS.host, FLAGS.port)
    workdir = pathlib.Path(FLAGS.workdir) if FLAGS.workdir else None
    config = with_knowledge(read_config() if workdir is None else load_config(workdir), FLAGS.knowledge)
    pictures = pathlib.Path(tempfile.mkdtemp(prefix="routerl-chat-")) if workdir is None else workdir / "chat"
    chat = open_chat(
        config,
        workdir,
        pictures,
        policy=FLAGS.policy or "",
        step=FLAGS.step,
        rows=(FLAGS.rows or 4) if FLAGS.page else 1,
        earlier=FLAGS.earlier,
        temperature=FLAGS.temperature,
        seed=FLAGS.seed,
        progress=not FLAGS.quiet,
    )
    if FLAGS.page:
        from routerl_jax.extras.chat.page import serve

        serve(chat, FLAGS.host, FLAGS.port)
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - keys of editing, and earlier lines
    try:
        Terminal(chat, Console(highlight=False)).run()
    finally:
        chat.close()


if __name__ == "__main__":
    start(main, define_flags, schemas)
