"""The parts of a run, built from its configuration."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from absl import logging
from jax.sharding import Mesh

from routerl_jax.agents.agent import Agent
from routerl_jax.agents.search_agent import SearchAgent
from routerl_jax.core.config import naming, override, unknown_key
from routerl_jax.core.tokenizer import with_template
from routerl_jax.core.types import Example
from routerl_jax.data.readers import ExampleSource, Subset, open_dataset
from routerl_jax.engine.engine import Engine
from routerl_jax.models.config import DecoderConfig
from routerl_jax.models.decoder import Decoder
from routerl_jax.models.embedding import Embedder
from routerl_jax.models.huggingface import load_pretrained
from routerl_jax.models.lora import apply_lora, merged
from routerl_jax.models.sight import add_sight
from routerl_jax.models.vision_language import VisionLanguageModel
from routerl_jax.parallel.mesh import make_mesh
from routerl_jax.parallel.sharding import create_sharded
from routerl_jax.recipes.recipe import RECIPES, Recipe, Stage
from routerl_jax.rewards.terms import RewardFunction
from routerl_jax.services.judge import ModelJudge, open_judge
from routerl_jax.training.config import AgentConfig, MeshConfig, ModelConfig, TrainConfig
from routerl_jax.training.credit import credit_named
from routerl_jax.training.knowledge import open_knowledge as open_knowledge
from routerl_jax.training.knowledge import tool_schemas

_SOURCES = "{sources}"  # in config.agent.prompt
_LORA_KEY, _SIGHT_KEY = 0x10A, 0x5EE  # make random keys of the adapter and the tower differ from that of random weights


def build_mesh(config: MeshConfig) -> Mesh:
    """The run's device mesh, over all devices."""
    return make_mesh(_sizes(config))


def learner_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh of a training run's learner, over all devices but those of the engine alone (config.mesh.engine).

    Args:
      devices: the run's devices; default: all that are attached.
    """
    devices = jax.devices() if devices is None else devices
    return make_mesh(_sizes(config), devices[: len(devices) - config.engine])


def _sizes(config: MeshConfig) -> dict[str, int]:
    return {"data": config.data, "fsdp": config.fsdp, "tensor": config.tensor}


def check_engine_devices(config: MeshConfig, count: int | None = None) -> None:
    """Raises ValueError if the engine can't have config.mesh.engine devices of its own.

    Args:
      count: number of the run's devices; default: all that are attached.
    """
    if not config.engine:
        return
    count, start = count or len(jax.devices()), f"config.mesh.engine={config.engine}"
    if jax.process_count() > 1:
        raise ValueError(
            f"{start}: the engine has devices of its own in a run of one process only, and there are {jax.process_count()}; "
            "set it to 0"
        )
    if config.engine >= count:
        raise ValueError(f"{start} leaves the learner none of {count} devices: take fewer, or config.mesh.cpu_devices")
    if config.engine % config.tensor:
        raise ValueError(
            f"{start}: these devices are shared by the work of a layer as the learner's are, and {config.engine} can't be "
            f"divided by config.mesh.tensor={config.tensor}"
        )


def engine_mesh(config: MeshConfig, mesh: Mesh, devices: Sequence[Any] | None = None) -> Mesh:
    """The devices of the engine: the last config.mesh.engine of the run's `devices`, or the learner's `mesh`."""
    if not config.engine:
        return mesh
    devices = jax.devices() if devices is None else devices
    return make_mesh({"data": -1, "tensor": config.tensor}, devices[-config.engine :])


def engine_layout(config: TrainConfig) -> str:
    """The layout of the engine's weights; "": those of the learner are used as they are."""
    own = config.mesh.engine or config.engine.weight_qtype
    return config.engine.layout or (config.mesh.layout if own else "")


def build_policy(config: TrainConfig, mesh: Mesh) -> Decoder:
    """The policy with its initial weights, sharded over the mesh, and with the adapter that config.model.lora describes.

    If the path is an adapter (a PEFT directory), the policy is its base with the adapter merged. If config.model.lora describes
    the same adapter, it is not merged, and training continues it.

    Raises:
      ValueError: the path holds an encoder or nothing usable, the architecture has unknown fields, or the adapter does not
        fit.
    """
    model = _initial_policy(config, mesh)
    bound_pictures(config.model, model)
    if config.model.chat_template:
        with naming("config.model.chat_template"):
            if model.tokenizer is None:
                raise ValueError("a new vocabulary lacks what a chat template writes: give config.model.path")
            model.tokenizer = with_template(model.tokenizer, config.model.chat_template)
    if not config.model.lora.rank:
        return merged(model)
    with naming("config.model.lora"):
        key = jax.random.fold_in(jax.random.key(config.seed), _LORA_KEY)
        apply_lora(model, config.model.lora.build(), key, config.model.lora.dtype)
    return model


def _initial_policy(config: TrainConfig, mesh: Mesh) -> Decoder:
    dtype = config.model.dtype
    compute_dtype = config.model.compute_dtype or dtype
    if config.model.path:
        model = load_pretrained(config.model.path, mesh, dtype, compute_dtype=compute_dtype, layout=config.mesh.layout)
        if isinstance(model, Embedder):
            raise ValueError(f"config.model.path={config.model.path!r} is an encoder; a policy must be a decoder")
        if not config.model.sight:
            return model
        if isinstance(model, VisionLanguageModel):
            raise ValueError(f"config.model.path={config.model.path!r} sees already: leave config.model.sight empty")
        key = jax.random.fold_in(jax.random.key(config.seed), _SIGHT_KEY)
        return add_sight(model, config.model.sight, key, mesh, config.mesh.layout)
    architecture = random_architecture(config.model)
    return create_sharded(
        lambda: Decoder(
            architecture,
            jax.random.key(config.seed),
            param_dtype=jnp.dtype(dtype),
            compute_dtype=jnp.dtype(compute_dtype),
        ),
        mesh,
        config.mesh.layout,
    )


def bound_pictures(config: ModelConfig, model: Decoder) -> None:
    """Sets the least and most pixels of the model's pictures. Raises ValueError if it sees none, or least exceeds most."""
    bounds = {name: value for name in ("min_pixels", "max_pixels") if (value := getattr(config, name))}
    if not bounds:
        return
    settings = ", ".join(f"config.model.{name}={value}" for name, value in bounds.items())
    if not isinstance(model, VisionLanguageModel):
        raise ValueError(f"{settings}: a {model.config.model_type} model sees no pictures; set it to 0")
    processor = dataclasses.replace(model.image_processor, **bounds)
    if processor.min_pixels > processor.max_pixels:
        raise ValueError(
            f"{settings}: pictures would have at least {processor.min_pixels} and at most {processor.max_pixels} pixels"
        )
    model.image_processor = processor


def random_architecture(config: ModelConfig) -> DecoderConfig:
    """The architecture of a policy without pretrained weights. Raises ValueError for an unknown field."""
    fields = {field.name for field in dataclasses.fields(DecoderConfig)}
    for key in config.architecture:
        if key not in fields:
            raise ValueError(unknown_key("config.model.architecture", key, fields))
    return DecoderConfig(**dict(config.architecture))  # type: ignore[arg-type]


def build_recipe(config: TrainConfig) -> Recipe:
    """The recipe with its stages and its agent, to which config.agent.settings are applied.

    Raises:
      ValueError: a setting is no field of the agent or has another type; a reward needs a judge and none is configured; or the
        recipe itself refuses the configuration.
    """
    with naming("config.recipe"):
        build = RECIPES.get(config.recipe)
    recipe = _made(build, config)
    _check_verdicts(config, recipe)
    agent = _with_settings(recipe.agent, config.agent)
    if agent.functions:
        _check_tags(recipe)
        if _SOURCES in config.agent.prompt:
            raise ValueError(
                f"config.agent.prompt: the chat template shows each knowledge base with its description; leave out {_SOURCES}"
            )
        agent = agent.with_schemas(tool_schemas(config.knowledge))
    elif isinstance(agent, SearchAgent) and agent.prompt and _SOURCES in agent.prompt:
        label = agent.grammar.label  # a line per knowledge base: its name, as the policy writes it, and its description
        lines = [f"- {label(name)}: {spec.description}".removesuffix(": ") for name, spec in config.knowledge.items()]
        agent = dataclasses.replace(agent, prompt=agent.prompt.replace(_SOURCES, "\n".join(lines)))
    elif described := [name for name, spec in config.knowledge.items() if spec.description]:
        raise ValueError(
            f"config.knowledge.{described[0]}.description: the policy is not shown it; leave it empty, put {_SOURCES} into "
            "config.agent.prompt, or set config.agent.grammar='tool_calls'"
        )
    return dataclasses.replace(recipe, agent=agent)


def _made(build: Callable[..., Recipe], config: TrainConfig) -> Recipe:
    """What the recipe's function returns.

    Raises:
      ValueError: it takes other arguments, does not return a Recipe, or never reads a setting of config.agent that was changed.
    """
    agent, read = _noting_reads(config.agent)
    arguments = (agent, config.stages, tuple(config.knowledge), config.evaluation.normalizer)
    try:
        inspect.signature(build).bind(*arguments)
    except TypeError as error:
        raise ValueError(
            f"config.recipe={config.recipe!r} must take four arguments: config.agent, config.stages, the names of the "
            f"knowledge bases, and the normaliser: {error}"
        ) from error
    recipe = build(*arguments)
    if not isinstance(recipe, Recipe) or not isinstance(recipe.agent, Agent):
        wrong = f"a Recipe whose agent is {recipe.agent!r:.60}" if isinstance(recipe, Recipe) else f"{recipe!r:.60}"
        raise ValueError(
            f"config.recipe={config.recipe!r} gave {wrong}: it must give a Recipe with an object of a class that derives from "
            "routerl_jax.Agent (docs/extending.md)"
        )
    default = AgentConfig()
    for name in (field.name for field in dataclasses.fields(AgentConfig)):
        if name in read or name == "settings" or (value := getattr(config.agent, name)) == getattr(default, name):
            continue
        message = f"config.agent.{name}={value!r:.80}: config.recipe={config.recipe!r} never reads it"
        if name not in _CARRIED:
            raise ValueError(f"{message}; leave it out, or let the recipe use agent.{name}")
        logging.warning("%s, so it has no effect", message)
    return recipe


# what a configuration that begins from a shipped one carries along, though its own recipe has another protocol
_CARRIED = ("grammar", "max_searches", "k", "max_turn_tokens", "answer_tokens")


def _noting_reads(agent: AgentConfig) -> tuple[AgentConfig, set[str]]:
    """A copy of the section, and the names of its fields that have been read from the copy."""
    read: set[str] = set()

    class Noting(AgentConfig):
        def __getattribute__(self, name: str) -> Any:
            read.add(name)
            return super().__getattribute__(name)

    noting = object.__new__(Noting)
    noting.__dict__.update(agent.__dict__)
    read.clear()
    return noting, read


def _judged_terms(stage: Stage) -> tuple[str, ...]:
    """The terms of a stage's reward that need a judge's verdicts."""
    return stage.reward.asks if isinstance(stage.reward, RewardFunction) else ()


def _check_tags(recipe: Recipe) -> None:
    """Raises ValueError if a reward needs tags, which a policy that calls functions does not write."""
    for stage in recipe.stages:
        if isinstance(stage.reward, RewardFunction) and (terms := stage.reward.reads_tags):
            raise ValueError(
                f"config.stages.{stage.name}.reward.{terms[0]} looks for tags in what the policy writes, with these options, "
                "and config.agent.grammar='tool_calls' writes none: every attempt would be scored wrong. Take another term or "
                "option (docs/models.md#tool-calls)"
            )


def _check_verdicts(config: TrainConfig, recipe: Recipe) -> None:
    for stage in filter(_judged_terms, recipe.stages):
        term = f"config.stages.{stage.name}.reward.{_judged_terms(stage)[0]}"
        if not config.judge.model:
            raise ValueError(
                f"{term} asks a judge, and config.judge.model is empty: name the language model that judges"
            )
        credit = config.in_stage(stage.name).learner.credit
        if config.judge.failed == "leave_out" and credit_named(credit).forked:
            raise ValueError(
                f"{term} with config.judge.failed='leave_out' does not go with config.learner.credit={credit!r}: without one "
                "of its branches a choice has only the advantages of the others; take failed='zero' or 'em'"
            )


def build_judge(config: TrainConfig, recipe: Recipe) -> ModelJudge | None:
    """The run's judge, if a reward or the evaluation needs one; else None. Every process must call this.

    Raises:
      ValueError: the judge can't be reached with config.judge, or an environment variable is not set.
    """
    if not (config.evaluation.judge or any(map(_judged_terms, recipe.stages))):
        return None
    with naming("config.judge"):
        return open_judge(config.judge, config.evaluation.normalizer)


def with_judge(recipe: Recipe, judge: ModelJudge | None) -> Recipe:
    """The recipe with the judge for its rewards that need one."""
    stages = [
        dataclasses.replace(stage, reward=dataclasses.replace(stage.reward, judge=judge))
        if isinstance(stage.reward, RewardFunction) and _judged_terms(stage)
        else stage
        for stage in recipe.stages
    ]
    return dataclasses.replace(recipe, stages=stages)


def _with_settings(agent: Agent, config: AgentConfig) -> Agent:
    path = "config.agent.settings"
    for key in config.settings:
        if not dataclasses.is_dataclass(agent):
            raise ValueError(
                f"{path}.{key}: {type(agent).__name__} has no fields; make it a frozen dataclass with a field {key}"
            )
        if key in (reserved := [field.name for field in dataclasses.fields(AgentConfig)]):
            raise ValueError(
                f"{path}.{key}: set config.agent.{key}, from which recipes make it. If an agent of your own has such a field, "
                f"call it something else: {', '.join(reserved)} are reserved"
            )
        fields = [field.name for field in dataclasses.fields(agent) if field.init]
        if key not in fields:
            raise ValueError(f"{unknown_key(path, key, fields)} (of {type(agent).__name__})")
    return override(agent, config.settings, path) if config.settings else agent


def evaluated_agent(config: TrainConfig, recipe: Recipe) -> Agent:
    """The recipe's agent for evaluation: with config.evaluation.k passages per search."""
    return recipe.agent.with_passages(config.evaluation.k) if config.evaluation.k else recipe.agent


def headline(config: TrainConfig, recipe: Recipe) -> tuple[str, ...]:
    """The metrics that lead the run's tables: those of config.evaluation.headline, else the paper's."""
    return config.evaluation.headline or recipe.headline


def evaluation_examples(
    config: TrainConfig, part: Literal["validation", "test"], count: int | None = None
) -> list[Example]:
    """The questions that a run is evaluated on.

    Args:
      count: take the first `count` questions (-1: all); default: the number in config.evaluation.
    """
    data, evaluation = config.data, config.evaluation
    if part == "test":
        name, limits, default = data.test, data.test_range, evaluation.final_examples
    else:
        name, limits, default = data.validation, data.validation_range, evaluation.examples
    return take_examples(name or data.train, limits, f"config.data.{part}", default if count is None else count)


def take_examples(name: str, limits: tuple[int, ...], key: str, count: int) -> list[Example]:
    """The first `count` examples of a data set, or of a range of it (-1: all)."""
    return first_examples(open_examples(name, limits, key), count)


def first_examples(source: ExampleSource, count: int) -> list[Example]:
    """The first `count` examples (-1: all)."""
    return [source[i] for i in range(len(source) if count == -1 else min(count, len(source)))]


def open_examples(name: str, limits: tuple[int, ...], key: str) -> ExampleSource:
    """A data set, or a range of it.

    Args:
      key: the setting that names it, for errors, such as "config.data.train"; `limits` are then config.data.train_range.
    """
    with naming(key):
        source = open_dataset(name)
    if not limits:
        return source
    if len(limits) != 2:
        raise ValueError(f"{key}_range={limits} must be empty or (start, stop)")
    with naming(f"{key}_range"):
        return Subset(source, *limits)


def make_engine(config: TrainConfig, model: Decoder, rows: int | None = None, *, mesh: Mesh | None = None) -> Engine:
    """The run's engine, or one with fewer rows. config.engine.lora says how it applies an adapter.

    Args:
      mesh: its devices (`engine_mesh`); default: those of the model.
    """
    return Engine(
        merged(model, model.compute_dtype) if config.engine.lora == "merged" else model,
        rows=rows or config.engine.rows,
        max_length=config.engine.max_length,
        mesh=mesh,
        segment=config.engine.segment,
        leave_fraction=config.engine.leave_fraction,
        seed=config.seed,
        layout=engine_layout(config) if mesh is not None or config.engine.weight_qtype else config.engine.layout,
        routes=config.learner.replay_routing,
        drafts=config.engine.drafts,
        cache=config.engine.cache,
        weight_qtype=config.engine.weight_qtype,
        cache_qtype=config.engine.cache_qtype,
    )
