"""A run's web in WORKDIR/snapshot: recorded by one setting, gone on with, and replayed to equal metrics without a network."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import zlib
from typing import Any

import pytest

from routerl_jax.core.types import Episode
from routerl_jax.data.atlas.world import KNOWLEDGE_BASES
from routerl_jax.evaluation.records import read_records
from routerl_jax.knowledge.hybrid import HybridConfig, build_hybrid
from routerl_jax.knowledge.web.build import build_web
from routerl_jax.knowledge.web.kb import WebKB
from routerl_jax.knowledge.web.snapshot import NotRecorded
from routerl_jax.learning.optimizer import OptimizerConfig
from routerl_jax.parallel.mesh import single_device_mesh
from routerl_jax.training import config as schema
from routerl_jax.training import rl, setup
from routerl_jax.training.controls import control_config
from routerl_jax.training.knowledge import check_snapshot, snapshots
from routerl_jax.training.setup import open_knowledge
from tests.programs import launch_here
from tests.training.small_run import make_config
from tests.training.test_resume import TIMED, untimed_episodes


def answers(world: Any, query: str) -> list[str]:
    """Other pages for every query, some of them gone; nothing for some queries."""
    number = zlib.crc32(query.encode())
    paths = [f"/page/{number % 97 + i}" for i in range(4)]
    paths[0] = "/gone" if number % 3 else paths[0]
    return [] if number % 10 == 0 else [world.pages.url + path for path in paths]


def shown(episode: Episode) -> float:
    """A reward that depends on every letter that a search has shown."""
    return zlib.crc32("".join(turn.observation for turn in episode.turns).encode()) % 100 / 100


def web_run(home: pathlib.Path, web: pathlib.Path, **snapshot: str) -> schema.TrainConfig:
    """Three web knowledge bases under the names that the small policy asks."""
    return make_config(
        home,
        steps=2,
        knowledge={name: schema.KnowledgeConfig(kind="web", directory=str(web)) for name in KNOWLEDGE_BASES},
        snapshot=schema.WebSnapshotConfig(**snapshot),  # type: ignore[arg-type]
        stages={"only": schema.StageConfig(reward={"em": 1.0, f"{__name__}:shown": 1.0})},
        engine=schema.EngineConfig(rows=8, max_length=256),
        rollout=schema.RolloutConfig(examples=2, samples=4),
        learner=schema.LearnerConfig(optimizer=OptimizerConfig(lr=1e-4), micro_tokens=1024),
        evaluation=schema.EvaluationConfig(every=0, final_examples=2, baselines=False, before=False),
    )


def rows(workdir: pathlib.Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.startswith((*TIMED, "tools/"))} for row in found]


@pytest.fixture
def web(world: Any, tmp_path: pathlib.Path) -> pathlib.Path:
    world.searches.answers = lambda query: answers(world, query)
    build_web(world.config(pages=2, cache__disk=False), tmp_path / "web", progress=False)
    return tmp_path / "web"


@pytest.mark.slow
def test_a_run_is_replayed_without_the_web(
    world: Any, web: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (rl, setup):  # launch.evaluate takes the latter's
        monkeypatch.setattr(module, "build_mesh", lambda _: single_device_mesh())
    recorded, replayed = tmp_path / "recorded", tmp_path / "replayed"
    first = rl.train_rl(web_run(tmp_path, web, mode="record"), recorded)
    assert world.requests[0] > 3
    assert world.pages.seen["/gone"] > 0
    assert {path.name for path in (recorded / "snapshot").iterdir()} == set(KNOWLEDGE_BASES)
    for server in (world.pages, world.search_server, world.chat_server):
        server.close()
    monkeypatch.delenv("TEST_KEY")
    config = web_run(tmp_path, web, mode="replay", directory=str(recorded / "snapshot"))
    again = rl.train_rl(config, replayed)
    assert rows(replayed) == rows(recorded)
    assert untimed_episodes(replayed) == untimed_episodes(recorded)
    assert sum(row["rollout/tool_calls"] for row in rows(recorded)) > 10
    trained = [dict(results["agents"]["trained"]) for results in (first, again)]
    assert {k: v for k, v in trained[0].items() if "second" not in k} == {
        k: v for k, v in trained[1].items() if "second" not in k
    }
    assert not (replayed / "snapshot").exists()
    by_step = list(map(json.loads, (recorded / "metrics.jsonl").read_text().splitlines()))
    for name, stages in first["tools"].items():
        for stage in ("query", "search", "page", "summary", "snapshot"):
            of_steps = sum(row[f"tools/{name}/{stage}/asked"] for row in by_step)
            assert stages[stage]["asked"] >= of_steps  # those of the final evaluation, too
    asked = [sum(stages["page"]["asked"] for stages in results["tools"].values()) for results in (first, again)]
    failed = [sum(stages["page"]["failures"] for stages in results["tools"].values()) for results in (first, again)]
    assert 0 < failed[0] < asked[0]
    assert asked[1] == failed[1] == 0  # whole answers were on record
    assert {stages["snapshot"]["failures"] for stages in again["tools"].values()} == {0}

    out = tmp_path / "out"
    flags = ("--snapshot=replay", "--agents=trained", f"--output={out}")
    assert not launch_here("evaluate", f"--workdir={recorded}", *flags)
    evaluated = json.loads((out / "results.json").read_text())
    assert evaluated["agents"]["trained"]["em"] == first["agents"]["trained"]["em"]
    assert [r["prediction"] for r in read_records(out / "trained.jsonl")] == [
        r["prediction"] for r in read_records(recorded / "evaluation" / "trained.jsonl")
    ]
    assert {stages["snapshot"]["failures"] for stages in evaluated["tools"].values()} == {0}


def test_record_is_begun_once_and_gone_on_with(world: Any, web: pathlib.Path, tmp_path: pathlib.Path) -> None:
    config, workdir = web_run(tmp_path, web, mode="record"), tmp_path / "run"
    check_snapshot(config, workdir, resume=False)
    open_and_close(config, workdir)
    check_snapshot(config, workdir, resume=False)  # nothing was recorded: refused before it began
    assert not (workdir / "snapshot" / "elements").exists()
    found = open_and_close(config, workdir, "q")
    with pytest.raises(
        ValueError, match=r"config\.snapshot\.mode='record': .*run/snapshot/\w+ holds a snapshot already"
    ):
        check_snapshot(config, workdir, resume=False)
    check_snapshot(config, workdir, resume=True)
    asked = world.requests
    assert open_and_close(config, workdir, "q") == found
    assert world.requests == asked
    other = web_run(tmp_path, web, mode="replay", directory=str(workdir / "snapshot"))
    assert open_and_close(other, tmp_path / "elsewhere", "q") == found
    with pytest.raises(NotRecorded):
        open_and_close(other, tmp_path / "elsewhere", "another")
    assert world.requests == asked


def open_and_close(config: schema.TrainConfig, workdir: pathlib.Path, query: str = "") -> Any:
    tools: Any = open_knowledge(config, workdir, progress=False)
    try:
        return [list(kb.search([query], k=2)) for kb in tools.values()] if query else None
    finally:
        for kb in tools.values():
            kb.close()


def test_controls_and_warm_starts_see_the_web_of_the_run(world: Any, web: pathlib.Path, tmp_path: pathlib.Path) -> None:
    control = schema.ControlConfig(stages={"dear": schema.StageConfig(reward={"searches": -1.0})})
    config = dataclasses.replace(web_run(tmp_path, web, mode="record"), controls={"dear": control})
    workdir = tmp_path / "run"
    of_control = control_config(config, workdir, "dear")
    assert snapshots(of_control, workdir / "controls" / "dear") == snapshots(config, workdir)
    assert control_config(web_run_with(config, mode=""), workdir, "dear").snapshot == schema.WebSnapshotConfig()


def web_run_with(config: schema.TrainConfig, **snapshot: Any) -> schema.TrainConfig:
    return dataclasses.replace(config, snapshot=schema.WebSnapshotConfig(**snapshot))


def test_refused(world: Any, web: pathlib.Path, tmp_path: pathlib.Path) -> None:
    config, workdir = web_run(tmp_path, web), tmp_path / "run"
    assert snapshots(config, workdir) == {}
    for changes, message in [
        ({"directory": "x"}, r"config\.snapshot\.directory='x' without config\.snapshot\.mode"),
        (
            {"mode": "replay"},
            r"config\.snapshot\.mode='replay': .*run/snapshot/\w+ holds no snapshot of .*snapshot\.dir",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            check_snapshot(web_run_with(config, **changes), workdir, resume=False)
    open_and_close(web_run_with(config, mode="auto"), workdir, "q")
    with pytest.raises(ValueError, match=r"did you mean config\.snapshot\.directory='.*run/snapshot'"):
        check_snapshot(web_run_with(config, mode="replay", directory=str(workdir)), tmp_path / "other", resume=False)
    local = {"text": schema.KnowledgeConfig(source="atlas/element")}
    without = dataclasses.replace(config, knowledge=local, snapshot=schema.WebSnapshotConfig(mode="auto"))
    with pytest.raises(ValueError, match=r"config\.snapshot\.mode='auto': none of config\.knowledge is a web .*text"):
        check_snapshot(without, workdir, resume=False)
    with pytest.raises(ValueError, match=r"config\.snapshot\.mode='auto' needs config\.snapshot\.directory"):
        open_knowledge(web_run_with(config, mode="auto"))


def test_a_directory_of_a_hybrid_that_joins_the_web(world: Any, web: pathlib.Path, tmp_path: pathlib.Path) -> None:
    build_hybrid(HybridConfig(members=(str(web),)), tmp_path / "both", progress=False)
    config = web_run(tmp_path, web, mode="auto")
    both = schema.KnowledgeConfig(kind="hybrid", directory=str(tmp_path / "both"))
    joined = dataclasses.replace(config, knowledge={**config.knowledge, "both": both})
    with pytest.raises(ValueError, match=r"config\.knowledge\.both: .* joins a web knowledge base"):
        open_knowledge(joined, tmp_path / "run")
    by_name = schema.KnowledgeConfig(kind="hybrid", members=tuple(KNOWLEDGE_BASES))
    tools: Any = open_knowledge(
        dataclasses.replace(joined, knowledge={**config.knowledge, "both": by_name}), tmp_path / "run"
    )
    assert len(tools["both"].search(["q"], k=2)[0]) == 2
    assert isinstance(tools[KNOWLEDGE_BASES[0]], WebKB)
    assert len(tools[KNOWLEDGE_BASES[0]]) == 1
