"""RouteRAG with its paper's settings (arXiv 2512.09487, section 4.1 and appendix B.3): Qwen2.5-3B-Instruct, Contriever."""

import dataclasses

import ml_collections

from routerl_jax.core.config import to_config_dict
from routerl_jax.recipes.routerag import STAGE_1, STAGE_2, STAGE_2_SECONDS
from routerl_jax.training import config as schema

_UPDATES = 10  # per step, as in the released code: 1,280 conversations in mini-batches of 128
_PAPER_UPDATES = 2  # 256 questions in mini-batches of 128


def get_config(variant: str = "stable") -> ml_collections.ConfigDict:
    """256 questions x 5 attempts per step; 20 steps for exact match, then 20 also for cost. Its control is `stage1_only`.

    python -m launch.build_kb --config=configs/build_kb.py:graph --workdir=kb/graph --config.corpus=corpus.jsonl \
        --config.encoder=facebook/contriever --config.extractor=llm --config.llm.model=...
    python -m launch.train --config=configs/routerag_qwen25_3b.py --distributed --workdir=/mnt/bucket/routerag_3b \
        --config.knowledge.passage.source=corpus.jsonl --config.knowledge.graph.directory=kb/graph
    python -m launch.compile_check --config=configs/routerag_qwen25_3b.py --topology=v5e:16x16

    Questions: RouteRAG's train.parquet and dev.parquet (10,000 and 100 of HotpotQA), and your own test set. The graph is
    that of HippoRAG 2, with triples by Llama-3.1-8B-Instruct; build it first.

    There are three variants, named after the configuration's path:

    - `:paper`, as in the paper: the ratio of whole sequences (equation 5), two updates per step, no entropy bonus, wall-clock
      times in stage 2, no floor under standard deviations.
    - `:released`, as in the released code: ratios of tokens, ten updates, an entropy bonus, a learning rate that rises over the
      whole run, top-p 0.95, 39 steps.
    - `:stable`, the default: the released objective with the paper's learning rate, top-p and steps. Costs are the same in
      every run, standard deviations have a floor, and groups without signal are left out.

    Compiled for v5e:16x16 (docs/accelerators.md), not run: no step time, no result.
    """
    return to_config_dict(routerag_run("Qwen/Qwen2.5-3B-Instruct", "facebook/contriever", tensor=2, variant=variant))


def routerag_run(path: str, encoder: str, tensor: int, variant: str) -> schema.TrainConfig:
    """The run with any model of this size. `tensor` chips share the heads."""
    if variant not in ("stable", "paper", "released"):
        raise ValueError(f"variant {variant!r} of the configuration: expected stable, paper or released")
    steps, paper, released, stable = 40, variant == "paper", variant == "released", variant == "stable"
    run = schema.TrainConfig(
        recipe="routerag",
        steps=steps,
        model=schema.ModelConfig(path=path, dtype="float32", compute_dtype="bfloat16"),
        mesh=schema.MeshConfig(data=1, fsdp=-1, tensor=tensor, layout="fsdp+tensor"),
        engine=schema.EngineConfig(rows=1280, max_length=4096, segment=64, layout="tensor"),
        agent=schema.AgentConfig(
            max_searches=4,
            k=3,
            max_turn_tokens=500,
            max_observation_tokens=500,
            answer_tokens=500,  # the last turn may think before it answers
            instruct=True,
        ),
        knowledge={
            "passage": schema.KnowledgeConfig(source="corpus.jsonl", encoder=encoder),
            "graph": schema.KnowledgeConfig(kind="graph", encoder=encoder, directory="kb/graph"),
            "graph_passage": schema.KnowledgeConfig(kind="hybrid", members=("passage", "graph")),
        },
        data=schema.DataConfig(train="train.parquet", validation="dev.parquet", test="test.jsonl"),
        rollout=schema.RolloutConfig(examples=256, samples=5, temperature=1.0, top_p=0.95 if released else 1.0),
        stages={
            "stage1": schema.StageConfig(start=0, reward=STAGE_1),
            "stage2": schema.StageConfig(start=20, reward=STAGE_2 if stable else STAGE_2_SECONDS),
        },
        controls={"stage1_only": schema.ControlConfig(without="stage2")},
        learner=schema.LearnerConfig(
            advantage="grpo",
            std_floor=0.1
            if stable
            else 0.0,  # else noise decides in groups whose answers are all right and cost the same
            drop_no_signal=stable,  # if groups without signal are kept, KL and entropy act on them, too
            minibatches=_PAPER_UPDATES if paper else _UPDATES,
            aggregation="sequence" if paper else "token",
            loss=schema.LossConfig(
                ratio="sequence" if paper else "token",
                clip_low=0.2,
                clip_high=0.2,
                kl="k3",
                kl_coef=0.001,
                entropy_coef=0.0 if paper else 0.001,
            ),
            optimizer=schema.OptimizerConfig(
                lr=1e-6,
                weight_decay=0.01,
                b2=0.999,  # PyTorch's default, as in the released code
                warmup=steps * _UPDATES if released else 0,
            ),
            length_buckets=(4096,),
            micro_tokens=64 * 4096,  # one long row for each group of four of the 256 chips
            remat="full",
        ),
        evaluation=schema.EvaluationConfig(every=10, examples=100, final_examples=1000),
        checkpoint=schema.CheckpointConfig(every=10),
    )
    return dataclasses.replace(run, steps=39) if released else run  # the released loop ends one step early
