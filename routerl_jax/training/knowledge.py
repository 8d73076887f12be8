"""The knowledge bases of a run: existing ones are opened, missing ones are built, and hybrid ones join others. Also users' own
tools, which a function named in the configuration makes; the schemas of all of them, for policies that call functions; and
snapshots of the web."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import itertools
import json
import pathlib
import shutil
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from routerl_jax.agents.agent import SearchTool
from routerl_jax.agents.calls import calls_of_all
from routerl_jax.agents.conversation import Request
from routerl_jax.core.background import run_coroutine
from routerl_jax.core.buckets import fetched, in_bucket, path_of, url_of
from routerl_jax.core.config import from_config_dict, naming, unknown_key
from routerl_jax.core.files import cache_directory
from routerl_jax.core.registry import Registry
from routerl_jax.core.secrets import masked, resolved
from routerl_jax.core.types import Query, TextAndImage, ToolSchema, kb_schema
from routerl_jax.data.readers import open_dataset
from routerl_jax.knowledge.base import KnowledgeBase
from routerl_jax.knowledge.cassette import RecordedTool
from routerl_jax.knowledge.corpus import file_sha256, passages_sha256
from routerl_jax.knowledge.encoders import resolved_encoder
from routerl_jax.knowledge.index import AUTO, has_scann
from routerl_jax.knowledge.store import MANIFEST, Manifest, Store, built_at
from routerl_jax.knowledge.web.config import SnapshotConfig
from routerl_jax.knowledge.web.snapshot import MANIFEST as RECORDED
from routerl_jax.knowledge.web.snapshot import holds_records
from routerl_jax.parallel import multihost
from routerl_jax.parallel.mirrors import mirrored
from routerl_jax.training.atlas_sources import ATLAS, atlas_passages, atlas_triples, shows_pages, written_passages
from routerl_jax.training.config import KnowledgeConfig, TrainConfig, WebSnapshotConfig

_PAGED = ("ocr", "pages")  # kinds that show pages
TOOL = "tool"
_HYBRID = "hybrid"
_TRIED = 3  # questions for the trial of a source ..
_SCANNED = 256  # .. and those among which one with a picture is looked for
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_FACTORIES: Registry[Callable[..., Any]] = Registry("tool")


def open_knowledge(
    config: TrainConfig, workdir: pathlib.Path | None = None, *, progress: bool = True
) -> dict[str, SearchTool]:
    """Loads the knowledge bases by name, in the order of the configuration, building those that do not exist yet.

    Args:
      workdir: the run's directory, with its snapshot of the web (config.snapshot).

    Raises:
      ValueError: a knowledge base can't be opened or built; names its section of config.knowledge, or config.snapshot.
    """
    return open_knowledge_bases(config.knowledge, snapshots(config, workdir), progress=progress)


def try_sources(config: TrainConfig, tools: Mapping[str, SearchTool], workdir: pathlib.Path | None = None) -> None:
    """Searches every knowledge base once before the first step (a collective call).

    The query is a training question or, where that fails or only pictures are read, its picture; if both fail, the next
    question is tried. Records of earlier searches answer no new query, so cassettes and replayed snapshots are not tried.

    Raises:
      ValueError: all searches of a knowledge base failed; names it and the first error.
    """
    replayed = snapshots(config, workdir) if config.snapshot.mode == "replay" else {}
    untried = {name for name, tool in tools.items() if not (isinstance(tool, RecordedTool) or name in replayed)}
    errors: dict[str, str] = {}
    reads = {name: getattr(tool, "reads", ("text", "image")) for name, tool in tools.items()}
    pictured = any("text" not in of_tool for of_tool in reads.values())
    with naming("config.data.train"):
        source = open_dataset(config.data.train)
    first = config.data.train_range[0] if config.data.train_range else 0
    examples = [source[i] for i in range(first, min(first + (_SCANNED if pictured else _TRIED), len(source)))]
    examples = [*examples[:_TRIED], *[example for example in examples[_TRIED:] if example.images][:_TRIED]]
    for example in examples:
        queries: list[tuple[str, Query]] = [("text", example.question)]
        queries += [("image", TextAndImage(image=image)) for image in example.images[:1]]
        for kind, query in queries:
            requests = [Request(name, query, config.agent.k) for name in sorted(untried) if kind in reads[name]]
            for call in run_coroutine(calls_of_all(tools, requests, config.rollout.tool_timeout)):
                if call.error is None:
                    untried.discard(call.tool)
                else:
                    errors.setdefault(call.tool, f"{call.error} (query: {call.query or 'a picture'!r:.100})")
    if failed := [name for name in sorted(untried) if name in errors]:
        raise ValueError(
            f"config.knowledge.{failed[0]}: every search failed that was tried before the first step, of {len(examples)} "
            f"training questions. The first error: {errors[failed[0]]}. Mend the source, or leave it out"
        )


def with_knowledge(config: TrainConfig, pairs: Sequence[str]) -> TrainConfig:
    """A run's configuration with some of its knowledge bases replaced.

    Args:
      pairs: `NAME=PLACE`. NAME is a knowledge base of the run. PLACE is the directory or URL of another knowledge base; or a
        file, or a directory of PDFs and page images, from which one is built with the run's settings.

    Raises:
      ValueError: a pair can't be used; names it.
    """
    knowledge = dict(config.knowledge)
    for pair in pairs:
        name, _, source = pair.partition("=")
        if name not in knowledge or not source:
            raise ValueError(f"{pair!r} is not NAME=PLACE with a knowledge base of the run: {', '.join(knowledge)}")
        spec = knowledge[name]
        if source.startswith(("http://", "https://")):
            knowledge[name] = KnowledgeConfig(source=source)
        elif built_at(source):
            knowledge[name] = KnowledgeConfig(directory=source)
        elif not fetched(source).exists():
            raise ValueError(
                f"{pair!r}: {source} does not exist; give a knowledge base, or what it is to be built from"
            )
        elif spec.kind in (TOOL, _HYBRID):
            raise ValueError(
                f"{pair!r}: the run's {name} is of kind {spec.kind!r}, so that nothing says how {source} is to be built; build "
                "it (launch.build_kb), and give its directory"
            )
        else:
            knowledge[name] = dataclasses.replace(spec, source=source, directory="")
    return dataclasses.replace(config, knowledge=knowledge)


def open_knowledge_bases(
    knowledge: Mapping[str, KnowledgeConfig],
    frozen: Mapping[str, SnapshotConfig] = types.MappingProxyType({}),
    *,
    progress: bool = True,
) -> dict[str, SearchTool]:
    """`open_knowledge` without the rest of a run. `frozen`: the snapshots of web knowledge bases, by name."""
    check_knowledge(knowledge)
    opened: dict[str, SearchTool] = {}
    for name, spec in knowledge.items():
        if spec.kind != _HYBRID:
            with naming(f"config.knowledge.{name}"):
                alone = make_tool(name, spec) if spec.kind == TOOL else _open_kb(name, spec, progress, frozen)
                opened[name] = _reranked(name, spec, alone)
    members = dict(opened)
    for name, spec in knowledge.items():
        if spec.kind == _HYBRID:
            with naming(f"config.knowledge.{name}"):
                opened[name] = _reranked(name, spec, _join(name, spec, members, frozen))
    return {name: opened[name] for name in knowledge}


def _reranked(name: str, spec: KnowledgeConfig, tool: SearchTool) -> SearchTool:
    """The knowledge base with its reranker, if the configuration names one."""
    if not spec.reranker:
        return tool
    if not isinstance(tool, KnowledgeBase):
        raise ValueError(
            f"config.knowledge.{name}.reranker: a {type(tool).__name__} is no KnowledgeBase (knowledge.base), and only those "
            "can be reranked; leave it empty"
        )
    from routerl_jax.knowledge.hybrid import RerankedKB, shared_reranker

    return RerankedKB(tool, shared_reranker(spec.reranker), depth=spec.rerank_depth)


def check_knowledge(knowledge: Mapping[str, KnowledgeConfig]) -> None:
    """Checks the configuration of knowledge bases before any is opened or built, because that may take long.

    Raises:
      ValueError: a tool's source can't be imported or called with the settings, or keys are set that tools do not have; a kind
        is unknown; a knowledge base's source does not exist, or its settings do not belong to its kind; or a hybrid one has an
        unknown member.
    """
    for name, spec in knowledge.items():
        with naming(f"config.knowledge.{name}"):
            if spec.kind == TOOL:
                tool_factory(name, spec)
            elif spec.kind == _HYBRID:
                _check_members(
                    name, spec, [other for other, other_spec in knowledge.items() if other_spec.kind != _HYBRID]
                )
            else:
                _check_kb(name, spec)


def check_sources_differ(knowledge: Mapping[str, KnowledgeConfig]) -> None:
    """Checks that no two knowledge bases hold the same passages with the same settings: a policy can't learn to choose then.

    Raises:
      ValueError: two do; a copy of a file under another name is the same.
    """
    contents = {
        name: dataclasses.replace(spec, source="", directory="", description="") for name, spec in knowledge.items()
    }
    for (first, one), (second, other) in itertools.combinations(knowledge.items(), 2):
        if one.kind == TOOL or not one.source or contents[first] != contents[second]:
            continue
        if one.source != other.source:
            files = [fetched(spec.source) for spec in (one, other)]
            if not all(file.is_file() for file in files) or len({file.stat().st_size for file in files}) > 1:
                continue
            if len({file_sha256(file) for file in files}) > 1:
                continue
        raise ValueError(
            f"config.knowledge.{second}.source={other.source!r} has the same passages as "
            f"config.knowledge.{first}.source={one.source!r}, and the same settings, so that every question has both or "
            "neither as its source; give it other passages or another kind, or leave it out"
        )


def _check_kb(name: str, spec: KnowledgeConfig) -> None:
    if spec.members:
        raise ValueError(f"config.knowledge.{name}.members: kind={spec.kind!r} joins no others, only 'hybrid' does")
    if spec.served:
        resolved(spec.source, f"config.knowledge.{name}.source")  # raises for a variable that is not set
        return
    if spec.directory and built_at(spec.directory):
        return
    if not spec.source:
        raise ValueError(
            f"config.knowledge.{name}: there is no knowledge base in {spec.directory or 'the cache'} and no source to "
            f"build it from; set config.knowledge.{name}.source"
        )
    if not spec.source.startswith(ATLAS) and not fetched(spec.source).exists():
        raise ValueError(f"config.knowledge.{name}.source={spec.source!r} does not exist; give a file or a directory")
    _build_config(name, spec)


def tool_factory(name: str, spec: KnowledgeConfig) -> Callable[..., SearchTool]:
    """The function or class that makes a tool of kind "tool". Raises ValueError like `check_knowledge`."""
    path = f"config.knowledge.{name}"
    for key in ("encoder", "index", "directory", "members"):
        if getattr(spec, key) != getattr(KnowledgeConfig, key):
            raise ValueError(f"{path}.{key}: kind='tool' has none; what its source takes are {path}.settings")
    if ":" not in spec.source:
        raise ValueError(
            f"{path}.source={spec.source!r}: with kind='tool' it names the function or class that makes the tool, "
            "'package.module:factory'"
        )
    factory = _FACTORIES.get(spec.source)
    if not callable(factory):
        raise ValueError(
            f"{path}.source={spec.source!r} is a {type(factory).__name__}; name a function or class that makes one"
        )
    try:
        parameters = inspect.signature(factory).parameters.values()
    except ValueError:  # a function written in C may have no signature
        return factory
    if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        for key in spec.settings:
            if key not in (names := [parameter.name for parameter in parameters]):
                raise ValueError(unknown_key(f"{path}.settings", key, names))
    if missing := [
        p.name for p in parameters if p.name not in spec.settings and p.default is p.empty and p.kind in _NAMED
    ]:
        raise ValueError(f"{path}.settings.{missing[0]} is missing: {spec.source} takes it")
    return factory


def make_tool(name: str, spec: KnowledgeConfig) -> SearchTool:
    """A tool of kind "tool". Raises ValueError if it can't be made, or can't search."""
    try:
        tool = tool_factory(name, spec)(**resolved(spec.settings, f"config.knowledge.{name}.settings"))
    except (ValueError, OSError, RuntimeError) as error:
        raise ValueError(masked(f"config.knowledge.{name}: {spec.source} made no tool: {error}")) from error
    search = getattr(tool, "search", None)
    if not callable(search):
        raise ValueError(
            f"config.knowledge.{name}: {spec.source} made a {type(tool).__name__}, which has no search(queries, k)"
        )
    try:
        inspect.signature(search).bind([], 1)
    except TypeError as error:
        raise ValueError(
            f"config.knowledge.{name}: the search of {spec.source} can't be called as search(queries, k), with a list of "
            f"queries and the number of passages for each: {error}"
        ) from error
    except ValueError:  # a function written in C may have no signature
        pass
    return tool


def _join(
    name: str, spec: KnowledgeConfig, others: Mapping[str, SearchTool], frozen: Mapping[str, SnapshotConfig]
) -> KnowledgeBase:
    """A hybrid knowledge base that joins several of the run, as the configuration or a directory describes it."""
    from routerl_jax.knowledge.hybrid import HybridKB

    if spec.directory and not spec.members:
        return _open_kb(name, spec, False, frozen)
    members = []
    for member in spec.members:
        if not isinstance(kb := others[member], KnowledgeBase):
            raise ValueError(
                f"config.knowledge.{name}.members: {member!r} is a {type(kb).__name__}; only a KnowledgeBase can be joined "
                "with others (knowledge.base)"
            )
        members.append(kb)
    return HybridKB(members, name=name, **spec.settings)


def _check_members(name: str, spec: KnowledgeConfig, others: list[str]) -> None:
    if spec.directory and not spec.members:
        return
    unknown = [member for member in spec.members if member not in others]
    if unknown or not spec.members:
        raise ValueError(
            f"config.knowledge.{name}.members={spec.members} must name knowledge bases of this run: {', '.join(others)}"
        )
    names = ("weights", "constant", "depth")
    for key in spec.settings:
        if key not in names:
            raise ValueError(unknown_key(f"config.knowledge.{name}.settings", key, names))


def _open_kb(
    name: str,
    spec: KnowledgeConfig,
    progress: bool,
    frozen: Mapping[str, SnapshotConfig] = types.MappingProxyType({}),
) -> KnowledgeBase:
    from routerl_jax.knowledge.build import KINDS
    from routerl_jax.knowledge.builds import check_kb
    from routerl_jax.knowledge.load import load_kb

    if spec.served:
        return load_kb(resolved(spec.source, f"config.knowledge.{name}.source"))
    directory = _built_in_bucket(name, spec, progress) if in_bucket(spec.directory) else kb_directory(name, spec)
    if not (directory / MANIFEST).is_file():  # several processes of a host may get here: one builds, the others wait
        _build_kb(name, spec, directory, progress)
    if spec.directory:  # a directory in the cache depends on the keys, so it always fits
        expected = {key: getattr(spec, key) for key in ("source", "kind", "encoder", "index") if _has_key(spec, key)}
        if not spec.source:  # without a source, only keys that differ from the defaults are compared
            expected = {key: value for key, value in expected.items() if value != getattr(KnowledgeConfig, key)}
        passages = atlas_passages(spec)
        if passages and spec.kind != "graph" and spec.kind not in KINDS:  # it is built from a file
            expected, passages = expected | {"source": written_passages(spec, passages, progress)}, None
        check_kb(spec.directory, expected, f"config.knowledge.{name}", passages)
    if not frozen:
        return load_kb(str(directory))
    from routerl_jax.knowledge.hybrid import HybridKB
    from routerl_jax.knowledge.web.kb import WebKB, open_web

    if name in frozen:
        return open_web(Store(directory), snapshot=frozen[name])
    kb = load_kb(str(directory))
    if isinstance(kb, HybridKB) and any(isinstance(member, WebKB) for member in kb.members):
        raise ValueError(
            f"config.knowledge.{name}: {directory} joins a web knowledge base, which config.snapshot can't reach there: name "
            "it in config.knowledge, and join it by `members`"
        )
    return kb


def kb_directory(name: str, spec: KnowledgeConfig) -> pathlib.Path:
    """The directory of a knowledge base on this machine, whether it is built yet or not."""
    if not spec.directory:
        return kb_cache_directory(name, spec)
    return built_at(spec.directory) or pathlib.Path(spec.directory).expanduser()


def _built_in_bucket(name: str, spec: KnowledgeConfig, progress: bool) -> pathlib.Path:
    """A copy of the knowledge base of a directory in a bucket. If there is none yet, the main process builds and uploads it."""

    def build() -> None:
        if built_at(spec.directory) is None:
            with mirrored(spec.directory) as directory:
                _build_kb(name, spec, directory, progress)

    multihost.on_main(build)
    return fetched(spec.directory)


def _has_key(spec: KnowledgeConfig, key: str) -> bool:
    """Whether the kind has this key, or the `retriever` of the kind does (ocr)."""
    fields = _fields(spec.kind)
    if "retriever" in fields and "retriever" in spec.settings:
        fields &= _fields(spec.settings["retriever"])
    return key in ("source", "kind") or key in fields


def _fields(kind: str) -> set[str]:
    from routerl_jax.knowledge.builds import KB_BUILDERS

    return {field.name for field in dataclasses.fields(KB_BUILDERS.get(kind).config)}


def _build_kb(name: str, spec: KnowledgeConfig, directory: pathlib.Path, progress: bool) -> None:
    from routerl_jax.knowledge.build import KINDS, build_from_passages
    from routerl_jax.knowledge.builds import KB_BUILDERS
    from routerl_jax.knowledge.graph.build import build_graph_from_passages

    passages = atlas_passages(spec)
    builder, build = KB_BUILDERS.get(spec.kind), _build_config(name, spec)
    if not passages:
        builder.build(build, directory, progress=progress)
    elif spec.kind == "graph":
        build_graph_from_passages(passages, build, directory, progress=progress)
    elif spec.kind in KINDS:
        build_from_passages(passages, build, directory, progress=progress)
    else:
        corpus = written_passages(spec, passages, progress)
        builder.build(dataclasses.replace(build, corpus=corpus), directory, progress=progress)


def _build_config(name: str, spec: KnowledgeConfig) -> Any:
    """The configuration, of the kind's own class, for building a knowledge base from a source.

    Raises:
      ValueError: the kind is unknown or lacks a setting, or Atlas has no such part.
    """
    from routerl_jax.knowledge.builds import KB_BUILDERS

    passages = atlas_passages(spec)
    fields: dict[str, Any] = {"kind": spec.kind, "name": name, "corpus": "" if passages else spec.source}
    fields |= {key: getattr(spec, key) for key in ("encoder", "index") if _has_key(spec, key)}
    if passages and spec.kind == "graph":
        fields |= atlas_triples(spec)
    config, settings = KB_BUILDERS.get(spec.kind).config, dict(spec.settings)
    if shows_pages(spec):
        if spec.kind not in _PAGED:
            raise ValueError(
                f"config.knowledge.{name}.kind={spec.kind!r} shows no pages; set it to {' or '.join(map(repr, _PAGED))}"
            )
        settings["pages"] = {
            "text": "layer",
            **settings.get("pages", {}),
        }  # their titles, without the text on the pages
    return from_config_dict(config, fields | settings, f"config.knowledge.{name}.settings")


def kb_cache_directory(name: str, spec: KnowledgeConfig) -> pathlib.Path:
    """The cache directory of a knowledge base. Its name depends on everything that determines the content."""
    from routerl_jax.knowledge.bm25 import Words

    key_fields = dataclasses.asdict(spec) | {"encoder": resolved_encoder(spec.encoder)}
    for key in ("description", "reranker", "rerank_depth"):  # they don't change the content
        del key_fields[key]
    if spec.index == AUTO:  # left out, so that knowledge bases from before "auto" existed are found
        key_fields["index"] = "scann" if has_scann() else "exact"
    key_fields = {key: value for key, value in key_fields.items() if value or key not in ("members", "settings")}
    if "bm25" in (spec.kind, spec.settings.get("retriever")):
        key_fields["split"] = Words().split  # knowledge bases from before it was a setting have other words
    content = ""
    if (passages := atlas_passages(spec)) is not None:
        content = passages_sha256(passages) + (str(atlas_triples(spec)) if spec.kind == "graph" else "")
    elif spec.source:
        content = content_sha256(fetched(spec.source))
    # files that settings name, such as triples
    named = [pathlib.Path(value).expanduser() for value in spec.settings.values() if value and isinstance(value, str)]
    content += "".join(file_sha256(file) for file in named if file.is_file())
    digest = hashlib.sha256((json.dumps(key_fields, sort_keys=True) + content).encode()).hexdigest()
    return cache_directory() / "knowledge" / f"{name}-{digest[:12]}"


def content_sha256(path: pathlib.Path) -> str:
    """Digest of a source: of a file, of a knowledge base's manifest, or of a directory's files with their names."""
    file = next((file for file in (path, path / MANIFEST) if file.is_file()), None)
    if file is not None:
        return file_sha256(file)
    files = sorted(file for file in path.rglob("*") if file.is_file())
    digests = [[str(file.relative_to(path)), file_sha256(file)] for file in files]
    return hashlib.sha256(json.dumps(digests).encode()).hexdigest() if digests else ""


def tool_schemas(knowledge: Mapping[str, KnowledgeConfig]) -> dict[str, ToolSchema]:
    """A schema for each knowledge base, from its name and config.knowledge.NAME.description.

    A tool with an attribute `schema` has its own; McpTool asks its server for it. A function that makes tools must name their
    class in its return annotation.

    Raises:
      ValueError: a tool with a schema of its own can't be made, or its schema is no ToolSchema.
    """
    schemas: dict[str, ToolSchema] = {}
    for name, spec in knowledge.items():
        schema = kb_schema(name, spec.description)
        if spec.kind == TOOL and _has_schema(tool_factory(name, spec)):
            own = _own_schema(name, json.dumps(dataclasses.asdict(spec), sort_keys=True))
            schema = dataclasses.replace(own, description=spec.description or own.description)
        if schema.name in {
            existing.name for existing in schemas.values()
        }:  # two servers may have tools of the same name
            schema = dataclasses.replace(schema, name=f"{kb_schema(name).name}_{schema.name}")
        schemas[name] = schema
    return schemas


def _has_schema(factory: Callable[..., Any]) -> bool:
    """True if the objects that a class or function makes have a schema, according to its annotation."""
    if inspect.isclass(factory):
        return hasattr(factory, "schema")
    try:
        return hasattr(typing.get_type_hints(factory).get("return"), "schema")
    except (NameError, TypeError):  # annotations that only a type checker can resolve
        return False


@functools.lru_cache(64)
def _own_schema(name: str, spec: str) -> ToolSchema:
    """The schema of a tool with this configuration (JSON). Each tool is made once per process."""
    tool: Any = make_tool(name, from_config_dict(KnowledgeConfig, json.loads(spec), f"config.knowledge.{name}"))
    try:
        schema = tool.schema
    finally:
        if close := getattr(tool, "close", None):
            close()
    if not isinstance(schema, ToolSchema):
        raise ValueError(
            f"config.knowledge.{name}: its schema is a {type(schema).__name__}; give a core.types.ToolSchema"
        )
    return schema


def snapshots(config: TrainConfig, workdir: pathlib.Path | None) -> dict[str, SnapshotConfig]:
    """The snapshot of every web knowledge base of a run, by name; {} if the run has no snapshot.

    Args:
      workdir: the run's directory; may be None if config.snapshot names a directory.
    """
    mode, directory = config.snapshot.mode, config.snapshot.directory
    if not mode:
        if directory:
            raise ValueError(
                f"config.snapshot.directory={directory!r} without config.snapshot.mode: say record, auto or replay"
            )
        return {}
    names = []
    for name, spec in config.knowledge.items():
        if spec.directory and (directory_of_kb := built_at(spec.directory)):
            with naming(f"config.knowledge.{name}"):
                if Manifest.read(directory_of_kb).kind == "web":
                    names.append(name)
    if not names:
        raise ValueError(
            f"config.snapshot.mode={mode!r}: none of config.knowledge is a web knowledge base ({', '.join(config.knowledge)}); "
            "leave it out"
        )
    root = _root(config, workdir)
    # A run's snapshot is started once (check_snapshot); all later processes, sessions and evaluations continue it.
    how = "replay" if mode == "replay" else "auto"
    return {name: SnapshotConfig(directory=str(root / name), mode=how) for name in names}


def check_snapshot(config: TrainConfig, workdir: pathlib.Path, *, resume: bool) -> None:
    """Checks that the run can be recorded or replayed. The main process checks, and all get the result (a collective call).

    Args:
      resume: continue an existing snapshot.

    Raises:
      ValueError: a directory is given without a mode; the run has no web knowledge base; there is no snapshot to replay; or
        there already is one where a new one is to be recorded.
    """
    multihost.on_main(lambda: _check(config, workdir, resume))


def shared_snapshot(config: TrainConfig, workdir: pathlib.Path) -> WebSnapshotConfig:
    """config.snapshot for a warm start or a control, which has its own workdir but uses the run's snapshot."""
    if not config.snapshot.mode:
        return config.snapshot
    return dataclasses.replace(config.snapshot, directory=url_of(_root(config, workdir).resolve()))


def _check(config: TrainConfig, workdir: pathlib.Path, resume: bool) -> None:
    for name, spec in snapshots(config, workdir).items():
        directory = pathlib.Path(spec.directory)
        if spec.mode == "replay" and not (directory / RECORDED).is_file():
            deeper = directory.parent / "snapshot"
            hint = f"; did you mean config.snapshot.directory={str(deeper)!r}?" if deeper.is_dir() else ""
            raise ValueError(
                f"config.snapshot.mode='replay': {directory} holds no snapshot of the knowledge base {name!r}. Record one "
                f"(config.snapshot.mode='auto'), or say in config.snapshot.directory where it lies{hint}"
            )
        if config.snapshot.mode == "record" and not resume and (directory / RECORDED).is_file():
            if holds_records(directory):
                raise ValueError(
                    f"config.snapshot.mode='record': {directory} holds a snapshot already. Go on with it "
                    "(config.snapshot.mode='auto', or --resume), or use another --workdir"
                )
            shutil.rmtree(directory)  # left by a run that was refused before it began, perhaps with other settings


def _root(config: TrainConfig, workdir: pathlib.Path | None) -> pathlib.Path:
    directory = config.snapshot.directory
    if in_bucket(directory):
        if (path := path_of(directory)) is None and config.snapshot.mode != "replay":
            raise ValueError(
                f"config.snapshot.directory={directory}: a snapshot in a bucket can be replayed alone; leave it out to record "
                "into the --workdir, or give a directory on this machine"
            )
        return path or fetched(directory)
    if directory:
        return pathlib.Path(directory).expanduser()
    if workdir is None:
        raise ValueError(f"config.snapshot.mode={config.snapshot.mode!r} needs config.snapshot.directory here")
    return workdir / "snapshot"
