"""VRAG-RL (arXiv 2505.22019) at its paper's settings: Qwen2.5-VL-7B searches pages, looks closer at regions, and answers."""

import ml_collections

from configs.common import with_tool_calls
from routerl_jax.core.config import to_config_dict
from routerl_jax.recipes.vrag_rl.rewards import AFTER_SFT, FROM_INSTRUCT, RELEASED, Preset
from routerl_jax.training import config as schema

PRESETS: dict[str, Preset] = {
    "after_sft": AFTER_SFT,
    "from_instruct": FROM_INSTRUCT,
    "tool_calls": FROM_INSTRUCT,
    "released": RELEASED,
}
VARIANTS = (*PRESETS, "sft")

_TOKEN = 28 * 28  # pixels of an image token
_QUESTIONS = 32  # of a step: the released script's, the paper gives none
_STEPS = -(-2000 // _QUESTIONS)  # of one pass over as many questions as the authors say they have
_DEMONSTRATIONS = 32  # of a supervised update: 16 a batch, two batches
_SUPERVISED = 3 * 3000 // _DEMONSTRATIONS  # updates of three passes over as many as the authors say they have
_LENGTH = 8192 + 2048  # of a conversation: the longest prompt and response
_SUPERVISED_LENGTH = 16384
_JUDGE = schema.JudgeConfig(
    model="Qwen/Qwen2.5-7B-Instruct", base_url="http://127.0.0.1:8000/v1", style="vrag", failed="leave_out"
)
_RELEASED_JUDGE = schema.JudgeConfig(
    model="qwen-max-latest",
    base_url="https://dashscope.aliyuncs.com/compatible-mode/v1",
    api_key_env="DASHSCOPE_API_KEY",
    style="vrag",
    failed="leave_out",
)


def get_config(variant: str = "after_sft") -> ml_collections.ConfigDict:
    """32 questions x 5 attempts a step, 3 updates a step, one pass, after three supervised passes over demonstrations.

    python -m launch.train --config=configs/vrag_rl_qwen25_vl_7b.py --distributed --workdir=/mnt/bucket/vrag_rl_7b \
        --config.data.train=vrag:train.parquet --config.data.test=vidoseek:vidoseek.json \
        --config.warm_start.demonstrations=messages:sft.jsonl
    python -m launch.compile_check --config=configs/vrag_rl_qwen25_vl_7b.py --topology=v5e:16x16

    After the configuration's path:

    :after_sft      supervised learning, then RL with KL 0.01 and no reward for the pattern; with a policy that has learnt from
                    demonstrations already, --config.model.path=DIR --config.warm_start.steps=0
    :from_instruct  RL of the instruct model as it is, without KL, 0.1 of the reward for the pattern
    :tool_calls     as :from_instruct, with JSON tool calls instead of the tags (not the paper's)
    :released       as :after_sft, with what the released code does where it differs: 5 updates a step, a shorter warm-up, a
                    mean over tokens, its reward, its judge and its crops
    :sft            the supervised learning alone

    Data: questions as VRAG-RL's converter writes them, conversations that configs/vrag_rl_data.py makes, and pages
    (docs/knowledge_bases.md#pages-and-pictures). The judge is asked at config.judge.base_url.

    Compiled for v5e:16x16 (docs/accelerators.md), not run: no step time, no result.
    """
    return to_config_dict(vrag_run("Qwen/Qwen2.5-VL-7B-Instruct", tensor=4, variant=variant))


def vrag_run(model: str, tensor: int, variant: str) -> schema.TrainConfig:
    """The run with a model of the hub.

    Args:
      tensor: chips that share its key/value heads.
      variant: of `VARIANTS`.

    Raises:
      ValueError: there is no such variant.
    """
    if variant not in VARIANTS:
        raise ValueError(f"variant {variant!r} of the configuration: expected one of {', '.join(VARIANTS)}")
    released, supervised = variant == "released", variant == "sft"
    preset = PRESETS.get(variant, AFTER_SFT)
    updates = 5 if released else 3  # of 160 attempts 32 each; 64, 64 and 32
    length = _SUPERVISED_LENGTH if supervised else _LENGTH
    teaching = schema.OptimizerConfig(
        lr=1e-5, schedule="cosine", warmup=_SUPERVISED // 10, decay_to=0.0, weight_decay=0.0, b2=0.999
    )
    run = schema.TrainConfig(
        kind="sft" if supervised else "rl",
        recipe="vrag_rl",
        steps=_SUPERVISED if supervised else 0,
        model=schema.ModelConfig(
            path=model,
            dtype="float32",
            compute_dtype="bfloat16",
            min_pixels=256 * _TOKEN,
            max_pixels=512 * _TOKEN,
            freeze=("visual",),
        ),
        mesh=schema.MeshConfig(data=1, fsdp=-1, tensor=tensor, layout="fsdp+tensor"),
        engine=schema.EngineConfig(rows=512, max_length=length, segment=64, layout="tensor"),
        agent=schema.AgentConfig(
            max_searches=4,
            k=10,
            max_turn_tokens=2048,
            answer_tokens=128,
            instruct=True,
            settings={"regions": {"released": True}} if released else {},
        ),
        knowledge={
            "pages": schema.KnowledgeConfig(kind="pages", encoder="vidore/colqwen2-v1.0-hf", directory="kb/pages")
        },
        data=schema.DataConfig(
            train="vrag:train.parquet",
            epochs=0 if supervised else 1,
            validation="vidoseek:vidoseek.json",
            test="vidoseek:vidoseek.json",
        ),
        rollout=schema.RolloutConfig(
            examples=_QUESTIONS, samples=5, temperature=1.0, deterministic=False, tool_timeout=120.0
        ),
        stages={"main": schema.StageConfig(reward=dict(preset.reward))},
        learner=schema.LearnerConfig(
            advantage="grpo",
            drop_no_signal=False,  # the objective averages over them, too
            minibatches=updates,
            aggregation="token" if released else "sequence",
            loss=schema.LossConfig(clip_low=0.2, clip_high=0.2, kl="k3", kl_coef=0.0 if supervised else preset.kl_coef),
            optimizer=teaching
            if supervised
            else schema.OptimizerConfig(
                lr=1e-6,
                warmup=updates * (5 if released else round(0.285 * _STEPS)),
                weight_decay=0.01,
                b2=0.999,
            ),
            length_buckets=(length,),
            micro_tokens=256 // tensor * length,  # of 256 chips, one long row for each group
            remat="full",
        ),
        judge=_RELEASED_JUDGE if released else _JUDGE,
        evaluation=schema.EvaluationConfig(
            every=25, examples=128, final_examples=-1, judge=not supervised, headline=() if supervised else ("judge",)
        ),
        checkpoint=schema.CheckpointConfig(every=25),
        warm_start=schema.WarmStartConfig(
            steps=0 if supervised or variant in ("from_instruct", "tool_calls") else _SUPERVISED,
            demonstrations="messages:sft.jsonl",
            examples=_DEMONSTRATIONS,
            optimizer=teaching,
        ),
    )
    return with_tool_calls(run) if variant == "tool_calls" else run
