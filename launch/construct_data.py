r"""Makes training data with models: a configuration says which job it is.

    python -m launch.construct_data --config=configs/r1_router_data.py --workdir=data/golden \
        --config.data=2wiki.json,open_wikitable.jsonl --config.llm.model=NAME --config.llm.base_url=http://host:8000/v1
    python -m launch.construct_data --config=configs/mmsearch_r1_data.py:balance --workdir=data/balance \
        --config.policy=runs/pool

| job | what it makes |
|---|---|
| golden | R1-Router's golden trajectories: a language model works on questions step by step; right trajectories are kept |
| balance | questions sorted by the searches that a trained policy needs, and a balanced sample of them (MMSearch-R1) |
| sft | demonstrations: a language model searches and answers like MMSearch-R1's policy; right ones are kept |
| vqa | questions about pictures of concepts, in equal numbers per kind of knowledge (MMSearch-R1) |
| experts | demonstrations: a planner searches pages, a grounder says where it looks; right ones are kept (VRAG-RL) |

A job writes its files, report.md and report.json into the workdir (docs/data.md). After a kill, run the same command again: the
job continues where it was, and no finished question is asked again.
"""

from __future__ import annotations

from routerl_jax.parallel.platform import split_cpu, tune_process

if __name__ == "__main__":
    tune_process()

import functools
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from absl import flags
from ml_collections import config_flags

from launch.command import check_writable, read_config_as, read_config_dict, start

if TYPE_CHECKING:
    from routerl_jax.extras.curation.balance import BalanceConfig
    from routerl_jax.extras.curation.experts import ExpertJobConfig
    from routerl_jax.extras.curation.golden import ConstructConfig
    from routerl_jax.extras.curation.teaching import TeachingConfig
    from routerl_jax.extras.curation.vqa import VqaConfig

FLAGS = flags.FLAGS


def define_flags() -> None:
    """Defines this program's flags."""
    config_flags.DEFINE_config_file(
        "config",
        None,
        "Configuration: configs/r1_router_data.py or configs/mmsearch_r1_data.py:JOB; keys as --config.key=value.",
    )
    flags.DEFINE_string("workdir", None, "Directory of the job.", required=True)
    flags.DEFINE_bool("overwrite", False, "Throw away the job of other settings that is in --workdir.")
    flags.DEFINE_bool("json", False, "Print the report as one JSON object.")
    flags.mark_flag_as_required("config")


def schemas() -> dict[str, type]:
    """The classes of configurations that --config may name, by their description."""
    from routerl_jax.extras.curation.balance import BalanceConfig
    from routerl_jax.extras.curation.experts import ExpertJobConfig
    from routerl_jax.extras.curation.golden import ConstructConfig
    from routerl_jax.extras.curation.teaching import TeachingConfig
    from routerl_jax.extras.curation.vqa import VqaConfig

    return {
        "A job: golden": ConstructConfig,
        "A job: balance": BalanceConfig,
        "A job: sft": TeachingConfig,
        "A job: vqa": VqaConfig,
        "A job: experts": ExpertJobConfig,
    }


def golden(config: ConstructConfig, workdir: pathlib.Path) -> Any:
    """The report of a job of golden trajectories."""
    from routerl_jax.extras.curation.golden import construct
    from routerl_jax.services.load import chat_model
    from routerl_jax.training.knowledge import open_knowledge_bases

    def resources() -> Any:
        teacher = chat_model(config.llm) if config.teacher == "model" else None
        return teacher, open_knowledge_bases(config.knowledge)

    return construct(config, workdir, resources, overwrite=FLAGS.overwrite)


def balance(config: BalanceConfig, workdir: pathlib.Path) -> Any:
    """The report of a job that balances questions."""
    from routerl_jax.extras.curation.balance import balance, open_run, probing
    from routerl_jax.extras.curation.selection import policy_attempts
    from routerl_jax.training.load import load_policy
    from routerl_jax.training.setup import open_examples

    policy = pathlib.Path(config.policy)
    run, agent, made_of = open_run(policy, config.step)
    split_cpu(run.mesh.cpu_devices)
    name, limits = (config.data, ()) if config.data else (run.data.train, run.data.train_range)
    source = open_examples(name, limits, "config.data" if config.data else f"config.data.train of {config.policy}")
    load = functools.partial(load_policy, policy, run, step=config.step or None)
    return balance(
        config,
        [source[i] for i in range(len(source))],
        policy_attempts(run, load, lambda n: probing(agent, n) if config.probe == "forced" else agent, policy),
        agent.image_tool,
        workdir,
        made_of=made_of,
        normalizer=run.evaluation.normalizer,
        overwrite=FLAGS.overwrite,
    )


def sft(config: TeachingConfig, workdir: pathlib.Path) -> Any:
    """The report of a job in which a language model shows how to search on demand."""
    from routerl_jax.extras.curation.teaching import teach
    from routerl_jax.services.load import chat_model
    from routerl_jax.training.knowledge import open_knowledge_bases

    return teach(
        config,
        workdir,
        lambda: (chat_model(config.llm), open_knowledge_bases(config.knowledge)),
        overwrite=FLAGS.overwrite,
    )


def vqa(config: VqaConfig, workdir: pathlib.Path) -> Any:
    """The report of a job that makes questions about pictures of concepts."""
    from routerl_jax.extras.curation.vqa import make_vqa
    from routerl_jax.services.load import chat_model
    from routerl_jax.training.knowledge import open_knowledge_bases

    return make_vqa(
        config,
        workdir,
        lambda: (chat_model(config.llm), next(iter(open_knowledge_bases(config.knowledge).values()))),
        overwrite=FLAGS.overwrite,
    )


def experts(config: ExpertJobConfig, workdir: pathlib.Path) -> Any:
    """The report of a job in which a planner and a grounder show how to search pages and look closer."""
    from routerl_jax.extras.curation.expert_job import ExpertResources, demonstrate
    from routerl_jax.services.load import chat_model
    from routerl_jax.training.knowledge import open_knowledge_bases

    def resources() -> ExpertResources:
        models = chat_model(config.planner), chat_model(config.grounder)
        return ExpertResources(*models, open_knowledge_bases(config.knowledge))

    return demonstrate(config, workdir, resources, overwrite=FLAGS.overwrite)


JOBS: Mapping[str, Callable[[Any, pathlib.Path], Any]] = {
    "golden": golden,
    "balance": balance,
    "sft": sft,
    "vqa": vqa,
    "experts": experts,
}


def main(_: Sequence[str]) -> None:
    job = str(read_config_dict().get("job", ""))
    if job not in JOBS:
        raise ValueError(f"config.job={job!r} is no job of this program: {', '.join(JOBS)}")
    config = read_config_as(schemas()[f"A job: {job}"])
    check_writable("--workdir", FLAGS.workdir)
    report = JOBS[job](config, pathlib.Path(FLAGS.workdir))
    print(json.dumps(report.record()) if FLAGS.json else report)


if __name__ == "__main__":
    start(main, define_flags, schemas)
