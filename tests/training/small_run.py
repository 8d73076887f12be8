"""A whole run that takes seconds: the shipped warm start on a handful of Atlas's questions; or a supervised one.

The first is also a program, for tests of devices, processes and kills:

    JAX_NUM_CPU_DEVICES=2 python -m tests.training.small_run HOME WORKDIR [--resume] [--fsdp N] [--kill MOMENT:STEP] [--ahead]
        [--partial] [--every N] [--peer-timeout SECONDS]

Its last line is a JSON object that says into how many pieces the batches and the weights were cut; `WORKDIR/reads.json`
lists the settings that it has read.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import pathlib
import shutil
import signal
import sys
from typing import Any

import jax

from routerl_jax.core.stopping import Interrupted
from routerl_jax.data.atlas import world
from routerl_jax.data.atlas.questions import real_questions
from routerl_jax.learning.learner import Learner
from routerl_jax.learning.losses import LossConfig
from routerl_jax.learning.optimizer import OptimizerConfig
from routerl_jax.models.pretrained import PACKAGED_MODELS
from routerl_jax.training import config as schema

STEPS = 3
QUESTIONS = 22


def make_inputs(home: pathlib.Path) -> None:
    """Questions, a corpus of some twenty passages per knowledge base (the gold ones among them), and an encoder."""
    home.mkdir(parents=True, exist_ok=True)
    questions = [question for question in real_questions("train") if question.hops][:QUESTIONS]
    gold = {hop.passage_id for question in questions for hop in question.hops}
    rows = [{"id": q.id, "question": q.text, "golden_answers": [q.answer]} for q in questions]
    rows[5]["question"] = "Why " * 300  # longer than a conversation
    write_rows(home / "questions.jsonl", rows)
    for kb in world.KNOWLEDGE_BASES:
        passages = world.passages_of(kb)
        chosen = [p for p in passages if p.id in gold] + [p for p in passages if p.id not in gold][:10]
        write_rows(home / f"{kb}.jsonl", [{"id": p.id, "title": p.title, "text": p.text} for p in chosen])
    make_encoder(home / "encoder")


def write_rows(path: pathlib.Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_encoder(directory: pathlib.Path) -> None:
    """A random BERT of one layer with the warm start's tokenizer: texts that share words lie close."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=1024,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=128,
    )
    transformers.BertModel(config).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(PACKAGED_MODELS["atlas-warm-start"] / name, directory)


def make_config(home: pathlib.Path, **changes: Any) -> schema.TrainConfig:
    """The configuration of an RL run; its inputs are made in `home` if they are not there."""
    if not (home / "encoder").is_dir():
        make_inputs(home)
    fields: dict[str, Any] = {
        "steps": STEPS,
        "model": schema.ModelConfig(path="atlas-warm-start"),
        "engine": schema.EngineConfig(rows=16, max_length=256),
        "agent": schema.AgentConfig(grammar="r1_router", max_searches=2, k=1, max_turn_tokens=48, answer_tokens=16),
        "knowledge": {
            kb: schema.KnowledgeConfig(
                source=str(home / f"{kb}.jsonl"),
                encoder=str(home / "encoder"),
                index="exact",
                directory=str(home / f"kb-{kb}"),
            )
            for kb in world.KNOWLEDGE_BASES
        },
        "data": schema.DataConfig(
            train=str(home / "questions.jsonl"),
            validation="",
            test="",
            train_range=(0, 16),
            validation_range=(16, 18),
            test_range=(18, 22),
        ),
        "rollout": schema.RolloutConfig(examples=4, samples=4),
        "stages": {
            "first": schema.StageConfig(start=0, reward={"em": 1.0, "searches": -0.1}),
            "second": schema.StageConfig(
                start=2,
                reward={"f1": 1.0, "format": 0.2, "searches": -0.1},
                data={"train_range": (4, 16)},
                rollout={"samples": 3},
                learner={"advantage": "reinforce_pp_baseline", "loss": {"clip_high": 0.2, "kl_coef": 0.0}},
            ),
        },
        "learner": schema.LearnerConfig(
            minibatches=2,
            loss=LossConfig(clip_high=0.28, kl_coef=0.01),
            optimizer=OptimizerConfig(lr=1e-4, schedule="linear"),
            micro_tokens=1024,
        ),
        "evaluation": schema.EvaluationConfig(
            every=2, examples=2, final_examples=4, baselines=False, before=False, canary=True
        ),
        "checkpoint": schema.CheckpointConfig(every=1),
    }
    return schema.TrainConfig(**{**fields, **changes})


def ahead(config: schema.TrainConfig) -> schema.TrainConfig:
    """The run with rollouts one step ahead, generated on the last device while the others learn."""
    return dataclasses.replace(
        config,
        mesh=dataclasses.replace(config.mesh, engine=1),
        rollout=dataclasses.replace(config.rollout, ahead=1, refill=1),
        learner=dataclasses.replace(config.learner, importance_cap=2.0, mask_mean_ratio=1.5),
    )


def partial(config: schema.TrainConfig) -> schema.TrainConfig:
    """The run with attempts that go on after the update, and one checkpoint before its end."""
    return dataclasses.replace(
        config,
        rollout=dataclasses.replace(config.rollout, partial=2, refill=1),
        checkpoint=dataclasses.replace(config.checkpoint, every=2),
    )


def make_sft_config(**changes: Any) -> schema.TrainConfig:
    """The configuration of a supervised run of a tiny policy."""
    fields: dict[str, Any] = {
        "kind": "sft",
        "steps": STEPS,
        "model": schema.ModelConfig(
            architecture={
                "model_type": "llama",
                "vocab_size": 400,
                "embed": 16,
                "layers": 1,
                "heads": 2,
                "kv_heads": 1,
                "head_dim": 8,
                "mlp": 32,
                "max_length": 1024,
                "tied_embeddings": True,
            }
        ),
        "engine": schema.EngineConfig(max_length=1024),
        "agent": schema.AgentConfig(max_searches=2, k=1),
        "knowledge": {kb: schema.KnowledgeConfig() for kb in world.KNOWLEDGE_BASES},
        "learner": schema.LearnerConfig(optimizer=OptimizerConfig(kind="muon", lr=3e-3, adam_lr=1e-3)),
        "evaluation": schema.EvaluationConfig(every=2),
        "checkpoint": schema.CheckpointConfig(every=1),
        "warm_start": schema.WarmStartConfig(examples=4, drills=0.5, observation_weight=0.3, vocabulary=400),
    }
    return schema.TrainConfig(**{**fields, **changes})


# --- killed at a certain point -----------------------------------------------------------------------------------------


def arm(moment: str, fatal: int) -> None:
    """`kill -9` of this process in its save after `fatal` steps.

    `before-save`, `in-commit` (all is written under the checkpoint's temporary name) or `after-save` (the checkpoint is
    there, what would follow it is not). Or, as a scheduler asks for it, SIGTERM: `in-update`, in update `fatal` of the session.
    """
    from routerl_jax.training.run import Run

    if moment == "in-update":
        update, updates = Learner.update, itertools.count()

        def asked_update(self: Learner, batch: Any) -> Any:
            if next(updates) == fatal:
                os.kill(os.getpid(), signal.SIGTERM)
            return update(self, batch)

        Learner.update = asked_update

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    save, rename = Run.save, os.rename

    def deadly_save(self: Run, step: int, **extra: Any) -> None:
        if (moment, step) == ("before-save", fatal):
            die()
        save(self, step, **extra)
        if (moment, step) == ("after-save", fatal):
            self.checkpoints.wait()
            die()

    def deadly_rename(source: Any, target: Any, **options: Any) -> None:
        if moment == "in-commit" and pathlib.Path(target).parts[-2:] == ("checkpoints", str(fatal)):
            die()
        rename(source, target, **options)

    Run.save = deadly_save
    os.rename = deadly_rename


def pieces(array: jax.Array) -> int:
    """Into how many different pieces an array is cut."""
    return len({str(index) for index in array.sharding.devices_indices_map(array.shape).values()})


def watch_devices() -> dict[str, int]:
    """Keeps count, from now on, of the pieces that batches and the largest weight are cut into, and the devices they lie on."""
    seen: dict[str, int] = {}
    update = Learner.update

    def watched(self: Learner, batch: Any) -> Any:
        weights = max(jax.tree.leaves(self.params), key=lambda leaf: leaf.size)
        seen["batch"] = pieces(batch.tokens)
        seen["weights"] = pieces(weights)
        seen["devices"] = len(weights.sharding.device_set)
        return update(self, batch)

    Learner.update = watched
    return seen


def main() -> None:
    from routerl_jax.parallel import multihost
    from routerl_jax.parallel.mirrors import mirrored
    from routerl_jax.training.rl import train_rl
    from tests.training.reads import recorded_reads

    parser = argparse.ArgumentParser()
    parser.add_argument("home", type=pathlib.Path)
    parser.add_argument("workdir", help="a directory, here or in a bucket")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--fsdp", type=int, default=1)
    parser.add_argument("--kill", default="never:0")
    parser.add_argument("--every", type=int, help="steps between checkpoints; 0: only at the end")
    parser.add_argument("--peer-timeout", type=float, default=60.0)
    parser.add_argument("--ahead", action="store_true", help="rollouts one step ahead, on a device of the engine's own")
    parser.add_argument("--partial", action="store_true", help="attempts that go on after the update")
    arguments = parser.parse_args()
    moment, _, step = arguments.kill.partition(":")
    arm(moment, int(step))
    seen = watch_devices()
    if "JAX_COORDINATOR_ADDRESS" in os.environ:
        multihost.initialize(arguments.peer_timeout)
    mesh = schema.MeshConfig(fsdp=arguments.fsdp, layout="fsdp" if arguments.fsdp > 1 else "replicated")
    config = make_config(arguments.home, mesh=mesh)
    if arguments.ahead:
        config = ahead(config)
    if arguments.partial:
        config = partial(config)
    if arguments.every is not None:
        config = dataclasses.replace(config, checkpoint=schema.CheckpointConfig(every=arguments.every))
    with mirrored(arguments.workdir) as workdir:
        with recorded_reads() as reads:
            try:
                train_rl(config, workdir, resume=arguments.resume)
            except Interrupted:
                sys.exit(130)  # as launch.train
        if multihost.is_main():
            (workdir / "reads.json").write_text(json.dumps(sorted(reads)))
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
