"""MMSearch-R1 on Atlas's flags: the packaged policy that sees, a reverse image search, a text search; a run of two steps."""

import collections
import dataclasses
import gzip
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import optax
import pytest

from configs import mmsearch_r1_small
from routerl_jax.agents.driver import run
from routerl_jax.core.types import Example
from routerl_jax.data.atlas.known import known_questions
from routerl_jax.data.readers import open_dataset
from routerl_jax.engine.engine import Engine
from routerl_jax.evaluation.metrics import summarize
from routerl_jax.learning.batch import BatchLayout
from routerl_jax.learning.learner import Learner, trained_parameters
from routerl_jax.learning.losses import LossConfig
from routerl_jax.models.huggingface import load_pretrained
from routerl_jax.models.vision_language import VisionLanguageModel
from routerl_jax.parallel.mesh import single_device_mesh
from routerl_jax.recipes.mmsearch_r1.rewards import REWARD
from routerl_jax.rewards.terms import RewardFunction
from routerl_jax.training import config as schema
from routerl_jax.training.knowledge import open_knowledge_bases
from routerl_jax.training.rl import train_rl
from routerl_jax.training.setup import build_recipe
from tests.agents.scripted import SeeingScript
from tests.data.original_rows import as_fvqa, as_json, as_parquet
from tests.training.small_run import make_encoder


def knowledge(encoder: pathlib.Path) -> dict[str, schema.KnowledgeConfig]:
    """All flags, found by their colours, and a fact a passage, found by words."""
    return {
        "image": schema.KnowledgeConfig(
            source="atlas/text_image",
            kind="reverse_image",
            encoder=f"colours+{encoder}",
            index="exact",
            settings={"picture_format": "png"},
        ),
        "text": schema.KnowledgeConfig(source="atlas/facts", kind="bm25"),
    }


def questions() -> list[Example]:
    return known_questions("train", 8)


def judged() -> list[Example]:
    return known_questions("test", 4)


def make_config(encoder: pathlib.Path) -> schema.TrainConfig:
    fields: dict[str, Any] = {
        "recipe": "mmsearch_r1",
        "steps": 2,
        "model": schema.ModelConfig(path="atlas-sight"),
        "engine": schema.EngineConfig(rows=8, max_length=512),
        "agent": schema.AgentConfig(
            max_searches=2, k=2, max_turn_tokens=16, answer_tokens=8, settings={"image_k": 3, "repeat_pictures": True}
        ),
        "knowledge": knowledge(encoder),
        "data": schema.DataConfig(
            train=f"{__name__}:questions", validation=f"{__name__}:judged", test=f"{__name__}:judged", overlap="warn"
        ),
        "rollout": schema.RolloutConfig(examples=2, samples=2),
        "stages": {"main": schema.StageConfig(reward=dict(REWARD))},
        "learner": schema.LearnerConfig(
            drop_no_signal=False, length_buckets=(512,), micro_tokens=1024, share_prefixes=True
        ),
        "evaluation": schema.EvaluationConfig(
            every=0, examples=-1, final_examples=-1, before_baselines=("direct", "rag_workflow")
        ),
    }
    return schema.TrainConfig(**fields)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[schema.TrainConfig]:
    home = tmp_path_factory.mktemp("mmsearch")
    make_encoder(home / "encoder")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROUTERL_CACHE", str(home / "cache"))
        yield make_config(home / "encoder")


@pytest.mark.slow
def test_sampler_and_learner_agree_on_searched_pictures(config: schema.TrainConfig) -> None:
    """1e-4 in float32: the question's picture, thumbnails of other sizes, the picture again."""
    model = load_pretrained("atlas-sight")
    assert isinstance(model, VisionLanguageModel)
    workflow = build_recipe(config).agent.baselines(("image", "text"))["rag_workflow"]
    episodes = run(
        workflow,
        judged(),
        Engine(model, rows=4, max_length=512),
        open_knowledge_bases(config.knowledge, progress=False),
    )
    for episode in episodes:
        assert [call.error for call in episode.calls][:1] == [None]
        assert len(episode.calls[0].passages) == 3
    sequences = [episode.sequences[0] for episode in episodes]
    assert all(len(sequence.images) >= 1 + 3 + 1 for sequence in sequences)
    assert len({image.tokens for sequence in sequences for _, image in sequence.images}) > 1
    layout = BatchLayout(single_device_mesh(), (512,), 1024, model)
    learner = Learner(model, optax.sgd(0.0), LossConfig(kind="reinforce"), layout, trainable=trained_parameters(model))
    for sequence, logprobs in zip(sequences, learner.logprobs(sequences)):
        sampled = sequence.loss_mask
        assert sampled.any()
        np.testing.assert_allclose(logprobs[sampled], sequence.logprobs[sampled], rtol=0, atol=1e-4)


def test_infoseek_s_questions_through_the_loop(
    config: schema.TrainConfig, shared_data: Callable[[str], pathlib.Path], tmp_path: pathlib.Path
) -> None:
    """Real rows and pictures, in the released columns: each picture finds itself, a page tells the rest, answers are scored."""
    path = shared_data("infoseek/questions_dev.jsonl.gz")
    with gzip.open(path, "rt", encoding="utf-8") as file:
        rows = [row for row in map(json.loads, file) if row["image"]]
    made = [as_fvqa(row, path.parent, "mmsearch_r1/infoseek_train_split") for row in rows]
    data = open_dataset(f"{as_parquet(tmp_path / 'mini_data.parquet', *made)}[pictures]")
    examples = [data[i] for i in range(len(data))]
    assert len(examples) == len(rows) == 4
    names = {row["id"]: f"Thing{number}" for number, row in enumerate(rows)}
    album = [{"id": row["id"], "title": names[row["id"]], "image": str(path.parent / row["image"])} for row in rows]
    pages = [
        {"id": f"page {row['id']}", "title": names[row["id"]], "text": f"It is {row['golden_answers'][0]}."}
        for row in rows
    ]
    fields = dataclasses.asdict(config.knowledge["image"]) | {
        "source": str(as_json(tmp_path / "album.jsonl", *album)),
        "settings": {},
    }
    tools = open_knowledge_bases(
        {
            "image": schema.KnowledgeConfig(**fields),
            "text": schema.KnowledgeConfig(source=str(as_json(tmp_path / "pages.jsonl", *pages)), kind="bm25"),
        },
        progress=False,
    )
    aliases = {example.id: example.answers[1] for example in examples}

    def script(example: str, sample: int, turn: int) -> str:
        answer = aliases[example] if sample == 0 else "a lake"
        return (
            "<reason>what is it?</reason><search><img></search>",
            f"<reason>I see</reason><text_search>{names[example]}</text_search>",
            f"<reason>so</reason><answer>{answer}</answer>",
        )[turn]

    agent = dataclasses.replace(build_recipe(config).agent, image_k=2, max_turn_tokens=200, answer_tokens=40)
    episodes = run(agent, examples, SeeingScript(script, max_length=4000), tools, samples=2)
    assert len(episodes) == 8
    for episode in episodes:
        by_picture, in_words = episode.calls
        assert [call.error for call in episode.calls] == [None, None]
        assert by_picture.passages[0].id == episode.example.id
        assert in_words.passages[0].id == f"page {episode.example.id}"
        assert episode.example.answers[0] in episode.turns[1].observation
        seen = [item for item in episode.turns[0].shown if item.digest]
        assert [item.passage for item in seen] == [*(passage.id for passage in by_picture.passages), ""]
    totals = [row["total"] for row in RewardFunction(dict(REWARD))(episodes)]
    assert totals == pytest.approx([0.91, 0.1] * 4)
    found = summarize(episodes, budget=agent.search_budget)
    assert (found["em"], found["search_ratio"], found["answered_rate"]) == (0.5, 1, 1)


@pytest.mark.slow
def test_a_run_on_flags(config: schema.TrainConfig, tmp_path: pathlib.Path) -> None:
    """Its table has the paper's agents and measures, by kind of question; its records show what was seen."""
    train_rl(config, tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 2
    assert max(row["sampler_gap/max"] for row in rows) < 1e-3
    agents = json.loads((tmp_path / "run" / "results.json").read_text())["agents"]
    before = ["warm_start", "warm_start_direct", "warm_start_rag_workflow"]
    assert list(agents) == [*before, "trained", "direct", "rag_workflow"]
    assert agents["warm_start_direct"]["searched_rate"] == 0
    assert agents["warm_start_rag_workflow"]["searched_rate"] == 1
    assert agents["direct"]["searched_rate"] == 0
    assert agents["rag_workflow"]["searched_rate"] == 1
    assert agents["direct"]["forced_rate"] + agents["direct"]["truncated_rate"] > 0
    assert set(agents["trained"]["by"]["kind"]) == {"search_free", "text", "image", "mixed"}
    assert {"search_ratio", "searched_rate", "em"} <= set(agents["trained"]["by"]["kind"]["image"])
    record = json.loads((tmp_path / "run" / "evaluation" / "rag_workflow.jsonl").read_text().splitlines()[0])
    shown = [item for turn in record["turns"] for item in turn["shown"] if item["digest"]]
    assert len(shown) >= 4
    assert all((tmp_path / "run" / "evaluation" / item["image"]).is_file() for item in shown)


@pytest.mark.slow
def test_a_start_from_which_no_price_could_teach_anything_is_refused(
    config: schema.TrainConfig, tmp_path: pathlib.Path
) -> None:
    """The packaged policy doesn't know the protocol: it answers nothing with searches or without."""
    asked = schema.CalibrationConfig(kind="search_free")
    strict = dataclasses.replace(config, evaluation=dataclasses.replace(config.evaluation, calibration=asked))
    with pytest.raises(
        ValueError, match=r"of the search_free questions the untrained policy answers .* without a search"
    ):
        train_rl(strict, tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.jsonl").read_text()  # no step was taken
    unasked = dataclasses.replace(config.evaluation, before_baselines=("rag_workflw",))
    with pytest.raises(ValueError, match=r"before_baselines.rag_workflw; did you mean .*rag_workflow"):
        train_rl(dataclasses.replace(config, evaluation=unasked), tmp_path / "other")


@pytest.mark.slow
def test_the_small_runs_demonstrations(config: schema.TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind of question with each plan, oftenest with the searches that it needs; what was taught between; reproducible."""
    monkeypatch.setattr(mmsearch_r1_small, "DEMONSTRATIONS", 160)
    monkeypatch.setattr(mmsearch_r1_small, "QUESTIONS", 40)
    agent = build_recipe(config).agent
    training, held_out = mmsearch_r1_small.shown(config, agent)
    assert (len(training), len(held_out)) == (152, 8)
    worked = [training[i] for i in range(300)]
    assert [i for i, one in enumerate(worked) if one.bare] == list(range(0, 300, mmsearch_r1_small.KEPT_SIGHT))
    plans = collections.Counter(
        (one.example.metadata["kind"], len(one.pieces)) for one in worked if not one.bare
    )  # three pieces a search, and the answer
    assert all(plans[kind, count] > 0 for kind in ("search_free", "text", "image", "mixed") for count in (1, 3, 5))
    alone = {kind: [count for (one, count), n in plans.items() if one == kind for _ in range(n)] for kind, _ in plans}
    assert 0.1 < np.mean([count == 1 for count in alone["search_free"]]) < 0.45  # 0.25 are meant to be
    assert 0.35 < np.mean([count == 5 for count in alone["mixed"]]) < 0.8  # 0.55
    # those of an epoch whose places others take come in another epoch
    over_epochs = [training[i] for i in range(8 * 152)]
    assert len({one.example.id for one in over_epochs if not one.bare}) == 152
    # half of the facts that are searched for, of countries that it knows, have another value where they are found
    read = [one for one in worked if one.example.metadata["kind"] == "text" and len(one.pieces) == 3]
    told = [any(f">{answer}<" in one.pieces[-1][0] for answer in one.example.answers) for one in read]
    assert 0.2 < np.mean(told) < 0.85
    again = mmsearch_r1_small.shown(config, agent)[0]
    assert [again[i].example.id for i in range(20)] == [one.example.id for one in worked[:20]]
    model = load_pretrained("atlas-sight")
    assert max(len(one.sequence(agent, model)) for one in worked) <= 448
    taught = mmsearch_r1_small.taught(config, agent)[0]
    needed = {"search_free": 1, "text": 3, "image": 3, "mixed": 5}
    for one in (taught[i] for i in range(1, 48) if i % mmsearch_r1_small.KEPT_SIGHT):
        assert len(one.pieces) == needed[one.example.metadata["kind"]]
