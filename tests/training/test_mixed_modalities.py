"""R1-Router on Atlas with pictures: golden files, and a whole run, questions with and without pictures."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import pytest

from routerl_jax.core.types import Example, Passage, TextAndImage
from routerl_jax.data.atlas import flags, world
from routerl_jax.data.atlas.questions import PICTURES, SHOWN
from routerl_jax.data.trajectories import StepExamples, golden_step, read_trajectories
from routerl_jax.knowledge import encoders
from routerl_jax.models.huggingface import load_pretrained
from routerl_jax.models.vision_language import VisionLanguageModel
from routerl_jax.parallel.mesh import single_device_mesh
from routerl_jax.recipes.r1_router.rewards import REWARD
from routerl_jax.training import config as schema
from routerl_jax.training import golden, rl, sft
from routerl_jax.training.golden import atlas_golden, atlas_questions, write_atlas_golden
from routerl_jax.training.loggers import read_metrics
from tests.training.small_run import make_config, write_rows

KBS = (*world.KNOWLEDGE_BASES, PICTURES)


class GoldKB:
    """Finds the passage that Atlas's paths lead to, as if every search succeeded."""

    def __init__(self, examples: Sequence[Example]) -> None:
        hops = [hop for example in examples for hop in example.metadata["path"]]
        self.passages = {hop["query"]: (hop["passage_id"], hop["value"]) for hop in hops}
        self.asked: list[Any] = []

    def search(self, queries: Sequence[Any], k: int) -> list[list[Passage]]:
        self.asked += queries
        texts = [query if isinstance(query, str) else query.text for query in queries]
        return [[Passage(id=name, title="", text=value)] for name, value in (self.passages[text] for text in texts)]


def two_visual() -> list[Example]:
    """Of one country, as `Which country has this flag?` finds one passage only."""
    source = atlas_questions("validation", {"visual": 100})
    country = source[0].metadata["entities"]
    return [example for example in source if example.metadata["entities"] == country][:2]


def questions() -> list[Example]:
    return [*atlas_questions("test", {"single": 2}), *atlas_questions("test", {"visual": 2})]


def test_the_first_of_mixed_questions_stand_for_all() -> None:
    counts = {"none": 2, "single": 6, "visual": 4}
    mixed, apart = (atlas_questions("test", counts, mixed) for mixed in (True, False))
    kinds = ["visual" if one.images else "search" if one.metadata["path"] else "none" for one in mixed]
    assert {kind: kinds[:6].count(kind) for kind in set(kinds)} == {"none": 1, "search": 3, "visual": 2}
    assert sorted(one.id for one in mixed) == sorted(one.id for one in apart)
    assert [len(one.metadata["path"]) > 0 for one in apart] == [False] * 2 + [True] * 10


def test_golden_files_hold_what_was_found(tmp_path: pathlib.Path) -> None:
    examples = [*atlas_questions("validation", {"none": 1, "single": 3}), *two_visual()]
    tools = {kb: GoldKB(examples) for kb in KBS}
    path = tmp_path / "golden.jsonl"
    assert write_atlas_golden(path, examples, tools, k=1) == 6
    asked = tools["text_image"].asked
    assert len(asked) == 2
    assert all(isinstance(query, TextAndImage) and query.text == SHOWN for query in asked)
    assert [query.image for query in asked] == [example.images[0] for example in examples[4:]]
    trajectories = [trajectory for _, trajectory in read_trajectories(path)]
    assert [trajectory.id for trajectory in trajectories] == [example.id for example in examples]
    assert [bool(trajectory.images) for trajectory in trajectories] == [False] * 4 + [True] * 2
    steps = StepExamples(path)
    [image] = steps[len(steps) - 1].images
    assert pathlib.Path(image).read_bytes() == examples[-1].images[0]
    answers = [step for i in range(len(steps)) if (step := golden_step(steps[i])) and step.kind == "answer"]
    assert all(step.answers[0] in step.documents[0].text for step in answers)
    kb = examples[1].metadata["path"][0]["kb"]
    tools[kb].passages = dict.fromkeys(tools[kb].passages, ("another", ""))
    lost = sum(any(hop["kb"] == kb for hop in example.metadata["path"]) for example in examples)
    assert write_atlas_golden(tmp_path / "fewer.jsonl", examples, tools, k=1) == 6 - lost < 6
    with pytest.raises(ValueError, match=r"leads through the knowledge base 'text_image', which is not among text"):
        write_atlas_golden(path, examples[4:], {"text": tools["text"]}, k=1)


@pytest.mark.slow
def test_golden_data_sets_are_made_once(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(golden, "cache_directory", lambda: tmp_path)
    opened: list[int] = []

    def open_them(knowledge: Any) -> dict[str, GoldKB]:
        opened.append(len(knowledge))
        examples = atlas_questions("train", {"single": 2})
        return {kb: GoldKB(examples) for kb in world.KNOWLEDGE_BASES}

    monkeypatch.setattr(golden, "open_knowledge_bases", open_them)
    knowledge = {kb: schema.KnowledgeConfig(source=f"atlas/{kb}") for kb in world.KNOWLEDGE_BASES}
    made = atlas_golden("train", {"none": 1, "single": 2}, knowledge, k=1)
    assert len(made) == 2 + 2 * 4
    again = atlas_golden("train", {"none": 1, "single": 2}, knowledge, k=1)
    assert [again[i] for i in range(len(again))] == [made[i] for i in range(len(made))]
    assert opened == [3]
    atlas_golden("train", {"none": 1, "single": 2}, knowledge, k=2)
    assert opened == [3, 3]
    with pytest.raises(ValueError, match=r"atlas/train has 437 questions of kind 'none', fewer than 9999"):
        atlas_golden("train", {"none": 9999}, knowledge)


@pytest.fixture
def one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoders, "_loaded", {})
    monkeypatch.setattr(encoders, "local_mesh", lambda mesh: single_device_mesh())
    for module in (rl, sft):
        monkeypatch.setattr(module, "build_mesh", lambda _: single_device_mesh())


def with_pictures(home: pathlib.Path) -> schema.TrainConfig:
    """The small run's configuration with a fourth knowledge base."""
    config = make_config(home)
    names = sorted({name for example in questions() for name in example.metadata["entities"] if example.images})
    rows = [
        {"id": f"text_image/{n}/flag", "title": n, "text": f"The flag of {n}.", "image": flags.data_uri(flags.flag(n))}
        for n in [*names, "Mali", "Japan"]
    ]
    write_rows(home / "flags.jsonl", rows)
    pictures = schema.KnowledgeConfig(
        source=str(home / "flags.jsonl"),
        kind="text_image",
        encoder=f"colours+{home / 'encoder'}",
        index="exact",
        directory=str(home / "kb-flags"),
    )
    return dataclasses.replace(config, knowledge={**config.knowledge, "text_image": pictures})


@pytest.mark.slow
def test_a_run_with_and_without_pictures(tmp_path: pathlib.Path, one_device: None) -> None:
    """A warm start, Step-GRPO, supervised learning on the same steps, and agents by the names that were asked for."""
    base = with_pictures(tmp_path / "home")
    examples = [*atlas_questions("train", {"single": 2}), *two_visual()]
    path = tmp_path / "golden.jsonl"
    write_atlas_golden(path, examples, {kb: GoldKB(examples) for kb in KBS}, k=1)
    encoder = {"encoder": str(tmp_path / "home" / "encoder")}
    config = dataclasses.replace(
        base,
        recipe="r1_router",
        steps=1,
        model=schema.ModelConfig(
            path="atlas-warm-start",
            sight={"depth": 1, "embed": 16, "heads": 2, "mlp": 16, "window": 112, "max_pixels": 4 * 28 * 28},
        ),
        engine=schema.EngineConfig(rows=16, max_length=256),
        agent=schema.AgentConfig(max_searches=2, k=1, max_turn_tokens=32, answer_tokens=8),
        data=schema.DataConfig(
            train=f"trajectories:{path}",
            validation=f"trajectories:{path}",
            test=f"{__name__}:questions",
            overlap="warn",
        ),
        rollout=schema.RolloutConfig(examples=8, samples=2),
        stages={"main": schema.StageConfig(reward={**REWARD, "r1_router.route": encoder})},
        controls={
            "sft": schema.ControlConfig(
                supervised=schema.WarmStartConfig(steps=1, examples=8, demonstrations=f"trajectories:{path}")
            )
        },
        learner=dataclasses.replace(
            base.learner, minibatches=1, drop_no_signal=False, length_buckets=(512,), micro_tokens=2048
        ),
        warm_start=schema.WarmStartConfig(steps=1, examples=8),
        evaluation=schema.EvaluationConfig(
            every=0, final_examples=-1, baselines=False, names={"warm_start": "prompt", "trained": "step_grpo"}
        ),
    )
    results = rl.train_rl(config, tmp_path / "run")
    assert list(results["agents"]) == ["prompt", "step_grpo", "sft"]
    for row in results["agents"].values():
        assert {"f1_recall", "em", "routing_accuracy", "searches_per_question"} <= row.keys()
    assert "sft" in results["comparisons"]
    [row] = read_metrics(tmp_path / "run")
    assert row["actor/trained_sequences"] == 16
    assert row["sampler_gap/max"] < 1e-3  # sampler and learner see the same pictures
    for place in ("warm_start", ".", "controls/sft/warm_start", "controls/sft"):
        assert isinstance(load_pretrained(str(tmp_path / "run" / place / "policy")), VisionLanguageModel)


def test_a_policy_that_sees_nothing_is_shown_no_pictures(tmp_path: pathlib.Path, one_device: None) -> None:
    base = with_pictures(tmp_path / "home")
    config = dataclasses.replace(
        base, kind="sft", recipe="r1_router", steps=1, warm_start=schema.WarmStartConfig(examples=16), stages={}
    )
    with pytest.raises(ValueError, match=r"has a picture, and the policy sees none"):
        sft.train_sft(config, tmp_path / "run")
