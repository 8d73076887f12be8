"""Partial rollouts: attempts that are under way when a step's batch is taken go on after the update."""

import dataclasses
import json
import pathlib
import signal
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from routerl_jax.agents.agent import LLM, Agent, Tools
from routerl_jax.agents.driver import run
from routerl_jax.core.types import Episode, Example
from routerl_jax.learning.losses import LossConfig
from routerl_jax.learning.optimizer import OptimizerConfig
from routerl_jax.parallel.mesh import make_mesh
from routerl_jax.training import config as schema
from routerl_jax.training.asynchronous import Ahead, PartialRollouts
from routerl_jax.training.profiler import Clock
from routerl_jax.training.rollouts import Rollouts, RolloutSource
from routerl_jax.training.run import Run
from routerl_jax.training.setup import build_recipe, make_engine
from routerl_jax.training.stages import ExampleStream, Stages
from tests import tiny
from tests.invariants.test_devices_and_processes import check
from tests.programs import finish, start, two_processes
from tests.training.steps import take_step
from tests.training.test_ahead import KB, untimed
from tests.training.test_resume import assert_same_run, untimed_rows

STEPS, EXAMPLES, SAMPLES, LENGTH = 5, 3, 2, 128
WHOLE = 2  # the step before a checkpoint
LEARNER = schema.LearnerConfig(
    advantage="dr_grpo", drop_no_signal=False, micro_tokens=512, optimizer=OptimizerConfig(lr=1e-2)
)


class LongTail(Agent):
    """Writes eight tokens; at every fourth question one attempt writes long, and at one of all in turns without end."""

    async def run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        chat = llm.conversation(f"Question: {example.question}")
        long = int(example.id) % 4 == 1 and llm.sample == 1
        await chat.generate(max_tokens=20 if long else 8)
        if example.id == "5":
            for _ in range(5):
                chat.observe(" and? ")
                await chat.generate(max_tokens=8)
        return chat.episode(answer=None)


class Parts:
    """A run of a tiny policy on one device, in order of the questions."""

    def __init__(self, directory: pathlib.Path, ahead: int, resume: bool = False) -> None:
        directory.mkdir(exist_ok=True)
        rows = [{"id": str(i), "question": "What?", "golden_answers": ["!"]} for i in range(STEPS * EXAMPLES)]
        (directory / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.config = schema.TrainConfig(
            seed=5,
            steps=STEPS,
            model=schema.ModelConfig(path="tiny"),
            engine=schema.EngineConfig(rows=16, max_length=LENGTH, segment=8),
            knowledge=KB,
            data=schema.DataConfig(train=str(directory / "questions.jsonl")),
            rollout=schema.RolloutConfig(
                examples=EXAMPLES, samples=SAMPLES, partial=2, ahead=ahead, max_staleness=1 + ahead
            ),
            stages={"main": schema.StageConfig(reward={"tests.training.test_rl:small_ids": 1.0})},
            learner=LEARNER,
            log_episodes=0,
        )
        mesh, model = make_mesh(devices=jax.devices()[:1]), tiny.model()
        self.agent, self.stages = LongTail(), Stages(self.config, build_recipe(self.config))
        self.engine = make_engine(self.config, model)
        self.run = Run(self.config, directory / "run", model, mesh, LEARNER.loss, STEPS, resume)
        self.engine.update(self.run.served_params(), self.run.start)
        self.partial = PartialRollouts(self.stages, self.agent, self.engine, {})
        self.ahead = Ahead(self.partial, apart=False) if self.config.rollout.ahead else None
        self.source = self.ahead or self.partial
        if self.run.restored:
            self.stages.restore(self.run.restored["streams"])
            self.source.restore(self.run.restored_rollouts)
        self.weights: dict[int, nnx.State] = {}  # by version

    def steps(self, start: int) -> list[dict[str, Any]]:
        """Takes the steps from `start` on. After each the policy is asked something else on the same engine, as to validate."""
        rows = []
        for step in range(start, STEPS):
            stage, whole = self.stages.at(step), step == WHOLE
            self.weights[step] = jax.tree.map(lambda x: x.copy(), self.run.served_params())
            with (clock := Clock())("step"):
                rows.append(take_step(self.source, stage, self.run, self.engine, {}, step, clock, whole))
            run(self.agent, [Example(id="0", question="Why?", answers=())], self.engine, {}, 2)
            if whole:
                assert not self.partial.under_way
                self.run.save(step + 1, rollouts=self.source.state(), streams=self.stages.state(), stage="main")
                self.run.checkpoints.wait()
        return rows


@dataclasses.dataclass
class Taken:
    """A run, the rollouts that its steps learnt from, and their metrics."""

    directory: pathlib.Path
    parts: Parts
    rollouts: list[Rollouts]
    rows: list[dict[str, Any]]


@pytest.fixture(scope="module", params=[0, pytest.param(1, marks=pytest.mark.slow)], ids=["at once", "ahead"])
def taken(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Taken:
    directory, kept, roll_out = tmp_path_factory.mktemp("partial"), [], RolloutSource.roll_out

    def rolled(source: RolloutSource, step: int, *, whole: bool) -> Rollouts:
        kept.append(roll_out(source, step, whole=whole))
        return kept[-1]

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(RolloutSource, "roll_out", rolled)
        parts = Parts(directory, request.param)
        rows = parts.steps(0)
    return Taken(directory, parts, kept, rows)


def test_every_step_has_whole_groups_and_all_steps_every_question_once(taken: Taken) -> None:
    for rollouts in taken.rollouts:
        asked = [episode.example.id for episode in rollouts.episodes]
        assert [episode.sample for episode in rollouts.episodes] == [*range(SAMPLES)] * EXAMPLES
        assert rollouts.groups.tolist() == [i for i in range(EXAMPLES) for _ in range(SAMPLES)]
        assert asked[::SAMPLES] == list(dict.fromkeys(asked))
    every = [episode.example.id for rollouts in taken.rollouts for episode in rollouts.episodes][::SAMPLES]
    assert sorted(every, key=int) == [str(i) for i in range(STEPS * EXAMPLES)]


def test_every_token_has_the_version_and_the_log_probability_of_the_weights_that_sampled_it(taken: Taken) -> None:
    """By a plain forward pass of each version over the whole conversation. Some turns go on in their middle."""
    model, mixed, in_turns = tiny.model(), 0, 0
    graph = nnx.graphdef(model)
    scores = jax.jit(lambda weights, tokens: jax.nn.log_softmax(nnx.merge(graph, weights)(tokens)[0]))
    for episode in (episode for rollouts in taken.rollouts for episode in rollouts.episodes):
        (sequence,) = episode.sequences
        versions = sequence.versions[sequence.loss_mask]
        assert np.all(np.diff(versions) >= 0)
        mixed += len(np.unique(versions)) > 1
        turns = [sequence.versions[turn.start : turn.start + turn.tokens] for turn in episode.turns]
        in_turns += any(len(np.unique(one)) > 1 for one in turns)
        padded = np.pad(sequence.tokens, (0, LENGTH - len(sequence)))[None]
        for version in np.unique(versions):
            found = np.asarray(scores(taken.parts.weights[int(version)], jnp.asarray(padded)))
            expected = np.append(0.0, found[np.arange(len(sequence) - 1), sequence.tokens[1:]])
            theirs = sequence.versions == version
            np.testing.assert_allclose(sequence.logprobs[theirs], expected[theirs], atol=1e-4)
    assert mixed >= 2
    assert in_turns >= 1


def test_metrics(taken: Taken) -> None:
    """What is too old is waited for; sampler and learner are compared where their weights are the same."""
    ahead, rows = int(taken.parts.ahead is not None), taken.rows
    stale = [row["rollout/staleness/max"] for row in rows]
    assert stale == ([0, 1, 2, 2, 1] if ahead else [0, 1, 1, 0, 1])
    assert rows[0]["rollout/partial/unfinished"] > 0
    assert rows[WHOLE + ahead]["rollout/partial/unfinished"] == 0
    assert rows[1]["rollout/partial/overdue"] == 0 or not ahead  # the first two steps have the same weights
    assert rows[1 + ahead]["rollout/partial/overdue"] > 0
    assert rows[0]["timing_s/carried"] == 0 < rows[1]["timing_s/carried"]
    for rollouts, row in zip(taken.rollouts, rows, strict=True):
        several = [len(np.unique(e.sequences[0].versions[e.sequences[0].loss_mask])) > 1 for e in rollouts.episodes]
        assert row["rollout/partial/episodes"] == np.mean(several)
        old = row["rollout/staleness/max"] > 0
        assert (row["sampler_gap/max"] < 1e-4) == (not ahead or not old)
        assert (row["ratio/log_p99"] > 1e-3) == old
    assert not taken.parts.engine._streams
    assert taken.parts.stages.state()["main"]["position"] == STEPS * EXAMPLES


def test_a_checkpoint_holds_no_attempt_and_the_run_goes_on_exactly(taken: Taken) -> None:
    found, wanted = Parts(taken.directory, int(taken.parts.ahead is not None), resume=True), taken.parts
    assert found.run.start == WHOLE + 1
    assert untimed(found.steps(WHOLE + 1)) == untimed(taken.rows)[WHOLE + 1 :]
    for ours, theirs in zip(*(jax.tree.leaves(parts.run.learner.params) for parts in (found, wanted)), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
    # a run that ends early
    found.partial.roll_out(0)
    assert found.partial.under_way
    found.partial.close()
    assert not found.partial.under_way
    assert not found.engine._streams


@pytest.mark.slow
def test_a_whole_run_that_was_killed_goes_on_exactly(small_run: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A whole run that searches, with groups that are replaced, a validation after every other step and two stages."""
    module, whole, workdir = "tests.training.small_run", tmp_path / "whole", tmp_path / "killed"
    one = {"JAX_NUM_CPU_DEVICES": "1"}
    finish(start(module, small_run, whole, "--partial", **one))
    finish(start(module, small_run, workdir, "--partial", "--kill", "after-save:2", **one), status=-signal.SIGKILL)
    finish(start(module, small_run, workdir, "--partial", "--resume", **one))
    assert_same_run(whole, workdir)
    rows = untimed_rows(workdir)
    assert rows[0]["rollout/partial/unfinished"] > 0
    assert [row["rollout/staleness/max"] for row in rows] == [0, 1, 0]


@pytest.mark.slow
def test_two_processes_take_the_same_groups(small_run: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """As one process with two devices: which groups are complete first depends on the engine's rows and their devices."""
    module, one, pair = "tests.training.small_run", tmp_path / "one", tmp_path / "pair"
    finish(start(module, small_run, one, "--partial", JAX_NUM_CPU_DEVICES="2"))
    two_processes(module, small_run, pair, "--partial", workdir=pair, JAX_NUM_CPU_DEVICES="1")
    check(one, pair)


class Numbers:
    """Questions by number."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> Example:
        return Example(id=str(index), question="?", answers=("!",))


def test_a_question_that_is_under_way_is_put_off() -> None:
    """At the end of a pass; every pass has it once all the same."""
    plain, stream = ExampleStream(Numbers(), seed=1), ExampleStream(Numbers(), seed=1)
    passes = [{example.id for example in plain.next(9)} for _ in range(2)]
    first = [example.id for example in stream.next(9)]
    second = [example.id for example in stream.next(5, first[-3:])]
    assert not {*second} & {*first[-3:]}
    third = [example.id for example in stream.next(4)]
    assert passes[1] == {*second, *third}
    with pytest.raises(
        ValueError, match=r"9 examples, fewer than config.rollout.examples=7 and config.rollout.partial=3"
    ):
        stream.check(7, 3)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"rollout": {"examples": 2, "partial": 3}}, r"rollout.partial=3 exceeds config.rollout.examples=2"),
        ({"rollout": {"partial": 1, "max_staleness": 1, "ahead": 1}}, r"max_staleness=1 and ahead=1: .* raise .* to 2"),
        ({"rollout": {"partial": 1}, "checkpoint": {"every": 1}}, r"partial=1 with config.checkpoint.every=1: a step"),
        (
            {"rollout": {"partial": 1}, "learner": {"loss": LossConfig(kind="reinforce")}},
            r"partial=1 with .*'reinforce'",
        ),
    ],
)
def test_settings_that_do_not_go_together(changes: dict[str, dict[str, Any]], complaint: str) -> None:
    kinds = {
        "rollout": schema.RolloutConfig,
        "checkpoint": schema.CheckpointConfig,
        "learner": schema.LearnerConfig,
    }
    sections: dict[str, Any] = {name: kinds[name](**fields) for name, fields in changes.items()}
    with pytest.raises(ValueError, match=complaint):
        schema.TrainConfig(model=schema.ModelConfig(path="tiny"), knowledge=KB, **sections)
