"""Reinforcement learning runs: generate, score, compare within groups, update; read top to bottom."""

from __future__ import annotations

import dataclasses
import difflib
import json
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import logging
from tqdm.auto import tqdm

from routerl_jax.agents.agent import Agent, SearchTool
from routerl_jax.agents.driver import DriverStats, run
from routerl_jax.agents.room import no_room
from routerl_jax.core.types import Episode, Example
from routerl_jax.data.trajectories import check_retrievers, golden_step
from routerl_jax.evaluation import figures
from routerl_jax.evaluation.benchmark import compare, score
from routerl_jax.evaluation.canary import canary
from routerl_jax.evaluation.records import episode_record, write_records
from routerl_jax.evaluation.report import print_table
from routerl_jax.generation.engine import Engine
from routerl_jax.generation.sampling import Sampling
from routerl_jax.generation.streams import EngineStats
from routerl_jax.models.decoder import Decoder
from routerl_jax.models.lora import merged
from routerl_jax.parallel import multihost
from routerl_jax.parallel.workdir import alone_as_job
from routerl_jax.training.config import TrainConfig
from routerl_jax.training.contamination import check_overlap
from routerl_jax.training.controls import fork, run_controls
from routerl_jax.training.credit import (
    NotFinite,
    assign,
    attempts_of,
    cap_importance,
    portions,
    sequences_of,
    with_logprobs,
)
from routerl_jax.training.fork_credit import as_the_policy_goes
from routerl_jax.training.health import gap_metrics, memory_metrics, promoted_metrics, ratio_metrics, rollout_metrics
from routerl_jax.training.knowledge import check_tools
from routerl_jax.training.loggers import require_log
from routerl_jax.training.passes import count_steps
from routerl_jax.training.run import Run, check_context, check_workdir, step_seed
from routerl_jax.training.setup import (
    build_mesh,
    build_policy,
    build_recipe,
    evaluated_agent,
    evaluation_examples,
    headline,
    open_knowledge,
)
from routerl_jax.training.stages import RunStage, Stages
from routerl_jax.training.warm_start import warm_start
from routerl_jax.training.watch import Alarm, RunStopped, Watch
from routerl_jax.training.writer import read_metrics

_ESTIMATED_AFTER = 10  # steps; the line on what is left of the run
_TRIED = 64  # questions, to see whether a conversation has room


def train_rl(config: TrainConfig, workdir: pathlib.Path, *, resume: bool = False) -> dict[str, Any]:
    """Trains a policy with multi-turn tool calls and evaluates it, and its controls; leaves the run in `workdir`.

    That is config.json, warm_start/ (a supervised run, if it begins with one), metrics.jsonl, checkpoints/, episodes/, policy/
    (a Hugging Face directory), evaluation/, controls/, figures/ and results.json.

    Returns:
      The content of results.json.

    Raises:
      ValueError: something is wrong with the configuration or its inputs, or `workdir` is another's: of another run, or in use.
      RunStopped: the run went wrong (config.watch).
    """
    config = count_steps(config)
    with alone_as_job(workdir):
        results = _train(config, workdir, resume=resume)
        return run_controls(config, workdir, results, _train) if config.controls else results


def _train(config: TrainConfig, workdir: pathlib.Path, *, resume: bool = False) -> dict[str, Any]:
    started = time.perf_counter()
    clock = _Clock()
    with clock("setup"):  # all that may be refused, before anything takes long
        check_workdir(config, workdir, resume)
        require_log(config.log)
        check_overlap(config)
        check_tools(config.knowledge)
        recipe = build_recipe(config)
        judged = evaluated_agent(config, recipe)
        _check_names(config, judged)
        stages, watch = Stages(config, recipe), Watch(config.watch)
        validation, test = _questions(config)
    with clock("warm_start"):
        start = warm_start(config, workdir, resume=resume)
    with clock("setup"):
        mesh = build_mesh(config.mesh)
        model = build_policy(start, mesh)
        check_context(config, model)
        engine = make_engine(config, model)
        _check_room(config, judged, stages.at(0), engine)
        engine.rest()  # a merged adapter's weights exist once
        tools = open_knowledge(config, progress=multihost.is_main())
        loss = stages.at(0).config.learner.loss
        run_ = Run(config, workdir, model, mesh, loss, stages.at(0).updates, resume, stages.has_reference)
        engine.update(run_.served_params(), run_.start)
        if run_.restored:
            stages.restore(run_.restored["streams"])
            watch.restore(run_.restored["watch"])

    judging: dict[str, Any] = {
        "normalizer": config.evaluation.normalizer,
        "tool_timeout": config.rollout.tool_timeout,
    }

    def evaluate(agents: Mapping[str, Agent]) -> dict[str, Any]:
        records = workdir / "evaluation"
        with clock("evaluation"):
            return compare(agents, test, engine, tools, **judging, progress=multihost.is_main(), records=records)

    asked = {"questions": len(test), "k": config.evaluation.k or config.agent.k}
    if config.evaluation.before and run_.start == 0:
        _keep(workdir, "warm_start", evaluate({"warm_start": judged}), asked)
    bar = tqdm(
        range(run_.start, config.steps),
        initial=run_.start,
        total=config.steps,
        desc="training",
        unit="step",
        disable=not multihost.is_main(),
    )
    alarm: Alarm | None = None
    owed = False  # a checkpoint
    paces: list[float] = []  # seconds of this sitting's first steps
    for step in bar:
        step_clock = _Clock()
        stage = stages.at(step)
        try:
            with step_clock("step"):
                metrics = _train_step(stage, recipe.agent, run_, engine, tools, stage.examples(), step, step_clock)
        except NotFinite as error:
            alarm = Alarm(step, error.metric, str(error))
            break
        done = step + 1
        if config.evaluation.every and (done % config.evaluation.every == 0 or done == config.steps):
            with step_clock("validation"):
                summary, _ = score(judged, validation, engine, tools, **judging)
            metrics |= {f"validation/{name}": value for name, value in summary.items() if isinstance(value, float)}
            if config.evaluation.canary:
                with step_clock("canary"):
                    metrics |= canary(judged, validation, engine, tools, **judging)
        metrics |= {f"timing_s/{name}": seconds for name, seconds in step_clock.seconds.items()}
        run_.writer.write(step, metrics)  # before the checkpoint: a run killed in between must not lack this row
        if config.evaluation.stages and stages.ended(done):
            _keep(workdir, stage.name, evaluate({stage.name: judged}), asked)
        if alarm := watch.see(step, stage.name, metrics):
            break
        extra = {"streams": stages.state(), "stage": stage.name, "watch": watch.state()}
        owed = owed or run_.due(done)
        try:
            fork(
                run_, done, **extra
            )  # before the checkpoint: a sitting that begins from that one comes too late for it
            if owed and (done == config.steps or not watch.worried):
                with clock("checkpoint"):
                    run_.save(done, **extra)
                owed = False
        except NotFinite as error:
            alarm = Alarm(step, error.metric, str(error))
            break
        bar.set_postfix_str(_headline(metrics))
        paces.append(step_clock.seconds["step"])
        if len(paces) == _ESTIMATED_AFTER and multihost.is_main():
            bar.write(estimate(paces, config.steps - done))
    clock.seconds["training"] = sum(row.get("timing_s/step", 0.0) for row in read_metrics(workdir))

    stopped = _stop(run_, engine, alarm) if alarm else {}
    usable = not stopped or stopped["stopped"]["steps"] > 0  # else its weights are those of the trouble
    run_.finish(export=usable)
    agents = {"trained": judged}
    if config.evaluation.baselines and not any(golden_step(example) is not None for example in test):
        agents |= judged.baselines(tuple(config.knowledge))
    names = config.evaluation.names
    table = _kept(workdir, ["warm_start", *config.stages], asked) | (evaluate(agents) if usable else {})
    table = {names.get(name, name): row for name, row in table.items()}
    results = {
        "agents": table,
        "seconds": {**clock.seconds, "total": time.perf_counter() - started},
        "devices": len(jax.devices()),
        "platform": jax.devices()[0].platform,
        "steps": config.steps,
        **stopped,
        "seed": config.seed,
        "peak_memory_gib": memory_metrics(),
    }
    if multihost.is_main():
        (workdir / "results.json").write_text(json.dumps(results, indent=2) + "\n")
        figures.training_figures(read_metrics(workdir), workdir / "figures", tuple(config.knowledge))
        if table:
            print_table(table, workdir, headline=headline(config, recipe))
    if alarm:
        raise RunStopped(stopped["stopped"]["message"])
    return results


def _questions(config: TrainConfig) -> tuple[list[Example], list[Example]]:
    """For validation, and for the final table.

    Raises:
      ValueError: there are golden steps among them with retrievers that the run lacks, or that the canary can't be tried on.
    """
    validation, test = evaluation_examples(config, "validation"), evaluation_examples(config, "test")
    for part, examples in (("validation", validation), ("test", test)):
        name = getattr(config.data, part) or config.data.train
        check_retrievers(examples, tuple(config.knowledge), f"config.data.{part}={name}")
    if config.evaluation.canary and any(golden_step(example) is not None for example in validation):
        raise ValueError(
            "config.evaluation.canary changes what searches find, and golden steps, of which config.data.validation has "
            "some, search nothing: switch it off, or validate on questions"
        )
    return validation, test


def _check_names(config: TrainConfig, judged: Agent) -> None:
    """Complains about two agents of one name, and about config.evaluation.names of agents that are not scored."""
    baselines = judged.baselines(tuple(config.knowledge))
    for section in ("stages", "controls"):
        if both := next((name for name in getattr(config, section) if name in baselines), None):
            raise ValueError(
                f"config.{section}.{both}: call it something else; results.json has another agent so named"
            )
    scored = ("warm_start", "trained", *config.stages, *baselines)
    if taken := [name for key, name in config.evaluation.names.items() if name in scored and name != key]:
        raise ValueError(f"config.evaluation.names: {taken[0]!r} is another agent's name; take one that nobody has")
    if unknown := [name for name in config.evaluation.names if name not in scored]:
        close = difflib.get_close_matches(unknown[0], scored, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(scored)}"
        raise ValueError(f"config.evaluation.names.{unknown[0]}: no agent is called so; {hint}")


def _check_room(config: TrainConfig, agent: Agent, stage: RunStage, engine: Engine) -> None:
    """Raises ValueError if conversations are too short for all of the first training questions."""
    reason = no_room(agent, stage.stream.first(_TRIED), engine, tuple(config.knowledge))
    if reason:
        raise ValueError(
            f"config.engine.max_length={config.engine.max_length} leaves no room for a turn at any of the first training "
            f"questions ({reason}); raise it, or shorten the prompt or config.agent.answer_tokens"
        )


def _stop(run_: Run, engine: Engine, alarm: Alarm) -> dict[str, Any]:
    """Goes back to the last checkpoint from before the trouble, if there is one; for results.json, what happened."""
    engine.rest()
    done = run_.back_to_checkpoint()
    if done:
        engine.update(run_.served_params(), done)
        left = (
            f"policy/ is that of {done} steps. Start another run from it with other settings "
            f"(config.model.path={run_.workdir / 'policy'}), or loosen config.watch and --resume"
        )
    else:
        left = (
            "this was before the first checkpoint; no policy was written. Start again with other settings, or a smaller "
            "config.checkpoint.every"
        )
    message = f"stopped after step {alarm.step}: {alarm.complaint}; {left}"
    return {"stopped": {**dataclasses.asdict(alarm), "steps": done, "message": message}}


def _keep(workdir: pathlib.Path, name: str, table: Mapping[str, Any], asked: Mapping[str, int]) -> None:
    """Keeps a table that was measured on the way for the end of the run, whichever sitting that is in; `asked`: with which
    settings, that may be others by then."""
    if multihost.is_main():
        path = workdir / "evaluation" / f"{name}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"asked": asked, "agents": table}))


def _kept(workdir: pathlib.Path, names: Sequence[str], asked: Mapping[str, int]) -> dict[str, Any]:
    """The kept tables; those of other settings are left out, with a warning."""
    found: dict[str, Any] = {}
    for path in (workdir / "evaluation" / f"{name}.json" for name in names):
        if not path.is_file():
            continue
        kept = json.loads(path.read_text())
        if kept["asked"] == asked:
            found |= kept["agents"]
        else:
            logging.warning("%s was measured with %s, and now it is %s: it is left out", path, kept["asked"], asked)
    return found


def make_engine(config: TrainConfig, model: Decoder, rows: int | None = None) -> Engine:
    """The run's engine, or one with fewer rows. It serves an adapter as config.engine.lora says."""
    return Engine(
        merged(model, model.compute_dtype) if config.engine.lora == "merged" else model,
        rows=rows or config.engine.rows,
        max_length=config.engine.max_length,
        segment=config.engine.segment,
        leave_fraction=config.engine.leave_fraction,
        seed=config.seed,
        layout=config.engine.layout,
    )


def _train_step(
    stage: RunStage,
    agent: Agent,
    run_: Run,
    engine: Engine,
    tools: Mapping[str, SearchTool],
    examples: Sequence[Example],
    step: int,
    clock: _Clock,
) -> dict[str, Any]:
    """One step: rollouts, rewards, advantages, updates. Returns its metrics."""
    config, learner = stage.config, run_.learner
    settings = config.learner
    if stage.restart and step == stage.start:
        learner.restart()
    learner.switch(settings.loss, config.rollout.temperature or 1.0, run_.optimizer(stage.updates))
    engine.stats, stats = EngineStats(), DriverStats()
    with clock("rollout"):
        episodes = run(
            agent,
            examples,
            engine,
            tools,
            samples=config.rollout.samples,
            seed=step_seed(config.seed, step),
            sampling=Sampling(
                temperature=config.rollout.temperature, top_p=config.rollout.top_p, top_k=config.rollout.top_k
            ),
            deterministic=config.rollout.deterministic,
            tool_timeout=config.rollout.tool_timeout,
            stats=stats,
            forks=config.rollout.forks,
        )
    engine.rest()
    for episode, rewards in zip(episodes, stage.reward(episodes), strict=True):
        episode.rewards = rewards
    place = {example.id: i for i, example in enumerate(examples)}
    groups = np.asarray([place[episode.example.id] for episode in episodes])
    seen = as_the_policy_goes(episodes, [config.seed, step]) if config.rollout.forks else range(len(episodes))
    metrics = rollout_metrics(
        [episodes[i] for i in seen], groups[list(seen)], config.evaluation.normalizer, tuple(tools)
    )
    metrics |= {"stage": stage.name, "rollout/tool_calls": stats.tool_calls, "rollout/tool_errors": stats.tool_errors}

    sequences, _ = sequences_of(episodes)
    portion = -(-len(sequences) // settings.minibatches)
    reference = None
    if settings.reward_kl_coef:
        with clock("reference"):
            reference = learner.logprobs(sequences, learner.reference, portion=portion)
    credit = assign(settings, episodes, groups, reference)
    keep, learned = credit.keep, sequences
    if settings.importance_cap:
        with clock("old_logprobs"):
            scored = learner.logprobs([sequences[i] for i in keep], portion=portion)
        credit = cap_importance(credit, sequences, scored, settings.importance_cap)
        learned = with_logprobs(sequences, keep, scored)
    metrics |= credit.metrics
    order = np.random.default_rng([config.seed, step])
    attempts = attempts_of(episodes) if settings.share_prefixes else None
    computed = 0
    behaviour, current, promoted, gap = [], [], [], {}
    sums: dict[str, list[float]] = {}
    for minibatch in portions(keep, settings.minibatches, order, attempts):
        if not len(minibatch):
            continue
        chosen = [learned[i] for i in minibatch]
        with clock("update"):
            weights = credit.token_weights(sequences, minibatch, settings.aggregation, config.engine.max_length)
            batch, index = run_.layout.build(chosen, weights, [credit.advantages[i] for i in minibatch])
        if settings.loss.kl_coef and not settings.loss.exact_kl:
            with clock("reference"):
                batch = learner.with_reference(batch)
        with clock("update"):
            update_metrics, logprobs = learner.update(batch)
        computed += index.tokens
        old = [sequences[i].logprobs[sequences[i].loss_mask] for i in minibatch]
        new = [lp[s.loss_mask] for s, lp in zip(chosen, index.split(logprobs))]
        if not gap:  # the first mini-batch was scored with the very weights that sampled it
            gap = gap_metrics(old, new)
        behaviour += old
        current += new
        gains = [credit.advantages[i][sequences[i].loss_mask] > 0 for i in minibatch]
        promoted += [lp[gain] for lp, gain in zip(new, gains)]
        for name, value in update_metrics.items():
            sums.setdefault(f"actor/{name}", []).append(value)
    if not len(keep):  # nothing to learn from; sampler and learner are compared all the same
        scored = learner.logprobs(sequences, portion=portion)
        gap = gap_metrics(
            [s.logprobs[s.loss_mask] for s in sequences], [lp[s.loss_mask] for s, lp in zip(sequences, scored)]
        )
    engine.update(run_.served_params(), step + 1)

    metrics |= {name: float(np.mean(values)) for name, values in sums.items()} | gap
    if behaviour:
        metrics |= ratio_metrics(behaviour, current) | promoted_metrics(promoted)
    trained_tokens = sum(len(sequences[i]) for i in keep)
    metrics |= {
        "actor/trained_sequences": len(keep),
        "perf/rollout_tokens_per_s": sum(map(len, sequences)) / clock.seconds["rollout"],
        "perf/update_tokens_per_s": trained_tokens / clock.seconds.get("update", 1.0),
        "perf/trained_tokens": computed,
        "perf/trained_tokens_unshared": trained_tokens,
        "perf/prefilled_tokens": engine.stats.prefilled_tokens,
        "perf/shared_prompt_tokens": engine.stats.forked_tokens,
        "perf/decoded_tokens": engine.stats.decoded_tokens,
        "perf/prefill_occupancy": engine.stats.prefilled_tokens / max(engine.stats.prefill_slots, 1),
        "perf/decode_occupancy": engine.stats.decoded_tokens / max(engine.stats.decode_slots, 1),
        "perf/compilations": engine.compilations + learner.compilations,
        "timing_s/generate": stats.generate_seconds,
        "timing_s/tools": stats.tool_seconds,
        **memory_metrics(),
    }
    _log_episodes(run_.workdir, step, episodes, config.log_episodes)
    return metrics


class _Clock:
    """Adds up seconds by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def __call__(self, name: str) -> _Timer:
        return _Timer(self.seconds, name)


@dataclasses.dataclass
class _Timer:
    seconds: dict[str, float]
    name: str
    started: float = 0.0

    def __enter__(self) -> None:
        self.started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds[self.name] = self.seconds.get(self.name, 0.0) + time.perf_counter() - self.started


def _log_episodes(workdir: pathlib.Path, step: int, episodes: Sequence[Episode], count: int) -> None:
    """Writes a spread of the step's episodes, of a forked attempt all ways."""
    if count and multihost.is_main():
        attempts: dict[tuple[str, int], list[Episode]] = {}
        for episode in episodes:
            attempts.setdefault((episode.example.id, episode.sample), []).append(episode)
        stride = max(len(episodes) // count, 1)
        spread = [episode for attempt in list(attempts.values())[::stride] for episode in attempt][:count]
        records = [episode_record(episode, step=step) for episode in spread]
        write_records(workdir / "episodes" / f"step-{step:06d}.jsonl", records)


def estimate(paces: Sequence[float], left: int) -> str:
    """How long a run has still to go, from the seconds of its first steps; the first ones compile, so the median counts."""
    pace = float(np.median(paces))
    seconds = pace * left
    span = f"{seconds / 3600:.1f} hours" if seconds >= 2 * 3600 else f"{max(seconds / 60, 1):.0f} minutes"
    return f"{pace:.1f} s a step: about {span} of training to go, validation and the final evaluation not counted"


def _headline(metrics: Mapping[str, Any]) -> str:
    parts = [f"reward {metrics['reward/total']:.2f}", f"em {metrics['rollout/em']:.2f}"]
    if "rollout/routing_accuracy" in metrics:
        parts.append(f"routing {metrics['rollout/routing_accuracy']:.2f}")
    parts.append(f"searches {metrics['rollout/searches_per_question']:.2f}")
    return ", ".join(parts)
