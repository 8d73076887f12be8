"""A small policy that sees learns MMSearch-R1, VRAG-RL and R1-Router by tool calls: from examples, then a step of RL each."""

from __future__ import annotations

import base64
import dataclasses
import io
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from PIL import Image

from routerl_jax.agents.agent import Agent
from routerl_jax.core.types import Demonstration, DemonstrationStep, Example, Passage
from routerl_jax.data.trajectories import AnswerStep, Document, FinalStep, RouteStep, Trajectory, write_trajectories
from routerl_jax.models.huggingface import save_pretrained
from routerl_jax.models.vision_language import VisionLanguageModel
from routerl_jax.parallel.mesh import single_device_mesh
from routerl_jax.recipes.mmsearch_r1.rewards import REWARD as MMSEARCH
from routerl_jax.recipes.r1_router.rewards import REWARD as ROUTER
from routerl_jax.recipes.vrag_rl.rewards import reward
from routerl_jax.training import config as schema
from routerl_jax.training import rl, sft
from routerl_jax.training.demonstrations import Demonstrations, Worked, shuffled
from routerl_jax.training.loggers import read_metrics
from tests import seeing
from tests.agents import chat_templates as templates

LENGTH = 1280


def pictured(seed: int, high: int, wide: int) -> str:
    buffer = io.BytesIO()
    Image.fromarray(seeing.picture(seed, high, wide)).save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


FOUND = {
    "image": [Passage(id="f", title="Ghana", text="", image=pictured(1, 16, 16))],
    "text": [Passage(id="t", title="", text="Accra.")],
    "pages": [Passage(id="p", title="Page", text="", image=pictured(7, 240, 320))],
    "table": [Passage(id="r", title="", text="rows")],
}


class Finds:
    """Finds the same passage, whatever is asked."""

    def __init__(self, kind: str) -> None:
        self.found = FOUND[kind]

    def search(self, queries: Sequence[Any], k: int) -> list[list[Passage]]:
        return [self.found for _ in queries]


PICTURED, PLAIN = (
    [Example(id=f"{i}", question="Where?", answers=("Accra",), images=images) for i in range(4)]
    for images in ((seeing.picture(0),), ())
)


def pictured_questions() -> list[Example]:
    return PICTURED


def plain_questions() -> list[Example]:
    return PLAIN


STEPS = {
    "mmsearch_r1": (
        DemonstrationStep(thought="a", tool="image", passages=tuple(FOUND["image"])),
        DemonstrationStep(thought="b", tool="text", query="c", passages=tuple(FOUND["text"])),
    ),
    "vrag_rl": (
        DemonstrationStep(thought="a", tool="pages", query="c", passages=tuple(FOUND["pages"])),
        DemonstrationStep(thought="b", box=(8, 8, 30, 24)),
    ),
}


def shown(config: schema.TrainConfig, agent: Agent) -> tuple[Demonstrations, Demonstrations]:
    example = (PICTURED if config.recipe == "mmsearch_r1" else PLAIN)[0]
    demonstration = Demonstration(example=example, steps=STEPS[config.recipe], thought="d", answer="Accra")
    worked = [Worked(example, agent.pieces(demonstration))] * 2
    return shuffled(worked, 0), shuffled(worked, 0)


def make_policy(directory: pathlib.Path) -> str:
    tokenizer = templates.tokenizer(templates.QWEN25, seeing.tokenizer())
    config = seeing.config(LENGTH)
    config = dataclasses.replace(config, text=dataclasses.replace(config.text, vocab_size=len(tokenizer)))
    model = VisionLanguageModel(config, jax.random.key(0), param_dtype=jnp.float32)
    model.tokenizer, model.image_processor = tokenizer, seeing.PROCESSOR
    save_pretrained(model, directory, tokenizer)
    return str(directory)


def golden(path: pathlib.Path) -> str:
    rows = [
        Trajectory(
            id=str(i),
            question=f"Where? {i}",
            steps=(
                RouteStep(query="c", retrievers=("text retriever",)),
                AnswerStep(answer="Accra", documents=(Document(retriever="text retriever", text="Accra."),)),
                RouteStep(query="none", retrievers=("none",)),
                FinalStep(answers=("Accra",)),
            ),
        )
        for i in range(3)
    ]
    write_trajectories(path, rows)
    return f"trajectories:{path}"


RECIPES: dict[str, tuple[tuple[str, ...], Any, dict[str, Any]]] = {
    "mmsearch_r1": (("image", "text"), dict(MMSEARCH), {}),
    "vrag_rl": (("pages",), dict(reward(0.1, alpha=0.0, outcome="em")), {"settings": {"regions": {"least": 4}}}),
    "r1_router": (("text", "table"), dict(ROUTER), {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_step(recipe: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The start learns the form, then a step of RL is rewarded for it."""
    for module in (rl, sft):
        monkeypatch.setattr(module, "build_mesh", lambda _: single_device_mesh())
    tools, paid, agent = RECIPES[recipe]
    steps = golden(tmp_path / "golden.jsonl") if recipe == "r1_router" else ""
    questions = f"{__name__}:{'pictured' if recipe == 'mmsearch_r1' else 'plain'}_questions"
    config = schema.TrainConfig(
        recipe=recipe,
        steps=1,
        model=schema.ModelConfig(path=make_policy(tmp_path / "policy")),
        mesh=schema.MeshConfig(cpu_devices=1),
        engine=schema.EngineConfig(rows=8, max_length=LENGTH),
        agent=schema.AgentConfig(
            grammar="tool_calls", max_searches=3, k=1, max_turn_tokens=100, answer_tokens=16, **agent
        ),
        knowledge={
            tool: schema.KnowledgeConfig(kind="tool", source=f"{__name__}:Finds", settings={"kind": tool})
            for tool in tools
        },
        data=schema.DataConfig(
            train=steps or questions, validation=steps or questions, test=questions, overlap="ignore"
        ),
        rollout=schema.RolloutConfig(examples=2, samples=2, temperature=0.5),
        stages={"main": schema.StageConfig(reward=paid)},
        learner=schema.LearnerConfig(drop_no_signal=False, length_buckets=(LENGTH,), micro_tokens=LENGTH),
        evaluation=schema.EvaluationConfig(every=0, examples=-1, final_examples=2, before=False, baselines=False),
        warm_start=schema.WarmStartConfig(
            steps=80,
            examples=4 if steps else 1,
            demonstrations=steps or f"made:{__name__}:shown",
            optimizer=schema.OptimizerConfig(lr=1e-2, warmup=5, weight_decay=0.0),
        ),
    )
    rl.train_rl(config, tmp_path / "run")
    (row,) = read_metrics(tmp_path / "run")
    assert row["sampler_gap/max"] < 1e-3
    assert row["rollout/well_formed_rate"] > 0
    assert row["reward/total"] > 0
