"""Runs of the recipe "r1_router" that take seconds: Step-GRPO and supervised learning on golden steps; its settings."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import numpy as np
import pytest

from configs import r1_router_qwen25_vl_7b
from routerl_jax.core.config import from_config_dict
from routerl_jax.data.atlas import world
from routerl_jax.data.atlas.questions import Question, real_questions
from routerl_jax.data.trajectories import (
    AnswerStep,
    Document,
    FinalStep,
    RouteStep,
    Trajectory,
    label_of,
    write_trajectories,
)
from routerl_jax.knowledge import encoders
from routerl_jax.parallel.mesh import single_device_mesh
from routerl_jax.recipes.r1_router.agents import StepwiseAgent
from routerl_jax.recipes.r1_router.rewards import RELEASED_REWARD, REWARD
from routerl_jax.training import config as schema
from routerl_jax.training import rl, sft
from routerl_jax.training.demonstrations import open_demonstrations
from routerl_jax.training.loggers import read_metrics
from routerl_jax.training.setup import build_recipe, evaluated_agent
from routerl_jax.training.stages import Stages
from tests.data.original_rows import png
from tests.data.trajectories import CAPITAL, RIVER, write
from tests.training.small_run import make_config, make_sft_config


def atlas_trajectory(question: Question) -> Trajectory:
    """A question's gold path as a golden trajectory."""
    passages = {passage.id: passage for passage in world.passages_of(question.hops[0].kb)}
    hop = question.hops[0]
    document = Document(retriever=label_of(hop.kb), text=passages[hop.passage_id].text)
    return Trajectory(
        id=question.id,
        question=question.text,
        steps=(
            RouteStep(query=hop.query, retrievers=(label_of(hop.kb),)),
            AnswerStep(answer=f"the {hop.noun} is {hop.value}", documents=(document,)),
            RouteStep(query="none", retrievers=("none",)),
            FinalStep(answers=(question.answer,)),
        ),
    )


@pytest.fixture(scope="module")
def trajectories(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("golden") / "golden.jsonl"
    chosen = [question for question in real_questions("train") if len(question.hops) == 1][30:40]
    write_trajectories(path, map(atlas_trajectory, chosen))
    return path


@pytest.fixture
def one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoders, "_loaded", {})
    monkeypatch.setattr(encoders, "local_mesh", lambda mesh: single_device_mesh())
    for module in (rl, sft):
        monkeypatch.setattr(module, "build_mesh", lambda _: single_device_mesh())


@pytest.mark.slow
def test_a_run_trains_on_golden_steps_and_is_evaluated_on_questions(
    trajectories: pathlib.Path, tmp_path: pathlib.Path, one_device: None
) -> None:
    """The warm start knows tags and growing conversations; what matters here is that all of the run's parts fit."""
    whole = make_config(tmp_path / "home")
    config = dataclasses.replace(
        whole,
        recipe="r1_router",
        steps=2,
        engine=schema.EngineConfig(rows=16, max_length=384),
        agent=schema.AgentConfig(max_searches=2, k=1, max_turn_tokens=48, answer_tokens=16),
        data=schema.DataConfig(
            train=f"trajectories:{trajectories}",
            validation=whole.data.train,
            test=whole.data.train,
            validation_range=(16, 18),
            test_range=(18, 21),
        ),
        stages={"main": schema.StageConfig(reward=_with_encoder(tmp_path))},
        learner=dataclasses.replace(whole.learner, minibatches=1, drop_no_signal=False, aggregation="sequence"),
        evaluation=schema.EvaluationConfig(
            every=2,
            examples=2,
            final_examples=3,
            before=False,
            baselines=True,
            normalizer="vqa",
            names={"trained": "step_grpo", "random_kb": "step_grpo_random_routing"},
        ),
        log_episodes=99,
    )
    results = rl.train_rl(config, tmp_path / "run")
    routed = [
        "only_text",
        "only_table",
        "only_elements",
        "step_grpo_random_routing",
        "full_budget",
        "full_budget_random",
    ]
    assert list(results["agents"]) == ["step_grpo", *routed, "no_search"]
    for row in results["agents"].values():
        assert {"f1_recall", "em", "searches_per_question"} <= row.keys()
    for name in ("full_budget", "full_budget_random"):
        assert results["agents"][name]["searches_per_question"] == 2
    assert results["agents"]["no_search"]["searches_per_question"] == 0
    rows = read_metrics(tmp_path / "run")
    assert len(rows) == 2
    for step, row in enumerate(rows):
        assert row["actor/trained_sequences"] == 16  # four steps, four attempts, one chat each
        assert row["rollout/searches_per_question"] == 0
        assert row["sampler_gap/max"] < 1e-3
        lines = (tmp_path / "run" / "episodes" / f"step-{step:06d}.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        assert len(records) == 16
        assert all(len(record["turns"]) == 1 for record in records)
        assert {record["id"].rpartition("/")[2] for record in records} <= {"1", "2", "3", "4"}
        _check_means_by_kind(row, records)


def test_what_is_evaluated_on_is_checked(trajectories: pathlib.Path, tmp_path: pathlib.Path, one_device: None) -> None:
    """Names of agents that are not scored, and golden steps that nobody could get right."""
    whole = make_config(tmp_path / "home")
    config = dataclasses.replace(
        whole,
        recipe="r1_router",
        knowledge={"text": whole.knowledge["text"], "elements": whole.knowledge["elements"]},
        data=dataclasses.replace(whole.data, validation=f"trajectories:{trajectories}", validation_range=()),
        stages={"main": schema.StageConfig(reward={"em": 1.0})},
        evaluation=schema.EvaluationConfig(examples=-1),
    )
    with pytest.raises(
        ValueError, match=r"^config.data.validation=trajectories:.* retrievers that config.knowledge lack"
    ):
        rl.train_rl(config, tmp_path / "run")
    taken = dataclasses.replace(config, evaluation=schema.EvaluationConfig(names={"trained": "no_search"}))
    with pytest.raises(ValueError, match=r"config.evaluation.names: 'no_search' is another agent's name"):
        rl.train_rl(taken, tmp_path / "taken")
    named = dataclasses.replace(config, evaluation=schema.EvaluationConfig(names={"randm_kb": "random"}))
    with pytest.raises(ValueError, match=r"config.evaluation.names.randm_kb: .* did you mean random_kb\?"):
        rl.train_rl(named, tmp_path / "other")


def _check_means_by_kind(row: dict, records: list[dict]) -> None:
    """Steps 1 and 3 of a trajectory are routes, 2 is an answer, 4 the final one: means are of what a term judges."""
    kinds = {"1": "route", "2": "answer", "3": "route", "4": "final"}
    by_kind: dict[str, list[dict]] = {}
    for record in records:
        by_kind.setdefault(kinds[record["id"].rpartition("/")[2]], []).append(record)
    assert {key for key in row if key.startswith("rollout/em/")} == {f"rollout/em/{kind}" for kind in by_kind}
    assert row["rollout/em"] == pytest.approx(
        sum(row[f"rollout/em/{kind}"] * len(of_kind) for kind, of_kind in by_kind.items()) / len(records)
    )
    answers = [*by_kind.get("answer", ()), *by_kind.get("final", ())]
    for term, judged in (("r1_router.route", by_kind.get("route", [])), ("r1_router.answer", answers)):
        mean = np.mean([record["rewards"][term] for record in judged]) if judged else None
        assert row.get(f"reward/{term}") == (mean if mean is None else pytest.approx(mean))
    assert row["reward/total"] == pytest.approx(np.mean([record["rewards"]["total"] for record in records]))


def _with_encoder(tmp_path: pathlib.Path) -> dict:
    return {**REWARD, "r1_router.route": {"encoder": str(tmp_path / "home" / "encoder")}}


def test_a_supervised_run_learns_golden_steps(
    trajectories: pathlib.Path, tmp_path: pathlib.Path, one_device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sft, "_VOCABULARY_EXAMPLES", 40)
    warm_start = schema.WarmStartConfig(examples=8, vocabulary=400, demonstrations=f"trajectories:{trajectories}")
    config = make_sft_config(recipe="r1_router", steps=16, warm_start=warm_start)
    config = dataclasses.replace(config, evaluation=dataclasses.replace(config.evaluation, every=8))
    agent = build_recipe(config).agent
    training, held_out = open_demonstrations(config, agent)
    assert len(training) + len(held_out) == 40
    of = [{source[i].example.question for i in range(len(source))} for source in (training, held_out)]
    assert not of[0] & of[1]
    assert all(any(map(str.strip, training[i].example.answers)) for i in range(len(training)))
    [one] = [training[i] for i in range(len(training)) if training[i].example.id == training[0].example.id][:1]
    assert one.pieces[0][0].startswith("<think></think>")
    sft.train_sft(config, tmp_path / "sft")
    losses = [row["held_out/nll"] for row in read_metrics(tmp_path / "sft") if "held_out/nll" in row]
    assert len(losses) == 2
    assert losses[1] < losses[0]


def test_demonstrations_go_with_their_agents(trajectories: pathlib.Path) -> None:
    golden = schema.WarmStartConfig(demonstrations=f"trajectories:{trajectories}")
    config = make_sft_config(warm_start=golden)
    with pytest.raises(
        ValueError, match=r"golden steps are for agents that work step by step \(config.recipe='r1_router'\)"
    ):
        open_demonstrations(config, build_recipe(config).agent)
    config = make_sft_config(recipe="r1_router", warm_start=schema.WarmStartConfig(demonstrations="annotated"))
    with pytest.raises(ValueError, match="give 'trajectories:FILE', or 'atlas'"):
        open_demonstrations(config, build_recipe(config).agent)
    config = make_sft_config(recipe="r1_router", warm_start=schema.WarmStartConfig(demonstrations="atlas/validation"))
    with pytest.raises(ValueError, match="holds questions"):
        open_demonstrations(config, build_recipe(config).agent)


def test_golden_steps_need_their_knowledge_bases(tmp_path: pathlib.Path) -> None:
    """Without them a retriever that does not exist would be learnt, and never be rewarded."""
    path = write(tmp_path / "golden.jsonl", RIVER, CAPITAL)
    picture = tmp_path / "volta.png"
    picture.write_bytes(png())
    settings = {"recipe": "r1_router", "knowledge": {kb: schema.KnowledgeConfig() for kb in ("text", "text_image")}}
    config = make_sft_config(**settings, warm_start=schema.WarmStartConfig(demonstrations=f"trajectories:{path}"))
    missing = (
        r"1 of 4 golden routes name retrievers that config.knowledge lacks: 'table retriever' \(1\); there are text"
    )
    with pytest.raises(ValueError, match=rf"config.warm_start.demonstrations=.*{missing}"):
        open_demonstrations(config, build_recipe(config).agent)
    reinforced = make_config(
        tmp_path / "home",
        **settings,
        data=schema.DataConfig(train=f"trajectories:{path}"),
        stages={"main": schema.StageConfig(reward=REWARD)},
    )
    with pytest.raises(ValueError, match=rf"^config.data.train=trajectories:.*{missing}"):
        Stages(reinforced, build_recipe(reinforced))
    text = dataclasses.replace(reinforced, data=schema.DataConfig(train=f"trajectories/text:{path}"))
    with pytest.raises(ValueError, match=r"1 of 3 golden routes"):
        Stages(text, build_recipe(text))
    whole = {**settings["knowledge"], "table": schema.KnowledgeConfig()}
    Stages(dataclasses.replace(reinforced, knowledge=whole), build_recipe(reinforced))


def test_the_paper_s_settings() -> None:
    config = from_config_dict(schema.TrainConfig, r1_router_qwen25_vl_7b.get_config())
    assert (config.rollout.samples, config.agent.max_searches, config.agent.k) == (8, 3, 5)
    loss = config.learner.loss
    assert (loss.kl_coef, config.learner.reward_kl_coef, loss.clip_low, loss.clip_high) == (0.0, 0.0, 0.2, 0.2)
    assert config.learner.aggregation == "sequence"
    assert (config.learner.optimizer.lr, config.learner.optimizer.b2) == (1e-6, 0.999)
    assert (config.data.epochs, config.steps) == (15, 0)
    agent = build_recipe(config).agent
    assert isinstance(agent, StepwiseAgent)
    assert set(agent.protocol.tools) == {"text", "text_image", "table"}
    assert evaluated_agent(config, build_recipe(config)) == agent
    k = dataclasses.replace(config, evaluation=dataclasses.replace(config.evaluation, k=9))
    assert evaluated_agent(k, build_recipe(k)) == dataclasses.replace(agent, k=9)
    released = from_config_dict(schema.TrainConfig, r1_router_qwen25_vl_7b.get_config("released"))
    assert (released.rollout.samples, released.learner.aggregation) == (5, "token")
    assert released.stages["main"].reward == RELEASED_REWARD
    assert (released.data, released.learner.optimizer) == (config.data, config.learner.optimizer)
    with pytest.raises(ValueError, match="expected one of paper, released, tool_calls"):
        r1_router_qwen25_vl_7b.get_config("mine")


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        (schema.AgentConfig(grammar="search_r1"), "config.agent.grammar='search_r1'"),
        (schema.AgentConfig(prompt="{question}"), "config.agent.prompt"),
        (schema.AgentConfig(on_invalid="end"), "config.agent.on_invalid='end'"),
    ],
)
def test_settings_of_other_recipes_are_refused(agent: schema.AgentConfig, message: str) -> None:
    config = make_sft_config(recipe="r1_router", agent=agent)
    with pytest.raises(ValueError, match=message):
        build_recipe(config)
