"""The schema of a run: every field means something, every mistake is named."""

import dataclasses
import json
import pathlib
import re
import sys
import types
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from configs import (
    atlas_sight,
    atlas_warm_start,
    credit,
    mmsearch_r1_small,
    quickstart,
    r1_router_qwen25_vl_7b,
    r1_router_small,
    r1_searcher_llama31_8b,
    r1_searcher_qwen3_30b_a3b,
    r1_searcher_qwen25_7b,
    r1_searcher_small,
    routerag_qwen25_3b,
    routerag_qwen25_7b,
    routerag_small,
    search_qwen25_vl_7b,
    search_r1_qwen25_3b,
    search_r1_small,
    smollm2_router,
    smollm2_search,
    vrag_rl_qwen25_vl_3b,
    vrag_rl_qwen25_vl_7b,
    vrag_rl_small,
)
from routerl_jax.core.config import from_config_dict
from routerl_jax.knowledge.hybrid import RerankedKB
from routerl_jax.learning.advantages import advantage
from routerl_jax.learning.logprobs import Scores
from routerl_jax.learning.losses import LossConfig, objective
from routerl_jax.learning.optimizer import OptimizerConfig
from routerl_jax.models.experts import Routing
from routerl_jax.models.lora import LoraConfig
from routerl_jax.parallel import multihost
from routerl_jax.parallel.mesh import single_device_mesh
from routerl_jax.recipes import r1_searcher
from routerl_jax.recipes.r1_router.agents import StepwiseAgent
from routerl_jax.services.cache import MemoryCache
from routerl_jax.services.judge import open_judge
from routerl_jax.services.load import chat_model
from routerl_jax.services.policy import ChatModel
from routerl_jax.training import config as schema
from routerl_jax.training import sft
from routerl_jax.training.credit import assign
from routerl_jax.training.demonstrations import open_demonstrations
from routerl_jax.training.evaluation import calibration, check_calibration
from routerl_jax.training.knowledge import open_knowledge_bases
from routerl_jax.training.setup import build_policy, build_recipe, evaluated_agent, headline
from routerl_jax.training.sft import supervised
from routerl_jax.training.stages import count_steps
from tests.knowledge.test_reranked import made
from tests.programs import launch_here, write_config
from tests.training import test_fork_credit
from tests.training.reads import recorded_reads, settings
from tests.training.small_run import make_sft_config
from tests.training.test_passes import two_stages

KB = {"text": schema.KnowledgeConfig(source="atlas/text")}


def test_reads_are_told_from_bookkeeping() -> None:
    with recorded_reads() as reads:
        config = schema.TrainConfig(model=schema.ModelConfig(path="somewhere"), knowledge=KB)
        assert dataclasses.replace(config) == from_config_dict(schema.TrainConfig, dataclasses.asdict(config))
        assert repr(config)
        assert not reads
        assert config.model.path
    assert reads == {"TrainConfig.model", "ModelConfig.path"}


def test_every_setting_is_read(small_run: pathlib.Path, tmp_path: pathlib.Path, monkeypatch) -> None:
    """By a reinforcement run (small_run records its reads), a supervised one, when an adapter is made, by finer credit, when
    steps are counted, by a judge, experts, a reranker, or a chat model as the policy."""
    monkeypatch.setattr(sft, "_HELD_OUT", 4)
    monkeypatch.setattr(sft, "_VOCABULARY_EXAMPLES", 40)
    path = write_config(make_sft_config(steps=1), tmp_path / "config.py")
    with recorded_reads() as reads:
        monkeypatch.setattr(multihost, "initialize", lambda *_: None)
        assert not launch_here("train", f"--config={path}", f"--workdir={tmp_path / 'run'}", "--distributed")
        sample = make_sft_config().warm_start
        kept = dataclasses.replace(
            sample, demonstrations=str(small_run / "whole" / "episodes"), select={"answered": 1}, least=0.0
        )
        config = make_sft_config(warm_start=kept)
        assert open_demonstrations(config, build_recipe(config).agent)[0][0].pieces
        model = dataclasses.replace(make_sft_config().model, lora=LoraConfig(rank=1, base_qtype="int8", tile_size=0))
        build_policy(make_sft_config(model=model, learner=schema.LearnerConfig()), single_device_mesh())
        seeing = schema.AgentConfig(max_searches=2, k=1, sees=("table",))
        agent = build_recipe(make_sft_config(recipe="r1_router", agent=seeing)).agent
        assert isinstance(agent, StepwiseAgent)
        assert agent.sees == ("table",)
        assign(schema.LearnerConfig(credit="counterfactual"), test_fork_credit.TREE, np.zeros(4, int))
        unsaid = [dataclasses.replace(episode, sequences=[]) for episode in test_fork_credit.TREE]
        assign(schema.LearnerConfig(credit="turn"), unsaid, np.zeros(4, int))
        assert count_steps(two_stages(tmp_path)).steps
        assert supervised(two_stages(tmp_path)).kind == "sft"
        asked, rows = schema.CalibrationConfig(kind="k"), {"by": {"kind": {"k": {"em": 0.5, "n": 2}}}}
        measured = calibration({f"warm_start_{name}": rows for name in ("direct", "rag_workflow")}, asked)
        with pytest.raises(ValueError, match="so that no search pays"):
            check_calibration(measured, asked)
        assert OptimizerConfig(schedule="sigmoid").learning_rate(2)
        judge = schema.JudgeConfig(model="atlas-warm-start", base_url="http://127.0.0.1:9/v1", retries=0, rate=9.0)
        tried = dataclasses.replace(test_fork_credit.TREE[0], answer="somewhere")
        assert open_judge(judge, cache=MemoryCache())([tried])[0].kind == "failed"
        with pytest.raises(ValueError, match="no chat template"):
            chat_model(dataclasses.replace(judge, kind="engine"))
        ones = jnp.ones((1, 1))
        routing = Routing(chosen=jnp.zeros((1, 1, 1), int), load=ones, mass=ones, entropy=ones[0], tokens=ones[0])
        fields = {"weights": ones, "advantages": ones, "old_logprobs": ones}
        assert "balance_loss" in objective(LossConfig(balance_coef=0.1), Scores(ones, ones, ones, routing), fields)[1]
        made("bert", tmp_path / "reranker")
        reranked = schema.KnowledgeConfig(source="atlas/text", kind="bm25", reranker=str(tmp_path / "reranker"))
        assert isinstance(open_knowledge_bases({"text": reranked}, progress=False)["text"], RerankedKB)
        policy = schema.PolicyModelConfig(model="m", rate=9.0, token_rate=9.0)
        assert ChatModel(policy, cache=MemoryCache()).about["model"] == "m"
    reads |= set(json.loads((small_run / "whole" / "reads.json").read_text()))
    assert len(settings()) > 80
    assert sorted(settings() - reads) == []


def test_a_configuration_imports_modules_of_one_s_own(tmp_path: pathlib.Path, monkeypatch) -> None:
    (tmp_path / "extension_of_mine.py").write_text("LOADED = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = {"model": {"path": "somewhere"}, "knowledge": {"text": {"source": "atlas/text"}}}
    from_config_dict(schema.TrainConfig, config | {"imports": ["extension_of_mine"]})
    assert sys.modules.pop("extension_of_mine").LOADED
    with pytest.raises(ValueError, match=r"config\.imports: cannot import 'extension_of_yours'"):
        from_config_dict(schema.TrainConfig, config | {"imports": ["extension_of_yours"]})


SHIPPED = (
    atlas_sight,
    mmsearch_r1_small,
    quickstart,
    atlas_warm_start,
    credit,
    smollm2_search,
    smollm2_router,
    search_r1_qwen25_3b,
    search_r1_small,
    r1_searcher_small,
    r1_searcher_qwen25_7b,
    r1_searcher_qwen3_30b_a3b,
    r1_router_qwen25_vl_7b,
    r1_router_small,
    r1_searcher_llama31_8b,
    routerag_qwen25_3b,
    routerag_qwen25_7b,
    routerag_small,
    search_qwen25_vl_7b,
    vrag_rl_qwen25_vl_3b,
    vrag_rl_qwen25_vl_7b,
    vrag_rl_small,
)


def test_variants_of_a_configuration() -> None:
    for variant, grammar in {
        "r1_searcher": "r1_searcher_answer",
        "search_r1-cpu": "",
        "routerag-cpu": "routerag_answer",
    }.items():
        config = from_config_dict(schema.TrainConfig, smollm2_search.get_config(variant))
        assert (config.recipe, config.agent.grammar) == (variant.removesuffix("-cpu"), grammar)
    for module in (smollm2_search, search_r1_qwen25_3b):
        config = from_config_dict(schema.TrainConfig, module.get_config("tool_calls"))
        assert (config.recipe, config.agent.grammar, config.agent.instruct) == ("search_r1", "tool_calls", True)
    with pytest.raises(ValueError, match="variant 'paper' of the configuration: expected none, or tool_calls"):
        search_r1_qwen25_3b.get_config("paper")
    for module in (r1_searcher_small, r1_searcher_qwen25_7b):
        ablation = from_config_dict(schema.TrainConfig, module.get_config("cover_em"))
        assert ablation.stages["stage2"].reward["r1_searcher.answer"] == {"metric": "cover_em", "signed": True}
        with pytest.raises(ValueError, match=r"'bleu' .* one of .*em, cover_em"):
            module.get_config("bleu")
    for module, default in ((r1_searcher_qwen25_7b, "paper"), (r1_searcher_llama31_8b, "released")):
        usual, grpo = (from_config_dict(schema.TrainConfig, module.get_config(name)) for name in (default, "grpo"))
        advantages = [run.in_stage("stage2").learner.advantage for run in (usual, grpo)]
        assert advantages == ["reinforce_pp_baseline", "grpo"]
        assert grpo.stages == usual.stages
    for variant, scale in (("fixed", 18.0), ("p95", "p95")):
        saving = from_config_dict(schema.TrainConfig, routerag_small.get_config(variant)).stages["stage2"].reward
        assert saving["routerag.efficiency"] == {"weight": 1.0, "by": "cost", "scale": scale}
    with pytest.raises(ValueError, match=r"routerag_small.py:p99 is neither fixed nor p95"):
        routerag_small.get_config("p99")
    with pytest.raises(ValueError, match="variant 'em' of the configuration: expected released, paper or grpo"):
        r1_searcher_llama31_8b.get_config("em")
    paper, released = (
        from_config_dict(schema.TrainConfig, r1_searcher_llama31_8b.get_config(v)) for v in ("paper", "released")
    )
    qwen = from_config_dict(schema.TrainConfig, r1_searcher_qwen25_7b.get_config())
    assert (paper.stages, paper.data, paper.rollout) == (qwen.stages, qwen.data, qwen.rollout)
    assert (paper.learner.reward_kl_coef, qwen.learner.reward_kl_coef) == (1e-4, 0.0)
    assert [released.in_stage(stage).rollout.examples for stage in ("stage1", "stage2")] == [15, 65]
    for run in (paper, released, qwen):
        assert [run.in_stage(stage).data.epochs for stage in ("stage1", "stage2")] == [1, 1]
    alone = from_config_dict(schema.TrainConfig, r1_searcher_qwen25_7b.get_config("released")).stages
    assert alone == {"stage2": schema.StageConfig(reward=r1_searcher.RELEASED_STAGE_2)}
    routed = {
        variant: from_config_dict(schema.TrainConfig, module.get_config(*variant.split()))
        for module, variant in (
            (routerag_qwen25_3b, ""),
            (routerag_qwen25_7b, "paper"),
            (routerag_qwen25_3b, "released"),
        )
    }
    settings = {
        name: (
            run.stages["stage2"].reward["routerag.efficiency"]["by"],
            run.learner.std_floor,
            run.learner.drop_no_signal,
            run.learner.optimizer.warmup,
            run.rollout.top_p,
            run.steps,
            run.learner.minibatches,
            run.learner.loss.ratio,
            run.learner.loss.entropy_coef,
        )
        for name, run in routed.items()
    }
    assert settings == {
        "": ("cost", 0.1, True, 0, 1.0, 40, 10, "token", 0.001),
        "paper": ("seconds", 0.0, False, 0, 1.0, 40, 2, "sequence", 0.0),
        "released": ("seconds", 0.0, False, 400, 0.95, 39, 10, "token", 0.001),
    }
    assert {run.learner.optimizer.b2 for run in routed.values()} == {0.999}
    with pytest.raises(ValueError, match="variant 'cheap' of the configuration: expected stable, paper or released"):
        routerag_qwen25_3b.get_config("cheap")
    golden, online = (
        from_config_dict(schema.TrainConfig, r1_router_small.get_config(variant)) for variant in ("step_grpo", "online")
    )
    assert (golden.learner.credit, online.learner.credit) == ("episode", "turn")
    assert golden.warm_start == online.warm_start
    large, small = (from_config_dict(schema.TrainConfig, smollm2_router.get_config(m)) for m in ("gpu", "cpu"))
    assert (small.knowledge, small.stages) == (large.knowledge, large.stages)
    with pytest.raises(ValueError, match=r"smollm2_router\.py:tpu is neither gpu nor cpu"):
        smollm2_router.get_config("tpu")
    with pytest.raises(ValueError, match=r"small\.py:sft is neither step_grpo nor online"):
        r1_router_small.get_config("sft")
    plain, prices = (from_config_dict(schema.TrainConfig, mmsearch_r1_small.get_config(v)) for v in ("", "prices"))
    assert set(prices.controls) - set(plain.controls) == {"high_penalty"}
    assert dataclasses.replace(prices, controls=plain.controls) == plain
    with pytest.raises(ValueError, match=r"mmsearch_r1_small\.py:price is not known"):
        mmsearch_r1_small.get_config("price")
    for variant in ("r1_router", "search_r1-tpu"):
        with pytest.raises(
            ValueError, match=f"variant '{variant}' of the configuration: expected one of r1_searcher, "
        ):
            smollm2_search.get_config(variant)


@pytest.mark.parametrize("module", SHIPPED)
def test_shipped_configurations_are_valid(module) -> None:
    config = from_config_dict(schema.TrainConfig, module.get_config())
    again = from_config_dict(schema.TrainConfig, json.loads(json.dumps(dataclasses.asdict(config))))
    assert again == config  # what a workdir's config.json holds is the same configuration
    if config.kind == "rl":
        build_recipe(config)
        for stage in config.stages:
            config.in_stage(stage)


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (r1_searcher_qwen25_7b, ("cover_em",)),
        (r1_searcher_small, ("cover_em",)),
        (r1_router_qwen25_vl_7b, ("f1_recall",)),
        (r1_router_small, ("f1_recall",)),
        (mmsearch_r1_small, ("em",)),
        (vrag_rl_small, ("em",)),
        (routerag_qwen25_3b, ("em", "f1")),
        (search_r1_qwen25_3b, ("em",)),
        (search_r1_small, ("em",)),
        (quickstart, ("em",)),
    ],
)
def test_tables_are_led_by_the_metric_of_the_paper(module: types.ModuleType, expected: tuple[str, ...]) -> None:
    config = from_config_dict(schema.TrainConfig, module.get_config())
    assert headline(config, build_recipe(config)) == expected
    said = dataclasses.replace(config, evaluation=dataclasses.replace(config.evaluation, headline=("f1", "em")))
    assert headline(said, build_recipe(said)) == ("f1", "em")


@pytest.mark.parametrize(
    ("metrics", "message"), [(("accuracy",), "'accuracy' is none of em, f1"), (("f1", "f1"), "twice")]
)
def test_headlines_that_make_no_sense(metrics: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=f"config.evaluation.headline.*{message}"):
        schema.EvaluationConfig(headline=metrics)


def test_passages_of_evaluation() -> None:
    config = from_config_dict(schema.TrainConfig, r1_searcher_qwen25_7b.get_config())
    recipe = build_recipe(config)
    assert (recipe.agent.k, evaluated_agent(config, recipe).k) == (3, 5)
    config = dataclasses.replace(config, evaluation=schema.EvaluationConfig())
    assert evaluated_agent(config, recipe) == recipe.agent


def silent(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """An advantage that does not say that it compares no attempts."""
    return rewards


as_they_are = advantage(grouped=False)(silent)


def test_unknown_parts_of_the_objective_are_named() -> None:
    """When the configuration is read, not after the first rollouts."""
    fields = {"model": {"path": "somewhere"}, "knowledge": {"text": {"source": "atlas/text"}}}
    for learner, message in (
        ({"advantage": "grop"}, "config.learner: unknown advantage 'grop'; did you mean 'grpo'?"),
        ({"loss": {"kind": "ppo"}}, "config.learner.loss: unknown policy loss 'ppo'"),
        ({"drop_tails": True, "loss": {"kl_coef": 0.1}}, "config.learner.loss.kl_coef=0.1, which is about all tokens"),
        (
            {"drop_tails": True, "loss": {"ratio": "geometric"}},
            "config.learner.loss.ratio='geometric', which is about all",
        ),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            from_config_dict(schema.TrainConfig, {**fields, "learner": learner})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": schema.ModelConfig()}, "config.model.path is empty"),
        ({"knowledge": {}}, "name at least one knowledge base"),
        ({"rollout": schema.RolloutConfig(samples=1)}, "set config.rollout.samples above 1"),
        (
            {
                "rollout": schema.RolloutConfig(samples=1),
                "learner": schema.LearnerConfig(advantage="tests.training.test_config:silent", drop_no_signal=False),
            },
            "above 1 (or let it say that it compares none: @advantage(grouped=False))",
        ),
        ({"rollout": schema.RolloutConfig(forks=1, deterministic=False)}, "leave deterministic on"),
        ({"learner": schema.LearnerConfig(minibatches=1000)}, "exceeds the episodes of a step"),
        (
            {
                "model": schema.ModelConfig(path="somewhere", lora=LoraConfig(rank=2)),
                "learner": schema.LearnerConfig(optimizer=OptimizerConfig(kind="muon")),
            },
            "config.learner.optimizer.kind='muon' works on the layers' matrices, which config.model.lora freezes",
        ),
        ({"stages": {"late": schema.StageConfig(start=3)}}, "no stage starts at step 0"),
        (
            {"learner": schema.LearnerConfig(length_buckets=(128, 256))},
            "config.learner.length_buckets=(128, 256) end below config.engine.max_length=512: add a bucket",
        ),
        (
            {"engine": schema.EngineConfig(weight_qtype="int8", cache_qtype="int8")},
            "config.engine.weight_qtype='int8' and cache_qtype='int8': the sampler's probabilities are not the learner's. Set "
            "config.learner.importance_cap",
        ),
        (
            {
                "engine": schema.EngineConfig(cache_qtype="int8"),
                "learner": schema.LearnerConfig(aggregation="sequence", loss=LossConfig(ratio="sequence")),
            },
            "Set config.learner.mask_mean_ratio",
        ),
    ],
)
def test_mistakes_are_named(changes, message) -> None:
    fields = {"model": schema.ModelConfig(path="somewhere"), "knowledge": KB, **changes}
    with pytest.raises(ValueError, match=re.escape(message)):
        schema.TrainConfig(**fields)


@pytest.mark.parametrize(
    ("recipe", "sees", "message"),
    [
        ("search", ("table",), "config.agent.sees=('table',) is for config.recipe='r1_router'"),
        ("r1_router", ("tabel",), "config.agent.sees: 'tabel' is no knowledge base; there are: text"),
    ],
)
def test_pictures_go_where_there_is_someone_to_see_them(recipe: str, sees: tuple[str, ...], message: str) -> None:
    run = schema.TrainConfig(recipe=recipe, model=schema.ModelConfig(path="somewhere"), knowledge=KB)
    assert build_recipe(run).agent
    with pytest.raises(ValueError, match=re.escape(message)):
        build_recipe(dataclasses.replace(run, agent=schema.AgentConfig(sees=sees)))


def test_single_attempts_are_fine_where_none_are_compared() -> None:
    """By REINFORCE++, and by a user's own advantage that says so."""
    one = {"rollout": schema.RolloutConfig(samples=1), "knowledge": KB, "model": schema.ModelConfig(path="somewhere")}
    mine = "tests.training.test_config:as_they_are"
    for learner in (
        schema.LearnerConfig(advantage="reinforce_pp"),
        schema.LearnerConfig(advantage=mine),
    ):
        assert schema.TrainConfig(learner=learner, **one).learner.advantage == learner.advantage


@pytest.mark.parametrize(
    ("section", "settings"),
    [
        ("", {"seed": -1}),
        ("", {"steps": -1}),
        ("warm_start", {"steps": -1}),
        ("warm_start", {"drills": 1.5}),
        ("rollout", {"samples": 0}),
        ("rollout", {"forks": -1}),
        ("rollout", {"temperature": -0.5}),
        ("agent", {"k": 0}),
        ("agent", {"max_searches": -1}),
        ("agent", {"max_turn_tokens": 0}),
        ("evaluation", {"every": -1}),
        ("checkpoint", {"keep": 0}),
        ("mesh", {"fsdp": 0}),
        ("learner.optimizer", {"lr": -1.0}),
        ("learner.optimizer", {"lr": float("nan")}),
        ("learner.optimizer", {"max_grad_norm": float("inf")}),
        ("learner.optimizer", {"b2": 1.5}),
        ("learner.optimizer", {"b2": 1.0}),
        ("learner.optimizer", {"warmup": -3}),
        ("warm_start.optimizer", {"decay_to": 2.0}),
        ("learner.loss", {"clip_low": -0.2}),
        ("learner.loss", {"kl_coef": -0.1}),
        ("model.lora", {"rank": -1}),
        ("rollout", {"top_p": 0.0}),
        ("rollout", {"top_k": -1}),
        ("rollout", {"tool_timeout": 0.0}),
        ("engine", {"leave_fraction": 1.0}),
        ("engine", {"rows": 0}),
        ("learner", {"minibatches": 0}),
        ("learner", {"micro_tokens": 0}),
    ],
)
def test_numbers_that_nothing_can_be_done_with_are_named(section: str, settings: dict[str, float]) -> None:
    """When the configuration is read, by their keys."""
    fields: dict[str, Any] = {"model": {"path": "somewhere"}, "knowledge": {"text": {"source": "atlas/text"}}}
    [(key, value)] = settings.items()
    inner = fields
    for name in section.split(".") if section else ():
        inner = inner.setdefault(name, {})
    inner |= settings
    named = ".".join(part for part in ("config", section, key) if part)
    with pytest.raises(ValueError, match=rf"^{re.escape(f'{named}={value} must')}"):
        from_config_dict(schema.TrainConfig, fields)


def test_settings_of_an_agent_are_its_fields() -> None:
    def made(**fields):
        agent = schema.AgentConfig(max_searches=2, k=1, settings=fields)
        return build_recipe(make_sft_config(recipe="r1_router", agent=agent)).agent

    assert made(attempts=2) == dataclasses.replace(made(), attempts=2)
    assert made(beyond="own").beyond == "own"
    for fields, message in {
        ("attempts", "two"): "config.agent.settings.attempts='two' must be of type int",
        (
            "attempt",
            2,
        ): "unknown config key config.agent.settings.attempt; did you mean config.agent.settings.attempts? (of",
        ("routing", "text"): "config.agent.settings.routing can't be set in a configuration: it is a Routing",
        (
            "max_searches",
            2,
        ): "config.agent.settings.max_searches: set config.agent.max_searches, from which recipes make",
    }.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            made(**dict([fields]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recipe": "r1"}, "^config.recipe: unknown recipe 'r1'"),
        ({"agent": {"grammar": "r2"}}, "^config.agent.grammar: unknown grammar 'r2'"),
        ({"evaluation": {"normalizer": "squad"}}, "^config.evaluation.normalizer: unknown normalizer 'squad'"),
        ({"stages": {"main": {"reward": {"bleu": 1.0}}}}, "^config.stages.main.reward: unknown reward term 'bleu'"),
        ({"model": {"path": "x", "dtype": "int8"}}, "^config.model.dtype='int8' .*bfloat16"),
        ({"model": {"path": "x", "compute_dtype": "half"}}, "^config.model.compute_dtype='half' .*bfloat16"),
        ({"mesh": {"layout": "zero3"}}, r"^config.mesh.layout='zero3' .*fsdp\+tensor"),
        ({"engine": {"layout": "zero3"}}, r"^config.engine.layout='zero3' .*fsdp\+tensor"),
    ],
)
def test_a_name_that_there_is_not_comes_with_its_key(changes: dict[str, Any], message: str) -> None:
    fields = {"model": {"path": "somewhere"}, "knowledge": {"text": {"source": "atlas/text"}}}
    with pytest.raises(ValueError, match=message):
        build_recipe(from_config_dict(schema.TrainConfig, fields | changes))
