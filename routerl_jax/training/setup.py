"""The parts of a run, built from its configuration."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from routerl_jax.agents.agent import SearchTool
from routerl_jax.agents.search_agent import SearchAgent
from routerl_jax.core.config import unknown_key
from routerl_jax.core.types import Passage
from routerl_jax.data.readers import ExampleSource, Subset, open_dataset
from routerl_jax.knowledge.corpus import file_sha256, passages_sha256
from routerl_jax.knowledge.encoders import encoder_place
from routerl_jax.models.config import DecoderConfig
from routerl_jax.models.decoder import Decoder
from routerl_jax.models.embedding import Embedder
from routerl_jax.models.huggingface import load_pretrained
from routerl_jax.models.lora import apply_lora, merged
from routerl_jax.models.pretrained import cache_directory
from routerl_jax.parallel.mesh import make_mesh
from routerl_jax.parallel.sharding import create_sharded
from routerl_jax.recipes.known import RECIPES
from routerl_jax.recipes.recipe import Recipe
from routerl_jax.training.config import KnowledgeConfig, MeshConfig, ModelConfig, TrainConfig

_LORA_KEY = 0x10A  # tells the adapter's randomness from that of random weights


def build_mesh(config: MeshConfig) -> Mesh:
    """The run's device mesh."""
    return make_mesh({"data": config.data, "fsdp": config.fsdp, "tensor": config.tensor})


def build_policy(config: TrainConfig, mesh: Mesh) -> Decoder:
    """The policy with its initial weights, sharded over the mesh, and with the adapter that config.model.lora describes.

    A path of an adapter (a PEFT directory) gives its base with the adapter merged, or, where config.model.lora describes
    the same one, with the adapter to be trained on.

    Raises:
      ValueError: the path holds an encoder or nothing usable, the architecture has unknown fields, or the adapter does not
        fit.
    """
    model = _initial_policy(config, mesh)
    if not config.model.lora.rank:
        return merged(model)
    try:
        key = jax.random.fold_in(jax.random.key(config.seed), _LORA_KEY)
        apply_lora(model, config.model.lora.build(), key, config.model.lora.dtype)
    except ValueError as error:
        raise ValueError(f"config.model.lora: {error}") from error
    return model


def _initial_policy(config: TrainConfig, mesh: Mesh) -> Decoder:
    dtype = config.model.dtype
    compute_dtype = config.model.compute_dtype or dtype
    if config.model.path:
        model = load_pretrained(config.model.path, mesh, dtype, compute_dtype=compute_dtype, layout=config.mesh.layout)
        if isinstance(model, Embedder):
            raise ValueError(f"config.model.path={config.model.path!r} is an encoder; a policy must be a decoder")
        return model
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


def random_architecture(config: ModelConfig) -> DecoderConfig:
    """The architecture of a policy without pretrained weights. Raises ValueError for an unknown field."""
    fields = {field.name for field in dataclasses.fields(DecoderConfig)}
    for key in config.architecture:
        if key not in fields:
            raise ValueError(unknown_key("config.model.architecture", key, fields))
    return DecoderConfig(**dict(config.architecture))  # type: ignore[arg-type]


def build_recipe(config: TrainConfig) -> Recipe:
    """The recipe with its agent and stages."""
    return RECIPES.get(config.recipe)(
        config.agent, config.stages, tuple(config.knowledge), config.evaluation.normalizer
    )


def evaluated_agent(config: TrainConfig, recipe: Recipe) -> SearchAgent:
    """The recipe's agent as it is evaluated: with config.evaluation.k passages per search."""
    return dataclasses.replace(recipe.agent, k=config.evaluation.k or recipe.agent.k)


def open_examples(name: str, limits: tuple[int, ...], key: str) -> ExampleSource:
    """A dataset, or a stretch of it. `key` names the config section in errors."""
    source = open_dataset(name)
    if not limits:
        return source
    if len(limits) != 2:
        raise ValueError(f"config.data.{key}_range={limits} must be empty or (start, stop)")
    return Subset(source, *limits)


def open_knowledge(config: TrainConfig, *, progress: bool = True) -> dict[str, SearchTool]:
    """Loads the knowledge bases, building those that do not exist yet."""
    return {name: _open_kb(name, spec, progress) for name, spec in config.knowledge.items()}


def _open_kb(name: str, spec: KnowledgeConfig, progress: bool) -> SearchTool:
    from routerl_jax.knowledge.load import check_kb, load_kb

    if spec.source.startswith(("http://", "https://")):
        return load_kb(spec.source)
    directory = pathlib.Path(spec.directory).expanduser() if spec.directory else _cache_place(name, spec)
    if not (directory / "kb.json").is_file():  # several processes of one host may get here; one builds, the others wait
        _build_kb(name, spec, directory, progress)
    if spec.directory:  # in the cache the place depends on the keys
        said = {key: getattr(spec, key) for key in ("source", "kind", "encoder", "index")}
        if not spec.source:  # then defaults say nothing: whatever is there is meant
            said = {key: value for key, value in said.items() if value != getattr(KnowledgeConfig, key)}
        check_kb(directory, said, f"config.knowledge.{name}", _atlas_passages(spec))
    return load_kb(str(directory))


def _build_kb(name: str, spec: KnowledgeConfig, directory: pathlib.Path, progress: bool) -> None:
    from routerl_jax.knowledge.build import BuildConfig, build_from_passages, build_kb

    if not spec.source:
        raise ValueError(
            f"config.knowledge.{name}: there is no knowledge base in {directory} and no source to build it from; "
            f"set config.knowledge.{name}.source"
        )
    passages = _atlas_passages(spec)
    build = BuildConfig(
        name=name,
        kind=spec.kind,
        corpus=spec.source if passages is None else "",
        encoder=spec.encoder,
        index=spec.index,
    )
    if passages is None:
        build_kb(config=build, directory=directory, progress=progress)
    else:
        build_from_passages(passages, config=build, directory=directory, progress=progress)


def _atlas_passages(spec: KnowledgeConfig) -> list[Passage] | None:
    """The passages that a source `atlas/...` stands for; None for a file."""
    if not spec.source.startswith("atlas/"):
        return None
    from routerl_jax.data.atlas.world import passages_of

    return passages_of(spec.source.removeprefix("atlas/"))


def _cache_place(name: str, spec: KnowledgeConfig) -> pathlib.Path:
    """A cache directory that depends on what goes into the knowledge base."""
    what = dataclasses.asdict(spec) | {"encoder": encoder_place(spec.encoder)}
    content = ""
    if (passages := _atlas_passages(spec)) is not None:
        content = passages_sha256(passages)
    elif spec.source and (path := pathlib.Path(spec.source).expanduser()).is_file():
        content = file_sha256(path)
    digest = hashlib.sha256((json.dumps(what, sort_keys=True) + content).encode()).hexdigest()
    return cache_directory() / "knowledge" / f"{name}-{digest[:12]}"
