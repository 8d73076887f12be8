"""Benchmarks by name (those of benchmarks.toml, and others'): questions, knowledge bases, and the search for their files."""

from __future__ import annotations

import dataclasses
import glob
import os
import pathlib
import string
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from routerl_jax.core.config import checked
from routerl_jax.core.registry import Registry
from routerl_jax.data.formats.known import split_name
from routerl_jax.data.hub import PREFIX, on_this_machine
from routerl_jax.knowledge.store import MANIFEST, Manifest
from routerl_jax.training.config import KnowledgeConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class Benchmark:
    """Questions, and the knowledge bases that answer them.

    Attributes:
      questions: alternatives for data.readers.open_dataset; the first that exists is used. Each is `atlas/SPLIT`, or a pattern
        of files in the data directory (`hotpotqa/dev.*`), with the format before it if the keys of the rows don't show it.
      knowledge: knowledge bases by the names that agents use. A `source` is a pattern, or several patterns separated by `|`, of
        which the first that exists is used; or `atlas/NAME`; or the address of a served knowledge base. A directory with a
        built knowledge base is opened as it is, whatever its kind. `hf://datasets/ORG/NAME/FILE` is a file on the hub
        (data.hub); questions may use it, too.
      pictures: questions need their pictures. Questions whose picture is missing are left out, and counted.
      about: a description in one line.
      paper: arXiv number; "" if there is none.
      licence: licence of the data, if known.
      get: where to get the data, and how to prepare them.
    """

    questions: tuple[str, ...]
    knowledge: Mapping[str, KnowledgeConfig]
    pictures: bool = False
    about: str = ""
    paper: str = ""
    licence: str = ""
    get: str = ""


BENCHMARKS: Registry[Benchmark] = Registry("benchmark")
OWN = "own:"  # prefix of a source: the source of the benchmark's own knowledge base with the name that follows


def _packaged() -> Iterator[tuple[str, Benchmark]]:
    """The benchmarks of the package by name. The file says how it is read."""
    read = tomllib.loads(pathlib.Path(__file__).with_suffix(".toml").read_text())

    def filled(value: Any, texts: Mapping[str, str]) -> Any:
        """The value with texts in the place of their $names."""
        if isinstance(value, Mapping):
            return {key: filled(item, texts) for key, item in value.items()}
        if isinstance(value, list):
            return tuple(filled(item, texts) for item in value)
        return string.Template(value).substitute(texts) if isinstance(value, str) else value

    for name, fields in read["benchmarks"].items():
        entry = {**read["benchmarks"].get(fields.get("like"), {}), **fields}
        entry.pop("like", None)
        directory = {"directory": split_name(entry["questions"][0])[1].partition("/")[0]}
        entry = filled(entry, filled(read["texts"], directory) | directory)
        specs = {
            kb: read["knowledge"][spec] if isinstance(spec, str) else spec for kb, spec in entry["knowledge"].items()
        }
        entry["knowledge"] = {kb: KnowledgeConfig(**filled(spec, directory)) for kb, spec in specs.items()}
        yield name, Benchmark(**entry)


for _name, _benchmark in _packaged():
    BENCHMARKS.register(_name)(_benchmark)


def with_knowledge(name: str, benchmark: Benchmark, knowledge: Mapping[str, KnowledgeConfig]) -> Benchmark:
    """The benchmark with `knowledge` instead of its own knowledge bases; unchanged if `knowledge` is empty.

    Args:
      knowledge: new knowledge bases. A source `own:NAME` is the source of the benchmark's own knowledge base NAME.

    Raises:
      ValueError: the benchmark has no knowledge base of that name.
    """
    if not knowledge:
        return benchmark
    replaced = {}
    for kb, spec in knowledge.items():
        if spec.source.startswith(OWN):
            own = spec.source.removeprefix(OWN)
            if own not in benchmark.knowledge:
                raise ValueError(
                    f"config.knowledge.{kb}.source={spec.source!r}: benchmark {name!r} has the knowledge bases "
                    f"{', '.join(benchmark.knowledge)}"
                )
            spec = dataclasses.replace(spec, source=benchmark.knowledge[own].source)
        replaced[kb] = spec
    get = f"{benchmark.get} config.knowledge says what is asked in the place of its own knowledge bases.".strip()
    return dataclasses.replace(benchmark, knowledge=replaced, get=get)


def listing() -> list[tuple[str, str, str, str, str, str]]:
    """(name, paper, names of the knowledge bases, description, licence, where to get the data) of every benchmark, sorted by
    name."""
    entries = [(name, BENCHMARKS.get(name)) for name in BENCHMARKS]
    return [
        (name, benchmark.paper, ", ".join(benchmark.knowledge), benchmark.about, benchmark.licence, benchmark.get)
        for name, benchmark in entries
    ]


class NoData(ValueError):
    """Files of a benchmark are not there."""


def located(name: str, benchmark: Benchmark, data: str) -> Benchmark:
    """The benchmark with existing files instead of patterns, and a single name of questions.

    Args:
      data: directory in which patterns are searched for; "": the working directory.

    Raises:
      NoData: the questions or the source of a knowledge base do not exist. The message says where they were searched for, and
        where to get them.
    """
    questions = next((match for pattern in benchmark.questions if (match := _first_match(pattern, data))), None)
    if questions is None:
        raise _lacking(name, benchmark, data, "questions", benchmark.questions)
    knowledge = {}
    for kb, spec in benchmark.knowledge.items():
        fixed = spec.directory or spec.kind in ("tool", "hybrid")
        patterns = (spec.source,) if fixed else tuple(spec.source.split("|"))
        source = (
            spec.source
            if fixed
            else next((match for pattern in patterns if (match := _first_match(pattern, data))), None)
        )
        if source is None:
            raise _lacking(name, benchmark, data, f"knowledge base {kb!r}", patterns)
        source = on_this_machine(source)
        built = not fixed and (pathlib.Path(source) / MANIFEST).is_file()
        if built:
            spec = KnowledgeConfig(directory=source, kind=Manifest.read(pathlib.Path(source)).kind)
        knowledge[kb] = spec if built else dataclasses.replace(spec, source=source)
    questions += "[pictures]" if benchmark.pictures else ""
    return dataclasses.replace(benchmark, questions=(questions,), knowledge=knowledge)


def _first_match(pattern: str, data: str) -> str | None:
    """The first file, by name, that matches a pattern; None if there is none. A name of another kind is returned unchanged."""
    form, files = split_name(pattern)
    if files.startswith(("atlas/", "http://", "https://", PREFIX)) or (":" in files and "/" not in files):
        return pattern
    paths = sorted(glob.glob(os.path.join(_root(data), os.path.expanduser(files))))
    return f"{form}:{paths[0]}" if paths and form else next(iter(paths), None)


def _root(data: str) -> str:
    return os.path.expanduser(data) if data else ""


def _lacking(name: str, benchmark: Benchmark, data: str, part: str, patterns: tuple[str, ...]) -> NoData:
    names = [str(pathlib.Path(_root(data)) / split_name(pattern)[1]) for pattern in patterns]
    searched = f"looked for {' or '.join(names)}"
    if not data:
        searched += " (config.data is empty: name the directory with the files of benchmarks)"
    advice = f". {benchmark.get}" if benchmark.get else ""
    advice += f" Licence: {benchmark.licence}." if benchmark.licence else ""
    are = "are" if part == "questions" else "is"
    return NoData(
        f"benchmark {name!r}: its {part} {are} not there; {searched}{advice} --benchmarks without it does the others alone."
    )
